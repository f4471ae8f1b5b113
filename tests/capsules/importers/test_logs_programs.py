"""Lines of torchtitan, DeepSpeed, nanoGPT, llm.c, OLMo and of loops of one's own, beside the real logs of some."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from llmconsole.capsules import EvidenceError
from llmconsole.capsules.importers import import_files

from .conftest import Imports, notes, values

GIB = 2**30


class TestTorchtitan:
    COLOURED = (
        "[rank0]:[titan] 2025-06-16 16:24:23,544 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.18800  "
        "\x1b[38;2;180;60;0mgrad_norm:  1.2345  \x1b[38;2;54;234;195mmemory:  4.50GiB(6.16%)  \x1b[34mtps: 1,028  "
        "\x1b[36mtflops: 0.31  \x1b[35mmfu: N/A\x1b[39m\n"
    )

    def test_colours_sizes_shares_and_thousands_are_read(self, imported: Imports):
        capsule = imported(self.COLOURED)
        assert values(capsule, "loss") == [(1, 8.188)]
        assert values(capsule, "grad_norm") == [(1, 1.2345)]
        assert values(capsule, "memory_reserved") == [(1, 4.5 * GIB)]
        assert values(capsule, "memory_reserved(%)") == [(1, 6.16)]
        assert values(capsule, "throughput") == [(1, 1028.0)]
        assert "mfu(%)" not in {key.name for key in capsule.scalar_keys()}  # N/A is no number

    def test_older_lines_and_validation(self, imported: Imports):
        capsule = imported(
            "2024-06-06 12:00:00,123 - root - INFO - step: 10  loss:  7.1  memory: 10.50GiB(13.16%)  wps: 1,028 "
            " mfu: 22.5%\n"
            "[titan] 2025-06-16 16:24:23,544 - root - INFO - validate step: 10  loss:  8.1  memory:  "
            "4.5GiB(6.1%)  tps: 9\n"
        )
        assert values(capsule, "loss") == [(10, 7.1)]
        assert values(capsule, "eval_loss") == [(10, 8.1)]
        assert values(capsule, "wps") == [(10, 1028.0)]
        assert values(capsule, "throughput") == []

    def test_ranks_that_print_together_are_kept_apart(self, imported: Imports):
        text = "".join(
            f"[rank{rank}]:[titan] 2025-06-16 16:24:23,544 - root - INFO - step: {step}  loss: {rank}.5  "
            f"memory: 1.0GiB(1%)\n"
            for step in (1, 2)
            for rank in (1, 0)
        )
        capsule = imported(text)
        assert values(capsule, "loss", rank=0) == [(1, 0.5), (2, 0.5)]
        assert values(capsule, "loss", rank=1) == [(1, 1.5), (2, 1.5)]

    @pytest.mark.parametrize(("run", "steps"), [("run62", [1, 10]), ("run68", [1, 10]), ("run35", [1])])
    def test_real_runs(self, real: Path, imported: Imports, run: str, steps: list[int]):
        capsule = imported(real / "text_logs" / "torchtitan" / "autoresearch" / f"{run}.log")
        assert [step for step, _ in values(capsule, "loss")] == steps
        assert capsule.manifest.training is not None
        assert capsule.manifest.training.max_length == 4096
        assert capsule.manifest.model is not None
        assert capsule.manifest.model.parameters == 14_768_307_200

    def test_the_real_run_with_retries_has_them(self, real: Path, imported: Imports):
        path = real / "text_logs" / "torchtitan" / "autoresearch" / "run348.log"
        capsule = imported(path)
        printed = [
            float(each) for each in re.findall(r"WARNING - .*?(\d+) CUDA memory allocation retries", path.read_text())
        ]
        assert [value for _, value in values(capsule, "alloc_retries")] == printed
        assert printed
        assert [step for step, _ in values(capsule, "loss")] == sorted({step for step, _ in values(capsule, "loss")})


class TestDeepSpeed:
    def test_overflows_are_events_scales_and_steps(self, imported: Imports):
        capsule = imported(
            "[2026-08-22 12:19:04,123] [INFO] [logging.py:107:log_dist] [Rank 0] step=10, skipped=2, "
            "lr=[1e-05, 2e-05], mom=[[0.9, 0.95]]\n"
            "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768\n"
            "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 32768, but hysteresis is 2. "
            "Reducing hysteresis to 1\n"
            "[deepspeed] OVERFLOW! Rank 0 Skipping step.\n"
        )
        assert values(capsule, "learning_rate") == [(10, 1e-05)]
        assert values(capsule, "overflow") == [(11, 1.0), (12, 1.0), (13, 1.0)]
        assert values(capsule, "loss_scale") == [(11, 65536.0), (12, 32768.0)]
        scales = [each for each in capsule.records("events") if each["kind"] == "scaler_update"]
        assert [(each["scale_before"], each["scale_after"]) for each in scales] == [(65536, 32768), (32768, 32768)]
        assert sum(each["kind"] == "optimizer_step_skipped" for each in capsule.records("events")) == 3

    def test_its_own_rate_does_not_mix_with_the_trainers(self, imported: Imports):
        capsule = imported(
            "[2026-08-22 12:19:04,123] [INFO] [logging.py:107:log_dist] [Rank 0] step=1, skipped=0, lr=[0.5], "
            "mom=[0.9]\n"
            " iteration 1/ 10 | elapsed time per iteration (ms): 1.0 | learning rate: 0.25 | lm loss: 1.0 |\n"
        )
        assert values(capsule, "learning_rate") == [(1, 0.25)]
        assert values(capsule, "learning_rate", side="DeepSpeed") == [(1, 0.5)]

    def test_memory_and_accumulation(self, imported: Imports):
        capsule = imported(
            "[x] [INFO] [timer.py:199:stop] epoch=0/micro_step=20/global_step=10, RunningAvgSamplesPerSec=12.5, "
            "CurrSamplesPerSec=12.7, MemAllocated=3.25GB, MaxMemAllocated=14.5GB\n"
            "[x] [INFO] [utils.py:627:see_memory_usage] After Building Model\n"
            "[x] [INFO] [utils.py:628:see_memory_usage] MA 1.5 GB         Max_MA 2.5 GB         CA 3.5 GB       "
            "  Max_CA 4 GB\n"
            "[deepspeed] OVERFLOW! Rank 0 Skipping step.\n"
        )
        assert values(capsule, "memory_peak") == [(10, 14.5 * GIB)]
        assert capsule.manifest.training is not None
        assert capsule.manifest.training.accumulation_steps == 2
        (row,) = capsule.records("memory")
        assert (row["phase"], row["allocated"], row["reserved"]) == ("After Building Model", 1.5 * GIB, 3.5 * GIB)


class TestNanoGpt:
    def test_iterations_and_estimates(self, imported: Imports):
        capsule = imported(
            "number of parameters: 10.65M\n"
            "step 0: train loss 4.2874, val loss 4.2823\n"
            "iter 0: loss 4.2659, time 4560.19ms, mfu -100.00%\n"
            "iter 10: loss 3.1400, time 15.50ms, mfu 3.21%\n"
        )
        assert values(capsule, "loss") == [(0, 4.2659), (10, 3.14)]
        assert values(capsule, "eval_loss") == [(0, 4.2823)]
        assert values(capsule, "train loss") == [(0, 4.2874)]
        assert values(capsule, "step_time") == [(0, pytest.approx(4.56019)), (10, pytest.approx(0.0155))]
        assert values(capsule, "mfu(%)") == [(0, -100.0), (10, 3.21)]
        assert capsule.manifest.model is not None
        assert capsule.manifest.model.parameters == 10_650_000


class TestLlmC:
    def test_its_log(self, imported: Imports):
        capsule = imported("s:0 tel:11.0092\ns:0 trl:11.0091 lr:0.000001 norm:15.37\ns:250 eel:0.2465\n")
        assert values(capsule, "eval_loss") == [(0, 11.0092)]
        assert values(capsule, "loss") == [(0, 11.0091)]
        assert values(capsule, "learning_rate") == [(0, 1e-6)]
        assert values(capsule, "grad_norm") == [(0, 15.37)]
        assert values(capsule, "eel") == [(250, 0.2465)]

    @pytest.mark.parametrize("name", ["llm.c/main.log", "modded-nanogpt/2024-06-06_AdamW.log"])
    def test_the_real_logs_keep_every_point(self, real: Path, imported: Imports, name: str):
        path = real / "text_logs" / name
        capsule = imported(path)
        text = path.read_text()
        for key, series in (("trl", "loss"), ("tel", "eval_loss")):
            printed = [(int(step), float(value)) for step, value in re.findall(rf"s:(\d+) {key}:([\d.]+)", text)]
            assert values(capsule, series) == printed
        assert not notes(capsule)


class TestOlmo:
    def test_blocks_of_both_generations(self, imported: Imports):
        capsule = imported(
            "2025-01-02 03:04:05.123 host:0 console_logger:12 INFO [step=5/1,000,epoch=1,eta=1:02:03]\n"
            "    train/CE loss=8.1234\n"
            "    optim/total grad norm=1.25\n"
            "    throughput/total tokens=4,194,304\n"
            "    optim/step skipped=0\n"
            "2025-01-02 03:05:05.123 host:0 INFO [step=6/1000]\n"
            "    train/CrossEntropyLoss=7.5\n"
            "    optim/learning_rate_group0=0.0003\n"
            "2025-01-02 03:05:06.123 host:0 INFO something else\n"
            "    a/later line=3\n"
        )
        assert values(capsule, "loss") == [(5, 8.1234), (6, 7.5)]
        assert values(capsule, "grad_norm") == [(5, 1.25)]
        assert values(capsule, "throughput/total tokens") == [(5, 4194304.0)]
        assert values(capsule, "learning_rate") == [(6, 0.0003)]
        assert "a/later line" not in {key.name for key in capsule.scalar_keys()}


class TestOwnPrints:
    @pytest.mark.parametrize(
        ("line", "step", "expected"),
        [
            (
                "step     7 | loss: 10.955 | lr 6.0000e-04 | norm: 15.2 | dt: 338.5ms | tok/sec: 1,549,222",
                7,
                {
                    "loss": 10.955,
                    "learning_rate": 6e-4,
                    "grad_norm": 15.2,
                    "step_time": 0.3385,
                    "throughput": 1549222.0,
                },
            ),
            (
                "step:125/5100 val_loss:4.63 train_time:1334ms step_avg:12.5ms",
                125,
                {"eval_loss": 4.63, "step_avg": 0.0125},
            ),
            (
                "step    1/19560 | loss 11.009 (+nanz)| norm 15.37 (+nanz)| lr 1.00e-06 | 300 ms",
                1,
                {"grad_norm": 15.37},
            ),
            ("Epoch 1 | iter 10 step 2 | loss train: 10.234, val: n/a | iter time: 123.5 ms", 2, {"loss": 10.234}),
            ("| train_inner | epoch 001: loss=11.2, num_updates=100, lr=1e-05, gnorm=3.1", 100, {"grad_norm": 3.1}),
            ("Iter(train) [  10/1000]  lr: 2.0e-05  eta: 0:10:00  loss: 1.9", 10, {"loss": 1.9}),
            ("INFO:trainer:global_step=42 train_loss=nan", 42, {"loss": float("nan")}),
        ],
    )
    def test_forms(self, imported: Imports, line: str, step: int, expected: dict[str, float]):
        capsule = imported(line + "\n")
        for name, value in expected.items():
            assert values(capsule, name) == [(step, pytest.approx(value, nan_ok=True))], name

    def test_the_last_painting_of_a_bar_counts(self, imported: Imports):
        bar = "Epoch {epoch}:  10%|█▎  | {n}/500 [00:10<01:30,  5.00it/s, loss={loss}, v_num=0]\r"
        capsule = imported(
            bar.format(epoch=0, n=50, loss=2.31)
            + bar.format(epoch=0, n=50, loss=2.25)
            + bar.format(epoch=1, n=1, loss=2.0)
            + "\n"
        )
        assert values(capsule, "loss") == [(50, 2.25), (501, 2.0)]


class TestOthers:
    def test_blocks_of_composer(self, imported: Imports):
        capsule = imported(
            "[epoch=1][batch=1/50]:\n\t Train time/batch: 50\n\t Train loss/train/total: 5.25\n"
            "\t Train lr-DecoupledAdamW/group0: 2e-4\n\t Train l2_norm/grad/global: 1.5\n"
            "[Eval batch=2/2] Eval on c4 data:\n\t Eval metrics/c4/LanguageCrossEntropy: 5.5\n"
        )
        assert values(capsule, "loss") == [(51, 5.25)]
        assert values(capsule, "learning_rate") == [(51, 2e-4)]
        assert values(capsule, "grad_norm") == [(51, 1.5)]
        assert values(capsule, "eval_loss") == [(51, 5.5)]

    def test_objects_behind_a_logger_and_fairseqs_text(self, imported: Imports):
        capsule = imported(
            '2021-10-01 12:00:00 | INFO | train_inner | {"loss": "9.5", "num_updates": "100", "gnorm": "1.5"}\n'
        )
        assert values(capsule, "loss") == [(100, 9.5)]
        assert values(capsule, "grad_norm") == [(100, 1.5)]
        capsule = imported(
            "INFO | train_inner | epoch 001:    99 / 500 loss=9.5, num_updates=100, lr=5e-4\n"
            "INFO | valid | epoch 001 | valid on 'valid' subset | loss 9.75 | ppl 12.3 | num_updates 100\n"
            "INFO | train | epoch 001 | loss 11.5 | num_updates 100\n"
        )
        assert values(capsule, "loss") == [(100, 9.5)]  # the mean of the epoch stands aside
        assert values(capsule, "eval_loss") == [(100, 9.75)]

    @pytest.mark.parametrize(
        ("line", "found"),
        [
            ("epoch {e}: step {s}/2 loss={v}", [(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)]),
            ("Epoch [{e}/2], Step [{s}/2], Loss: {v}", [(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)]),
            ("Epoch: [{e}][{s}/2]\tTime 0.3 (0.4)\tLoss {v} (4.0)", [(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)]),
            ("Train Epoch: {e} [{s}/2 (0%)]\tLoss: {v}", [(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)]),
            ("\rLoss: {v}:  12%|##  | {t}/4 [00:01<00:05,  1.1s/it]", [(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)]),
            ("\r1|{t}|Loss: {v}:  12%|##  | {t}/4 [00:01<00:05,  1.1s/it]", [(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)]),
            ("Epoch {t}/4 | train loss: {v} | val loss: 5.5", [(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)]),
            ("\r2/2 [=====] - 3s 10ms/step - loss: {v} - val_loss: 5.5", [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]),
        ],
    )
    def test_epochs_bars_and_steps_that_begin_anew(self, imported: Imports, line: str, found: list[tuple[int, float]]):
        text = "".join(line.format(e=t // 2, s=t % 2, t=t, v=4.0 - t) + "\n" for t in range(4))
        capsule = imported(text)
        assert values(capsule, "loss") == found
        if "5.5" in line:
            assert {value for _, value in values(capsule, "eval_loss")} == {5.5}

    def test_a_sentence_about_a_loss_is_no_log(self, tmp_path: Path):
        file = tmp_path / "notes.txt"
        file.write_text("Last night\nThe loss rises from 11.87 around step 33 to 20.12.\nstep 400 the loss is 3.1\n")
        with pytest.raises(EvidenceError):
            import_files([file], tmp_path / "runs", attach=False)

    def test_lines_about_held_out_data_are_no_training_loss(self, imported: Imports):
        capsule = imported(
            "step 5 | loss: 2.5 | lr 1e-4\n[eval] step 5 | loss: 3.5\nValidation at step 6: loss = 3.25\n"
        )
        assert values(capsule, "loss") == [(5, 2.5)]
        assert values(capsule, "eval_loss") == [(5, 3.5), (6, 3.25)]

    @pytest.mark.parametrize(
        "line",
        [
            "completed step: {t}, seconds: 3.312, TFLOP/s/device: 120.1, Tokens/s/device: 5123.1, "
            "total_weights: 65536, loss: {v}",
            "Step... ({t} | Loss: {v}, Learning Rate: 1e-4)",
            "step: {t}, loss: tensor({v}, device='cuda:0', grad_fn=<NllLossBackward0>)",
            "{{'loss': np.float64({v}), 'step': {t}, 'epoch': 0.5}}",
            '{{"log":"step {t} | loss: {v}\\n","stream":"stdout"}}',
            "steps:   1%|    | {t}/9 [00:10<01:00,  2.0s/it, avr_loss={v}]",
        ],
    )
    def test_forms_of_one_loss(self, imported: Imports, line: str):
        text = "".join(line.format(t=t, v=value) + "\n" for t, value in enumerate(["4.5", "3.5"]))
        assert values(imported(text), "loss") == [(0, 4.5), (1, 3.5)]

    @pytest.mark.parametrize("spelt", ["inf", "Inf", "Infinity"])
    def test_an_infinite_loss_however_it_is_spelt(self, imported: Imports, spelt: str):
        assert values(imported(f"step 1 | loss: 4.5\nstep 2 | loss: {spelt}\n"), "loss")[1] == (2, float("inf"))
