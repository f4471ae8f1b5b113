"""Which computation gave the reported loss: every rule of the loss catalogue on a few real optimizer steps.

A tiny model is trained by torch with the loss written as a script would write it, right or wrong; logits and the
number go into a capsule; the rules see nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.objective.loss_batch import attended
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.report import CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, CapsuleWriter
from torch import Tensor, nn

VOCABULARY, LENGTH, BATCH, IGNORE = 23, 12, 4, -100
PAD, SYSTEM, USER, ASSISTANT, TOOL = range(5)
Build = Callable[..., Capsule]
Loss = Callable[["Job", Tensor, "Rows"], Tensor]


class Rows:
    """Chat rows: system, user, answer, tool result, answer, right padding; labels ask for the answers."""

    def __init__(self, generator: torch.Generator) -> None:
        self.ids = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)
        self.roles = torch.tensor([SYSTEM] + [USER] * 2 + [ASSISTANT] * 3 + [TOOL] * 2 + [ASSISTANT] * 4).repeat(
            BATCH, 1
        )
        for row, padding in enumerate((0, 1, 3, 2)):
            if padding:
                self.ids[row, -padding:] = 0
                self.roles[row, -padding:] = PAD
        self.mask = (self.roles != PAD).long()
        self.labels = torch.where(self.roles == ASSISTANT, self.ids, torch.full_like(self.ids, IGNORE))

    def asked_of(self, *roles: int) -> Tensor:
        wanted = torch.isin(self.roles, torch.tensor(roles))
        return torch.where(wanted, self.ids, torch.full_like(self.ids, IGNORE))


class Job:
    """A real training loop: embedding, linear layer, AdamW; ``window`` micro-batches a step."""

    def __init__(self, seed: int = 0, window: int = 1) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Tanh(), nn.Linear(16, VOCABULARY))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-2)
        self.window = window

    def step(self, loss: Loss) -> tuple[list[tuple[Rows, Tensor]], float]:
        """Micro-batches with their logits, and the sum of what went into backward."""
        rows = [self.shape(index, Rows(self.generator)) for index in range(self.window)]
        self.tokens = sum(int((each.labels[:, 1:] != IGNORE).sum()) for each in rows)
        captured: list[tuple[Rows, Tensor]] = []
        total = 0.0
        for each in rows:
            logits = self.model(each.ids)
            value = loss(self, logits, each)
            value.backward()
            captured.append((each, logits.detach()))
            total += float(value.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return captured, total

    def shape(self, index: int, rows: Rows) -> Rows:
        """Later micro-batches have fewer answers, so that means over micro-batches and tokens differ."""
        rows.labels[: index % BATCH] = IGNORE
        return rows


def ce(logits: Tensor, labels: Tensor, reduction: str = "mean", **options: Any) -> Tensor:
    return F.cross_entropy(
        logits.reshape(-1, VOCABULARY), labels.reshape(-1), ignore_index=IGNORE, reduction=reduction, **options
    )


def right(job: Job, logits: Tensor, rows: Rows) -> Tensor:
    return ce(logits[:, :-1], rows.labels[:, 1:], "sum") / job.tokens


def labelled(make: Callable[[Rows], Tensor]) -> Loss:
    return lambda job, logits, rows: ce(logits[:, :-1], make(rows)[:, 1:])


def capture(
    writer: CapsuleWriter, job: Job, loss: Loss, steps: int = 2, compact: bool = False, decimals: int | None = None
) -> None:
    for step in range(steps):
        micros, value = job.step(loss)
        value = value if decimals is None else round(value, decimals)
        writer.scalars("loss", step=[step], value=[value], rank=0)
        for index, (rows, logits) in enumerate(micros):
            scores: dict[str, Any] = {"logits": logits}
            if compact:
                flat = torch.cat([rows.ids.reshape(-1), torch.zeros(2, dtype=torch.long)])
                scores = {"logsumexp": torch.logsumexp(logits, -1)}
                at = torch.arange(rows.ids.numel())
                picked = torch.stack(
                    [logits.reshape(-1, VOCABULARY)[at, flat[at + offset]] for offset in range(3)], dim=-1
                )
                picked[-1, 1:] = float("nan")
                picked[-2, 2] = float("nan")
                scores["target_logits"] = picked.reshape(*rows.ids.shape, 3)
            writer.batch(
                step=step,
                micro=index,
                rank=0,
                split="train",
                input_ids=rows.ids,
                labels=rows.labels,
                attention_mask=rows.mask,
                roles=rows.roles,
                label_layout="unshifted",
                loss_dtype="float32",
                logits_dtype="float32",
                reported_loss=value if len(micros) == 1 else None,
                reported_decimals=decimals,
                **scores,
            )
            writer.record("microbatches", {"step": step, "micro": index, "window": job.window})


def manifest(reduction: str | None = "token-mean", objective: str | None = "sft", **more: Any) -> dict[str, Any]:
    training = {"objective": objective, "reduction": reduction, **more}
    return {"training": {key: value for key, value in training.items() if value is not None}}


def said(capsule: Capsule) -> tuple[CapsuleReport, dict[str, Finding]]:
    """What the rules of the loss say, one finding a rule at most; rows masked on purpose are another matter."""
    report = analyze(capsule, [each for each in all_rules() if each.id.startswith("objective/")])
    assert not report.errors, report.errors
    assert len({each.rule for each in report.findings}) == len(report.findings)
    found = {each.rule: each for each in report.findings if each.rule != "objective/all-masked"}
    return report, found


def trained(build: Build, loss: Loss, window: int = 1, declared: dict[str, Any] | None = None, **how: Any) -> Capsule:
    more = {"accumulation_steps": window} if window > 1 else {}
    return build(
        lambda writer: capture(writer, Job(window=window), loss, **how),
        manifest(**more) if declared is None else declared,
    )


NOT_SHIFTED: Loss = lambda job, logits, rows: ce(logits, rows.labels)  # noqa: E731


@pytest.mark.fires("objective/labels-not-shifted")
@pytest.mark.recorded("objective/labels-not-shifted")
@pytest.mark.parametrize("compact", [False, True])
def test_labels_that_are_not_shifted_are_confirmed_and_nothing_else_is_named(build: Build, compact: bool) -> None:
    report, found = said(trained(build, NOT_SHIFTED, compact=compact))
    assert set(found) == {"objective/labels-not-shifted"}
    finding = found["objective/labels-not-shifted"]
    assert (finding.severity, finding.confidence, finding.kind) == ("critical", "confirmed", "divergence")
    assert finding.where.step == 0
    assert finding.counterfactual is not None
    assert finding.counterfactual.classes == (("labels-not-shifted",),)
    assert finding.counterfactual.candidates[0].off_by < 1e-6 < abs(finding.counterfactual.healthy - 1e-6)
    assert report.first_divergence is not None
    assert report.first_divergence.rule == "objective/labels-not-shifted"


@pytest.mark.quiet("objective/labels-not-shifted")
@pytest.mark.quiet("objective/labels-shifted-twice")
@pytest.mark.quiet("objective/pad-in-loss")
@pytest.mark.quiet("objective/prompt-in-loss")
@pytest.mark.quiet("objective/tool-in-loss")
@pytest.mark.quiet("objective/ignore-index-missing")
@pytest.mark.quiet("objective/reduction")
@pytest.mark.quiet("objective/unexplained-loss")
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("decimals", [None, 4, 2])
def test_the_right_loss_is_quiet_with_and_without_accumulation(build: Build, window: int, decimals: int | None) -> None:
    report, found = said(trained(build, right, window=window, decimals=decimals))
    assert not found
    assert "objective/labels-not-shifted" in report.quiet


def test_a_loss_near_zero_on_memorised_text_is_quiet(build: Build) -> None:
    def fill(writer: CapsuleWriter) -> None:
        ids = torch.arange(1, LENGTH + 1).repeat(BATCH, 1)
        logits = 12.0 * F.one_hot(torch.roll(ids, -1, 1), VOCABULARY).float()
        loss = float(ce(logits[:, :-1], ids[:, 1:]))
        assert loss < 1e-3
        writer.batch(step=0, rank=0, input_ids=ids, labels=ids, logits=logits, reported_loss=loss, loss_dtype="float32")

    assert not said(build(fill, manifest()))[1]


TWICE: dict[str, Loss] = {
    "within rows": lambda job, logits, rows: ce(logits[:, :-2], rows.labels[:, 2:]),
    "over the flattened batch": lambda job, logits, rows: ce(
        logits.reshape(-1, VOCABULARY)[:-2], rows.labels.reshape(-1)[2:]
    ),
    "over rows cut by one": lambda job, logits, rows: ce(
        logits[:, :-1], F.pad(rows.labels[:, 1:].reshape(-1), (0, 1), value=IGNORE)[1:]
    ),
}


@pytest.mark.fires("objective/labels-shifted-twice")
@pytest.mark.recorded("objective/labels-shifted-twice")
@pytest.mark.parametrize("how", TWICE)
def test_labels_shifted_twice_are_confirmed_however_the_second_shift_runs(build: Build, how: str) -> None:
    _, found = said(trained(build, TWICE[how]))
    assert set(found) == {"objective/labels-shifted-twice"}
    assert found["objective/labels-shifted-twice"].confidence == "confirmed"


def test_variants_that_agree_because_first_tokens_are_masked_are_one_set(build: Build) -> None:
    # Every row starts with a masked system token: a leak of one token over the row boundary meets an ignored label.
    _, found = said(trained(build, TWICE["within rows"]))
    table = found["objective/labels-shifted-twice"].counterfactual
    assert table is not None
    assert "labels-shifted-twice" in table.classes[0]
    assert len(table.classes[0]) > 1


@pytest.mark.parametrize("twice", [False, True])
def test_a_collator_that_shifts_is_healthy_and_a_model_that_shifts_again_is_not(build: Build, twice: bool) -> None:
    def fill(writer: CapsuleWriter) -> None:
        stream = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(3))
        ids, targets = stream[:, :-1], stream[:, 1:]
        logits = Job(seed=3).model(ids).detach()
        loss = ce(logits[:, :-1], targets[:, 1:]) if twice else ce(logits, targets)
        writer.batch(
            step=0,
            rank=0,
            input_ids=ids,
            labels=targets,
            logits=logits,
            reported_loss=float(loss),
            loss_dtype="float32",
        )

    _, found = said(build(fill, manifest()))
    assert set(found) == ({"objective/labels-shifted-twice"} if twice else set())


SAME_END = {
    "end": lambda logits, labels: ce(logits[:, :-1], labels[:, :-1]),
    "start": lambda logits, labels: ce(logits[:, 1:], labels[:, 1:]),
}


@pytest.mark.fires("objective/labels-not-shifted")
@pytest.mark.parametrize("end", SAME_END)
@pytest.mark.parametrize("shifted", [False, True])
def test_logits_and_labels_cut_at_the_same_end_are_not_shifted_either(build: Build, end: str, shifted: bool) -> None:
    """``shifted``: the targets are built as tokens[1:], and it is the inputs that are scored by mistake."""

    def fill(writer: CapsuleWriter) -> None:
        stream = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(3))
        ids = stream[:, :-1]
        logits = Job(seed=3).model(ids).detach()
        writer.batch(
            step=0,
            rank=0,
            input_ids=ids,
            labels=stream[:, 1:] if shifted else ids,
            logits=logits,
            reported_loss=float(SAME_END[end](logits, ids)),
            loss_dtype="float32",
        )

    finding = said(build(fill, manifest()))[1]["objective/labels-not-shifted"]
    assert (finding.severity, finding.confidence) == ("critical", "confirmed")
    assert finding.counterfactual is not None
    assert finding.counterfactual.classes == ((f"labels-not-shifted-cut-{end}",),)


@pytest.mark.fires("objective/labels-not-shifted")
@pytest.mark.fires("objective/labels-shifted-twice")
@pytest.mark.parametrize("rule", ["objective/labels-not-shifted", "objective/labels-shifted-twice"])
def test_an_undeclared_mean_of_micro_batches_beside_a_wrong_shift_excuses_nothing(build: Build, rule: str) -> None:
    """Each micro-batch's mean over the number of them is what most scripts do; the shift is wrong all the same."""
    wrong = NOT_SHIFTED if rule.endswith("not-shifted") else TWICE["within rows"]

    def loss(job: Job, logits: Tensor, rows: Rows) -> Tensor:
        return wrong(job, logits, rows) / job.window

    _, found = said(trained(build, loss, window=3, declared=manifest(reduction=None)))
    assert set(found) == {rule}
    assert (found[rule].severity, found[rule].confidence) == ("critical", "confirmed")


