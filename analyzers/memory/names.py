"""What the names along a stack say of its blocks: a logged value, an evaluation's, or something that is to be kept."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from .allocator import is_beyond_torch, is_own, place
from .records import mappings, whole

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
    r"(?<![a-z])(?:eval(?:uat(?:e|ion|or|ing))?|valid(?:at(?:e|ion|ing))?|val)(?![a-z])|^test(?:_step|_epoch|_loop)?$"
)
_EVALUATION: Final = re.compile(
    r"_?(?:evaluate|evaluation_loop|evaluation_step|eval_step|prediction_loop|prediction_step|validate"
    r"|validation_step|test_step|predict|predict_step|run_evaluation)$"
)
#: Functions that make text token by token, with a cache that grows in a lawful way.
_GENERATES: Final = re.compile(r"generat|decode|sample_token|beam_search", re.I)
#: Functions that join what the batches gave, and what only one batch's ranks gave; a container of the former.
_JOINS: Final = re.compile(r"(?<![a-z])(?:concat(?:enate)?|cat|collect\w*|append|accumulate)(?![a-z])")
_OF_RANKS: Final = re.compile(r"distributed|gather|across_processes")
_CONTAINER: Final = re.compile(r"transformers/trainer_pt_utils\.py$")


def is_value(history: History, stack: int) -> bool:
    """Whether the names along a stack, up to its innermost line beyond torch, are of a loss, a metric or a log."""
    for name, file, _ in history.stacks.of(stack):
        beyond = is_beyond_torch(file)
        said = (name, file.rpartition("/")[2].partition(".")[0])
        if any(_VALUE.search(each) or (beyond and _LOGS.search(each)) for each in said):
            return True
        if beyond:
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


def collecting(frames: Any) -> str | None:
    """The line (``function file:line``) at which an evaluation joins the outputs of its batches, by an error's frames.

    Args:
        frames: records {name, file, line}, innermost first, or whatever stands there.

    Returns:
        The innermost line that says so by the names along the stack; None where a forward pass, or nothing, does.
    """
    within = [
        (str(each.get("name") or ""), str(each.get("file") or ""), whole(each.get("line")) or 0)
        for each in mappings(frames)
    ]
    ends = next((at for at, (name, file, _) in enumerate(within) if evaluates(name, file)), None)
    inner = within[:ends] if ends is not None else []
    if any(name in ("forward", "_call_impl") or _OF_RANKS.search(name) for name, _, _ in inner):
        return None
    joins = (
        at
        for at, (name, file, _) in enumerate(inner)
        if _JOINS.search(name) or (name == "add" and _CONTAINER.search(file))
    )
    first = next(joins, None)
    return None if first is None else place(inner[first : first + 1])
