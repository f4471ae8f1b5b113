"""Loops that hand over nonsense, hide their optimizer or raise what cannot be printed: each costs what it must."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from llmconsole.capsules import Capsule, Recorder
from llmconsole.capsules.recorder import recorder as module
from torch import Tensor, nn


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Broken:
    """Raises at every touch."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __iter__(self) -> Any:
        raise RuntimeError("iterated")


def warned(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "llmconsole.recorder"]


def descend(model: nn.Module, rate: float = 0.1) -> None:
    """An optimizer that torch knows nothing of."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= rate * parameter.grad
            parameter.grad = None


def test_an_exception_without_words_is_recorded_by_its_name(run: Any) -> None:
    recording = run()
    recording.train(1)
    with pytest.raises(Unprintable), recording.recorder.step():
        raise Unprintable
    trigger = recording.capsule().trigger
    assert (trigger.kind, trigger.message) == ("exception", "Unprintable: (its words cannot be had: RuntimeError)")


def test_what_is_no_number_no_name_and_no_cursor_costs_only_itself(run: Any, gpt: Any, caplog: Any) -> None:
    recording = run()
    for turn in range(3):
        inputs, targets = gpt.shifted(turn)
        step = recording.recorder.step(batch=(inputs, targets), sample_ids=Broken(), cursor={1: Broken()}, step=-5)
        with step as handle:
            handle.loss("none")  # type: ignore[arg-type]
            handle.log(text="none", several=torch.ones(3), nothing=None, good=turn)  # type: ignore[arg-type]
            gpt.cross_entropy(recording.model(inputs), targets).backward()
            recording.optimizer.step()
            recording.optimizer.zero_grad()
    parts = [line.split(":")[0].removeprefix("no longer recording ") for line in warned(caplog)]
    assert parts == ["step numbers", "sample ids", "step.loss", "step.log(text)", "step.log(several)"]
    capsule = recording.capsule()
    assert capsule.scalars("good").value.tolist() == [0, 1, 2]
    assert capsule.scalars("loss").step.tolist() == [0, 1, 2]
    assert len(capsule.records("microbatches")) == 3


def test_names_may_be_a_tensor_and_a_cursor_a_bare_position(run: Any, gpt: Any) -> None:
    recording = run()
    inputs, targets = gpt.shifted(0)
    with recording.recorder.step(batch=(inputs, targets), sample_ids=torch.arange(4), cursor=17):
        gpt.cross_entropy(recording.model(inputs), targets).backward()
        recording.optimizer.step()
    capsule = recording.capsule()
    assert [record["id"] for record in capsule.records("samples")] == ["0", "1", "2", "3"]
    assert capsule.manifest.position.data_cursor == {"position": 17}


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": None},
        {"every": "often"},
        {"keep_batches": "few"},
        {"model": len},
        {"directory": None},
        {"phase": "nowhere"},
        {"manifest": [1]},
        {"max_bytes": "4 GiB"},
        {"tokenizer": Broken()},
        {"config": Broken()},
    ],
    ids=lambda wrong: next(f"{name}={type(value).__name__}" for name, value in wrong.items()),
)
def test_wrong_arguments_cost_the_recording_and_never_the_loop(tmp_path: Path, gpt: Any, wrong: Any) -> None:
    model = gpt.GPT()
    arguments = {"directory": tmp_path, "model": model, "optimizer": None} | wrong
    recorder = Recorder(arguments.pop("directory"), **arguments)
    for turn in range(3):
        inputs, targets = gpt.shifted(turn)
        with recorder.step(batch=(inputs, targets)):
            gpt.cross_entropy(model(inputs), targets).backward()
    recorder.trigger()
    assert recorder.triggered is None or recorder.triggered.kind == "manual"
    recorder.close()


def test_without_a_model_every_optimizer_ends_a_step(tmp_path: Path, gpt: Any) -> None:
    model = gpt.GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path) as recorder:
        for turn in range(3):
            inputs, targets = gpt.shifted(turn)
            with recorder.step(batch=(inputs, targets)):
                gpt.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
    assert len(Capsule.open(recorder.path).scalars("loss")) == 3


def test_an_optimizer_that_takes_the_place_of_the_named_one_ends_steps_too(run: Any) -> None:
    recording = run()
    recording.train(2)
    recording.optimizer = torch.optim.SGD(recording.model.parameters(), lr=0.1)
    recording.train(3)
    assert recording.capsule().scalars("loss").step.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("declared", "steps"), [({}, 1 + 6), ({"training": {"accumulation_steps": 2}}, 1 + 3)])
def test_a_loop_whose_steps_cannot_be_seen_is_cut_before_memory_is_full(
    run: Any, gpt: Any, monkeypatch: Any, declared: dict[str, Any], steps: int
) -> None:
    monkeypatch.setattr(module, "UNSEEN_MICROS", 4)
    recording = run(manifest=declared)
    for turn in range(10):
        inputs, targets = gpt.shifted(turn)
        with recording.recorder.step(batch=(inputs, targets)):
            gpt.cross_entropy(recording.model(inputs), targets).backward()
            descend(recording.model)
    capsule = recording.capsule()
    assert len(capsule.scalars("loss")) == steps
    (words,) = (each["message"] for each in capsule.records("events") if each["kind"] == "log" and "step" in each)
    assert words.startswith("no optimizer step was seen in 4 micro-batches; a step is ")


def test_logits_of_an_open_window_are_held_only_up_to_the_limit(run: Any, gpt: Any, monkeypatch: Any) -> None:
    from llmconsole.capsules.recorder import reading

    inputs, targets = gpt.shifted(0)
    monkeypatch.setattr(reading, "LOGITS_BYTES", 2 * 4 * inputs.numel() * gpt.vocabulary)
    recording = run()
    for turn in range(5):
        with recording.recorder.step(batch=(inputs, targets)):
            gpt.cross_entropy(recording.model(inputs), targets).backward()
            if turn == 4:
                recording.optimizer.step()
    batches = recording.capsule().batches()
    assert [("logits" in batch.arrays, "logsumexp" in batch.arrays) for batch in batches] == [
        *[(True, True)] * 2,
        *[(False, True)] * 3,
    ]


def test_losses_that_the_loop_adds_up_in_place_are_those_of_backward(run: Any, gpt: Any) -> None:
    recording = run()
    expected: list[float] = []
    total: Tensor | None = None
    for turn in range(3):
        inputs, targets = gpt.shifted(turn)
        with recording.recorder.step(batch=(inputs, targets)) as step:
            loss = gpt.cross_entropy(recording.model(inputs), targets)
            loss.backward()
            expected.append(loss.item())
            total = loss.detach() if total is None else total
            step.log(total=total)
            total += loss.detach()
            recording.optimizer.step()
            recording.optimizer.zero_grad()
    capsule = recording.capsule()
    assert capsule.scalars("loss").value.tolist() == pytest.approx(expected, rel=1e-6)
    assert capsule.scalars("total").value[0] == pytest.approx(expected[0], rel=1e-6)
    assert [batch.reported_loss for batch in capsule.batches()] == pytest.approx(expected, rel=1e-6)


def test_a_model_without_storage_is_followed_without_a_word(tmp_path: Path, gpt: Any, caplog: Any) -> None:
    with torch.device("meta"):
        model = gpt.GPT()
    with Recorder(tmp_path, model=model) as recorder:
        for _ in range(2):
            with recorder.step(batch=torch.zeros(2, 5, dtype=torch.int64, device="meta")):
                model(torch.zeros(2, 5, dtype=torch.int64, device="meta"))
    assert warned(caplog) == []


def test_a_scripted_and_a_lazy_model_are_followed(tmp_path: Path, gpt: Any, caplog: Any) -> None:
    lazy = nn.Sequential(nn.Embedding(gpt.vocabulary, 8), nn.LazyLinear(gpt.vocabulary))
    scripted = torch.jit.script(nn.Sequential(nn.Embedding(gpt.vocabulary, 8), nn.Linear(8, gpt.vocabulary)))
    for number, model in enumerate((lazy, scripted)):
        with Recorder(tmp_path / str(number), model=model) as recorder:
            for turn in range(2):
                inputs, targets = gpt.shifted(turn)
                with recorder.step(batch=(inputs, targets)):
                    gpt.cross_entropy(model(inputs), targets).backward()
                    torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert len(Capsule.open(recorder.path).scalars("loss")) == 2
    assert warned(caplog) == []


def test_a_job_may_change_its_working_directory(run: Any, gpt: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    recording = gpt.Run(Path("runs"))
    recording.train(1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    recording.train(2)
    assert len(recording.capsule().scalars("loss")) == 3
    assert recording.recorder.path.parent == tmp_path / "runs"


def test_inference_and_function_transforms_inside_a_step_cost_no_later_activation(
    run: Any, gpt: Any, caplog: Any
) -> None:
    recording = run()
    recording.train(1)
    model, (inputs, targets) = recording.model, gpt.shifted(1)

    def loss_of(parameters: dict[str, Tensor], row: Tensor, target: Tensor) -> Tensor:
        return gpt.cross_entropy(torch.func.functional_call(model, parameters, (row[None],)), target[None])

    with recording.recorder.step(batch=(inputs, targets)):
        with torch.inference_mode():
            model(inputs)
        each = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))
        each({name: p.detach() for name, p in model.named_parameters()}, inputs, targets)
        gpt.cross_entropy(model(inputs), targets).backward()
        recording.optimizer.step()
    assert warned(caplog) == []
    capsule = recording.capsule()
    assert len(capsule.stats(step=1, role="gradient", name="head")) == 1
    assert len(capsule.scalars("loss")) == 2


@pytest.mark.parametrize("name", ["../../outside", "/outside", "..", "-rf", "é", "\x1b[31m", "x" * 300, "a\nb"])
def test_a_hostile_name_of_a_run_is_a_plain_folder_in_its_place(tmp_path: Path, monkeypatch: Any, name: str) -> None:
    monkeypatch.setenv("LLMCONSOLE_RUN", name)
    with Recorder(tmp_path / "runs") as recorder:
        pass
    assert recorder.path.parent == tmp_path / "runs"
    assert recorder.path.name[0].isalnum()
    assert len(recorder.path.name) < 120
    assert recorder.path.name.isprintable()


def test_a_signal_in_the_middle_of_a_step_leaves_a_crashed_capsule(job: Any) -> None:
    killed = job(
        """
        import os, signal, sys, torch
        from llmconsole.capsules import Recorder
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = Recorder(sys.argv[1], model=model, optimizer=optimizer)
        for turn in range(3):
            with recorder.step():
                model(torch.ones(3)).sum().backward()
                if turn == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                optimizer.step()
        """
    )
    assert killed.finish()[0] == -15
    capsule = killed.capsule()
    assert (capsule.status, capsule.trigger.signal) == ("crashed", "SIGTERM")


class Unhashable:
    """A forward that somebody has wrapped into an object with an equality of its own."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __call__(self, input_ids: Tensor) -> Tensor:
        return self._forward(input_ids)


def test_arguments_have_names_whatever_forward_is_and_no_model_is_kept_for_them(run: Any, gpt: Any) -> None:
    class Positions(gpt.GPT):
        def forward(self, where: Tensor, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids)

    for replace in (False, True):
        recording = run(Positions())
        if replace:
            inner = gpt.GPT()
            recording.model.forward = Unhashable(inner.forward)
            recording.optimizer.add_param_group({"params": list(inner.parameters())})
        for turn in range(2):
            inputs, targets = gpt.shifted(turn)
            given = (inputs,) if replace else (torch.zeros_like(inputs), inputs)
            with recording.recorder.step():
                gpt.cross_entropy(recording.model(*given), targets).backward()
                recording.optimizer.step()
        batches = recording.capsule().batches()
        assert [each.input_ids.tolist() for each in batches] == [gpt.shifted(turn)[0].tolist() for turn in range(2)]
        kept = weakref.ref(recording.model)
        del recording
        gc.collect()
        assert kept() is None
