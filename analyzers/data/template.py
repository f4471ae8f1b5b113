"""The response template by which a collator finds where the answer begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..finding import Confidence, Evidence, Finding, Severity, Where
from ..registry import rule
from . import thresholds as T
from .rows import Ints, Rows, rows_of

if TYPE_CHECKING:
    from ...capsules import Capsule


@rule(
    "data/template-not-found",
    stage="data",
    needs=("batches.input_ids", "manifest.tokenizer.response_template_ids"),
)
def template_not_found(capsule: Capsule) -> Iterator[Finding]:
    """The response template does not occur in the rows, so that nothing of them is trained on.

    What it checks:
        Whether the ids of the response template are a sub-sequence of each captured row, and whether they are all but
        their first or last one; and how many rows have no label left.

    Why it matters:
        A collator that masks everything before the template masks the whole row where it does not find it. The job
        runs, on the few rows that are left or on none.

    How it decides:
        The template is in no row while all of it but the last id (or the first) is: the tokenizer merges that token
        with its neighbour in context; confirmed. It is in no row at all, or lacking in more than 5 % of the rows, and
        rows without it have no label.

    Looks like it but is not:
        Rows whose labels are there all the same: they were made in another way. Rows cut before the answer begins,
        which are a few. Rows without labels that the model makes itself.

    What to try next:
        Print the ids of one row beside the ids of the template.

    Fix:
        Take the template's ids from a tokenized conversation, or end it before a blank; mask by the chat template's
        own generation mask.
    """
    tokenizer = capsule.manifest.tokenizer
    template = np.array((tokenizer.response_template_ids if tokenizer else None) or [], np.int64)
    if not template.size:
        return
    total, found, head, tail, dead, judged = 0, 0, 0, 0, 0, 0
    lost: tuple[Rows, int] | None = None
    for rows in rows_of(capsule):
        whole = occurs(rows.ids, template)
        total, found = total + len(whole), found + int(whole.sum())
        without = ~whole & rows.real.any(axis=1)
        if template.size > 1:
            head += int((without & occurs(rows.ids, template[:-1])).sum())
            tail += int((without & occurs(rows.ids, template[1:])).sum())
        if rows.asked is not None:
            unasked = ~rows.asked.any(axis=1)
            dead, judged = dead + int((without & unasked).sum()), judged + int(without.sum())
            without = without & unasked
        if lost is None and without.any():
            lost = (rows, int(np.argmax(without)))
    missing = total - found
    if not total or lost is None or missing < max(1.0, T.ROWS_SHARE * total) or (judged and dead <= judged / 2):
        return
    yield _finding(template.tolist(), lost, total, missing, head, tail, dead if judged else None)


def occurs(ids: Ints, wanted: Ints) -> NDArray[np.bool_]:
    """[B], whether ``wanted`` stands in a row without a gap."""
    if not wanted.size or wanted.size > ids.shape[1]:
        return np.zeros(len(ids), bool)
    width = ids.shape[1] - wanted.size + 1
    same = np.ones((len(ids), width), bool)
    for offset, token in enumerate(wanted.tolist()):
        same &= ids[:, offset : offset + width] == token
    return np.asarray(same.any(axis=1), bool)


def _finding(
    template: Sequence[int], lost: tuple[Rows, int], total: int, missing: int, head: int, tail: int, dead: int | None
) -> Finding:
    rows, row = lost
    nowhere = missing == total
    merged = max(head, tail) >= 0.5 * missing
    last = head >= tail
    token = template[-1] if last else template[0]
    near = _neighbour(rows.ids[row], template, last) if merged else None
    severity: Severity | None = None if nowhere and dead != 0 else "warning"
    confidence: Confidence = "confirmed" if nowhere and merged else "likely"
    side = "last" if last else "first"
    evidence = [
        Evidence(name="rows without the template", value=missing, expected=0, unit="rows", note=f"of {total}"),
        Evidence(name="template ids", value=list(template)),
    ]
    if merged:
        evidence += [
            Evidence(
                name=f"rows with all but the {side} id", value=head if last else tail, unit="rows", note=f"of {missing}"
            ),
            Evidence(name=f"{side} id in context", value=near, expected=token, note=rows.name(row)),
        ]
    if dead is not None:
        share = dead / total
        evidence.append(
            Evidence(name="rows without a supervised token", value=share, expected=0, unit="share", note=f"{dead} rows")
        )
    told = f"; all of it but the {side} id is in {head if last else tail}" if merged else ""
    return Finding(
        severity=severity,
        confidence=confidence,
        title="The response template is not found" if nowhere else "The response template is missing from rows",
        summary=f"The template {list(template)} is in {total - missing} of {total} rows{told}"
        + (f"; {dead} rows have no supervised token." if dead is not None else "."),
        where=Where(step=rows.batch.step, rank=rows.batch.rank, sample=rows.name(row)),
        evidence=tuple(evidence),
        cause=f"the template's {side} token merges with its neighbour in context"
        if merged
        else "rows were made with another template, or cut before the answer"
        if not nowhere
        else "the rows do not hold this template",
        next=("print the ids of one row beside those of the template",),
        fix=(
            "take the template's ids from a tokenized conversation, or leave out the blank at its end",
            "mask by the chat template's generation mask",
        ),
    )


def _neighbour(ids: Ints, template: Sequence[int], last: bool) -> int | None:
    """The id that stands in a row where the template's last (or first) id should."""
    part = np.array(template[:-1] if last else template[1:], np.int64)
    for at in range(len(ids) - len(part) + 1):
        if (ids[at : at + len(part)] == part).all():
            place = at + len(part) if last else at - 1
            return int(ids[place]) if 0 <= place < len(ids) else None
    return None
