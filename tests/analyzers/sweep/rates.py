"""Run random incidents through capsule and rules and count what was said about them."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from llmconsole.analyzers.fault import Verdict
from llmconsole.analyzers.objective.loss_faults import BY_NAME, CATALOGUE, LossSpec, reported_loss
from llmconsole.analyzers.objective.loss_verdict import explain_windows, loss_verdict
from llmconsole.analyzers.objective.loss_windows import Observed, observed_windows
from llmconsole.capsules import Capsule, CapsuleWriter

from . import incidents
from .incidents import Incident, Mode

FP32_FULL = Mode("fp32, full precision, one step")
FP32_FOUR = Mode("fp32, 4 decimals, one step", decimals=4)
FP32_TWO_STEPS = Mode("fp32, 4 decimals, two steps", decimals=4, steps=2)
PRINTED_TWO = Mode("fp32, 2 decimals, two steps", decimals=2, steps=2)
BF16_LOGITS = Mode("bf16 logits, fp32 loss, 4 decimals", logits=torch.bfloat16, decimals=4)
FP16_LOGITS = Mode("fp16 logits, fp32 loss, full precision", logits=torch.float16)
BF16_LOSS = Mode("loss in bf16, one step", logits=torch.bfloat16, loss=torch.bfloat16)
BF16_LOSS_FIVE = Mode("loss in bf16, five steps", logits=torch.bfloat16, loss=torch.bfloat16, steps=5)
MODES = (
    *(FP32_FULL, FP32_FOUR, FP32_TWO_STEPS, PRINTED_TWO),
    *(BF16_LOGITS, FP16_LOGITS, BF16_LOSS, BF16_LOSS_FIVE),
)


def write(incident: Incident, path: Path) -> Capsule:
    """The incident as a capsule, with the evidence that a job would leave."""
    configured = incident.steps[0].configured
    training = {"objective": "sft", "reduction": "token-mean", "accumulation_steps": configured}
    with CapsuleWriter(path, title=incident.truth, phase="training", manifest={"training": training}) as writer:
        several = any(len(step.micros) > 1 for step in incident.steps) or configured > 1
        if several:
            writer.scalars("loss", step=list(range(len(incident.steps))), value=incident.reported, rank=0)
        for step, (window, reported) in enumerate(zip(incident.steps, incident.reported, strict=True)):
            for index, micro in enumerate(window.micros):
                writer.batch(
                    step=step,
                    rank=0,
                    micro=index,
                    split="train",
                    input_ids=micro.ids.numpy(),
                    labels=micro.labels.numpy(),
                    attention_mask=micro.mask.numpy(),
                    logits=micro.logits,
                    reported_loss=None if several else reported,
                    reported_decimals=incident.decimals,
                    label_layout="unshifted",
                    loss_dtype=incident.loss_dtype,
                    logits_dtype=incident.logits_dtype,
                )
                writer.record("microbatches", {"step": step, "micro": index, "window": configured})
    return Capsule.open(path)


@dataclass
class Rates:
    """What was said of the incidents of one mode."""

    mode: str
    said: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def count(self, prefix: str) -> int:
        """Incidents whose outcome starts with ``prefix`` (``fault:`` for all that carry a fault that can be seen)."""
        return sum(count for outcome, count in self.said.items() if outcome.startswith(prefix))


def judge(truth: str, verdict: Verdict) -> str:
    """One word for a verdict against the truth of its incident."""
    named = {name for members in verdict.classes for member in members for name in member}
    if truth == "healthy":
        return "healthy:" + ("quiet" if verdict.status == "healthy" else "false-alarm")
    if truth.startswith("unknown:"):
        if verdict.status in ("confirmed", "likely"):
            return f"unknown:named-{verdict.status}"
        return "unknown:undetermined" if verdict.status == "undetermined" else "unknown:inert"
    if verdict.status == "healthy":
        inert = truth in verdict.inert
        return "inert:quiet" if inert else "fault:missed"
    if verdict.status == "undetermined":
        return "fault:undetermined"
    return f"fault:{verdict.status}" if truth in named and len(verdict.classes) == 1 else "fault:misnamed"


def is_truth_by_another_name(truth: str, outcome: tuple[Verdict, tuple[Observed, ...]]) -> bool:
    """Whether what was named gives the truth's own value on this input, to FP64 rounding: then it is no other cause."""
    verdict, observed = outcome
    spec = BY_NAME[truth].fault.edit(LossSpec())
    values = [reported_loss(each.window, spec, None, None) for each in observed]
    return any(abs(verdict.table.candidates[0].value - value) <= 1e-11 * abs(value) for value in values)


def run(mode: Mode, truths: Sequence[str], seeds: range, without_truth: bool = False) -> Rates:
    """Every truth once a seed, through a capsule on disk; ``without_truth`` takes it out of the catalogue."""
    rates = Rates(mode.name)
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            for index, truth in enumerate(truths):
                incident = incidents.make(seed * 1009 + index, mode, truth)
                capsule = write(incident, Path(folder) / f"{seed}-{index}.capsule")
                if without_truth:
                    rest = [each for each in CATALOGUE if each.fault.name != truth]
                    outcome = explain_windows(capsule, observed_windows(capsule), rest)
                else:
                    outcome = loss_verdict(capsule)
                assert outcome is not None, truth
                word = judge(f"unknown:{truth}" if without_truth else truth, outcome[0])
                if "named" in word and without_truth and is_truth_by_another_name(truth, outcome):
                    word = "equivalent"
                rates.said[word] += 1
                if word in ("healthy:false-alarm", "fault:missed", "fault:misnamed") or "named" in word:
                    rates.wrong.append(f"{truth} seed {seed}: {word} {outcome[0].classes} {outcome[0].z:.3g}")
    return rates
