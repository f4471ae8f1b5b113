"""Megatron-LM golden values: metrics by step as its functional tests compare them.

Source of the schema: Megatron-LM tests/functional_tests/python_test_utils/common.py. Newer files hold ``values`` by
step, older ones a list from ``start_step`` on, one value every ``step_interval`` steps.
"""

from __future__ import annotations

import re
from typing import Any, cast

from ..errors import EvidenceError
from ..limits import MIB
from . import tags
from .prefix import decode_prefix
from .run import Run
from .source import Source
from .trainer_state import number

FORMAT = "Megatron-LM golden values"

_LARGEST = 256 * MIB
_FIRST = re.compile(r'^\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*\{\s*"(start_step|end_step|step_interval|values)"\s*:')


def sniff(source: Source) -> bool:
    """Whether the file is an object of metrics that have ``start_step`` or ``values``."""
    head = source.head.decode("utf-8", "replace").lstrip("\ufeff")
    return _FIRST.match(head) is not None


def read(source: Source, out: Run) -> None:
    """Write every value that was logged; the text ``"nan"`` stands for a step at which nothing was."""
    document, whole = decode_prefix(source.read(_LARGEST), str(source.path))
    if not isinstance(document, dict):
        raise EvidenceError("is no object of metrics", str(source.path))
    if not whole:
        source.ends_early("what stands before the tear was read")
    names = tags.Names()
    for metric, described in cast("dict[str, Any]", document).items():
        if not isinstance(described, dict) or "values" not in described:
            out.note("metrics without values left out")
            continue
        _read_metric(names.of(metric), cast("dict[str, Any]", described), out)


def _read_metric(named: tags.Named, described: dict[str, Any], out: Run) -> None:
    start, interval = number(described.get("start_step")), number(described.get("step_interval"))
    first, every = int(start or 0), int(interval or 1)
    values = described["values"]
    if isinstance(values, list):
        rows = [(first + at * every, each) for at, each in enumerate(cast("list[Any]", values))]
    elif isinstance(values, dict):
        rows = [(number(step), each) for step, each in cast("dict[str, Any]", values).items()]
    else:
        out.note("metrics without values left out")
        return
    for step, value in rows:
        found = number(value)
        if isinstance(value, str) and found is not None and found != found:
            out.note('steps at which a metric was not logged ("nan" in this format)')
        elif found is None or step is None or not 0 <= step < 2**63:
            out.note("values that are no numbers left out")
        else:
            out.scalar(named.name, int(step), found * named.factor, unit=named.unit)
