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
from torch import Tensor

from . import incidents
from .incidents import Incident, Mode

FP32_FULL = Mode("fp32, full precision, one step")
FP32_FOUR = Mode("fp32, 4 decimals, one step", decimals=4)
FP32_TWO_STEPS = Mode("fp32, 4 decimals, two steps", decimals=4, steps=2)
PRINTED_TWO = Mode("fp32, 2 decimals, two steps", decimals=2, steps=2)
BF16_LOGITS = Mode("bf16 logits, fp32 loss, 4 decimals", logits=torch.bfloat16, decimals=4)
BF16_LOGITS_TWO = Mode("bf16 logits, fp32 loss, two steps", logits=torch.bfloat16, decimals=4, steps=2)
FP16_LOGITS = Mode("fp16 logits, fp32 loss, full precision", logits=torch.float16)
BF16_STORED = Mode("fp32 job, capture in bf16, 4 decimals", stored=torch.bfloat16, decimals=4)
BF16_STORED_THREE = Mode("fp32 job, capture in bf16, three steps", stored=torch.bfloat16, decimals=4, steps=3)
COMPACT = Mode("fp32, 4 decimals, log-sum-exp only", decimals=4, compact=True)
BF16_LOSS = Mode("loss in bf16, one step", logits=torch.bfloat16, loss=torch.bfloat16)
BF16_LOSS_FIVE = Mode("loss in bf16, five steps", logits=torch.bfloat16, loss=torch.bfloat16, steps=5)
MODES = (
    *(FP32_FULL, FP32_FOUR, FP32_TWO_STEPS, PRINTED_TWO),
    *(COMPACT, BF16_LOGITS, BF16_LOGITS_TWO, FP16_LOGITS, BF16_STORED, BF16_STORED_THREE, BF16_LOSS, BF16_LOSS_FIVE),
)


def compacted(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """Log-sum-exp, and the logits of the tokens at flattened offsets 0, 1 and 2; NaN past the end."""
    rows, flat = logits.reshape(-1, logits.shape[-1]), ids.reshape(-1)
    picked = torch.full((len(flat), 3), float("nan"))
    for offset in range(3):
        at = torch.arange(len(flat) - offset)
        picked[: len(flat) - offset, offset] = rows[at, flat[offset:]].float()
    return {"logsumexp": logits.float().logsumexp(-1), "target_logits": picked.reshape(*ids.shape, 3)}


def scores(mode: Mode, micro: incidents.Micro) -> dict[str, Tensor]:
    """What the capture keeps of the logits."""
    if mode.compact:
        return compacted(micro.logits, micro.ids)
    return {"logits": micro.logits if mode.stored is None else micro.logits.to(mode.stored)}


def write(incident: Incident, path: Path, mode: Mode) -> Capsule:
    """The incident as a capsule, with the evidence that a job would leave."""
    configured, ranks = incident.steps[0].configured, 2 if incident.steps[0].others else 1
    training = {"objective": "sft", "reduction": "token-mean", "accumulation_steps": configured}
    about = {"training": training, "run": {"world_size": ranks}}
    with CapsuleWriter(path, title=incident.truth, phase="training", manifest=about) as writer:
        several = any(len(step.micros) > 1 for step in incident.steps) or configured > 1
        if several:
            writer.scalars("loss", step=list(range(len(incident.steps))), value=incident.reported, rank=0)
        for step, (window, reported) in enumerate(zip(incident.steps, incident.reported, strict=True)):
            every = [(0, at, each) for at, each in enumerate(window.micros)]
            every += [(1, at, each) for at, each in enumerate(window.others)]
            for rank, index, micro in every:
                writer.batch(
                    step=step,
                    rank=rank,
                    micro=index,
                    split="train",
                    input_ids=micro.ids.numpy(),
                    labels=micro.labels.numpy(),
                    attention_mask=micro.mask.numpy(),
                    roles=None if micro.roles is None else micro.roles.numpy(),
                    segment_ids=None if micro.segments is None else micro.segments.numpy(),
                    reported_loss=None if several or rank else reported,
                    reported_decimals=incident.decimals,
                    label_layout="unshifted",
                    loss_dtype=incident.loss_dtype,
                    logits_dtype=incident.logits_dtype,
                    **scores(mode, micro),
                )
                about_micro = {"step": step, "micro": index, "window": configured}
                writer.record("microbatches", about_micro, rank=rank)
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


def judge(truth: str, outcome: tuple[Verdict, tuple[Observed, ...]]) -> str:
    """One word for a verdict against the truth of its incident."""
    verdict = outcome[0]
    named = {frozenset(member) for members in verdict.classes for member in members}
    if truth == "healthy":
        return "healthy:" + ("quiet" if verdict.status == "healthy" else "false-alarm")
    if truth.startswith("unknown:"):
        if verdict.status in ("confirmed", "likely"):
            return f"unknown:named-{verdict.status}"
        return "unknown:undetermined" if verdict.status == "undetermined" else "unknown:inert"
    if verdict.status == "healthy":
        return "inert:quiet" if is_truth_by_another_name(truth, outcome) else "fault:missed"
    if verdict.status == "undetermined":
        return "fault:undetermined"
    if frozenset(truth.split(" + ")) in named and len(verdict.classes) == 1:
        return f"fault:{verdict.status}"
    return "equivalent" if is_truth_by_another_name(truth, outcome) else "fault:misnamed"


def is_truth_by_another_name(truth: str, outcome: tuple[Verdict, tuple[Observed, ...]]) -> bool:
    """Whether what was named gives the truth's own value on this input, to FP64 rounding: then it is no other cause."""
    verdict, observed = outcome
    spec = LossSpec()
    for name in truth.split(" + "):
        spec = BY_NAME[name].fault.edit(spec)
    values = [reported_loss(each.window, spec, None, None) for each in observed]
    return any(abs(verdict.table.candidates[0].value - value) <= 1e-11 * abs(value) for value in values)


def run(mode: Mode, truths: Sequence[str], seeds: range, without_truth: bool = False) -> Rates:
    """Every truth once a seed, through a capsule on disk; ``without_truth`` takes it out of the catalogue."""
    rates = Rates(mode.name)
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            for index, truth in enumerate(truths):
                incident = incidents.make(seed * 1009 + index, mode, truth)
                capsule = write(incident, Path(folder) / f"{seed}-{index}.capsule", mode)
                if without_truth:
                    rest = [each for each in CATALOGUE if each.fault.name not in truth.split(" + ")]
                    outcome = explain_windows(capsule, observed_windows(capsule), rest)
                else:
                    outcome = loss_verdict(capsule)
                assert outcome is not None, truth
                word = judge(f"unknown:{truth}" if without_truth else truth, outcome)
                if "named" in word and without_truth and is_truth_by_another_name(truth, outcome):
                    word = "equivalent"
                rates.said[word] += 1
                if word in ("healthy:false-alarm", "fault:missed", "fault:misnamed") or "named" in word:
                    rates.wrong.append(f"{truth} seed {seed}: {word} {outcome[0].classes} {outcome[0].z:.3g}")
    return rates