@pytest.mark.fires("objective/labels-not-shifted")
def test_a_caller_who_shifts_and_forgot_is_seen_as_labels_that_equal_the_inputs(build: Build) -> None:
    def fill(writer: CapsuleWriter) -> None:
        ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
        logits = Job(seed=3).model(ids).detach()
        loss = float(ce(logits, ids))  # y = data[i : i + T] where it should be data[i + 1 : i + T + 1]
        writer.batch(step=0, rank=0, input_ids=ids, labels=ids, logits=logits, reported_loss=loss, loss_dtype="float32")

    assert set(said(build(fill, manifest()))[1]) == {"objective/labels-not-shifted"}


POSITIONS: dict[str, tuple[str, Loss]] = {
    "padding": ("objective/pad-in-loss", labelled(lambda rows: rows.asked_of(ASSISTANT, PAD))),
    "the prompt": ("objective/prompt-in-loss", labelled(lambda rows: rows.asked_of(ASSISTANT, SYSTEM, USER))),
    "tool results": ("objective/tool-in-loss", labelled(lambda rows: rows.asked_of(ASSISTANT, TOOL))),
    "everything": ("objective/ignore-index-missing", labelled(lambda rows: rows.ids)),
    "the denominator": (
        "objective/ignore-index-missing",
        lambda job, logits, rows: ce(logits[:, :-1], rows.labels[:, 1:], "none").mean(),
    ),
    "the denominator, whole rows": (
        "objective/ignore-index-missing",
        lambda job, logits, rows: ce(logits[:, :-1], rows.labels[:, 1:], "sum") / rows.ids.numel(),
    ),
}


