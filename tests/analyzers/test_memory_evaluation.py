"""memory/eval-graph, memory/long-tail and memory/checkpointing-with-cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, Recorder
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.analyzers.conftest import rule_named

EVAL, TAIL, CACHE = "memory/eval-graph", "memory/long-tail", "memory/checkpointing-with-cache"
GIB, MIB = 1 << 30, 1 << 20

Make = Callable[..., Capsule]
Findings = Callable[[str, Capsule], list[Finding]]


def values(finding: Finding) -> dict[str, Any]:
    return {each.name: each.value for each in finding.evidence}


def size(tensors: Iterable[torch.Tensor]) -> float:
    """Bytes of the distinct storages."""
    return float(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()))


# -- eval-graph


def evaluated(
    inside: list[float], training: list[float], grad: bool | None = False, **manifest: Any
) -> tuple[Callable[[Any], None], dict[str, Any]]:
    """Memory records (in GiB) of training steps, and of one pass of evaluation after them."""

    def fill(writer: Any) -> None:
        for step, level in enumerate(training):
            writer.record("memory", {"step": step, "phase": "optimizer", "allocated": round(level * GIB)})
        begin = {"kind": "eval_begin", "step": len(training)}
        writer.record("events", begin if grad is None else begin | {"grad_enabled": grad})
        for level in inside:
            writer.record("memory", {"step": len(training), "phase": "eval", "allocated": round(level * GIB)})
        writer.record("events", {"kind": "eval_end", "step": len(training)})

    return fill, manifest


#: unslothai/unsloth-zoo 878: 500 rows of 1,024 tokens, a vocabulary of 128,256, float32.
UNSLOTH = {
    "model": {"vocab_size": 128_256},
    "config": {"eval_samples": 500, "seq": 1024, "dtype": "fp32", "per_device_eval_batch_size": 2},
}
A_BATCH = 2 * 1024 * 128_256 * 4 / GIB


@pytest.mark.fires(EVAL)
def test_collected_logits_are_named_with_the_bytes_that_they_will_take(build: Make, findings_of: Findings):
    """2·1,024·128,256·4 B = 1,050,673,152 B a batch; 500·1,024·128,256·4 B = 262,668,288,000 B in all."""
    (finding,) = findings_of(
        EVAL, build(*evaluated([20 + n * A_BATCH for n in range(1, 8)], [20.0, 20.0, 20.1, 20.0], **UNSLOTH))
    )
    assert (finding.severity, finding.confidence, finding.where.step) == ("warning", "likely", 4)
    found = values(finding)
    assert found["logits of a batch, predicted"] == 1_050_673_152
    assert found["logits of the evaluation, predicted"] == 262_668_288_000
    assert found["rise a step"] == pytest.approx(1_050_673_152, rel=1e-6)
    assert "logits of every batch" in (finding.cause or "")


@pytest.mark.fires(EVAL)
def test_concatenation_makes_the_rise_three_times_the_logits(build: Make, findings_of: Findings):
    """transformers 12878: 32·128·32,000·4 B are 0.488 GiB, and the process grows by 1,494 MiB."""
    manifest = {"model": {"vocab_size": 32_000}, "config": {"eval_samples": 32, "max_length": 128}}
    rising = [(405.7 + 1494 * n / 8) / 1024 for n in range(9)]
    (finding,) = findings_of(EVAL, build(*evaluated(rising, [0.4, 0.4, 0.4], **manifest)))
    assert values(finding)["logits of the evaluation, predicted"] == pytest.approx(0.488 * GIB, rel=1e-3)
    assert "3 times over" in finding.summary


@pytest.mark.fires(EVAL)
@pytest.mark.parametrize(("grad", "confidence"), [(True, "likely"), (False, "undetermined"), (None, "undetermined")])
def test_a_rise_that_no_logits_explain_is_a_graph_where_gradients_are_enabled(
    build: Make, findings_of: Findings, grad: bool | None, confidence: str
):
    (finding,) = findings_of(EVAL, build(*evaluated([20, 20.5, 21, 21.6, 22], [20.0] * 4, grad)))
    assert finding.confidence == confidence
    assert (finding.cause is None) == (confidence == "undetermined")


@pytest.mark.fires(EVAL)
def test_curves_with_times_tell_it_too(build: Make, findings_of: Findings):
    def fill(writer: Any) -> None:
        times = [100.0 + n for n in range(20)]
        level = [2e9] * 10 + [2e9 + 3e8 * n for n in range(1, 7)] + [2e9] * 4
        writer.scalars(
            "memory_allocated", step=list(range(10)) + [10] * 6 + list(range(10, 14)), value=level, time=times
        )
        writer.record("events", {"kind": "eval_begin", "step": 10, "t": 109.5, "grad_enabled": True})
        writer.record("events", {"kind": "eval_end", "step": 10, "t": 115.5})

    (finding,) = findings_of(EVAL, build(fill))
    assert values(finding)["rise of the pass"] == pytest.approx(15e8)


@pytest.mark.fires(EVAL)
def test_a_failure_in_evaluation_counts_with_gradients_or_with_logits_larger_than_the_device(
    build: Make, findings_of: Findings
):
    def fill(grad: bool) -> Callable[[Any], None]:
        def fill(writer: Any) -> None:
            writer.record("events", {"kind": "eval_begin", "step": 4, "grad_enabled": grad})
            writer.record("events", {"kind": "oom", "step": 4, "phase": "eval", "requested": GIB, "capacity": 80 * GIB})

        return fill

    assert [each.confidence for each in findings_of(EVAL, build(fill(True)))] == ["likely"]
    assert [each.confidence for each in findings_of(EVAL, build(fill(False), UNSLOTH))] == ["undetermined"]
    assert not findings_of(EVAL, build(fill(False)))


@pytest.mark.quiet(EVAL)
@pytest.mark.parametrize(
    ("inside", "training"),
    [
        ([30, 30, 30, 30, 30], [20.0] * 5),
        ([20, 26, 26, 26, 26.1], [20.0] * 5),
        ([20, 21, 22, 23, 24], [15.0, 16, 17, 18, 19, 20]),
        ([20, 20.001, 20.002, 20.003], [20.0] * 5),
        ([20, 24, 20, 24, 20, 24], [20.0] * 5),
        ([20, 21], [20.0] * 5),
    ],
    ids=["a larger batch", "one jump", "a leak everywhere", "a little", "back and forth", "too short"],
)
def test_what_only_looks_like_it_is_quiet(
    build: Make, findings_of: Findings, inside: list[float], training: list[float]
):
    assert not findings_of(EVAL, build(*evaluated(inside, training, True, **UNSLOTH)))


@pytest.mark.fires(EVAL)
@pytest.mark.recorded(EVAL)
@pytest.mark.parametrize("collect", [True, False])
def test_a_recorded_loop_that_collects_its_logits(tmp_path: Path, findings_of: Findings, collect: bool):
    """Real tensors, counted while they live: 16·32·4,096·4 B = 8 MiB a batch are kept for a metric, or are not."""
    model = nn.Sequential(nn.Embedding(4096, 8), nn.Linear(8, 4096))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manifest = {"model": {"vocab_size": 4096}, "training": {"micro_batch": 16, "max_length": 32}}
    with Recorder(tmp_path, model=model, optimizer=optimizer, manifest=manifest) as recorder:
        for step in range(4):
            ids = torch.randint(0, 4096, (16, 32))
            with recorder.step(batch=(ids, ids)):
                F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
            recorder.log(step=step, memory_allocated=size(model.parameters()))
        kept: list[torch.Tensor] = []
        with recorder.evaluation(), torch.no_grad():
            for at in range(6):
                logits = model(torch.randint(0, 4096, (16, 32)))
                kept.append(logits if collect else logits.argmax(-1))
                recorder.log(step=4 + at, memory_allocated=size([*model.parameters(), *kept]))
    assert recorder.path is not None
    found = findings_of(EVAL, Capsule.open(recorder.path))
    assert len(found) == int(collect)
    if collect:
        assert values(found[0])["rise a step"] == pytest.approx(8 * MIB, rel=0.05)
        assert found[0].confidence == "likely"


# -- long-tail


def lengths_and_memory(lengths: list[int], memory: list[float], **more: Any) -> Callable[[Any], None]:
    def fill(writer: Any) -> None:
        writer.scalars("memory_peak", step=list(range(len(memory))), value=[each * GIB for each in memory])
        for step, length in enumerate(lengths):
            for row, size in enumerate((length, length // 2, 100)):
                record = {"step": step, "id": f"s{step}-{row}", "length": size}
                writer.record("samples", record)
        for event in more.get("events", ()):
            writer.record("events", event)

    return fill


def follows(lengths: list[int]) -> list[float]:
    """A high-water mark that the longest sample so far makes: 10 GiB and 10 MiB a token."""
    return [10 + max(lengths[: at + 1]) / 100 for at in range(len(lengths))]


def drawn(seed: int, count: int = 60) -> list[int]:
    random.seed(seed)
    return [random.choice((400, 450, 500, 520)) for _ in range(count)]


@pytest.mark.fires(TAIL)
def test_the_longest_sample_that_makes_the_peak_is_named(build: Make, findings_of: Findings):
    lengths = drawn(1)
    lengths[20], lengths[45] = 1200, 3000
    (finding,) = findings_of(TAIL, build(lengths_and_memory(lengths, follows(lengths))))
    assert (finding.severity, finding.where.step, finding.where.sample) == ("warning", 45, "s45-0")
    assert values(finding)["longest sample"] == 3000
    assert values(finding)["memory_peak"] == 40 * GIB


@pytest.mark.fires(TAIL)
def test_a_peak_that_is_not_far_above_the_usual_level_is_a_remark(build: Make, findings_of: Findings):
    lengths = drawn(2)
    lengths[10] = 900
    (finding,) = findings_of(TAIL, build(lengths_and_memory(lengths, follows(lengths))))
    assert finding.severity == "info"


@pytest.mark.fires(TAIL)
def test_a_failure_at_the_longest_sample_so_far(build: Make, findings_of: Findings):
    lengths = drawn(3)
    lengths[-1] = 4000
    event = {"kind": "oom", "step": 59, "requested": 2 * GIB, "free": GIB, "capacity": 80 * GIB}
    capsule = build(lengths_and_memory(lengths, [20.0] * 59, events=[event]))
    (finding,) = findings_of(TAIL, capsule)
    assert (finding.severity, finding.where.sample) == ("warning", "s59-0")
    assert not findings_of(TAIL, build(lengths_and_memory(drawn(3), [20.0] * 59, events=[event])))


@pytest.mark.fires(TAIL)
def test_images_are_measured_in_pixels(build: Make, findings_of: Findings):
    def fill(writer: Any) -> None:
        sides = [[224, 224]] * 12 + [[1024, 768]] + [[224, 224]] * 5
        memory = [10.0] * 12 + [30.0] * 6
        writer.scalars("memory_peak", step=list(range(18)), value=[each * GIB for each in memory])
        writer.records("samples", [{"step": step, "image_size": each} for step, each in enumerate(sides)])

    (finding,) = findings_of(TAIL, build(fill))
    assert (finding.where.step, values(finding)["longest sample"]) == (12, 1024 * 768)


@pytest.mark.quiet(TAIL)
@pytest.mark.parametrize(
    ("lengths", "memory"),
    [
        ([1024] * 60, [10.0] * 30 + [40.0] * 30),
        ([*drawn(4)[:30], 3000, *drawn(5)[:29]], [40.0] * 60),
        (drawn(6), [10 + n / 2 for n in range(60)]),
        ([*drawn(7)[:40], 3000, *drawn(8)[:19]], [10.0] * 20 + [40.0] * 40),
        ([100 + 10 * n for n in range(60)], [10 + n / 2 for n in range(60)]),
        ([*drawn(9)[:30], 3000, *drawn(10)[:29]], [10.0] * 60),
    ],
    ids=["constant lengths", "the peak at the start", "a leak", "another step", "sorted by length", "no effect"],
)
def test_peaks_that_no_long_sample_makes_are_quiet(
    build: Make, findings_of: Findings, lengths: list[int], memory: list[float]
):
    assert not findings_of(TAIL, build(lengths_and_memory(lengths, memory)))


@pytest.mark.quiet(TAIL)
def test_packed_rows_have_no_longest_sample(build: Make, findings_of: Findings):
    lengths = drawn(1)
    lengths[45] = 3000
    capsule = build(lengths_and_memory(lengths, follows(lengths)), {"training": {"packing": True}})
    assert not findings_of(TAIL, capsule)


@pytest.mark.fires(TAIL)
@pytest.mark.recorded(TAIL)
def test_a_recorded_run_with_one_long_row(tmp_path: Path, findings_of: Findings):
    """What autograd really keeps for backward is the memory of each step."""
    model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    highest = 0.0
    with Recorder(tmp_path, model=model, optimizer=optimizer) as recorder:
        for step in range(30):
            length = 400 if step == 20 else 40 + step % 3
            batch = {"input_ids": torch.randint(1, 64, (2, length)), "attention_mask": torch.ones(2, length)}
            sizes: dict[int, int] = {}

            def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with recorder.step(batch=batch), torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
                logits = model(batch["input_ids"])
                F.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
            highest = max(highest, float(sum(sizes.values())))
            recorder.log(step=step, memory_peak=highest)
    assert recorder.path is not None
    (finding,) = findings_of(TAIL, Capsule.open(recorder.path))
    assert (finding.where.step, values(finding)["longest sample"]) == (20, 400)


# -- checkpointing-with-cache


def setting(checkpointing: Any, cache: bool, **more: Any) -> dict[str, Any]:
    return {"training": {"activation_checkpointing": checkpointing}, "model": {"use_cache": cache}} | more


@pytest.mark.fires(CACHE)
def test_both_on_in_training(build: Make, findings_of: Findings):
    (finding,) = findings_of(CACHE, build(lambda writer: None, setting(True, True)))
    assert (finding.severity, finding.confidence, finding.kind) == ("warning", "likely", "hygiene")

    def fill(writer: Any) -> None:
        writer.record("memory", {"step": 0, "phase": "forward", "kv_cache": 3 * GIB})

    (finding,) = findings_of(CACHE, build(fill, setting("full", True, config={"transformers_version": "5"})))
    assert finding.confidence == "confirmed"


@pytest.mark.quiet(CACHE)
@pytest.mark.parametrize(
    "manifest",
    [
        setting(True, False),
        setting(False, True),
        setting("none", True),
        {"training": {"activation_checkpointing": True}, "model": {"use_cache": True, "library": "transformers"}},
        setting(True, True, config={"transformers_version": "4.44.0"}),
    ],
    ids=["no cache", "no checkpointing", "the word none", "transformers", "a configuration of transformers"],
)
def test_one_of_them_or_a_library_that_switches_it_off_is_quiet(build: Make, findings_of: Findings, manifest: Any):
    assert not findings_of(CACHE, build(lambda writer: None, manifest))


@pytest.mark.quiet(CACHE)
def test_a_library_that_says_so_is_quiet(build: Make, findings_of: Findings):
    def fill(writer: Any) -> None:
        words = "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`."
        writer.record("events", {"kind": "log", "level": "warning", "message": words})

    assert not findings_of(CACHE, build(fill, setting(True, True)))


@pytest.mark.fires(CACHE)
@pytest.mark.recorded(CACHE)
def test_a_recorded_model_that_recomputes_and_keeps_a_cache(tmp_path: Path):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.up(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"use_cache": True, "vocab_size": 32}
            self.tokens, self.block, self.head = nn.Embedding(32, 8), Block(), nn.Linear(8, 32)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.block, self.tokens(ids), use_reentrant=False))

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path, model=model, optimizer=optimizer, every=1) as recorder:
        for _ in range(3):
            ids = torch.randint(0, 32, (2, 9))
            with recorder.step(batch=(ids, ids)):
                F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
                optimizer.step()
    assert recorder.path is not None
    report = analyze(Capsule.open(recorder.path), [rule_named(CACHE)])
    assert [each.rule for each in report.findings] == [CACHE]


@pytest.mark.parametrize("rule", [EVAL, TAIL, CACHE])
def test_odd_evidence_raises_nothing(build: Make, rule: str):
    def fill(writer: Any) -> None:
        writer.records("memory", [{}, {"phase": "eval"}, {"phase": "eval", "allocated": 0}])
        writer.records("samples", [{}, {"step": 1, "length": 0}, {"step": 2, "image_size": 3}])
        writer.records("events", [{"kind": "eval_end"}, {"kind": "eval_begin", "t": float("nan")}, {"kind": "oom"}])
        writer.scalars("memory_peak", step=[0, 0, 5], value=[float("nan"), float("inf"), -1.0])

    manifest = setting(True, True, config={"eval_samples": -1, "seq": "x", "per_device_eval_batch_size": 1e30})
    assert not analyze(build(fill, manifest), [rule_named(rule)]).errors
