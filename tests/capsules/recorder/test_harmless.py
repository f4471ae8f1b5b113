"""Recording changes nothing: not the numbers, not the model, not the process, whatever goes wrong inside."""

from __future__ import annotations

import copy
import io
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmconsole.capsules import Capsule, Recorder
from llmconsole.capsules.recorder.tape import Row, Tape
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer


class Noisy(nn.Module):
    """Dropout everywhere, so that one random number drawn in between would show."""

    def __init__(self, gpt: Any) -> None:
        super().__init__()
        self.inner, self.drop = gpt.GPT(), nn.Dropout(0.2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.inner.tokens(ids))
        for block in self.inner.blocks:
            x = self.drop(block(x))
        return self.inner.head(x)


def train(gpt: Any, folder: Path | None, autocast: bool, steps: int = 6) -> tuple[list[float], list[Tensor], list[Any]]:
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    model = Noisy(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=autocast, init_scale=64.0)
    recorder = (
        None if folder is None else Recorder(folder, model=model, optimizer=optimizer, every=2, statistics_every=3)
    )
    losses: list[float] = []
    for step in range(steps):
        inputs, targets = gpt.shifted(step)

        def body(inputs: Tensor = inputs, targets: Tensor = targets) -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = gpt.cross_entropy(model(inputs).float(), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())

        if recorder is None:
            body()
        else:
            with recorder.step(batch=(inputs, targets)):
                body()
    if recorder is not None:
        recorder.close()
    state = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]
    return losses, [p.detach().clone() for p in model.parameters()], state


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast with a scaler"])
def test_losses_weights_and_generators_are_the_same_to_the_bit(gpt: Any, tmp_path: Path, autocast: bool) -> None:
    losses, weights, states = train(gpt, None, autocast)
    recorded_losses, recorded_weights, recorded_states = train(gpt, tmp_path, autocast)
    assert recorded_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(weights, recorded_weights, strict=True))
    assert torch.equal(states[0], recorded_states[0])
    assert states[1:] == recorded_states[1:]


def visible_state(model: nn.Module) -> list[Any]:
    modules = [
        (
            name,
            sorted(module.__dict__),
            [len(module.__dict__[key]) for key in sorted(module.__dict__) if "hooks" in key],
        )
        for name, module in model.named_modules()
    ]
    parameters = [
        (name, parameter._backward_hooks, bool(getattr(parameter, "_post_accumulate_grad_hooks", None)), dir(parameter))
        for name, parameter in model.named_parameters()
    ]
    scaler = torch.amp.GradScaler
    patched = [torch.autograd.backward, clip_grad._clip_grads_with_norm_, torch.nn.utils.clip_grad_norm_]
    patched += [scaler.scale, scaler.unscale_, scaler.step, scaler.update]
    hooks = [dict(torch_optimizer._global_optimizer_pre_hooks), dict(torch_optimizer._global_optimizer_post_hooks)]
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    return [modules, parameters, patched, hooks, handlers, sorted(model.state_dict())]


def test_taking_it_off_leaves_model_functions_and_handlers_as_they_were(run: Any, gpt: Any) -> None:
    model = gpt.GPT()
    before = visible_state(model)
    recording = run(model)
    recording.train(3)
    assert visible_state(model) != before
    recording.recorder.close()
    assert visible_state(model) == before


def test_two_recorders_at_once_each_see_their_own_model(run: Any, gpt: Any, tmp_path: Path) -> None:
    first, second = run(), gpt.Run(tmp_path, seed=1)
    inputs, targets = gpt.shifted(0)
    for _ in range(2):
        with first.recorder.step(batch=(inputs, targets)):
            gpt.cross_entropy(first.model(inputs), targets).backward()
            first.optimizer.step()
    original = torch.autograd.backward
    capsule = first.capsule()
    assert torch.autograd.backward is original  # the other one still needs it
    second.train(1)
    assert len(capsule.scalars("loss")) == 2
    assert len(second.capsule().scalars("loss")) == 1
    assert len(Capsule.open(first.recorder.path).scalars("update_norm")) == 2


