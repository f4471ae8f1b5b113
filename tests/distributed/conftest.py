"""Jobs under torchrun, each launch once for the tests of a file; the laboratory is reached from the repository root."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
