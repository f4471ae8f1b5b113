"""Two runs side by side: what ``diff`` prints. Raw files are imported first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ..imports import open_evidence, problems_of

if TYPE_CHECKING:
    from ...analyzers.diff.types import Difference


def difference(left: str, right: str, left_files: Sequence[str] = (), right_files: Sequence[str] = ()) -> Difference:
    """Compare two runs, each a capsule or the raw files of one job.

    Raises:
        EvidenceError: one of them cannot be read, or they hold nothing that can be compared.
    """
    from ...analyzers.diff.compare import NothingShared, compare
    from ...capsules.errors import EvidenceError

    try:
        found = compare(open_evidence(left, left_files), open_evidence(right, right_files))
    except NothingShared as error:
        raise EvidenceError(f"nothing to compare: {error}", f"{left} and {right}") from None
    notes = [*problems_of(left, left_files), *problems_of(right, right_files), *found.notes]
    return msgspec.structs.replace(
        found,
        left=msgspec.structs.replace(found.left, path=left),
        right=msgspec.structs.replace(found.right, path=right),
        notes=tuple(notes),
    )
