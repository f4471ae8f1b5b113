"""What the calls on record say of averaging between replicas: at every step, now and then, or not at all."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from . import thresholds as T

if TYPE_CHECKING:
    from ...capsules import Capsule

Averaging = Literal["every step", "now and then", "none", "unknown"]

_REDUCING = re.compile(r"all_?reduce|reduce_?scatter")
#: Ways of training that let replicas part between two averages.
_LOCAL = re.compile(
    r"local_?sgd|diloco|post_?local|model_?averag|periodic_?averag|federated|gossip|elastic_?averag", re.IGNORECASE
)


def averaging(capsule: Capsule) -> Averaging:
    """How often something as large as the model is reduced over the ranks.

    A configuration that names local SGD or the like decides; else the steps of the calls on record do, of the rank that
    has most of them. Unknown where no calls are on record, or the size of the model is not known.
    """
    if _says_local(capsule.manifest.raw.get("config")) or _says_local(capsule.manifest.raw.get("training")):
        return "now and then"
    model = capsule.manifest.model
    parameters = model.parameters if model is not None else None
    records = capsule.records("collectives")
    steps = [record["step"] for record in records if isinstance(record.get("step"), int)]
    if not parameters or not steps:
        return "unknown"
    rank = Counter(record["rank"] for record in records).most_common(1)[0][0]
    reduced: Counter[int] = Counter()
    for record in records:
        if record["rank"] == rank and isinstance(record.get("step"), int) and _REDUCING.search(record.get("op") or ""):
            reduced[record["step"]] += sum(math.prod(shape) for shape in record.get("shapes_in") or ())
    large = sorted(step for step, elements in reduced.items() if elements >= T.AS_LARGE * parameters)
    if not large:
        return "none"
    span = max(steps) - min(steps) + 1
    return "now and then" if len(large) >= T.AVERAGES and len(large) <= T.NOT_EVERY * span else "every step"


def _says_local(given: Any) -> bool:
    """Whether a key or a value of a nested mapping names such a way of training."""
    pending: list[Any] = [given]
    for _ in range(4096):
        if not pending:
            return False
        value = pending.pop()
        if isinstance(value, Mapping):
            for key, inner in cast("Mapping[Any, Any]", value).items():
                words = f"{key} {inner}" if isinstance(inner, str) else str(key)
                if inner not in (None, False, 0) and _LOCAL.search(words):
                    return True
                if isinstance(inner, Mapping):
                    pending.append(inner)
    return False