@pytest.mark.fires("objective/pad-in-loss")
@pytest.mark.fires("objective/prompt-in-loss")
@pytest.mark.fires("objective/tool-in-loss")
@pytest.mark.fires("objective/ignore-index-missing")
@pytest.mark.recorded("objective/pad-in-loss")
@pytest.mark.recorded("objective/prompt-in-loss")
@pytest.mark.recorded("objective/tool-in-loss")
@pytest.mark.recorded("objective/ignore-index-missing")
@pytest.mark.parametrize("what", POSITIONS)
def test_what_should_not_count_is_named_where_it_counts(build: Build, what: str) -> None:
    rule_id, loss = POSITIONS[what]
    _, found = said(trained(build, loss))
    assert set(found) == {rule_id}
    assert found[rule_id].confidence == "confirmed"


def test_labels_that_ask_for_padding_are_named_too(build: Build) -> None:
    def fill(writer: CapsuleWriter) -> None:
        rows = Rows(torch.Generator().manual_seed(5))
        logits = Job(seed=5).model(rows.ids).detach()
        loss = float(ce(logits[:, :-1], rows.ids[:, 1:]))
        writer.batch(
            step=0,
            rank=0,
            input_ids=rows.ids,
            labels=rows.ids,
            attention_mask=rows.mask,
            logits=logits,
            reported_loss=loss,
            loss_dtype="float32",
        )

    assert set(said(build(fill, manifest()))[1]) == {"objective/pad-in-loss"}


