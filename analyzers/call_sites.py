"""The line of the job by which something was called or raised: the innermost frame that belongs to no library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

#: Path parts of frames that are a library's own and no call site; frames of the standard library are nobody's.
_LIBRARY: Final = ("/torch/", "torch/distributed/", "torch/nn/parallel", "c10d_logger", "/importlib/", "<frozen")
_STANDARD: Final = re.compile(r"/lib/python3\.\d{1,3}/(?!site-packages/|dist-packages/)")


def call_site(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Frames of a record outside the library, innermost first; the innermost of all where there are no others."""
    frames = [each for each in record.get("frames") or () if isinstance(each, dict)]
    own = [each for each in frames if not _of_a_library(str(each.get("file") or ""))]
    return tuple(f"{each.get('file')}:{each.get('line')} in {each.get('name')}" for each in (own or frames[:1])[:8])


def _of_a_library(file: str) -> bool:
    return any(part in file for part in _LIBRARY) or _STANDARD.search(file) is not None
