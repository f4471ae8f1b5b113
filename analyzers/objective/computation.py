"""Rules that name what was computed instead of the declared loss; they share one counterfactual run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..finding import Evidence, Finding, Where
from ..registry import NotJudged, rule
from .loss_faults import BY_NAME, BY_RECORDED_SUMS, LossSpec, lawful_specs, reported_loss
from .loss_scale import comparable, scale_findings
from .loss_terms import declarable_terms
from .loss_verdict import (
    COMPARABLE,
    NEEDS,
    boundaries_asked_for,
    declared_extras,
    declared_reduction,
    evidence_rows,
    explain_windows,
    finding_of,
    judged,
    loss_verdict,
    named_by,
)
from .loss_windows import Observed, recorded_windows
from .thresholds import TERM_SHARE

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "objective/labels-not-shifted",
    stage="objective",
    needs=NEEDS,
    cases=("loss-near-zero-copies-input",),
)
def labels_not_shifted(capsule: Capsule) -> Iterator[Finding]:
    """Labels are compared with the token they come from.

    What it checks:
        The reported loss against the token cross-entropy of the captured logits at offset 0 (the token itself)
        and at offset 1 (the next token).
    Why it matters:
        The model learns to repeat its input. The loss falls towards 0, much faster than it should, and generation
        repeats the last token: nothing else looks wrong.
    How it decides:
        Counterfactual. The loss is computed again in FP64 as declared and under every fault of the catalogue
        (shift, positions scored, denominator, reduction, scale). The fault is named where it alone reproduces the
        number within print and dtype rounding; it is confirmed where at most 0.001 candidates would match by
        chance and the next one is at least 3 tolerances away.
    Looks like it but is not:
        A low loss on repetitive text, on memorised data or on templates: there offset 1 gives the number. Losses of
        other objectives (masked-language-model, rewards) are left alone.
    What to try next:
        Print the pairs (input token, target token) of one row: at each position they must differ by one place.
    Fix:
        Score logits[:, :-1] against labels[:, 1:], or build the targets as tokens[1:], in exactly one place.
    """
    return named_by(capsule, "objective/labels-not-shifted")


@rule("objective/labels-shifted-twice", stage="objective", needs=NEEDS, cases=("labels-shifted-twice",))
def labels_shifted_twice(capsule: Capsule) -> Iterator[Finding]:
    """Labels are shifted in two places.

    What it checks:
        The reported loss against the cross-entropy at offset 2, within rows and over the flattened batch, where the
        end of each row is scored on the start of the next.
    Why it matters:
        The model is trained to predict the token after the next. Shapes agree, nothing raises, and the loss stays
        high: it looks like hard data.
    How it decides:
        Counterfactual, as in objective/labels-not-shifted. Variants that give one number on this input (first tokens
        masked, say) are reported as a set.
    Looks like it but is not:
        Multi-token prediction heads, whose loss for the second token is one term among others, and plainly hard data:
        there offset 1 gives the number.
    What to try next:
        Look for a shift in the collator and another one in the model or its loss function; compare the last target
        of a row with the first token of the next row.
    Fix:
        Shift once: unshifted labels to a model that shifts, or shifted labels to a loss that does not.
    """
    return named_by(capsule, "objective/labels-shifted-twice")


@rule("objective/pad-in-loss", stage="objective", needs=NEEDS)
def pad_in_loss(capsule: Capsule) -> Iterator[Finding]:
    """Padding tokens are part of the loss.

    What it checks:
        The reported loss against the cross-entropy over supervised tokens and over those and the padding.
    Why it matters:
        Padding is easy to predict, so the loss looks better than it is, depends on how batches are padded, and the
        gradient is spent on padding.
    How it decides:
        Counterfactual, as in objective/labels-not-shifted. Padding is role 0, or what a two-dimensional attention
        mask hides where it is one and the same token.
    Looks like it but is not:
        An end-of-text token that is also the padding token and is attended to: it is text. Attention masks that hide
        real tokens.
    What to try next:
        Count the labels that are not ignored and compare with the sum of the attention mask.
    Fix:
        Set the labels of padding to the ignore index, by attention mask and not by token id.
    """
    return named_by(capsule, "objective/pad-in-loss")


@rule("objective/prompt-in-loss", stage="objective", needs=NEEDS)
def prompt_in_loss(capsule: Capsule) -> Iterator[Finding]:
    """Tokens of the prompt are part of the loss.

    What it checks:
        The reported loss against the cross-entropy over what the labels ask for and over that and the prompt.
    Why it matters:
        Fine-tuning on responses only then also trains the prompts: templates dominate the loss and the number cannot
        be compared with a run that masks them.
    How it decides:
        Counterfactual, as in objective/labels-not-shifted. The prompt is what roles mark as system or user, and
        without roles every token that labels or loss mask leave out and that is no padding.
    Looks like it but is not:
        Training on everything on purpose: then the labels ask for the prompt too, and the declared computation gives
        the number.
    What to try next:
        Check that the mask reaches the loss: a collator that rebuilds labels from input ids drops it.
    Fix:
        Apply the response mask to the labels that reach the loss.
    """
    return named_by(capsule, "objective/prompt-in-loss")


@rule("objective/tool-in-loss", stage="objective", needs=(*NEEDS, "batches.roles"))
def tool_in_loss(capsule: Capsule) -> Iterator[Finding]:
    """Tokens of tool results are part of the loss.

    What it checks:
        The reported loss against the cross-entropy with tokens of role tool added to what the labels ask for.
    Why it matters:
        The model learns to invent the answers of its tools.
    How it decides:
        Counterfactual, as in objective/labels-not-shifted, with the roles of the batch.
    Looks like it but is not:
        Labels that ask for tool tokens on purpose: then the declared computation gives the number.
    What to try next:
        Show one row with role, label and loss of each token side by side.
    Fix:
        Mask tool results in the labels.
    """
    return named_by(capsule, "objective/tool-in-loss")


@rule("objective/document-boundary-in-loss", stage="objective", needs=NEEDS)
def document_boundary_in_loss(capsule: Capsule) -> Iterator[Finding]:
    """The first token of a packed document is scored on the document before it.

    What it checks:
        The reported loss against the cross-entropy with and without the first tokens of documents that follow another
        one in their row.
    Why it matters:
        Nothing in one document foretells how the next one begins: the loss holds noise that depends on how documents
        were packed, and short documents suffer most.
    How it decides:
        Counterfactual, as in objective/labels-not-shifted. Documents are known by segment ids, cumulative lengths,
        positions that start again, or a block-diagonal mask. It is a fault where the labels leave those tokens out and
        the number holds them. Where the labels ask for them, it is a remark: many pretraining jobs mean it so.
    Looks like it but is not:
        Packed rows whose labels ask for every token, end-of-text and what follows it included; a row with one document.
    What to try next:
        Show the labels at the first token of the second document of a row, in the collator and where the loss is made.
    Fix:
        Keep the labels of first tokens masked up to the loss (a loss that rebuilds labels from input ids drops that).
    """
    named = list(named_by(capsule, "objective/document-boundary-in-loss"))
    yield from named or boundaries_asked_for(capsule)


@rule("objective/ignore-index-missing", stage="objective", needs=NEEDS)
def ignore_index_missing(capsule: Capsule) -> Iterator[Finding]:
    """Ignored labels enter the loss.

    What it checks:
        Whether positions whose label is the ignore index enter the numerator (scored on their own token, or on the
        ignore index where it is a token) or the denominator.
    Why it matters:
        The loss is diluted by a factor that changes with every batch: rows with short answers count less, and losses
        of two runs cannot be compared.
    How it decides:
        Counterfactual, as in objective/labels-not-shifted. Denominators tried: all positions, whole rows, and all
        attended tokens.
    Looks like it but is not:
        A low loss because most of the text is easy: there the declared computation gives the number.
    What to try next:
        Compare the denominator with the number of labels that are not ignored.
    Fix:
        Pass ignore_index to the loss, and divide by the count of labels that are not ignored.
    """
    return named_by(capsule, "objective/ignore-index-missing")


@rule("objective/unexplained-loss", stage="objective", needs=NEEDS)
def unexplained_loss(capsule: Capsule) -> Iterator[Finding]:
    """The reported loss is not the declared computation, and no named fault is certain.

    What it checks:
        Whether the reported loss is the token cross-entropy of the captured logits at all.
    Why it matters:
        Something else was optimised or printed: a further term, weights, another step's logits, an average, or a fault
        that the catalogue does not hold. A wrong guess at it would cost more than an open question.
    How it decides:
        The counterfactual run of objective/labels-not-shifted ends without a name: the declared computation does not
        fit, and no fault does, or several do, or one that chance could explain. Always undetermined. It is a remark
        where the number may hold a term that is meant: label smoothing or a z-loss of a usual strength gives it, or it
        lies above the declared loss by up to a quarter in every window; where nobody declared what the loss is
        (manifest training.reduction), or a trainer said that the job computes it itself; with several ranks of which
        one was captured, since the number may be an average over ranks.
    Looks like it but is not:
        Label smoothing, z-loss, auxiliary losses of experts, a KL term, a second prediction head, token weights,
        soft-capping after the capture: where the configuration declares one of them, this rule stays quiet.
    What to try next:
        Capture the terms of the loss apart, the per-token losses, and a second step at full precision.
    Fix:
        None before the cause is known.
    """
    verdict, observed = judged(capsule)
    if verdict.status != "undetermined" or declared_extras(capsule):
        return
    table = verdict.table
    terms = declarable_terms(observed, lawful_specs(declared_reduction(capsule), observed[0].window)[0])
    sets = " or ".join(" = ".join(each) for each in table.classes)
    window = observed[0].window
    partial = window.world > len(window.ranks)
    following = [
        "capture the terms of the loss apart (a smoothing, auxiliary or regularising term), and the per-token losses",
        "capture the loss of a second step at full precision, with its logits",
    ]
    if partial:
        following.append("capture every rank: the number may be an average over ranks")
    if terms:
        following.insert(0, f"declare it where it is meant: {terms[0].setting} in the manifest's config")
    undeclared = declared_reduction(capsule) is None
    if undeclared:
        following.append("declare the reduction that is meant (manifest training.reduction)")
    own = next((each for each in capsule.records("events") if each.get("type") == "custom_loss"), None)
    if own is not None:
        following.append(f"declare what the loss is meant to be: {own.get('message') or 'it is computed by the job'}")
    may_differ = own is not None or _may_hold_a_term(capsule, observed)
    yield Finding(
        title="The reported loss is none of the named computations"
        if not sets
        else "The reported loss is not as declared, and more than one cause is open",
        summary=(
            f"The reported loss {table.observed:.7g} differs from the declared computation {table.healthy:.7g} by "
            f"{abs(table.observed - table.healthy):.3g}; "
            + (f"{sets} would give it, but {verdict.reasons[0]}." if sets else "no named fault gives it.")
            + "".join(f" It is what {each.words} gives." for each in terms[:1])
        ),
        severity="info" if partial or undeclared or terms or may_differ else "warning",
        confidence="undetermined",
        where=Where(step=0),
        evidence=(
            *(Evidence(name=each.words, value=each.value, expected=each.observed, note=each.setting) for each in terms),
            *evidence_rows(capsule, verdict, observed),
        ),
        next=tuple(following),
        counterfactual=table,
    )


def _may_hold_a_term(capsule: Capsule, observed: tuple[Observed, ...]) -> bool:
    """Whether every number lies above the declared loss by a part that an added term could be."""
    spec = LossSpec(reduction=declared_reduction(capsule) or "token-mean")
    shares = [each.value / reported_loss(each.window, spec, None, None) - 1 for each in observed]
    return all(0 < share <= TERM_SHARE for share in shares)


@rule(
    "objective/reduction",
    stage="objective",
    needs=(
        "batches.reported_loss|scalars.loss|scalars.grad_norm",
        "batches.input_ids|records.microbatches|manifest.training.accumulation_steps|manifest.run.world_size|scalars.grad_norm",
    ),
    cases=("gradient-accumulation-loss-scale",),
)
def reduction(capsule: Capsule) -> Iterator[Finding]:
    """The loss is reduced in another way than was meant.

    What it checks:
        Sum, token mean, sequence mean, mean of micro-batch means, a missing division by the accumulation steps,
        division by the configured instead of the actual window, a factor of the world size, one rank's denominator.
    Why it matters:
        The gradient scale is off by a factor, or tokens weigh differently by the batch they fall in: learning rates no
        longer carry over, and a change of batch layout changes the result.
    How it decides:
        Counterfactual, as in objective/labels-not-shifted, over the micro-batches of whole windows. Without logits,
        by the recorded sums and token counts of micro-batches, of all ranks where they are there. What is not declared
        in the manifest is never confirmed; then a sum or a sequence mean is a remark. Without either, by sizes, and
        then likely at most: the first loss of a model that is not pretrained is accumulation steps or ranks times ln V
        (2 % below to 3 % above); the training loss is that multiple of the evaluation loss within 10 % at every
        evaluation; the first gradient norms of two sides (accumulated and whole batch) are a whole number apart within
        0.1 %, or their first losses are, within 2 % of a declared one.
    Looks like it but is not:
        Micro-batches of equal token counts, where the means agree: not testable there. A rank's own loss beside the
        mean over ranks. A loop that divides its gradients after the last backward instead of its loss: the gradient
        norms of the window's micro-batches tell. A learning rate that is too high moves no gradient norm at step 0.
    What to try next:
        Print loss sum and token count of each micro-batch of one window; run the same samples with accumulation 1.
    Fix:
        Sum the token losses of the whole window over all micro-batches and ranks, and divide once by its number of
        supervised tokens.
    """
    if all(capsule.has(need) for need in NEEDS) and loss_verdict(capsule) is not None:
        yield from named_by(capsule, "objective/reduction")
        return
    known = explain_windows(capsule, recorded_windows(capsule), [BY_NAME[name] for name in BY_RECORDED_SUMS])
    if known is not None:
        yield from finding_of(capsule, "objective/reduction", known)
        return
    found = list(scale_findings(capsule))
    yield from found
    if not found and not comparable(capsule):
        raise NotJudged(f"{COMPARABLE}; or loss sums and token counts of micro-batches")