REDUCTIONS: dict[str, Loss] = {
    "sum": lambda job, logits, rows: ce(logits[:, :-1], rows.labels[:, 1:], "sum"),
    "mean-of-micro-batch-means": lambda job, logits, rows: ce(logits[:, :-1], rows.labels[:, 1:]) / job.window,
    "accumulation-not-divided": lambda job, logits, rows: ce(logits[:, :-1], rows.labels[:, 1:]),
}


def with_gradients(build: Build, loss: Loss, norms: Sequence[float], grad_norm: float) -> Capsule:
    """A window of three whose accumulated parameter gradients have these norms after each micro-batch."""

    def fill(writer: CapsuleWriter) -> None:
        capture(writer, Job(window=3), loss)
        writer.record("param_groups", {"step": 0, "name": "head.weight", "group": 0, "shape": [4, 4]})
        rows = [
            {"step": 0, "order": at, "name": "head.weight", "role": "gradient", "dtype": "float32", "shape": [4, 4]}
            | {"micro": at, "numel": 16, "rms": norm / 4}
            for at, norm in enumerate(norms)
        ]
        writer.stats(rows)
        writer.scalars("grad_norm", step=[0], value=[grad_norm], time=None, rank=0)

    return build(fill, manifest(accumulation_steps=3))


GREW = ([1.0, 1.5, 2.0], 2.0)


@pytest.mark.quiet("objective/reduction")
@pytest.mark.parametrize(
    ("norms", "grad_norm"),
    [
        pytest.param([1.0, 1.5, 2.0 / 3], 2.0 / 3, id="independent gradients, row taken after the division"),
        pytest.param([1.0, 2.0, 1.0], 1.0, id="equal gradients, row taken after the division"),
        pytest.param([1.0, 1.5, 2.0], 2.0 / 3, id="row taken before the division"),
    ],
)
@pytest.mark.parametrize("name", ["accumulation-not-divided", "sum"])
def test_a_loop_that_divides_its_gradients_instead_of_its_loss_is_quiet(
    build: Build, name: str, norms: list[float], grad_norm: float
) -> None:
    assert not said(with_gradients(build, REDUCTIONS[name], norms, grad_norm))[1]


def test_a_missing_division_is_only_likely_where_the_gradients_were_not_seen(build: Build) -> None:
    _, found = said(trained(build, REDUCTIONS["accumulation-not-divided"], window=3))
    assert found["objective/reduction"].confidence == "likely"


@pytest.mark.fires("objective/reduction")
@pytest.mark.recorded("objective/reduction")
@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_wrong_reduction_over_a_window_is_confirmed_where_the_right_one_is_declared(build: Build, name: str) -> None:
    _, found = said(with_gradients(build, REDUCTIONS[name], *GREW))
    assert set(found) == {"objective/reduction"}
    finding = found["objective/reduction"]
    assert finding.confidence == "confirmed"
    assert finding.counterfactual is not None
    assert finding.counterfactual.classes == ((name,),)


def test_a_short_window_divided_by_the_configured_length_is_named(build: Build) -> None:
    loss: Loss = lambda job, logits, rows: ce(logits[:, :-1], rows.labels[:, 1:]) / 4  # noqa: E731
    capsule = trained(build, loss, window=3, declared=manifest(accumulation_steps=4))
    table = said(capsule)[1]["objective/reduction"].counterfactual
    assert table is not None
    assert table.classes == (("configured-window",),)


