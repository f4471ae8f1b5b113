"""The faults of the demo: each an ordinary commit to the job that happens to break it, and one that mends it."""

from __future__ import annotations

from .fault import Case, Edit, Fault, Repair
from .label_shift import LABEL_SHIFT
from .learning_rate import LEARNING_RATE
from .none import NONE
from .overflow import OVERFLOW
from .poison_sample import POISON_SAMPLE

#: Every fault by the name that ``--fault`` takes; the first is the default.
FAULTS = {fault.name: fault for fault in (OVERFLOW, LABEL_SHIFT, LEARNING_RATE, POISON_SAMPLE, NONE)}

__all__ = ["FAULTS", "Case", "Edit", "Fault", "Repair"]
