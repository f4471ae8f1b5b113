"""Slices that pay for the mean, and models that are served otherwise than they were trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, Recorder
from torch import nn
from torch.nn import functional

from tests.analyzers.conftest import rule_named

SLICE, DRIFT = "objective/slice-regression", "objective/template-drift"
A, B = "a" * 64, "b" * 64


# -- slices


def samples(means: dict[str, list[float]], count: int = 20, split: str = "validation", **fields: Any) -> Any:
    """``count`` samples of each domain at steps 0, 100 … with normal scatter 0.3 of their own around the means."""
    own = {name: np.random.default_rng(at).normal(0, 0.3, count) for at, name in enumerate(means)}
    noise = np.random.default_rng(99)

    def fill(writer):
        for at in range(max(map(len, means.values()))):
            for name, path in means.items():
                if at < len(path):
                    losses = path[at] + own[name] + noise.normal(0, 0.02, count)
                    writer.records(
                        "samples",
                        [
                            {
                                "step": 100 * at,
                                "id": f"{name}{row}",
                                "domain": name,
                                "split": split,
                                "loss": loss,
                                **fields,
                            }
                            for row, loss in enumerate(losses)
                        ],
                    )

    return fill


@pytest.mark.fires(SLICE)
def test_a_domain_that_rises_while_the_mean_falls_is_named(build, findings_of):
    made = samples({"web": [3.0, 2.5, 2.2], "books": [3.0, 2.6, 2.3], "code": [1.5, 1.6, 1.75]})
    (finding,) = findings_of(SLICE, build(made))
    assert (finding.severity, finding.where.step) == ("warning", 0)
    assert "domain code rises from 1.4" in finding.summary
    # The mean of all: (3 + 3 + 1.5) / 3 = 2.5 falls to (2.2 + 2.3 + 1.75) / 3 = 2.083, up to the samples' own scatter.
    assert finding.evidence[1].value == pytest.approx(2.083, abs=0.1)


@pytest.mark.quiet(SLICE)
@pytest.mark.parametrize(
    "means",
    [
        {"web": [3.0, 2.5, 2.2], "code": [1.5, 1.45, 1.44]},  # falls more slowly
        {"web": [3.0, 2.5, 2.2], "code": [1.5, 1.5, 1.51]},  # within the swing of a checkpoint
        {"web": [2.2, 2.5, 3.0], "code": [1.5, 1.6, 1.75]},  # all rise
    ],
    ids=["slow", "swing", "all"],
)
def test_parts_that_do_not_pay_for_the_mean_are_quiet(build, findings_of, means):
    assert not findings_of(SLICE, build(samples(means)))


@pytest.mark.quiet(SLICE)
def test_four_samples_are_no_slice(build, findings_of):
    def fill(writer):
        samples({"web": [3.0, 2.5]})(writer)
        samples({"code": [1.5, 1.8]}, count=4)(writer)

    assert not findings_of(SLICE, build(fill))


@pytest.mark.fires(SLICE)
def test_a_range_of_lengths_is_a_slice_too(build, findings_of):
    def fill(writer):
        samples({"short": [3.0, 2.5]}, length=60)(writer)
        samples({"long": [2.0, 2.3]}, length=600)(writer)

    (finding,) = findings_of(SLICE, build(fill))
    assert "lengths 512 to 1023" in finding.summary or "domain long" in finding.summary


@pytest.mark.quiet(SLICE)
@pytest.mark.parametrize("seed", range(3))
def test_training_samples_that_scatter_are_quiet_and_a_planned_change_is_not_judged(build, findings_of, seed):
    generator = np.random.default_rng(seed)

    def run(writer):
        for step in range(60):
            level = 2.0 + 3.0 * np.exp(-step / 15)
            names = generator.choice(["web", "code", "wiki"], 8)
            writer.records(
                "samples",
                [
                    {"step": step, "domain": str(name), "length": int(generator.integers(8, 200)), "split": "train",
                     "loss": level + generator.normal(0, 0.4)}
                    for name in names
                ],
            )  # fmt: skip

    assert not findings_of(SLICE, build(run))


@pytest.mark.fires(SLICE)
def test_a_domain_of_the_training_samples_that_rises_is_named_unless_the_mixture_changes(build, findings_of):
    generator = np.random.default_rng(5)

    def run(writer):
        for step in range(80):
            levels = {"web": 4.0 - step / 40, "code": 1.5 + step / 100}
            rows = [{"step": step, "domain": name, "loss": levels[name] + generator.normal(0, 0.3)} for name in levels]
            writer.records("samples", rows)

    (finding,) = findings_of(SLICE, build(run))
    assert "training loss" in finding.summary
    assert "domain code" in finding.summary

    def planned(writer):
        run(writer)
        writer.record("events", {"kind": "mixture_changed", "step": 40})

    assert not analyze(build(planned), [rule_named(SLICE)]).findings


def scores(part: str | None, values: list[float], **fields: Any) -> list[dict[str, Any]]:
    return [
        {"name": "accuracy", "suite": "exam", "value": value, "step": 10 * at, "n": 400, **fields}
        | ({"slice": part} if part else {})
        for at, value in enumerate(values)
    ]


@pytest.mark.fires(SLICE)
@pytest.mark.recorded(SLICE)
def test_a_model_that_forgets_one_domain_while_it_learns_another(build, findings_of):
    """Next-token tables trained on two languages, then on one alone; each held-out sample is scored by the model."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)

    def texts(jump: int, count: int) -> torch.Tensor:
        rows = [torch.randint(0, 24, (count, 1), generator=generator)]
        for _ in range(15):
            odd = torch.rand(count, 1, generator=generator) < 0.2
            rows.append(torch.where(odd, torch.randint(0, 24, (count, 1), generator=generator), (rows[-1] + jump) % 24))
        return torch.cat(rows, 1)

    held = {"law": texts(1, 20), "poetry": texts(5, 20)}
    table = nn.Embedding(24, 24)
    optimizer = torch.optim.Adam(table.parameters(), lr=0.1)

    def losses(ids: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(table(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none").mean(1)

    def fill(writer):
        for step in range(91):
            if step % 30 == 0:
                with torch.no_grad():
                    scored = {name: losses(ids).tolist() for name, ids in held.items()}
                writer.records(
                    "samples",
                    [
                        {"step": step, "id": f"{name}{row}", "domain": name, "split": "validation", "loss": loss}
                        for name, rows in scored.items()
                        for row, loss in enumerate(rows)
                    ],
                )
            batch = torch.cat([texts(1, 28), texts(5, 4)]) if step < 30 else texts(1, 32)
            optimizer.zero_grad()
            losses(batch).mean().backward()
            optimizer.step()

    (finding,) = findings_of(SLICE, build(fill))
    assert "domain poetry rises" in finding.summary


@pytest.mark.fires(SLICE)
def test_a_slice_of_scores_that_falls_while_the_whole_rises_is_named_once(build, findings_of):
    made = [*scores(None, [0.50, 0.60]), *scores("law", [0.5, 0.75]), *scores("poetry", [0.6, 0.45])]
    capsule = build(lambda writer: writer.records("evaluations", made))
    (finding,) = findings_of(SLICE, capsule)
    assert "poetry 0.6 → 0.45" in finding.summary
    assert not findings_of("numerics/capability-drop", capsule)
    # Without a rise of the whole it is a drop.
    made = [*scores(None, [0.55, 0.55]), *scores("law", [0.5, 0.5]), *scores("poetry", [0.6, 0.45])]
    capsule = build(lambda writer: writer.records("evaluations", made))
    assert not findings_of(SLICE, capsule)
    assert len(findings_of("numerics/capability-drop", capsule)) == 1


@pytest.mark.quiet(SLICE)
def test_a_domain_that_is_evaluated_and_not_trained_is_a_remark(build, findings_of):
    def fill(writer):
        samples({"web": [3.0]}, split="train")(writer)
        samples({"web": [3.0], "poetry": [4.0]})(writer)

    (finding,) = findings_of(SLICE, build(fill))
    assert (finding.severity, finding.kind) == ("info", "hygiene")
    assert finding.evidence[0].name == "training samples of poetry"


# -- drift


def tuned(**inference: Any) -> dict[str, Any]:
    both = {"tokenizer": {"name": "tok", "sha256": A}, "chat_template": {"name": "tok", "sha256": A}}
    return {"identity": both, "identity_inference": {name: both[name] | each for name, each in inference.items()}}


def nothing(writer: Any) -> None: ...


@pytest.mark.fires(DRIFT)
@pytest.mark.parametrize("part", ["tokenizer", "chat_template"])
def test_another_tokenizer_or_template_in_inference_is_confirmed(build, findings_of, part):
    (finding,) = findings_of(DRIFT, build(nothing, tuned(**{part: {"sha256": B}})))
    assert (finding.severity, finding.confidence) == ("critical", "confirmed")
    assert (finding.evidence[0].value, finding.evidence[0].expected) == (B, A)
    assert part.replace("_", " ") in finding.title


@pytest.mark.quiet(DRIFT)
def test_another_name_with_the_same_digest_is_quiet(build, findings_of):
    assert not findings_of(DRIFT, build(nothing, tuned(tokenizer={"name": "/mnt/tok"}, chat_template={})))
    assert not findings_of(DRIFT, build(nothing, tuned(tokenizer={"sha256": "SHA256:" + A.upper()})))


@pytest.mark.quiet(DRIFT)
def test_names_alone_are_not_compared(build):
    manifest = {"identity": {"tokenizer": {"name": "a"}}, "identity_inference": {"tokenizer": {"name": "b"}}}
    report = analyze(build(nothing, manifest), [rule_named(DRIFT)])
    assert "digests" in report.skipped[0].missing[0]


@pytest.mark.fires(DRIFT)
def test_another_revision_of_the_model_is_named(build, findings_of):
    manifest = {
        "identity": {"model": {"name": "m", "revision": "abc"}},
        "identity_inference": {"model": {"name": "m", "revision": "def"}},
    }
    (finding,) = findings_of(DRIFT, build(nothing, manifest))
    assert (finding.severity, finding.evidence[0].value) == ("critical", "def")


@pytest.mark.fires(DRIFT)
def test_the_last_evaluation_in_another_template_is_a_warning_and_that_of_the_base_is_not(build, findings_of):
    def scored(*templates: str) -> Capsule:
        made = [
            {"name": "acc", "value": 0.5, "step": 10 * at, "template_sha256": each} for at, each in enumerate(templates)
        ]
        return build(lambda w: w.records("evaluations", made), {"identity": {"chat_template": {"sha256": A}}})

    (finding,) = findings_of(DRIFT, scored(A, B))
    assert (finding.severity, finding.where.step) == ("warning", 10)
    assert not findings_of(DRIFT, scored(B, A))


def formats(training: str, inference: str) -> Any:
    sides = [{"side": "training", "dtype": training}, {"side": "inference", "dtype": inference}]
    return lambda writer: writer.records("environments", sides)


@pytest.mark.fires(DRIFT)
@pytest.mark.parametrize(
    ("training", "inference", "severity"),
    [
        ("bfloat16", "float16", "warning"),  # 3e38 against 65504
        ("bf16", "nf4", "warning"),
        ("torch.float16", "int8", "warning"),
        ("float32", "bfloat16", "info"),
        ("float32", "float16", "info"),
    ],
)
def test_a_narrower_number_format_is_named(build, findings_of, training, inference, severity):
    (finding,) = findings_of(DRIFT, build(formats(training, inference)))
    assert (finding.severity, finding.confidence) == (severity, "likely")


@pytest.mark.quiet(DRIFT)
@pytest.mark.parametrize(
    ("training", "inference"), [("bfloat16", "float32"), ("bf16", "bfloat16"), ("fp16", "bf16"), ("fp8", "bf16")]
)
def test_a_number_format_that_holds_as_much_is_quiet(build, findings_of, training, inference):
    assert not findings_of(DRIFT, build(formats(training, inference)))


@pytest.mark.quiet(DRIFT)
def test_mixed_precision_is_served_in_what_it_computes_in(build, findings_of):
    manifest = {"training": {"precision": "bf16-mixed"}, "model": {"dtype": "float32"}}
    made = [{"side": "inference", "dtype": "bfloat16"}]
    assert not findings_of(DRIFT, build(lambda writer: writer.records("environments", made), manifest))


class Tokenizer:
    """Enough of one to be told apart."""

    def __init__(self, words: list[str], chat_template: str) -> None:
        self.words, self.chat_template, self.name_or_path = words, chat_template, "words"

    def get_vocab(self) -> dict[str, int]:
        return {word: at for at, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)


WORDS = [f"w{at}" for at in range(12)]


def resumed(folder: Path, after: Tokenizer) -> Capsule:
    """A run that leaves a checkpoint with its contract, and one that loads it with the tokenizer ``after``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(recorder: Recorder) -> None:
        ids = torch.arange(12).view(2, 6)
        with recorder.step(batch={"input_ids": ids, "labels": ids}):
            functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

    before = Tokenizer(WORDS, "{user}: {text}")
    with Recorder(folder / "one", model=model, optimizer=optimizer, tokenizer=before, contract=True) as recorder:
        step(recorder)
        torch.save({"model": model.state_dict()}, folder / "model.pt")
    with Recorder(folder / "two", model=model, optimizer=optimizer, tokenizer=after) as recorder:
        model.load_state_dict(torch.load(folder / "model.pt", weights_only=True)["model"])
        step(recorder)
    assert recorder.path is not None
    return Capsule.open(recorder.path)


@pytest.mark.fires(DRIFT)
@pytest.mark.recorded(DRIFT)
def test_a_checkpoint_loaded_with_another_tokenizer_is_named(tmp_path, findings_of):
    (finding,) = findings_of(DRIFT, resumed(tmp_path, Tokenizer(WORDS[::-1], "{user}: {text}")))
    assert (finding.severity, finding.confidence) == ("critical", "confirmed")
    assert "tokenizer" in finding.title


@pytest.mark.quiet(DRIFT)
def test_a_checkpoint_loaded_with_its_own_tokenizer_is_quiet_and_new_tokens_are_a_remark(tmp_path, findings_of):
    for name in ("same", "grown"):
        (tmp_path / name).mkdir()
    assert not findings_of(DRIFT, resumed(tmp_path / "same", Tokenizer(WORDS, "{user}: {text}")))
    (finding,) = findings_of(DRIFT, resumed(tmp_path / "grown", Tokenizer([*WORDS, "<new>"], "{user}: {text}")))
    assert (finding.severity, finding.kind) == ("info", "hygiene")


def test_odd_evidence_makes_no_rule_raise(build):
    manifest = {
        "identity": {"tokenizer": {"sha256": ""}, "adapter": {"name": "x"}, "model": {}},
        "identity_inference": {"model": {"revision": "r"}},
        "contract": {"tokenizer": [], "dtype": 3, "special_ids": {"vocab_size": "x"}},
        "model": {"dtype": "complex64"},
    }

    def fill(writer):
        writer.records(
            "environments", [{"side": None, "dtype": ""}, {"quantisation": {"bits": 4}}, {"side": "inference"}]
        )
        writer.records(
            "samples", [{"domain": "x", "loss": float("inf"), "step": 0}, {"domain": "", "split": "validation"}]
        )
        writer.records("samples", [{"domain": "x", "loss": 1.0, "step": at, "length": 0} for at in range(3)])
        writer.records(
            "evaluations", [{"slice": "x", "value": 0.0, "step": 0}, {"slice": "x", "value": 0.0, "step": 0}]
        )

    report = analyze(build(fill, manifest))
    assert not report.errors