def test_sequence_mean_is_a_fault_only_where_the_token_mean_is_declared(build: Build) -> None:
    def by_row(job: Job, logits: Tensor, rows: Rows) -> Tensor:
        return torch.stack([ce(logits[row, :-1], rows.labels[row, 1:]) for row in range(BATCH)]).mean()

    _, found = said(trained(build, by_row))
    assert found["objective/reduction"].confidence == "confirmed"
    assert not said(trained(build, by_row, declared=manifest(reduction="sequence-mean")))[1]


class TestWithoutADeclaredReduction:
    """Nobody said which reduction is meant: none can be wrong for sure, but a shift is wrong under each of them."""

    def test_the_token_mean_is_quiet(self, build: Build) -> None:
        assert not said(trained(build, right, window=3, declared=manifest(reduction=None)))[1]

    def test_a_sum_is_a_remark(self, build: Build) -> None:
        finding = said(trained(build, REDUCTIONS["sum"], declared=manifest(reduction=None)))[1]["objective/reduction"]
        assert (finding.severity, finding.confidence) == ("info", "likely")

    def test_a_mean_of_means_that_hardly_matters_is_a_remark_and_asks_for_the_declaration(self, build: Build) -> None:
        capsule = trained(build, REDUCTIONS["mean-of-micro-batch-means"], 3, manifest(reduction=None))
        finding = said(capsule)[1]["objective/reduction"]
        assert (finding.severity, finding.confidence) == ("info", "likely")
        assert any("declare the reduction" in each for each in finding.next)

    def test_labels_that_are_not_shifted_are_still_confirmed(self, build: Build) -> None:
        finding = said(trained(build, NOT_SHIFTED, declared=manifest(reduction=None)))[1][
            "objective/labels-not-shifted"
        ]
        assert finding.confidence == "confirmed"


def test_two_faults_at_once_are_named_together_and_once(build: Build) -> None:
    loss: Loss = lambda job, logits, rows: ce(logits, rows.labels, "sum")  # noqa: E731
    _, found = said(trained(build, loss))
    assert set(found) == {"objective/labels-not-shifted"}
    table = found["objective/labels-not-shifted"].counterfactual
    assert table is not None
    assert table.classes == (("labels-not-shifted + sum",),)


def test_two_printed_decimals_are_never_confirmed(build: Build) -> None:
    _, found = said(trained(build, NOT_SHIFTED, steps=4, decimals=2))
    assert all(each.confidence != "confirmed" for each in found.values())
    assert found


SMOOTHED: Loss = lambda job, logits, rows: ce(logits[:, :-1], rows.labels[:, 1:], label_smoothing=0.1)  # noqa: E731

UNKNOWN: dict[str, Loss] = {
    "label smoothing": SMOOTHED,
    "a z-loss": lambda job, logits, rows: right(job, logits, rows) + 1e-2 * (logits.logsumexp(-1) ** 2).mean(),
    "logits capped after the capture": lambda job, logits, rows: right(job, torch.tanh(logits), rows),
    "class weights": lambda job, logits, rows: ce(
        logits[:, :-1], rows.labels[:, 1:], weight=torch.linspace(0.2, 2, VOCABULARY)
    ),
    "dropped positions": labelled(
        lambda rows: torch.where(rows.ids % 3 == 0, torch.full_like(rows.ids, IGNORE), rows.labels)
    ),
    "a number of another step": lambda job, logits, rows: right(job, logits, rows) * 0 + 2.345678,
    "a moving average": lambda job, logits, rows: 0.9 * right(job, logits, rows) + 0.3,
}


#: Terms that jobs add on purpose: smoothing, and the squared log-partition of a z-loss.
TERMS: dict[str, Loss] = {
    "label smoothing": SMOOTHED,
    "a second term": lambda job, logits, rows: right(job, logits, rows) + 1e-3 * logits.logsumexp(-1).square().mean(),
}


@pytest.mark.fires("objective/unexplained-loss")
@pytest.mark.recorded("objective/unexplained-loss")
@pytest.mark.parametrize("cause", UNKNOWN)
def test_a_cause_outside_the_catalogue_is_one_undetermined_finding(build: Build, cause: str) -> None:
    _, found = said(trained(build, UNKNOWN[cause]))
    assert set(found) == {"objective/unexplained-loss"}
    finding = found["objective/unexplained-loss"]
    assert (finding.confidence, finding.cause) == ("undetermined", None)
    assert finding.next


@pytest.mark.quiet("objective/unexplained-loss")
@pytest.mark.parametrize("cause", ["label smoothing", "a second term"])
def test_a_loss_that_nobody_declared_may_hold_a_term_that_is_meant(build: Build, cause: str) -> None:
    report, found = said(trained(build, TERMS[cause], declared=manifest(reduction=None)))
    assert {name: finding.severity for name, finding in found.items()} == {"objective/unexplained-loss": "info"}
    assert found["objective/unexplained-loss"].confidence == "undetermined"
    assert report.first_divergence is None