class TestCopiesOfTheModel:
    def test_a_copy_is_made_and_records_nothing(self, run: Any, gpt: Any) -> None:
        recording = run(every=1000)
        recording.train(1)
        average = copy.deepcopy(recording.model)
        inputs, targets = gpt.shifted(1)
        with recording.recorder.step(batch=(inputs, targets)):
            gpt.cross_entropy(recording.model(inputs), targets).backward()
            gpt.cross_entropy(average(inputs), targets)
            recording.optimizer.step()
        stats = recording.capsule().stats(step=1, role="activation", name="head")
        assert stats.call.tolist() == [0]

    def test_the_whole_model_can_be_saved_and_loaded(self, run: Any) -> None:
        recording = run()
        recording.train(1)
        file = io.BytesIO()
        torch.save(recording.model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(loaded.head.weight, recording.model.head.weight)


class TestErrorsInside:
    def test_a_part_that_fails_is_given_up_with_one_warning_and_the_rest_goes_on(
        self, run: Any, gpt: Any, monkeypatch: Any, caplog: Any
    ) -> None:
        def broken(*arguments: Any) -> Row:
            raise RuntimeError("no norm today\nwith a second line")

        recording = run()
        recording.train(1)
        monkeypatch.setattr(Tape, "measure", broken)
        losses = recording.train(3)
        assert len(losses) == 3
        warned = [record.getMessage() for record in caplog.records if record.name == "llmconsole.recorder"]
        assert warned == ["no longer recording activations and gradients: RuntimeError: no norm today"]
        capsule = recording.capsule()
        assert len(capsule.scalars("loss")) == 4
        assert capsule.status == "sealed"

    def test_a_directory_that_cannot_be_made_costs_the_recording_only(
        self, gpt: Any, tmp_path: Path, caplog: Any
    ) -> None:
        (tmp_path / "file").write_text("in the way")
        recording = gpt.Run(tmp_path / "file" / "runs")
        assert len(recording.train(2)) == 2
        recording.recorder.close()
        assert recording.recorder.path is None
        assert len(caplog.records) == 1

    def test_fields_of_the_manifest_that_are_wrong_cost_the_recording_only(self, run: Any, caplog: Any) -> None:
        recording = run(manifest={"training": {"reduction": "whatever"}})
        assert len(recording.train(2)) == 2
        assert len(caplog.records) == 1
        assert "reduction" in caplog.text

    @pytest.mark.parametrize(
        "part",
        ["ModuleHooks", "Loop", "Finisher", "Ranks", "Between", "optimizer.attach", "atexit.register"],
    )
    def test_a_recorder_that_fails_while_it_is_made_seals_its_capsule_and_takes_everything_off(
        self, part: str, gpt: Any, tmp_path: Path, monkeypatch: Any, caplog: Any
    ) -> None:
        from llmconsole.capsules.recorder import recorder

        def broken(*arguments: Any, **keywords: Any) -> None:
            raise RuntimeError("not today")

        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LLMCONSOLE_RUN": f"made-{part}"}.items():
            monkeypatch.setenv(name, value)
        model = gpt.GPT()
        before, threads = visible_state(model), threading.active_count()
        owner, _, name = part.rpartition(".")
        monkeypatch.setattr(getattr(recorder, owner) if owner else recorder, name, broken)
        recording = gpt.Run(tmp_path, model)
        assert len(recording.train(2)) == 2
        recording.recorder.close()
        assert visible_state(model) == before
        assert [record.getMessage() for record in caplog.records] == ["not recording: RuntimeError: not today"]
        capsule = Capsule.open(recording.recorder.path)
        assert capsule.status == "sealed"
        (event,) = capsule.records("events")
        assert event["message"] == "recording ended: RuntimeError: not today"
        deadline = time.monotonic() + 30
        while threading.active_count() > threads and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() == threads

    def test_recording_warns_of_nothing_by_itself(self, run: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            recording = run(statistics_every=1)
            recording.train(3, spoil=lambda step, loss: loss * float("nan") if step == 2 else loss)
            recording.recorder.close()

    def test_the_limit_on_bytes_ends_recording_with_one_warning(self, run: Any, monkeypatch: Any, caplog: Any) -> None:
        from llmconsole.capsules.recorder import finish

        monkeypatch.setattr(finish, "SIZE_EVERY", 0.0)
        recording = run(max_bytes=50_000)
        recording.train(6)
        assert not recording.recorder.recording
        assert len(caplog.records) == 1
        assert "max_bytes=50,000" in caplog.text
        capsule = recording.capsule()
        assert capsule.status == "sealed"
        assert len(capsule.scalars("loss")) >= 1


def test_a_step_after_closing_is_just_the_loop(run: Any) -> None:
    recording = run()
    recording.train(1)
    recording.recorder.close()
    recording.recorder.close()
    assert len(recording.train(2)) == 2


def test_importing_capsules_and_the_recorder_package_loads_no_torch() -> None:
    code = (
        "import sys, llmconsole.capsules, llmconsole.capsules.recorder, llmconsole.capsules.recorder.environment;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
