"""Megatron's lines, of today and of its forks, and the real logs of a DeepSpeed pair."""

from __future__ import annotations

import calendar
import math
import re
from pathlib import Path

from .conftest import Imports, values

LINE = (
    " [2026-08-22 15:22:22.123456] iteration     {step}/    8000 | consumed samples:       216640 | "
    "elapsed time per iteration (ms): 7624.3 | throughput per GPU (TFLOP/s/GPU): 402.1 | learning rate: "
    "6.676000E-06 | "
    "global batch size:    64 | {loss}loss scale: 1.0 | grad norm: 0.741 | num zeros: 5.0 | params norm: 55.125 | "
    "number of skipped iterations:   0 | number of nan iterations:   {nan} |\n"
)


def line(step: int, loss: str = "lm loss: 7.072597E-01 | ", nan: int = 0) -> str:
    return LINE.format(step=step, loss=loss, nan=nan)


class TestIterations:
    def test_each_field_has_its_standard_name_and_unit(self, imported: Imports):
        capsule = imported(line(3385))
        expected = {
            "loss": 0.7072597,
            "learning_rate": 6.676e-06,
            "grad_norm": 0.741,
            "loss_scale": 1.0,
            "param_norm": 55.125,
            "step_time": 7.6243,
            "overflow": 0.0,
            "consumed samples": 216640.0,
            "throughput per GPU (TFLOP/s/GPU)": 402.1,
        }
        for name, value in expected.items():
            (found,) = values(capsule, name)
            assert found[0] == 3385
            assert math.isclose(found[1], value, rel_tol=1e-12), name
        time = capsule.scalars("loss").time
        assert time is not None
        assert abs(time[0] - (calendar.timegm((2026, 8, 22, 15, 22, 22)) + 0.123456)) < 1e-5

    def test_old_forks_without_time_stamp_or_colon(self, imported: Imports):
        capsule = imported(
            " iteration        7/    1000 | consumed samples: 1024 | elapsed time per iteration (ms): 144915.6 | "
            "learning rate: 1.875E-05 | lm-loss: 1.244238E+01 | loss scale: -1.0 | grad norm: 0.000 | "
            "samples per second: 7.1 | TFLOPs: 64.50 |\n"
            " iteration        8/    1000 | elapsed time per iteration (ms): 1000.0 | learning rate 1.000E-04 | "
            "lm loss 6.912000E+00 | loss scale 65536.0 |\n"
        )
        assert values(capsule, "loss") == [(7, 12.44238), (8, 6.912)]
        assert values(capsule, "loss_scale") == [(7, -1.0), (8, 65536.0)]
        assert values(capsule, "grad_norm") == [(7, 0.0)]  # not wired: that is for rules to say
        assert values(capsule, "TFLOPs") == [(7, 64.5)]

    def test_a_loss_that_vanished_in_a_nan_iteration_is_nan_and_a_skipped_one_is_absent(self, imported: Imports):
        capsule = imported(line(1) + line(2, loss="", nan=1) + line(3, loss=""))
        steps = [step for step, _ in values(capsule, "loss")]
        assert steps == [1, 2]
        assert math.isnan(values(capsule, "loss")[1][1])

    def test_a_resumed_run_keeps_both_values_of_a_step_and_says_where_it_went_back(self, imported: Imports):
        text = "".join(line(step) for step in (1, 2, 3, 4)) + "".join(
            line(step, "lm loss: 5.0 | ") for step in (3, 4, 5)
        )
        capsule = imported(text)
        assert [step for step, _ in values(capsule, "loss")] == [1, 2, 3, 3, 4, 4, 5]
        (event,) = [each for each in capsule.records("events") if each["kind"] == "log"]
        assert event["step"] == 3
        assert "from 4 to 3" in event["message"]

    def test_last_ranks_prefix_makes_the_rank(self, imported: Imports):
        capsule = imported(f"[default7]:{line(1)}7: {line(2)}[1,7]<stdout>:{line(3)}")
        assert capsule.scalars("loss").rank == 7
        assert len(values(capsule, "loss", rank=7)) == 3