@pytest.mark.quiet("objective/unexplained-loss")
def test_a_declared_extra_term_is_no_surprise(build: Build) -> None:
    declared = {**manifest(), "config": {"trainer": {"label_smoothing_factor": 0.1}}}
    assert not said(trained(build, SMOOTHED, declared=declared))[1]
    assert said(trained(build, SMOOTHED, declared={**manifest(), "config": {"label_smoothing_factor": 0}}))[1]


@pytest.mark.parametrize("objective", ["masked-lm", "grpo", "dpo"])
def test_other_objectives_get_no_verdict(build: Build, objective: str) -> None:
    assert not said(trained(build, NOT_SHIFTED, declared=manifest(objective=objective)))[1]


def test_labels_of_a_masked_language_model_are_left_alone_even_where_nobody_says_so(build: Build) -> None:
    def fill(writer: CapsuleWriter) -> None:
        ids = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
        chosen = torch.rand(ids.shape, generator=torch.Generator().manual_seed(4)) < 0.3
        labels = torch.where(chosen, ids, torch.full_like(ids, IGNORE))
        logits = Job().model(torch.where(chosen, torch.zeros_like(ids), ids)).detach()
        writer.batch(
            step=0,
            rank=0,
            input_ids=torch.where(chosen, torch.zeros_like(ids), ids),
            labels=labels,
            logits=logits,
            reported_loss=float(ce(logits, labels)),
            loss_dtype="float32",
        )

    assert not said(build(fill, manifest(objective=None)))[1]


def test_packed_rows_may_score_document_boundaries_or_not(build: Build) -> None:
    def fill(writer: CapsuleWriter, inside: bool) -> None:
        ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
        segments = (torch.arange(LENGTH) >= 5).long().repeat(BATCH, 1)
        logits = Job().model(ids).detach()
        asked = ids.clone()
        if inside:
            asked[:, 5] = IGNORE
        loss = float(ce(logits[:, :-1], asked[:, 1:]))
        writer.batch(step=0, rank=0, input_ids=ids, labels=ids, segment_ids=segments, logits=logits, reported_loss=loss)

    assert not said(build(lambda writer: fill(writer, inside=True), manifest()))[1]
    _, found = said(build(lambda writer: fill(writer, inside=False), manifest()))
    assert {name: each.severity for name, each in found.items()} == {"objective/document-boundary-in-loss": "info"}


class TestSeveralRanks:
    """Two ranks with unequal token counts, each with its own micro-batch."""

    @staticmethod
    def fill(writer: CapsuleWriter, number: str) -> None:
        sums, counts, scored = [], [], []
        for rank in range(2):
            rows = Rows(torch.Generator().manual_seed(20 + rank))
            rows.labels[: 2 * rank] = IGNORE
            logits = Job(seed=9).model(rows.ids).detach()
            loss = ce(logits[:, :-1], rows.labels[:, 1:], "sum")
            sums.append(float(loss))
            counts.append(int((rows.labels[:, 1:] != IGNORE).sum()))
            scored.append((rows, logits))
        own = [total / count for total, count in zip(sums, counts, strict=True)]
        numbers = {
            "own": own,
            "mean over ranks": [sum(own) / 2] * 2,
            "all as one batch": [sum(sums) / sum(counts)] * 2,
            "one rank's denominator": [sum(sums) / count for count in counts],
            "times world size": [2 * each for each in own],
        }[number]
        for rank, (rows, logits) in enumerate(scored):
            writer.batch(
                step=0,
                rank=rank,
                input_ids=rows.ids,
                labels=rows.labels,
                attention_mask=rows.mask,
                logits=logits,
                reported_loss=numbers[rank],
                loss_dtype="float32",
            )

    @pytest.mark.parametrize("number", ["own", "mean over ranks", "all as one batch"])
    def test_a_rank_may_print_its_own_loss_or_that_of_all(self, build: Build, number: str) -> None:
        declared = {**manifest(), "run": {"world_size": 2}}
        assert not said(build(lambda writer: self.fill(writer, number), declared))[1]

    @pytest.mark.parametrize("number", ["one rank's denominator", "times world size"])
    def test_the_scale_of_the_world_is_named(self, build: Build, number: str) -> None:
        declared = {**manifest(), "run": {"world_size": 2}}
        _, found = said(build(lambda writer: self.fill(writer, number), declared))
        assert set(found) == {"objective/reduction"}
        assert found["objective/reduction"].confidence == "confirmed"


def test_a_printed_number_is_known_as_such_even_where_nobody_counted_its_decimals(build: Build) -> None:
    def fill(writer: CapsuleWriter) -> None:
        rows = Rows(torch.Generator().manual_seed(0))
        logits = Job().model(rows.ids).detach()
        loss = round(float(ce(logits[:, :-1], rows.labels[:, 1:])), 3)
        writer.batch(step=0, rank=0, input_ids=rows.ids, labels=rows.labels, logits=logits, reported_loss=loss)

    assert not said(build(fill, manifest()))[1]


