"""The garbage collector, kept from looking at millions of new containers again and again, to find nothing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def collector_still() -> Generator[None]:
    """Keep the collector off while much is read; reference counts go on freeing what is not in circles."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