class TestOtherLines:
    def test_validation_memory_timers_checkpoints_and_reports(self, imported: Imports):
        capsule = imported(
            line(1000)
            + "time (ms) | forward-compute: 29189.57 | optimizer: 470.39\n"
            + " validation loss at iteration 1000 | lm loss value: 2.345000E+00 | lm loss PPL: 1.043E+01 |\n"
            + " validation loss at iteration 1000 on test set | lm loss value: 2.5E+00 |\n"
            + "[Rank 3] (after 1000 iterations) memory (MB) | allocated: 12337.5 | max allocated: 19961.0 | "
            "reserved: 23288.0\n"
            + "  successfully saved checkpoint at iteration    1000 to /data/ckpt\n"
            + "Unexpected result nan on rank 5 at iteration #1001 invocation #1 (message='found NaN')\n"
            + "MnRtt/Rnk: 3453.08ms/8 | MxRtt/Rnk: 3468.20ms/0 | MnEtpt/Rnk: 0.98\n"
        )
        assert values(capsule, "eval_loss") == [(1000, 2.345)]
        assert values(capsule, "validation lm loss value (test set)") == [(1000, 2.5)]
        assert values(capsule, "time optimizer") == [(1000, 0.47039)]
        assert values(capsule, "memory_allocated", rank=3) == [(1000, 12337.5 * 2**20)]
        assert values(capsule, "memory_peak", rank=3) == [(1000, 19961.0 * 2**20)]
        events = capsule.records("events")
        saved = next(each for each in events if each["kind"] == "checkpoint_saved")
        assert (saved["step"], saved["path"]) == (1000, "/data/ckpt")
        rerun = next(each for each in events if each.get("logger") == "rerun")
        assert (rerun["step"], rerun["rank"]) == (1001, 5)
        assert next(each for each in events if each.get("logger") == "straggler")["step"] == 1000

    def test_arguments_become_the_manifest(self, imported: Imports):
        capsule = imported(
            "------------------------ arguments ------------------------\n"
            "  adam_beta1 ...................................... 0.9\n"
            "  adam_beta2 ...................................... 0.95\n"
            "  bf16 ............................................ True\n"
            "  clip_grad ....................................... 1.0\n"
            "  data_parallel_size .............................. 2\n"
            "  global_batch_size ............................... 64\n"
            "  lr .............................................. 0.00015\n"
            "  lr_decay_iters .................................. 800\n"
            "  lr_decay_style .................................. cosine\n"
            "  lr_warmup_fraction .............................. 0.01\n"
            "  micro_batch_size ................................ 4\n"
            "  num_layers ...................................... 24\n"
            "  wandb_api_key ................................... s3cr3t\n" + line(1)
        )
        training = capsule.manifest.training
        assert training is not None
        assert training.precision == "bf16-mixed"
        assert training.accumulation_steps == 8
        assert training.optimizer is not None
        assert training.optimizer.betas == [0.9, 0.95]
        assert training.schedule is not None
        assert (training.schedule.name, training.schedule.total_steps, training.schedule.warmup_steps) == (
            "cosine",
            800,
            8,
        )
        assert capsule.manifest.model is not None
        assert capsule.manifest.model.layers == 24
        assert "s3cr3t" not in str(capsule.manifest.raw)


class TestRealLogs:
    def test_the_pair_has_every_iteration_and_differs_first_at_step_three(self, real: Path, imported: Imports):
        place = real / "text_logs" / "bigscience"
        on, off = place / "meg_ds_3d_gpt2_perf_n16-ds-on.out", place / "meg_ds_3d_gpt2_perf_n16-ds-off.out"
        first, second = values(imported(on), "loss"), values(imported(off), "loss")
        assert [step for step, _ in first] == list(range(1, 50))
        assert [step for step, _ in second] == list(range(1, 63))
        assert next(a[0] for a, b in zip(first, second, strict=False) if a != b) == 3

    def test_ten_thousand_lines_of_set_up_hide_no_iteration(self, real: Path, imported: Imports):
        path = real / "text_logs" / "bigscience" / "meg_gpt2_perf_n16-1999618.out"
        capsule = imported(path)
        lines = re.findall(r"iteration +(\d+)/ +1000 .*?loss scale: ([\d.]+)", path.read_text(errors="replace"))
        assert values(capsule, "loss_scale") == [(int(step), float(scale)) for step, scale in lines]
        assert not len(capsule.scalars("loss"))
        assert any("TIME LIMIT" in each.get("message", "") for each in capsule.records("events"))