def test_padding_is_known_by_its_token_where_there_is_no_mask(build: Build) -> None:
    def fill(writer: CapsuleWriter) -> None:
        rows = Rows(torch.Generator().manual_seed(0))
        logits = Job().model(rows.ids).detach()
        loss = float(ce(logits[:, :-1], rows.asked_of(ASSISTANT, PAD)[:, 1:]))
        writer.batch(step=0, rank=0, input_ids=rows.ids, labels=rows.labels, logits=logits, reported_loss=loss)

    assert set(said(build(fill, {**manifest(), "tokenizer": {"pad_id": 0}}))[1]) == {"objective/pad-in-loss"}


def test_a_loss_that_is_not_finite_and_an_incomplete_window_give_no_verdict(build: Build) -> None:
    def fill(writer: CapsuleWriter) -> None:
        rows = Rows(torch.Generator().manual_seed(0))
        logits = Job().model(rows.ids).detach()
        common = {"rank": 0, "input_ids": rows.ids, "labels": rows.labels, "logits": logits}
        writer.batch(step=0, reported_loss=float("nan"), **common)
        writer.batch(step=1, reported_loss=9.0, micro=1, **common)
        for micro in range(3):
            writer.record("microbatches", {"step": 1, "micro": micro})
        writer.batch(step=2, reported_loss=9.0, **{**common, "logits": np.full(logits.shape, np.nan, np.float32)})

    assert set(said(build(fill, manifest()))[1]) == {"objective/logits-nonfinite"}


@pytest.mark.quiet("objective/reduction")
@pytest.mark.parametrize("stepped", [False, True])
def test_micro_batches_left_over_at_the_end_of_a_run_are_no_shorter_window(build: Build, stepped: bool) -> None:
    """Two of four, each divided by four: wrong where the optimizer stepped for them, and nothing where it did not."""

    def loss(job: Job, logits: Tensor, rows: Rows) -> Tensor:
        return ce(logits[:, :-1], rows.labels[:, 1:]) / 4

    def fill(writer: CapsuleWriter) -> None:
        capture(writer, Job(window=2), loss, steps=1)
        writer.record("events", {"kind": "optimizer_step", "step": 0 if stepped else 7})

    _, found = said(build(fill, manifest(accumulation_steps=4)))
    assert set(found) == ({"objective/reduction"} if stepped else set())


