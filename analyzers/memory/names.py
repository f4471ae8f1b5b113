"""What the names along a stack say of its blocks: a logged value, an evaluation's, or something that is to be kept."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from .allocator import is_own

if TYPE_CHECKING:
    from ...capsules.allocator import History

#: Functions by which a stack stands in a phase that keeps what it computes, and gives it back at its end.
_COLLECTS: Final = re.compile(r"eval|valid|predict|generate|inference|rollout|prefill|decode|warm_?up|calibrat", re.I)
_CHECKPOINT: Final = re.compile(r"checkpoint")
#: Names of what fills up and stays full, which cannot be told from a leak while it fills.
_STORES: Final = re.compile(r"cache|replay|buffer|memory_bank|queue|pool", re.I)
#: Functions and files of losses and metrics, and the step of Lightning, whose result is one.
_VALUE: Final = re.compile(
    r"(?<![a-z])(?:loss(?:es)?|criteri(?:on|a)|metrics?|accuracy|perplexity|objectives?|cross_entropy|nll)(?![a-z])"
    r"|[a-z](?:Loss|Metric)|^training_step$"
)
#: Functions and files that log.
_LOGS: Final = re.compile(
    r"(?<![a-z])log(?:s|ged|ger|ging)?(?![a-z])(?!_?(?:softmax|prob|sum|sigmoid|normal|likeli|det))"
)
#: Functions of an evaluation: of the program by a word of their name, of a library by the whole of it.
_EVALUATES: Final = re.compile(
    r"(?<![a-z])(?:eval(?:uat(?:e|ion|or|ing))?|valid(?:at(?:e|ion|ing))?|val|test)(?![a-z])"
)
_EVALUATION: Final = re.compile(
    r"_?(?:evaluate|evaluation_loop|evaluation_step|eval_step|prediction_loop|prediction_step|validate"
    r"|validation_step|test_step|predict|predict_step|run_evaluation)$"
)
#: Functions that make text token by token, with a cache that grows in a lawful way.
_GENERATES: Final = re.compile(r"generat|decode|sample_token|beam_search", re.I)


def is_value(history: History, stack: int) -> bool:
    """Whether the names along a stack, up to the program's own line, are those of a loss, a metric or a log."""
    for name, file, _ in history.stacks.of(stack):
        own = is_own(file)
        said = (name, file.rpartition("/")[2].partition(".")[0])
        if any(_VALUE.search(each) or (own and _LOGS.search(each)) for each in said):
            return True
        if own:
            break
    return False


def is_collected(history: History, stack: int) -> bool:
    """Whether a stack makes what a job keeps on purpose, one after the other, and outside of its steps."""
    if history.stacks.category_of(stack) not in ("unknown", "activation"):
        return True
    return any(_COLLECTS.search(name) or _CHECKPOINT.search(file) for name, file, _ in history.stacks.of(stack))


def is_store(history: History, stack: int) -> bool:
    """Whether the program's own frames are named after something that fills up and stays full."""
    own = ((name, file.rpartition("/")[2]) for name, file, _ in history.stacks.of(stack) if is_own(file))
    return any(_STORES.search(name) or _STORES.search(file) for name, file in own)


def evaluates(name: str, file: str) -> bool:
    """Whether a function is that of an evaluation."""
    return (_EVALUATES.search(name) if is_own(file) else _EVALUATION.match(name)) is not None


def generates(history: History, stack: int) -> bool:
    """Whether a stack stands in the making of text, or belongs to its cache."""
    if history.stacks.category_of(stack) == "kv_cache":
        return True
    return any(_GENERATES.search(name) for name, _, _ in history.stacks.of(stack))
