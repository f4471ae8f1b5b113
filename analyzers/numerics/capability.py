"""Scores of checkpoints: what was lost on the way, and whether anything would have shown it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..finding import Evidence, Finding, Where
from ..registry import NotCaptured, rule
from ..scores import BEYOND, CONDITIONS, Change, chance, families, improved, lower_is_better, tracks, worst_change
from ..series import Curve, curve
from . import thresholds as T
from .overfitting import HELD_OUT, Rise, held_out_losses, lasting_rise

if TYPE_CHECKING:
    from ...capsules import Capsule

#: Scores in training logs that are better when higher.
_HIGHER = re.compile(
    r"(?:^|[^a-z])(?:acc|accuracy|f1|exact_match|em|bleu|rouge[a-z0-9]*|pass|score|win_rate|mcc|auc)(?:[^a-z]|$)"
)
#: Suites that measure more than a domain.
GENERAL = re.compile(
    r"mmlu|hellaswag|winogrande|truthful|gsm8?k|big[-_ ]?bench|ifeval|mt[-_ ]?bench|boolq|piqa|lambada|cmmlu|agieval"
    r"|alpaca[-_ ]?eval|arena|humaneval|mbpp|wikitext|triviaqa"
    r"|(?:^|[^a-z])(?:general|control|common|base|helm|drop|squad|nq|bbh|c4|pile|ceval|arc[-_ ]?[ce]?)(?:[^a-z]|$)"
)


@rule(
    "numerics/capability-drop",
    stage="numerics",
    severity="warning",
    needs=("records.evaluations|scalars.loss",),
    explained_by=(
        "numerics/learning-rate",
        "numerics/first-nonfinite",
        "numerics/eval-mode",
        "objective/template-drift",
    ),
    cases=("general-ability-lost",),
)
def capability_drop(capsule: Capsule) -> Iterator[Finding]:
    """An evaluation fell from an earlier checkpoint to the last by more than noise.

    What it checks:
        Every score over checkpoints, suite by suite and slice by slice; and scores in a training log (eval_accuracy …).

    Why it matters:
        What a model could do and no longer can is lost for good in this checkpoint: the training that raised one set
        paid with another.

    How it decides:
        The last score against the earlier one that it fell furthest from, in standard errors of the difference (as
        declared, or √(p(1−p)/n); with five checkpoints or more their own scatter is added). More than 2 is a drop,
        where noise alone shows such a fall in any of the evaluations in at most 5 % of cases. Rises stand beside it:
        one set down and another up is forgetting. Harness, version, template or preprocessing that differ are named
        instead: then it is no drop.

    Looks like it but is not:
        Two scores within noise, such as 49 and 56 of 100 questions; one of fifty-seven subjects that fell by 2 standard
        errors, as one in forty does; a new version of the harness; a slice that falls while the mean rises
        (objective/slice-regression); an accuracy that falls where its loss rises (numerics/overfitting).

    What to try next:
        Evaluate the old checkpoint in the new harness. Then look at learning rate, steps and the mixture.

    Fix:
        A lower rate, fewer steps, adapters, 5 to 20 % of general data; or keep the earlier checkpoint.
    """
    found = tracks(capsule)
    logged = {name: each for name, each in _logged_scores(capsule).items() if len(each) >= T.EVALUATIONS}
    changes: list[Change] = []
    for whole, parts in families(found).values():
        # Slices of a mean that rises are another rule's; a mean made of slices adds nothing to them.
        if improved(whole) is None:
            changes += [change for part in parts if len(part.scores) > 1 and (change := worst_change(part)) is not None]
        if whole is not None and (whole in found or not parts) and len(whole.scores) > 1:
            change = worst_change(whole)
            changes += [change] if change is not None else []
    if not changes and not logged:
        raise NotCaptured("scores of two checkpoints with their standard error or number of questions")
    fallen = sorted((each for each in changes if each.z < -BEYOND), key=lambda each: each.z)
    comparisons = sum(max(1, len(each.track.scores) - 1) for each in changes)
    sure = [each for each in fallen if not each.differs and chance(-each.z, comparisons) <= T.DROP_CHANCE]
    unlike = [each for each in fallen if each.differs]
    risen = [each for each in (improved(each) for each in found) if each is not None]
    if sure:
        yield _drop(sure, risen, len(changes))
    elif fallen and not unlike:
        yield _by_chance(fallen[0], comparisons)
    if unlike:
        yield _measured_otherwise(unlike)
    falls = [rise for name, each in logged.items() if (rise := lasting_rise(name, Curve(each.step, -each.value)))]
    # Where an evaluation loss rises with it, numerics/overfitting says the same thing with its cause.
    if falls and not any(lasting_rise(name, each) for name, each in held_out_losses(capsule).items()):
        yield _logged_drop(min(falls, key=lambda rise: rise.first_step))


def _drop(fallen: Sequence[Change], risen: Sequence[Change], judged: int) -> Finding:
    worst = fallen[0]
    forgetting = f", while {risen[0].words} rose" if risen else ""
    return Finding(
        title="One ability was lost while another was gained" if risen else "An evaluation fell beyond its noise",
        summary=f"{worst.words} fell by {-worst.z:.1f} standard errors"
        + forgetting
        + (f"; {len(fallen)} of {judged} evaluations fell." if len(fallen) > 1 else "."),
        where=Where(step=worst.after.step),
        evidence=(
            Evidence(
                name="standard errors of the difference",
                value=worst.z,
                expected=f"≥ -{BEYOND:g}",
                note=worst.track.label,
            ),
            *(each.evidence() for each in fallen[:8]),
            *(each.evidence() for each in risen[:4]),
        ),
        cause="forgetting: the weights moved away from what nothing in the data held"
        if risen
        else "the weights lost it",
        next=("evaluate the earlier checkpoint in the same harness once more", "list the slices that fell furthest"),
        fix=("lower the rate, take fewer steps or adapters, or mix general data in", "keep the earlier checkpoint"),
    )


def _by_chance(worst: Change, comparisons: int) -> Finding:
    return Finding(
        severity="info",
        kind="hygiene",
        confidence="undetermined",
        title="One of many evaluations fell, as noise lets some fall",
        summary=f"{worst.words} fell by {-worst.z:.1f} standard errors; among {comparisons} comparisons noise alone "
        f"does that with a probability of {chance(-worst.z, comparisons):.0%}.",
        where=Where(step=worst.after.step),
        evidence=(
            worst.evidence(),
            Evidence(name="probability by noise", value=chance(-worst.z, comparisons), expected=f"≤ {T.DROP_CHANCE}"),
        ),
        next=("evaluate it again with more questions",),
    )


def _measured_otherwise(fallen: Sequence[Change]) -> Finding:
    worst = fallen[0]
    what = " and ".join(worst.differs)
    return Finding(
        severity="info",
        kind="hygiene",
        confidence="undetermined",
        title="A score fell, and was measured in another way",
        summary=f"{worst.words}, and the {what} differs between the two: no drop can be told from that.",
        where=Where(step=worst.after.step),
        evidence=(
            *(
                Evidence(
                    name=words, value=str(worst.after.record.get(field)), expected=str(worst.before.record.get(field))
                )
                for field, words in _condition_fields(worst.differs)
            ),
            *(each.evidence() for each in fallen[:8]),
        ),
        next=(f"evaluate the earlier checkpoint with the {what} of the later one",),
    )


def _condition_fields(words: Sequence[str]) -> list[tuple[str, str]]:
    return [(field, each) for field, each in CONDITIONS.items() if each in words]


def _logged_scores(capsule: Capsule) -> dict[str, Curve]:
    """Scores of held-out data in a training log that are better when higher."""
    found: dict[str, Curve] = {}
    for key in capsule.scalar_keys():
        name = key.name.lower()
        if HELD_OUT.search(name) and _HIGHER.search(name) and not lower_is_better(name, None) and key.name not in found:
            found[key.name] = curve(capsule, key.name, key.rank, key.side).finite()
    return found


def _logged_drop(fall: Rise) -> Finding:
    return Finding(
        title="An evaluation falls for good after its best checkpoint",
        summary=f"{fall.name} is best at step {fall.best_step} ({-fall.best:.4g}) and falls from step "
        f"{fall.first_step} on to {-fall.last:.4g}, beyond its scatter.",
        where=Where(step=fall.first_step),
        evidence=(
            Evidence(name="best checkpoint", value=fall.best_step, unit="step", note=f"{fall.name} {-fall.best:.4g}"),
            Evidence(
                name=fall.name, value=-fall.last, expected=f"≥ {-fall.best:.4g}", note=f"{fall.points} evaluations"
            ),
        ),
        cause="the weights lost it in training that went on",
        next=(f"evaluate the checkpoint of step {fall.best_step} again",),
        fix=(f"keep the checkpoint of step {fall.best_step}", "a lower rate, fewer steps, or other data"),
    )


@rule(
    "numerics/no-control-set",
    stage="numerics",
    kind="hygiene",
    severity="info",
    needs=("records.evaluations|scalars.eval_loss",),
    cases=("general-ability-lost",),
)
def no_control_set(capsule: Capsule) -> Iterator[Finding]:
    """A fine-tuned model is evaluated on its own domain alone.

    What it checks:
        Whether a job that starts from a trained model evaluates anything beside the set that it trains for.

    Why it matters:
        What the model loses elsewhere is then seen by its users first.

    How it decides:
        The job is fine-tuning (weights pretrained, an adapter, a base checkpoint, or an objective such as sft), and all
        that is evaluated is one set, or sets that are all domains of the training data, and none has the name of a
        general benchmark or of a control set. Info.

    Looks like it but is not:
        Training from scratch, where the validation set is as wide as the data; several sets of which one is not trained
        for; an evaluation that runs elsewhere, which this capsule cannot know of.

    What to try next:
        Evaluate base and tuned model on one general set of 500 questions or more.

    Fix:
        A general control set in every evaluation, with its standard error beside it.
    """
    if not _is_tuning(capsule.manifest.raw):
        return
    sets = {track.suite or track.name for track in tracks(capsule)}
    sets |= {track.part for track in tracks(capsule) if track.part is not None}
    sets = sets or set(held_out_losses(capsule))
    if not sets or any(GENERAL.search(each.lower()) for each in sets):
        return
    domains = {str(each["domain"]).lower() for each in capsule.records("samples") if each.get("domain")}
    if len(sets) > 1 and not (domains and all(each.lower() in domains for each in sets)):
        return
    yield Finding(
        title="Nothing beside the own domain is evaluated",
        summary=f"The job tunes a trained model and evaluates {', '.join(sorted(sets)[:6])} alone: abilities that it "
        "loses elsewhere do not show.",
        confidence="likely",
        evidence=(
            Evidence(
                name="sets evaluated", value=len(sets), expected="a general one, too", note=", ".join(sorted(sets)[:12])
            ),
        ),
        cause="no general evaluation set is configured",
        next=("evaluate base and tuned model on a general set of 500 questions or more",),
        fix=("add a general control set to every evaluation",),
    )


def _is_tuning(raw: dict[str, Any]) -> bool:
    """Whether the job starts from a trained model."""
    training, model, identity = (raw.get(part) or {} for part in ("training", "model", "identity"))
    objective = str(training.get("objective") or "").lower()
    tuned = objective.startswith(("sft", "dpo", "orpo", "kto", "instruct", "chat", "reward", *("grpo", "ppo", "rloo")))
    started = model.get("initialised")
    return started != "random" and (
        tuned or started == "pretrained" or bool(identity.get("adapter") or identity.get("base_checkpoint"))
    )