class TestRowsThatWereCutAndPadded:
    """``x = row[:-1]``, ``y = row[1:]``, each padded: the last label of a short row is no token of its inputs."""

    LENGTHS = (9, 5, 12, 7)

    def rows(self, pad_label: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(3)
        ids, labels = torch.zeros(4, 12, dtype=torch.long), torch.full((4, 12), pad_label)
        for row, length in enumerate(self.LENGTHS):
            whole = torch.randint(1, VOCABULARY, (length + 1,), generator=generator)
            ids[row, :length], labels[row, :length] = whole[:-1], whole[1:]
        return ids, labels

    def capsule(self, build: Build, pad_label: int, loss: Callable[[Tensor, Tensor], Tensor], **more: Any) -> Capsule:
        ids, labels = self.rows(pad_label)
        logits = torch.randn(4, 12, VOCABULARY, generator=torch.Generator().manual_seed(4))
        value = float(loss(logits, labels))

        def fill(writer: CapsuleWriter) -> None:
            writer.scalars("loss", step=[0], value=[value], rank=0)
            about = {"reported_loss": value, "loss_dtype": "float32", "logits_dtype": "float32"}
            writer.batch(step=0, rank=0, input_ids=ids, labels=labels, logits=logits, **about, **more)

        return build(fill, manifest())

    @pytest.mark.quiet("objective/reduction")
    def test_the_right_loss_is_computed_to_the_last_label(self, build: Build) -> None:
        report, found = said(self.capsule(build, IGNORE, lambda logits, labels: ce(logits, labels)))
        assert not found
        assert "objective/reduction" in report.quiet

    @pytest.mark.fires("objective/reduction")
    def test_a_sum_is_named(self, build: Build) -> None:
        _, found = said(self.capsule(build, IGNORE, lambda logits, labels: ce(logits, labels, "sum")))
        assert set(found) == {"objective/reduction"}

    def test_where_no_mask_says_whether_padding_counts_nothing_is_judged(self, build: Build) -> None:
        def masked(logits: Tensor, labels: Tensor) -> Tensor:
            return ce(logits, labels.masked_fill(labels == 0, IGNORE))

        for loss in (masked, lambda logits, labels: ce(logits, labels)):
            report, found = said(self.capsule(build, 0, loss))
            assert not found
            assert "objective/reduction" in {each.rule for each in report.skipped}

    def test_a_mask_that_was_captured_decides(self, build: Build) -> None:
        mask = (self.rows(0)[1] != 0).long()
        report, found = said(
            self.capsule(
                build, 0, lambda logits, labels: ce(logits, labels.masked_fill(labels == 0, IGNORE)), loss_mask=mask
            )
        )
        assert not found
        assert "objective/reduction" in report.quiet


class TestTermsThatAreMeant:
    """Label smoothing, a z-loss or an auxiliary term beside a declared reduction is normal practice, not a fault."""

    @pytest.mark.quiet("objective/unexplained-loss")
    @pytest.mark.parametrize("smoothing", [0.05, 0.1])
    def test_label_smoothing_is_a_remark_that_names_the_setting(self, build: Build, smoothing: float) -> None:
        loss: Loss = lambda job, logits, rows: ce(logits[:, :-1], rows.labels[:, 1:], label_smoothing=smoothing)  # noqa: E731
        finding = said(trained(build, loss))[1]["objective/unexplained-loss"]
        assert (finding.severity, finding.confidence) == ("info", "undetermined")
        assert f"label_smoothing_factor = {smoothing:g}" in finding.next[0]
        assert finding.evidence[0].value == pytest.approx(finding.evidence[0].expected, rel=1e-6)

    @pytest.mark.parametrize("everywhere", [True, False])
    def test_a_z_loss_of_the_usual_strength_is_known_too(self, build: Build, everywhere: bool) -> None:
        def loss(job: Job, logits: Tensor, rows: Rows) -> Tensor:
            z = logits.logsumexp(-1).square()
            scored = rows.labels[:, 1:] != IGNORE
            return right(job, logits, rows) + 1e-4 * (z.mean() if everywhere else z[:, :-1][scored].mean())

        finding = said(trained(build, loss))[1]["objective/unexplained-loss"]
        assert finding.severity == "info"
        assert "z-loss of 0.0001" in finding.summary

    def test_an_unknown_small_term_is_a_remark_and_names_nothing(self, build: Build) -> None:
        loss: Loss = lambda job, logits, rows: right(job, logits, rows) + 0.0317 * logits.std()  # noqa: E731
        finding = said(trained(build, loss))[1]["objective/unexplained-loss"]
        assert finding.severity == "info"
        assert not any("loss of" in each.name for each in finding.evidence)

    def test_a_loss_below_the_declared_one_is_no_added_term(self, build: Build) -> None:
        loss: Loss = lambda job, logits, rows: 0.9 * right(job, logits, rows)  # noqa: E731
        assert said(trained(build, loss))[1]["objective/unexplained-loss"].severity == "warning"


class TestLabelsThatTheModelMakesItself:
    """The recorder saw input ids and scores, and no labels."""

    @staticmethod
    def capsule(build: Build, loss: Callable[[Tensor, Tensor], Tensor], objective: str | None, **more: Any) -> Capsule:
        def fill(writer: CapsuleWriter) -> None:
            job = Job(seed=3)
            for step in range(2):
                ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=job.generator)
                logits = job.model(ids).detach()
                about = {"reported_loss": float(loss(logits, ids)), "loss_dtype": "float32", "logits_dtype": "float32"}
                writer.batch(step=step, rank=0, input_ids=ids, logits=logits, **about, **more)

        return build(fill, manifest(objective=objective))

    @pytest.mark.fires("objective/labels-not-shifted")
    def test_a_shift_that_is_missing_is_confirmed_where_every_token_is_a_target(self, build: Build) -> None:
        found = said(self.capsule(build, lambda logits, ids: ce(logits, ids), "causal-lm"))[1]
        assert {name: each.confidence for name, each in found.items()} == {"objective/labels-not-shifted": "confirmed"}

    @pytest.mark.quiet("objective/labels-not-shifted")
    def test_the_right_loss_is_quiet(self, build: Build) -> None:
        assert not said(self.capsule(build, lambda logits, ids: ce(logits[:, :-1], ids[:, 1:]), "causal-lm"))[1]

    @pytest.mark.parametrize("objective", ["sft", None])
    def test_where_it_may_be_answers_only_nothing_is_judged(self, build: Build, objective: str | None) -> None:
        report, found = said(self.capsule(build, lambda logits, ids: ce(logits, ids), objective))
        assert not found
        assert "objective/labels-not-shifted" in {each.rule for each in report.skipped}

    def test_another_reduction_is_a_remark_since_the_labels_were_not_seen(self, build: Build) -> None:
        found = said(self.capsule(build, lambda logits, ids: ce(logits[:, :-1], ids[:, 1:], "sum"), "causal-lm"))[1]
        assert (found["objective/reduction"].severity, found["objective/reduction"].confidence) == ("info", "likely")


def test_an_additive_mask_hides_what_is_far_below_zero() -> None:
    kept = attended(np.array([[0.0, 0.0, -1e4], [0.0, -np.inf, -3.4e38]]))
    assert kept.tolist() == [[True, True, False], [True, False, False]]
    assert attended(np.array([[1.0, 0.0]])).tolist() == [[True, False]]
    assert attended(np.array([[1, 0]])).tolist() == [[True, False]]
