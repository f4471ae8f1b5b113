"""The sample of the optimizer step: what is taken, when, and that training does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmconsole.capsules import Capsule, Recorder
from llmconsole.capsules.recorder import statistics
from llmconsole.capsules.recorder.captured import MOST_ELEMENTS, choose
from torch import nn

MEMBERS = ("before", "gradient", "exp_avg", "exp_avg_sq", "after", "exp_avg_after", "exp_avg_sq_after")


def arrays(capsule: Capsule, name: str) -> dict[int, dict[str, Any]]:
    """Arrays of one parameter by window and member."""
    found: dict[int, dict[str, Any]] = {}
    for tensor in capsule.tensors(f"optimizer/{name}/*"):
        found.setdefault(tensor.step, {})[tensor.name.rpartition("/")[2]] = tensor
    return found


def test_what_is_taken_is_what_the_optimizer_had_and_made(run: Any, gpt: Any) -> None:
    recording = run(every=3)
    expected: dict[int, dict[str, Any]] = {}
    weight = recording.model.head.weight
    for step in range(4):
        inputs, targets = gpt.shifted(step)
        with recording.recorder.step(batch=(inputs, targets)):
            gpt.cross_entropy(recording.model(inputs), targets).backward()
            torch.nn.utils.clip_grad_norm_(recording.model.parameters(), 0.1)
            state = recording.optimizer.state[weight]
            now = {"before": weight.detach().clone(), "gradient": weight.grad.clone()}
            now |= {name: state[name].clone() for name in ("exp_avg", "exp_avg_sq") if state}
            recording.optimizer.step()
            state = recording.optimizer.state[weight]
            now |= {"after": weight.detach().clone()}
            now |= {f"{name}_after": state[name].clone() for name in ("exp_avg", "exp_avg_sq")}
            expected[step] = now
            recording.optimizer.zero_grad()
    found = arrays(recording.capsule(), "head.weight")
    assert sorted(found) == [0, 3]
    for step, members in found.items():
        for name, tensor in expected[step].items():
            np.testing.assert_array_equal(members[name].array(), tensor.reshape(-1).numpy(), err_msg=name)
        ratio = members["gradient"].array() / members["gradient_raw"].array()
        told = members["after"].attributes
        assert ratio == pytest.approx(0.1 / (told["total_norm"] + 1e-6), rel=1e-4)
        assert (told["optimizer"], told["module"], told["decoupled"]) == ("AdamW", "torch.optim.adamw", True)
        assert (told["lr"], told["betas"], told["eps"], told["weight_decay"]) == (1e-2, [0.9, 0.999], 1e-8, 1e-2)
        assert (told["gradient_state"], told["state_step_before"], told["state_step"]) == ("clipped", step, step + 1)
        assert told["max_norm"] == 0.1


def test_with_a_scaler_the_scale_and_the_state_are_told(run: Any, gpt: Any) -> None:
    recording = run()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    inputs, targets = gpt.shifted(0)
    with recording.recorder.step(batch=(inputs, targets)):
        scaler.scale(gpt.cross_entropy(recording.model(inputs), targets)).backward()
        scaler.step(recording.optimizer)
        scaler.update()
    (members,) = arrays(recording.capsule(), "head.weight").values()
    told = members["after"].attributes
    assert (told["raw_state"], told["gradient_state"], told["grad_scale"]) == ("scaled", "unscaled", 8.0)
    assert members["gradient_raw"].array() == pytest.approx(8 * members["gradient"].array())


def test_every_kind_of_parameter_is_among_the_sample_and_it_is_small(gpt: Any) -> None:
    model = gpt.GPT(width=80, layers=12)
    model.blocks[3].requires_grad_(False)
    trained, frozen = choose(model, dict(model.named_parameters()))
    assert len(trained) <= 16
    assert 0 < len(frozen) <= 4
    assert {"tokens.weight", "blocks.0.up.weight", "head.weight", "head.bias"} <= set(trained)
    assert any("norm.weight" in name for name in trained)


def test_a_large_parameter_gives_its_leading_elements(tmp_path: Path) -> None:
    model = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Recorder(tmp_path, model=model, optimizer=optimizer) as recorder, recorder.step():
        first = model.weight.detach().clone()
        model(torch.ones(2, 100)).sum().backward()
        optimizer.step()
    members = arrays(Capsule.open(recorder.path), "weight")[0]
    assert members["before"].shape == (MOST_ELEMENTS,)
    np.testing.assert_array_equal(members["before"].array(), first.reshape(-1)[:MOST_ELEMENTS].numpy())
    assert set(members) == {"before", "gradient", "gradient_raw", "after", "momentum_buffer_after"}


def test_a_closure_and_a_subclass_that_calls_its_parent_are_told_apart(tmp_path: Path, gpt: Any) -> None:
    class Doubled(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            return result

    model = nn.Linear(4, 4)
    optimizer = Doubled(model.parameters(), lr=0.1)
    with Recorder(tmp_path, model=model, optimizer=optimizer, every=1) as recorder:
        for closure in (False, True):
            with recorder.step():
                loss = model(torch.ones(2, 4)).square().sum()
                loss.backward()
                optimizer.step((lambda loss=loss: loss) if closure else None)
                after = model.weight.detach().clone()
    found = arrays(Capsule.open(recorder.path), "weight")
    np.testing.assert_array_equal(found[1]["after"].array(), after.reshape(-1).numpy())
    assert [found[step]["after"].attributes["closure"] for step in (0, 1)] == [False, True]


def test_the_window_after_an_overflow_is_sampled_and_no_other(run: Any, gpt: Any) -> None:
    recording = run(every=1000)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(5):
        inputs, targets = gpt.shifted(step)
        with recording.recorder.step(batch=(inputs, targets)):
            scaler.scale(gpt.cross_entropy(recording.model(inputs), targets)).backward()
            if step == 2:
                recording.model.head.weight.grad[0, 0] = float("nan")
            scaler.step(recording.optimizer)
            scaler.update()
            recording.optimizer.zero_grad()
    assert {tensor.step for tensor in recording.capsule().tensors("optimizer/*")} == {0, 3}


def test_nothing_is_read_in_a_step_on_a_device(run: Any, gpt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = run(every=1)
    recording.train(1)
    monkeypatch.setattr(statistics, "at_hand", lambda tensor: False)
    moved: list[str] = []
    cpu = torch.Tensor.cpu
    inputs, targets = gpt.shifted(1)
    with recording.recorder.step(batch=(inputs, targets)):
        monkeypatch.setattr(torch.Tensor, "cpu", lambda self: moved.append("cpu") or cpu(self))
        gpt.cross_entropy(recording.model(inputs), targets).backward()
        recording.optimizer.step()
        assert moved == []
    assert moved
    assert arrays(recording.capsule(), "head.weight")[1]["after"].array().size


def test_a_group_with_odd_settings_costs_nothing_else(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0] |= {"betas": ["odd", None], "eps": "tiny", "weight_decay": None}
    optimizer.defaults["x"] = object()
    with Recorder(tmp_path, model=model, optimizer=optimizer) as recorder, recorder.step():
        model(torch.ones(2, 3)).sum().backward()
        optimizer.param_groups[0]["weight_decay"] = 0.0
        optimizer.step()
    capsule = Capsule.open(recorder.path)
    assert len(capsule.scalars("loss")) == 1


def test_records_say_what_is_shared_adapted_and_how_large_the_weights_are(tmp_path: Path, gpt: Any) -> None:
    model = gpt.GPT()
    model.head.weight = model.tokens.weight
    model.lora_A = nn.Linear(16, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = gpt.shifted(0)
    with Recorder(tmp_path, model=model, optimizer=optimizer) as recorder, recorder.step(batch=(inputs, targets)):
        gpt.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    rows = {each["name"]: each for each in Capsule.open(recorder.path).records("param_groups")}
    assert rows["tokens.weight"]["shared_with"] == ["head.weight"]
    assert rows["lora_A.weight"]["adapter"] is True
    assert "adapter" not in rows["head.bias"]
    after = model.blocks[0].up.weight.detach().abs().median().item()
    assert rows["blocks.0.up.weight"]["weight_absmedian"] == pytest.approx(after)
    assert rows["head.bias"]["optimizer"] == "AdamW"
