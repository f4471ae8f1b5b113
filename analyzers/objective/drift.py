"""Whether training, evaluation and inference are about one model: tokenizer, template, weights, number format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..finding import Confidence, Evidence, Finding, Severity, Where
from ..registry import NotCaptured, rule
from ..scores import records

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Parts of a job's identity and what a person calls them, the most harmful first.
PARTS = {"chat_template": "chat template", "tokenizer": "tokenizer", "model": "model", "adapter": "adapter"}
#: Number formats by their width and, of equal width, by their range (largest exponent).
_FORMATS = {
    "float64": (64, 1023),
    "float32": (32, 127),
    "bfloat16": (16, 127),
    "float16": (16, 15),
    "fp8": (8, 8),
    "int8": (8, 0),
    "int4": (4, 0),
}
_SPELLINGS = {
    "float64": ("float64", "fp64", "double"),
    "bfloat16": ("bfloat16", "bf16"),
    "float16": ("float16", "fp16", "half"),
    "float32": ("float32", "fp32", "tf32", "single"),
    "fp8": ("float8", "fp8", "e4m3", "e5m2"),
    "int8": ("int8", "w8", "8bit", "8-bit", "q8", "llm.int8"),
    "int4": ("int4", "nf4", "fp4", "w4", "4bit", "4-bit", "q4", "awq", "gptq", "int3", "int2", "q3", "q2"),
}


@dataclass(frozen=True)
class Drift:
    """One part that is one thing here and another there."""

    part: str
    here: str
    there: str
    side: str  # what there is
    severity: Severity
    confidence: Confidence
    cause: str
    step: int | None = None


@rule(
    "objective/template-drift",
    stage="objective",
    needs=(
        "manifest.identity|manifest.contract|manifest.model.dtype|manifest.training.precision|records.environments",
        "manifest.identity_inference|manifest.identity.base_checkpoint|manifest.contract|records.evaluations"
        "|records.environments",
    ),
    cases=("good-training-poor-inference", "general-ability-lost"),
)
def template_drift(capsule: Capsule) -> Iterator[Finding]:
    """What is evaluated or served is not what was trained: template, tokenizer, weights or number format.

    What it checks:
        Digests of tokenizer, chat template, model and adapter in training against the serving side, against what the
        loaded checkpoint says of itself, and against the latest evaluations; and the number format of each.

    Why it matters:
        Every part runs, and the answers are poor: the model sees prompts in a form that it was never trained on, or
        computes in numbers that it does not fit.

    How it decides:
        Digests are compared where both sides have one; revisions where not. Another tokenizer or template in inference
        is critical; another model or adapter, too, and only likely where this capsule trained it on. A template of an
        evaluation that differs is a warning. Number formats: bf16 to fp16 loses range and int8, fp8 or 4 bits lose
        digits (warning, likely); fp32 to bf16 or fp16 is a remark.

    Looks like it but is not:
        Another name with the same digest; a wider number format; training in bf16 from fp32 weights served in bf16; a
        base model without a template that gets one in fine-tuning, or a vocabulary that grew by new tokens (a remark);
        the base model's own evaluation before tuning.

    What to try next:
        Tokenise one conversation in both places and compare the ids, not the text. Compute the loss of one training
        sample in the serving stack: it must equal the trainer's to 1e-2.

    Fix:
        Ship tokenizer, template and generation settings with the weights, and load them from there.
    """
    raw = capsule.manifest.raw
    identity, inference, contract = (_mapping(raw.get(each)) for each in ("identity", "identity_inference", "contract"))
    compared: list[str] = []
    found = [
        *_against(identity, inference, "inference", compared, moved=_trains(capsule)),
        *_against_contract(raw, identity, contract, compared),
        *_against_base(identity, compared),
        *_against_evaluations(capsule, identity, compared),
        *_formats(capsule, contract, compared),
    ]
    if not compared:
        raise NotCaptured("digests, revisions or number formats of the same part on two sides")
    for each in found:
        yield _finding(each)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _trains(capsule: Capsule) -> bool:
    """Whether the weights of this capsule moved after their digest was taken."""
    return any(each.get("kind") == "optimizer_step" for each in capsule.records("events"))


def _differs(here: dict[str, Any], there: dict[str, Any]) -> tuple[str, str] | None:
    """The digests, else the revisions, of two artifacts where they differ; ("", "") where nothing can be compared."""
    for field in ("sha256", "revision"):
        left, right = here.get(field), there.get(field)
        if left and right:
            left, right = _digest(left), _digest(right)
            return (left, right) if left != right else None
    return ("", "")


def _digest(value: Any) -> str:
    return str(value or "").strip().lower().removeprefix("sha256:")


def _against(
    here: dict[str, Any], there: dict[str, Any], side: str, compared: list[str], *, moved: bool
) -> Iterator[Drift]:
    """Part by part against the serving side."""
    for part, words in PARTS.items():
        pair = _differs(_mapping(here.get(part)), _mapping(there.get(part)))
        if pair == ("", ""):
            if part == "adapter" and here.get(part) and there.get("model") and not there.get(part):
                compared.append(part)
                yield _no_adapter(here, side)
            continue
        compared.append(part)
        if pair is None:
            continue
        weights = part in ("model", "adapter")
        yield Drift(
            words, pair[0], pair[1], side, "critical", "likely" if weights and moved else "confirmed",
            f"{side} runs with another {words} than training",
        )  # fmt: skip


def _no_adapter(here: dict[str, Any], side: str) -> Drift:
    """An adapter was trained, and the serving side names none: it may be merged."""
    sha = str(_mapping(here.get("adapter")).get("sha256") or "present")
    return Drift("adapter", sha, "none named", side, "info", "undetermined", "")


def _against_contract(
    raw: dict[str, Any], identity: dict[str, Any], contract: dict[str, Any], compared: list[str]
) -> Iterator[Drift]:
    """Tokenizer and template against what the loaded checkpoint says that it was trained with."""
    side = f"the loaded checkpoint {contract.get('path') or ''}".rstrip()
    for part in ("chat_template", "tokenizer"):
        pair = _differs(_mapping(identity.get(part)), _mapping(contract.get(part)))
        if pair == ("", ""):
            continue
        compared.append(part)
        if pair is None:
            continue
        sizes = (
            _mapping(raw.get("tokenizer")).get("vocab_size"),
            _mapping(contract.get("special_ids")).get("vocab_size"),
        )
        now, then = (each if isinstance(each, int) else 0 for each in sizes)
        grown = part == "tokenizer" and now > then > 0
        severity: Severity = "info" if grown else "critical" if part == "tokenizer" else "warning"
        confidence: Confidence = "likely" if grown or part == "chat_template" else "confirmed"
        yield Drift(
            PARTS[part], pair[0], pair[1], side, severity, confidence,
            "the vocabulary grew by new tokens" if grown else f"the {PARTS[part]} is not the one of the checkpoint",
        )  # fmt: skip


def _against_base(identity: dict[str, Any], compared: list[str]) -> Iterator[Drift]:
    """An adapter belongs to one base: the frozen model must be the checkpoint that is named as base."""
    if not identity.get("adapter"):
        return  # without one, the weights are meant to leave their base
    pair = _differs(_mapping(identity.get("model")), _mapping(identity.get("base_checkpoint")))
    if pair == ("", ""):
        return
    compared.append("base_checkpoint")
    if pair is not None:
        yield Drift(
            "model", pair[0], pair[1], "the base checkpoint", "warning", "likely",
            "the adapter is trained on other weights than the named base",
        )  # fmt: skip


def _against_evaluations(capsule: Capsule, identity: dict[str, Any], compared: list[str]) -> Iterator[Drift]:
    """The template of the last record of each evaluation against that of training."""
    own = _digest(_mapping(identity.get("chat_template")).get("sha256"))
    last: dict[tuple[Any, ...], dict[str, Any]] = {}
    for each in records(capsule):
        last[each.get("name"), each.get("suite")] = each
    for (name, suite), each in last.items():
        there = _digest(each.get("template_sha256"))
        if not own or not there:
            continue
        compared.append("chat_template")
        if there != own:
            label = " ".join(str(word) for word in (suite, name) if word)
            yield Drift(
                "chat template", own, there, f"the evaluation {label}".rstrip(), "warning", "likely",
                "the evaluation asks in another template than training", each.get("step"),
            )  # fmt: skip
            return


def _formats(capsule: Capsule, contract: dict[str, Any], compared: list[str]) -> Iterator[Drift]:
    """Number formats of training against inference, evaluations, and of the loaded checkpoint against training."""
    sides: dict[str, str] = {}
    for each in capsule.records("environments"):
        for field in ("quantisation", "dtype"):
            if isinstance(each.get(field), str) and (found := number_format(each[field])) is not None:
                sides.setdefault(str(each.get("side")), found)
    manifest = capsule.manifest
    stored = number_format(manifest.model.dtype) if manifest.model is not None else None
    precision = number_format(manifest.training.precision) if manifest.training is not None else None
    trained = sides.get("training") or precision or stored
    if trained is None:
        return
    others = [("inference", sides.get("inference"), None)]
    evaluated = next((each for each in reversed(records(capsule)) if each.get("dtype")), None)
    if evaluated is not None:
        others.append(("the evaluation", number_format(str(evaluated["dtype"])), evaluated.get("step")))
    for side, there, step in others:
        if there is None:
            continue
        compared.append("dtype")
        if (drift := dtype_drift(trained, there, side, step)) is not None:
            yield drift
    saved = number_format(str(contract["dtype"])) if contract.get("dtype") else None
    if saved is not None and stored is not None:
        compared.append("dtype")
        if (drift := dtype_drift(saved, stored, "the weights as they were loaded", None)) is not None:
            yield drift


def number_format(word: str | None) -> str | None:
    """The one spelling of a number format or quantisation; None where it is none that is known."""
    lowered = (word or "").lower()
    for name, spellings in _SPELLINGS.items():
        if any(each in lowered for each in spellings):
            return name
    return None


def dtype_drift(here: str, there: str, side: str, step: int | None) -> Drift | None:
    """What is lost from one number format to another; None where nothing is."""
    (bits, reach), (narrow, low) = _FORMATS[here], _FORMATS[there]
    if narrow > bits or here == there or (narrow == bits and low >= reach):
        return None
    harmful = narrow < 16 or (bits == 16 and low < reach)
    words = "range" if narrow >= 16 and low < reach else "digits"
    return Drift(
        "number format", here, there, side, "warning" if harmful else "info", "likely",
        f"{there} holds less {words} than the {here} of training" if words == "range"
        else f"{there} holds fewer digits than the {here} of training", step,
    )  # fmt: skip


def _finding(drift: Drift) -> Finding:
    """One drift as a finding; a remark is hygiene."""
    digest = drift.part != "number format"
    here, there = (each[:12] if digest else each for each in (drift.here, drift.there))
    side = drift.side if drift.side.startswith("the ") else f"{drift.side}"
    return Finding(
        severity=drift.severity,
        confidence=drift.confidence,
        kind="hygiene" if drift.severity == "info" else None,
        title=f"The {drift.part} differs between training and {side}"[:100],
        summary=f"Training has the {drift.part} {here}, {side} has {there}.",
        where=Where(step=drift.step),
        evidence=(Evidence(name=f"{drift.part} of {side}", value=drift.there, expected=drift.here),),
        cause=drift.cause or None,
        next=(
            "tokenise one conversation in both places and compare the ids",
            "compute the loss of one training sample in both: they must agree to 1e-2",
        )
        if digest
        else ("compute the loss of a hundred samples in both number formats and compare",),
        fix=("ship tokenizer, template and settings with the weights, and load them from there",)
        if digest
        else (f"serve in the format of training ({drift.here}), or check the loss of the other one",),
    )
