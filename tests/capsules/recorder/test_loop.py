"""What the capsule says of an ordinary loop, against numbers worked out apart from the recorder."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from llmconsole.capsules import Capsule
from llmconsole.capsules.recorder import statistics
from torch import Tensor


class TestScalars:
    def test_are_those_that_the_loop_itself_computes(self, run: Any, gpt: Any) -> None:
        recording = run()
        expected: dict[str, list[float]] = {"loss": [], "grad_norm": [], "update_norm": [], "param_norm": []}
        for step in range(4):
            inputs, targets = gpt.shifted(step)
            before = torch.nn.utils.parameters_to_vector(recording.model.parameters()).detach().clone()
            with recording.recorder.step(batch=(inputs, targets)) as micro:
                loss = gpt.cross_entropy(recording.model(inputs), targets)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(recording.model.parameters(), 0.5)
                recording.optimizer.step()
                recording.optimizer.zero_grad()
                micro.log(mine=step / 2, also=torch.tensor(7.0))
            after = torch.nn.utils.parameters_to_vector(recording.model.parameters()).detach()
            expected["loss"].append(loss.item())
            expected["grad_norm"].append(norm.item())
            expected["param_norm"].append(before.norm().item())
            expected["update_norm"].append((after - before).norm().item())
        capsule = recording.capsule()
        for name, values in expected.items():
            assert capsule.scalars(name).value == pytest.approx(values, rel=1e-5), name
        clipped = np.minimum(expected["grad_norm"], 0.5)
        assert capsule.scalars("grad_norm_clipped").value == pytest.approx(clipped, rel=1e-5)
        assert capsule.scalars("learning_rate").value.tolist() == [1e-2] * 4
        assert capsule.scalars("tokens").value.tolist() == [48.0] * 4
        assert capsule.scalars("mine").value.tolist() == [0.0, 0.5, 1.0, 1.5]
        assert capsule.scalars("also").value.tolist() == [7.0] * 4
        assert capsule.scalars("loss").step.tolist() == [0, 1, 2, 3]
        assert (capsule.scalars("step_time").value > 0).all()

    def test_the_gradient_norm_is_there_without_clipping_too(self, run: Any, gpt: Any) -> None:
        recording = run()
        norms: list[float] = []
        for step in range(3):
            inputs, targets = gpt.shifted(step)
            with recording.recorder.step(batch=(inputs, targets)):
                gpt.cross_entropy(recording.model(inputs), targets).backward()
                norms.append(torch.stack([p.grad.norm() for p in recording.model.parameters()]).norm().item())
                recording.optimizer.step()
                recording.optimizer.zero_grad()
        capsule = recording.capsule()
        assert capsule.scalars("grad_norm").value == pytest.approx(norms, rel=1e-5)
        assert len(capsule.scalars("grad_norm_clipped")) == 0

    def test_the_step_given_by_the_loop_goes_on_counting_after_a_resume(self, run: Any, gpt: Any) -> None:
        recording = run()
        for step in (700, 701):
            inputs, targets = gpt.shifted(step)
            with recording.recorder.step(batch=(inputs, targets), step=step):
                gpt.cross_entropy(recording.model(inputs), targets).backward()
                recording.optimizer.step()
        assert recording.capsule().scalars("loss").step.tolist() == [700, 701]

    def test_without_backward_each_block_is_a_window_with_the_loss_it_was_told(self, run: Any, gpt: Any) -> None:
        recording = run(phase="evaluation")
        for step in range(2):
            inputs, targets = gpt.shifted(step)
            with recording.recorder.step(batch=(inputs, targets)) as micro, torch.no_grad():
                micro.loss(gpt.cross_entropy(recording.model(inputs), targets))
        assert len(recording.capsule().scalars("loss")) == 2


class TestStatistics:
    def test_norms_of_activations_and_gradients_match_the_tensors(self, run: Any, gpt: Any) -> None:
        recording = run(every=1000)
        recording.train(1)
        outputs: dict[str, Tensor] = {}

        def keep(name: str) -> Any:
            def hook(module: Any, inputs: Any, output: Tensor) -> None:
                output.retain_grad()
                outputs[name] = output

            return hook

        handles = [module.register_forward_hook(keep(name)) for name, module in recording.model.named_modules() if name]
        inputs, targets = gpt.shifted(1)
        with recording.recorder.step(batch=(inputs, targets)):
            gpt.cross_entropy(recording.model(inputs), targets).backward()
            gradients = {name: p.grad.clone() for name, p in recording.model.named_parameters()}
            recording.optimizer.step()
        for handle in handles:
            handle.remove()
        stats = recording.capsule().stats(step=1)
        rms = {(role, name): value for role, name, value in zip(stats.role, stats.name, stats.rms, strict=True)}
        for name, output in outputs.items():
            assert rms["activation", name] == pytest.approx(output.square().mean().sqrt().item(), rel=1e-5), name
            if ("gradient", name) in rms:
                assert rms["gradient", name] == pytest.approx(output.grad.square().mean().sqrt().item(), rel=1e-5), name
        for name, gradient in gradients.items():
            assert rms["gradient", name] == pytest.approx(gradient.square().mean().sqrt().item(), rel=1e-5), name

    def test_rows_come_in_execution_order_and_then_in_autograd_order(self, run: Any) -> None:
        recording = run(every=1000)
        recording.train(2)
        stats = recording.capsule().stats(step=1)
        assert stats.order.tolist() == list(range(len(stats)))
        names = [name for name, role in zip(stats.name, stats.role, strict=True) if role == "activation"]
        block = ["norm", "mix", "up", "down"]
        blocks = [f"blocks.{i}{part}" for i in range(2) for part in (*(f".{name}" for name in block), "")]
        assert names == ["tokens", *blocks, "head"]
        gradients = [name for name, role in zip(stats.name, stats.role, strict=True) if role == "gradient"]
        places = [gradients.index(name) for name in ("head", "blocks.1", "blocks.1.up", "blocks.0", "tokens")]
        assert places == sorted(places)
        assert gradients[-1] == "tokens.weight"

    def test_every_n_windows_all_statistics_of_everything_are_there(self, run: Any) -> None:
        recording = run(every=3)
        recording.train(5)
        stats = recording.capsule().stats()
        rows = list(zip(stats.step.tolist(), stats.role, stats.full, strict=True))
        whole = {step: {role for at, role, full in rows if full and at == step} for step in range(5)}
        assert whole[0] == whole[3] == {"activation", "gradient", "logits", "parameter", "update"}
        assert whole[1] == whole[2] == whole[4] == set()

    def test_statistics_every_step_can_be_asked_for(self, run: Any) -> None:
        recording = run(every=1000, statistics_every=1)
        recording.train(3)
        stats = recording.capsule().stats(role="activation")
        assert stats.full.all()
        assert sorted(set(stats.step.tolist())) == [0, 1, 2]

    def test_the_update_of_a_parameter_is_after_minus_before(self, run: Any) -> None:
        recording = run()
        before = recording.model.head.weight.detach().clone()
        recording.train(1)
        change = (recording.model.head.weight.detach() - before).double()
        stats = recording.capsule().stats(role="update", name="head.weight", step=0)
        assert float(stats.mean[0]) == pytest.approx(change.mean().item(), rel=1e-4, abs=1e-8)
        assert float(stats.max[0]) == pytest.approx(change.max().item(), rel=1e-5)


class TestBatches:
    def test_readings_of_the_logits_are_those_of_log_softmax(self, run: Any, gpt: Any) -> None:
        recording = run()
        inputs, targets = gpt.shifted(0)
        logits = recording.model(inputs).detach().double()
        recording.train(1)
        batch = recording.capsule().batches()[0]
        assert batch.logsumexp == pytest.approx(
            (logits - torch.log_softmax(logits, -1))[..., 0].numpy(), rel=1e-5, abs=1e-5
        )
        flat, width = inputs.flatten(), inputs.shape[1]
        for row in range(4):
            for at in range(width):
                for offset in range(3):
                    place = row * width + at + offset
                    found = batch.target_logits[row, at, offset]
                    if place < len(flat):
                        assert found == pytest.approx(logits[row, at, flat[place]].item(), rel=1e-5, abs=1e-5)
                    else:
                        assert math.isnan(found)
        assert batch.logits == pytest.approx(logits.numpy(), rel=1e-5, abs=1e-5)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        assert batch.token_loss == pytest.approx(expected.view(4, width).numpy(), rel=1e-5)
        assert (batch.loss_dtype, batch.logits_dtype, batch.reported_decimals) == ("float32", "float32", None)
        assert batch.reported_loss == pytest.approx(expected.mean().item(), rel=1e-6)

    def test_labels_of_the_next_token_are_known_as_shifted(self, run: Any) -> None:
        recording = run()
        recording.train(1)
        assert recording.capsule().batches()[0].label_layout == "shifted"

    def test_labels_of_the_same_token_are_known_as_unshifted(self, run: Any, gpt: Any) -> None:
        recording = run()
        inputs, _ = gpt.shifted(0)
        labels = inputs.clone()
        labels[:, :3] = -100
        with recording.recorder.step(batch={"input_ids": inputs, "labels": labels}):
            logits = recording.model(inputs)
            gpt.cross_entropy(logits[:, :-1], labels[:, 1:]).backward()
            recording.optimizer.step()
        batch = recording.capsule().batches()[0]
        assert (batch.label_layout, batch.keys) == ("unshifted", ["input_ids", "labels"])
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        assert np.nanmean(batch.token_loss) == pytest.approx(loss.item(), rel=1e-5)
        assert np.isnan(batch.token_loss[:, :2]).all()
        assert not np.isnan(batch.token_loss[:, 2:-1]).any()

    def test_labels_of_neither_kind_get_no_layout_and_no_loss(self, run: Any, gpt: Any) -> None:
        recording = run()
        inputs, targets = gpt.shifted(0)
        with recording.recorder.step(batch=(inputs, targets.flip(1))):
            gpt.cross_entropy(recording.model(inputs), targets).backward()
            recording.optimizer.step()
        batch = recording.capsule().batches()[0]
        assert (batch.label_layout, batch.token_loss) == (None, None)

    @pytest.mark.parametrize("given", ["nothing", "tensor", "row of one more"])
    def test_what_is_not_given_is_found_in_the_call(self, run: Any, gpt: Any, given: str) -> None:
        recording = run()
        inputs, targets = gpt.shifted(0)
        whole = torch.cat((inputs, targets[:, -1:]), 1)
        batch = {"nothing": None, "tensor": inputs, "row of one more": whole}[given]
        with recording.recorder.step(batch=batch):
            gpt.cross_entropy(recording.model(inputs), targets).backward()
            recording.optimizer.step()
        found = recording.capsule().batches()[0]
        assert (found.input_ids == inputs.numpy()).all()
        assert found.logsumexp is not None
        if given == "row of one more":
            assert (found.labels == targets.numpy()).all()

    @pytest.mark.parametrize("other", ["before", "after"])
    def test_the_logits_are_those_of_the_forward_that_was_trained_on(self, run: Any, gpt: Any, other: str) -> None:
        """A look at fixed rows without a graph, in training mode: a metric, or a teacher."""
        recording = run()
        (inputs, targets), (probe, _) = gpt.shifted(0), gpt.shifted(1)
        expected = recording.model(inputs).detach().logsumexp(-1)

        def look() -> None:
            with torch.no_grad():
                recording.model(probe)

        with recording.recorder.step(batch=(inputs, targets)):
            if other == "before":
                look()
            gpt.cross_entropy(recording.model(inputs), targets).backward()
            recording.optimizer.step()
            if other == "after":
                look()
        (found,) = recording.capsule().batches()
        assert found.logsumexp == pytest.approx(expected.numpy(), rel=1e-5)

    @pytest.mark.parametrize("given", [True, False])
    def test_ids_outside_the_vocabulary_are_recorded_and_break_nothing(
        self, run: Any, gpt: Any, caplog: Any, given: bool
    ) -> None:
        recording = run()
        inputs, targets = gpt.shifted(0)
        bad = inputs.clone()
        bad[0, 0] = 10_000
        with pytest.raises(IndexError), recording.recorder.step(batch=(bad, targets) if given else None):
            recording.model(bad)
        capsule = recording.capsule()
        assert capsule.batches()[0].input_ids[0, 0] == 10_000
        assert caplog.records == []

    def test_the_ring_keeps_the_last_windows_only(self, run: Any) -> None:
        recording = run(every=1000, keep_batches=3)
        recording.train(9)
        assert [batch.step for batch in recording.capsule().batches()] == [0, 6, 7, 8]

    def test_a_step_can_be_run_again_from_its_random_state(self, run: Any) -> None:
        recording = run()
        torch.manual_seed(99)
        np.random.seed(99)
        state, numpy_state = torch.get_rng_state(), np.random.get_state()
        recording.train(1)
        found = recording.capsule().rng(0)
        torch.set_rng_state(torch.from_numpy(np.frombuffer(bytes(found["torch"]), np.uint8).copy()))
        assert (torch.get_rng_state() == state).all()
        assert (found["numpy"][1] == numpy_state[1]).all()


class TestRecords:
    def test_each_sample_has_its_own_loss_digest_and_name(self, run: Any, gpt: Any) -> None:
        recording = run()
        inputs, targets = gpt.shifted(0)
        logits = recording.model(inputs).detach()
        with recording.recorder.step(batch=(inputs, targets), sample_ids=["a", "b", "c", "d"], cursor={"shard": 3}):
            gpt.cross_entropy(recording.model(inputs), targets).backward()
            recording.optimizer.step()
        capsule = recording.capsule()
        samples = capsule.records("samples")
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(4, -1)
        assert [sample["loss"] for sample in samples] == pytest.approx(each.mean(1).tolist(), rel=1e-5)
        assert [sample["id"] for sample in samples] == ["a", "b", "c", "d"]
        assert samples[0]["sha256"] == hashlib.sha256(inputs[0].numpy().astype("<i8").tobytes()).hexdigest()
        assert [sample["length"] for sample in samples] == [12] * 4
        assert [sample["loss_tokens"] for sample in samples] == [12] * 4
        begin = capsule.records("events")[0]
        assert (begin["kind"], begin["data_cursor"]) == ("step_begin", {"shard": 3})

    def test_one_sample_that_is_not_finite_is_seen_among_finite_ones(self, run: Any, gpt: Any) -> None:
        recording = run()
        with torch.no_grad():
            recording.model.tokens.weight[49] = math.nan
        inputs, targets = gpt.shifted(0)
        inputs, targets = inputs % 49, targets % 49
        inputs[2, 5] = 49
        targets[2, 4] = 49
        with recording.recorder.step(batch=(inputs, targets)):
            gpt.cross_entropy(recording.model(inputs), targets).backward()
        capsule = recording.capsule()
        losses = [sample["loss"] for sample in capsule.records("samples")]
        assert [math.isnan(loss) for loss in losses] == [False, False, True, False]
        assert "last finite the inputs → first bad activation tokens" in capsule.trigger.message

    def test_order_of_a_step_is_told_by_its_events(self, run: Any, gpt: Any) -> None:
        recording = run()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        inputs, targets = gpt.shifted(0)
        with recording.recorder.step(batch=(inputs, targets)):
            scaler.scale(gpt.cross_entropy(recording.model(inputs), targets)).backward()
            scaler.unscale_(recording.optimizer)
            torch.nn.utils.clip_grad_norm_(recording.model.parameters(), 1.0)
            scaler.step(recording.optimizer)
            scaler.update()
        events = [event for event in recording.capsule().records("events") if event["kind"] != "log"]
        kinds = ["step_begin", "backward", "unscale", "finite_check", "grad_norm", "clip", "optimizer_step"]
        kinds.append("scaler_update")
        assert [event["kind"] for event in events] == kinds
        assert (events[-1]["scale_before"], events[-1]["scale_after"]) == (8.0, 8.0)
        assert "nested" not in events[2]

    def test_parameter_groups_say_what_the_optimizer_owns(self, run: Any, gpt: Any) -> None:
        recording = run(gpt.GPT())
        recording.model.tokens.weight.requires_grad_(False)
        assert recording.optimizer.param_groups[0]["params"].pop() is recording.model.head.bias
        recording.train(1)
        rows = {row["name"]: row for row in recording.capsule().records("param_groups")}
        assert rows["head.weight"]["in_optimizer"]
        assert rows["head.weight"]["moved_fraction"] == 1.0
        assert rows["head.weight"]["state"]["exp_avg"]["dtype"] == "float32"
        assert rows["head.weight"]["lr"] == 1e-2
        assert not rows["head.bias"]["in_optimizer"]
        assert rows["head.bias"]["has_grad"]
        assert not rows["tokens.weight"]["has_grad"]


class TestAccumulation:
    def record(self, run: Any, gpt: Any, inside: bool) -> tuple[Capsule, list[float], list[float]]:
        recording = run(every=1000)
        losses: list[float] = []
        norms: list[float] = []
        for window in range(2):
            total = 0.0
            for micro in range(3):
                inputs, targets = gpt.shifted(10 * window + micro)
                with recording.recorder.step(batch=(inputs, targets)):
                    loss = gpt.cross_entropy(recording.model(inputs), targets) / 3
                    loss.backward()
                    total += loss.item()
                    if micro == 2:
                        norms.append(torch.stack([p.grad.norm() for p in recording.model.parameters()]).norm().item())
                    if micro == 2 and inside:
                        recording.optimizer.step()
                if micro == 2 and not inside:
                    recording.optimizer.step()
            recording.optimizer.zero_grad()
            losses.append(total)
        return recording.capsule(), losses, norms

    @pytest.mark.parametrize("inside", [True, False], ids=["step inside the block", "step after it"])
    def test_a_window_of_three_micro_batches_is_one_step(self, run: Any, gpt: Any, inside: bool) -> None:
        capsule, losses, norms = self.record(run, gpt, inside)
        assert capsule.scalars("loss").step.tolist() == [0, 1]
        assert capsule.scalars("loss").value == pytest.approx(losses, rel=1e-6)
        assert capsule.scalars("grad_norm").value == pytest.approx(norms, rel=1e-5)
        assert len(capsule.scalars("update_norm")) == 2
        assert [(batch.step, batch.micro) for batch in capsule.batches()] == [
            (s, m) for s in range(2) for m in range(3)
        ]
        micros = capsule.records("microbatches")
        assert [(row["step"], row["micro"], row["tokens"]) for row in micros] == [
            (s, m, 48) for s in range(2) for m in range(3)
        ]
        assert sum(row["loss_mean"] for row in micros[:3]) / 3 == pytest.approx(losses[0], rel=1e-5)
        assert capsule.manifest.training.accumulation_steps == 3

    def test_a_window_that_the_job_ends_within_bends_no_curve(self, run: Any, gpt: Any) -> None:
        """Eight micro-batches in windows of three: the last two are on record one by one, and are no step."""
        with (recording := run(gpt.GPT())).recorder:
            for number in range(8):
                ids, targets = gpt.shifted(number)
                with recording.recorder.step(batch={"input_ids": ids, "labels": targets}):
                    (gpt.cross_entropy(recording.model(ids), targets) / 3).backward()
                    if number % 3 == 2:
                        recording.optimizer.step()
                        recording.optimizer.zero_grad()
        capsule = recording.capsule()
        assert capsule.scalars("loss").step.tolist() == [0, 1]
        assert [each["step"] for each in capsule.records("microbatches")] == [0, 0, 0, 1, 1, 1, 2, 2]


class TestMixedPrecision:
    def test_autocast_and_scaler_give_unscaled_loss_and_gradient_norm(self, run: Any, gpt: Any) -> None:
        recording = run()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        losses: list[float] = []
        norms: list[float] = []
        for step in range(3):
            inputs, targets = gpt.shifted(step)
            with recording.recorder.step(batch=(inputs, targets)):
                with torch.autocast("cpu", torch.float16):
                    loss = gpt.cross_entropy(recording.model(inputs).float(), targets)
                scaler.scale(loss).backward()
                norms.append(torch.stack([p.grad.norm() for p in recording.model.parameters()]).norm().item() / 1024)
                scaler.step(recording.optimizer)
                scaler.update()
                recording.optimizer.zero_grad()
            losses.append(loss.item())
        capsule = recording.capsule()
        assert capsule.scalars("loss").value == pytest.approx(losses, rel=1e-6)
        assert capsule.scalars("grad_norm").value == pytest.approx(norms, rel=1e-5)
        assert capsule.scalars("loss_scale").value.tolist() == [1024.0] * 3
        assert capsule.scalars("overflow").value.tolist() == [0.0] * 3
        assert capsule.manifest.training.precision == "fp16-mixed"
        assert set(capsule.stats(name="head", role="activation").dtype) == {"float16"}
        assert capsule.batches()[0].logits_dtype == "float16"
        nested = [event.get("nested") for event in capsule.records("events") if event["kind"] == "unscale"]
        assert nested == [True] * 3

    def test_a_scaled_loss_divided_by_the_accumulation_is_unscaled(self, run: Any, gpt: Any) -> None:
        recording = run()
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        inputs, targets = gpt.shifted(0)
        with recording.recorder.step(batch=(inputs, targets)):
            loss = gpt.cross_entropy(recording.model(inputs), targets)
            (scaler.scale(loss) / 4).backward()
            scaler.step(recording.optimizer)
        assert recording.capsule().scalars("loss").value == pytest.approx([loss.item() / 4], rel=1e-6)


def test_the_manifest_tells_model_optimizer_and_environment(run: Any) -> None:
    recording = run(
        config={"layers": 2, "hf_token": "hf_abcdefghijklmnopqrstuvwxyz", "max_tokens": 5},
        manifest={"training": {"reduction": "token-mean", "optimizer": {"weight_decay": 0.25}}},
    )
    recording.train(1)
    manifest = recording.capsule().manifest
    assert (manifest.model.vocab_size, manifest.model.embedding_rows, manifest.model.layers) == (50, 50, 2)
    assert manifest.model.parameters == sum(p.numel() for p in recording.model.parameters())
    assert manifest.training.reduction == "token-mean"
    assert manifest.training.optimizer.name == "AdamW"
    assert manifest.training.optimizer.weight_decay == 0.25  # what the user says has the last word
    assert manifest.training.precision == "fp32"
    assert manifest.environment.torch == torch.__version__
    assert manifest.config["max_tokens"] == 5
    assert "abcdef" not in str(manifest.raw)
    assert len(manifest.identity.model.sha256) == 64
    assert manifest.position.global_step == 0


class TestOnADevice:
    """The path that reads nothing before the window ends, taken with tensors of the CPU."""

    @pytest.fixture(params=[1, 1000], ids=["full statistics", "norms"])
    def pair(self, run: Any, monkeypatch: Any, request: Any) -> tuple[Capsule, Capsule]:
        def record() -> Capsule:
            recording = run(statistics_every=request.param, every=1000)
            recording.train(4, spoil=lambda step, loss: loss * math.nan if step == 3 else loss)
            return recording.capsule()

        at_hand = record()
        monkeypatch.setattr(statistics, "at_hand", lambda tensor: False)
        return at_hand, record()

    def test_rows_scalars_and_trigger_are_those_of_the_direct_path(self, pair: tuple[Capsule, Capsule]) -> None:
        expected, found = pair
        for step in range(3):
            one, other = expected.stats(step=step), found.stats(step=step)
            assert list(one.name) == list(other.name)
            assert other.rms == pytest.approx(one.rms, rel=1e-5)
        for name in ("loss", "grad_norm", "update_norm", "tokens"):
            assert found.scalars(name).value == pytest.approx(expected.scalars(name).value, rel=1e-5, nan_ok=True)
        assert found.trigger.step == expected.trigger.step == 3
        assert found.trigger.message == expected.trigger.message
        assert [row["loss"] for row in found.records("samples")] == pytest.approx(
            [row["loss"] for row in expected.records("samples")], rel=1e-6
        )

    def test_nothing_is_read_while_forward_and_backward_run(self, run: Any, gpt: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(statistics, "at_hand", lambda tensor: False)
        recording = run()
        reads: list[str] = []
        item, tolist = Tensor.item, Tensor.tolist
        inputs, targets = gpt.shifted(0)
        with recording.recorder.step(batch=(inputs, targets)):
            monkeypatch.setattr(Tensor, "item", lambda self: reads.append("item") or item(self))
            monkeypatch.setattr(Tensor, "tolist", lambda self: reads.append("tolist") or tolist(self))
            gpt.cross_entropy(recording.model(inputs), targets).backward()
            assert reads == []
            recording.optimizer.step()
        assert "tolist" in reads
