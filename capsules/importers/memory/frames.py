"""Stack traces of a snapshot: each kept once, and what its frames say of what was allocated.

Sources of the signs: the layout of torch (``torch/optim/*.py``, ``nn/modules/module.py``, ``utils/checkpoint.py``,
``torch::autograd::Engine`` in C++ frames, ``distributed/distributed_c10d.py``), of Megatron-LM, of DeepSpeed and of
transformers (``cache_utils.py``). They are signs, no proof: where there is none, the category is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final, cast

import numpy as np

from ...allocator import CATEGORIES, Stacks
from ...plain_pickle import integer, text

#: Frames of one stack that are looked at, from both ends, and that are kept.
_LOOKED_AT, _FROM_OUTSIDE, _KEPT = 192, 64, 24
#: Stacks and frames of one device that are kept apart; the rest is one stack.
MOST_STACKS, MOST_FRAMES = 50_000, 100_000
_LONGEST: Final = 240

_PYTHON: Final = re.compile(r"\.pyx?$|^<")
#: Frames between the program and the allocator, which say nothing.
_BENEATH: Final = re.compile(
    r"^torch::(unwind|CapturedTraceback)|gather_with_cpp|^_start$|__libc_start|^Py(Eval|Object|Function|Vectorcall)_"
    r"|^_?Py|^c10::(cuda|CachingAllocator|StorageImpl)|^\?\?$|CUDACachingAllocator"
)

_OPTIMIZER_FILE: Final = re.compile(
    r"(^|/)(optim|optimizers?)(/|\.py$)|optimizer\w*\.py$|/zero/stage\w*\.py$|/adam\w*\.py$"
)
_OPTIMIZER_NAME: Final = re.compile(r"step|_init_group|init_?state|_(single|multi)_tensor|_fused_|exp_avg|master")
_COMMUNICATION: Final = re.compile(
    r"distributed_c10d\.py$|_functional_collectives|_fsdp_collectives|/_?flat_param\w*\.py$|ProcessGroupNCCL|ncclComm"
    r"|param_and_grad_buffer|nn/parallel/distributed\.py$|c10d::|all_?gather|reduce_?scatter|all_?reduce|all_to_all"
)
_RECOMPUTE: Final = re.compile(r"utils/checkpoint\.py$|activation_checkpoint|tensor_parallel/random\.py$")
#: The engine and the nodes of the graph; the rest of ``torch::autograd`` is what every operation of forward calls.
_BACKWARD_CODE: Final = re.compile(
    r"torch::autograd::(?:\w+::)?(?:Python)?(?:Engine|Node|PyNode|InputBuffer|GraphTask|CopySlices|CppNode)\b"
    r"|AccumulateGrad|Backward\d*::apply|BackwardPass"
)
_PARAMETER: Final = re.compile(
    r"reset_parameters|from_pretrained|load_state_dict|_load_from_state|to_empty|init_weights|_initialize_weights"
    r"|_materialize|param_init_fn|build_model|load_model"
)
_MODULE: Final = re.compile(r"nn/modules/|nn/parameter\.py$|modeling_\w+\.py$")
_CACHE: Final = re.compile(r"cache_utils\.py$|kv_?cache|cache_engine|past_key_values", re.IGNORECASE)
_FORWARD: Final = re.compile(r"^(forward\w*|_call_impl|_wrapped_call_impl)$|::forward")

Named = tuple[str, str, int]

# What one frame shows, as bits; of a stack, those of its frames together.
_PYTHONIC, _TELLS, _OPTIMIZER, _AGAIN, _CACHED, _COLLECTIVE, _BACKWARD, _INSIDE, _MADE = (1 << bit for bit in range(9))
#: Which sign decides, the strongest first: an optimizer runs nothing of the others, a checkpoint computes activations
#: within the backward pass, and the forward pass is where most stacks stand.
_ORDER: Final = (
    (_OPTIMIZER, "optimizer"),
    (_AGAIN, "activation"),
    (_CACHED, "kv_cache"),
    (_COLLECTIVE, "communication"),
    (_BACKWARD, "gradient"),
    (_INSIDE, "activation"),
    (_MADE, "parameter"),
)
_NOTHING: Named = ("", "", 0)
_SAID: Final = itemgetter("name", "filename", "line")


class StackTable:
    """Gives each stack trace a number; number 0 is the empty one, 1 stands for those too many to be kept apart.

    The data that hold the frames must stay alive while the table is filled: frames are known again by their identity.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self.unreadable = 0
        self._frames: list[Named] = []
        self._frame_numbers: dict[Named, int] = {}
        self._signs: dict[Named, int] = {}
        self._by_frame: dict[int, Named] = {}
        self._by_members: dict[tuple[int, ...], int] = {(): 0}
        self._by_said: dict[tuple[tuple[Any, ...], ...], int] = {}
        self._by_content: dict[tuple[Named | int, ...], int] = {}
        self._starts: list[int] = [0, 0, 0]
        self._members: list[int] = []
        self._category: list[int] = [0, 0]

    def numbers(self, lists: Sequence[Any]) -> list[int]:
        """``number`` of each of many."""
        found = _looked_up(self._by_members, id, lists)
        new = [frames for frames, known in zip(lists, found, strict=True) if known is None]
        numbers = iter(
            self.number(frames) if known is None else known
            for frames, known in zip(new, _looked_up(self._by_said, _SAID, new), strict=True)
        )
        return [next(numbers) if known is None else known for known in found]

    def number(self, frames: Any) -> int:
        """The number of a list of frames as a snapshot holds it; 0 where it is none."""
        if type(frames) is not list or not frames:
            return 0
        listed = cast("list[Any]", frames)
        if len(listed) > _LOOKED_AT + _FROM_OUTSIDE:
            listed = listed[:_LOOKED_AT] + listed[-_FROM_OUTSIDE:]
        members = tuple(map(id, listed))
        known = self._by_members.get(members)
        if known is None:
            known = self._by_what_they_say(listed)
            if len(self._by_members) < MOST_STACKS:
                self._by_members[members] = known
        return known

    def _by_what_they_say(self, frames: list[Any]) -> int:
        """The number of frames that are new: in a file that shares none, each event has its own."""
        try:
            said = tuple(map(_SAID, frames))
            known = self._by_said.get(said)
        except (KeyError, TypeError):  # a frame of another shape
            return self._content([self._named(each) for each in frames])
        if known is None:
            known = self._content([self._named(each) for each in frames])
            if len(self._by_said) < MOST_STACKS:
                self._by_said[said] = known
        return known

    def stacks(self) -> Stacks:
        """All of them."""
        starts, members = np.array(self._starts, np.int64), np.array(self._members, np.int64)
        return Stacks(list(self._frames), starts, members, np.array(self._category, np.int64))

    def _named(self, frame: Any) -> Named:
        known = self._by_frame.get(id(frame))
        if known is None:
            known = _named(frame)
            if len(self._by_frame) < MOST_FRAMES:
                self._by_frame[id(frame)] = known
        return known

    def _content(self, frames: list[Named]) -> int:
        signs = [self._signs.get(each) or self._signs.setdefault(each, _signs(each)) for each in frames]
        together = 0
        for each in signs:
            together |= each
        wanted = _PYTHONIC if together & _PYTHONIC else _TELLS
        kept = [each for each, sign in zip(frames, signs, strict=True) if sign & wanted][:_KEPT]
        if not kept:
            return 0
        category = next((CATEGORIES.index(name) for bit, name in _ORDER if together & bit), 0)
        known = self._by_content.get((*kept, category))
        if known is None:
            if len(self._by_content) >= MOST_STACKS or len(self._frames) + len(kept) > MOST_FRAMES:
                self.left_out += 1
                return 1
            known = self._by_content[*kept, category] = len(self._category)
            for each in kept:
                number = self._frame_numbers.setdefault(each, len(self._frames))
                if number == len(self._frames):
                    self._frames.append(each)
                self._members.append(number)
            self._starts.append(len(self._members))
            self._category.append(category)
        return known


def _looked_up(known: dict[Any, int], sign: Callable[[Any], Any], lists: Sequence[Any]) -> list[int | None]:
    """What is known of lists by the ``sign`` of each of their members."""
    try:
        return list(map(known.get, map(tuple, map(partial(map, sign), lists))))
    except (KeyError, TypeError):  # something is no list, or no frame as torch writes them
        return [None] * len(lists)


def category_of(frames: list[Named]) -> str:
    """What a stack allocates, by the signs of its frames: one of ``CATEGORIES``."""
    together = 0
    for each in frames:
        together |= _signs(each)
    return next((name for bit, name in _ORDER if together & bit), CATEGORIES[0])


def _named(frame: Any) -> Named:
    if type(frame) is not dict:
        return _NOTHING
    fields = cast("dict[Any, Any]", frame)
    line = integer(fields.get("line"))
    return (
        (text(fields.get("name"), _LONGEST) or "").encode("utf-8", "replace").decode(),
        (text(fields.get("filename")) or "")[-_LONGEST:].encode("utf-8", "replace").decode(),
        line if line is not None and 0 <= line < 1 << 31 else 0,
    )


def _signs(frame: Named) -> int:
    name, file, _ = frame
    found = 1 << 30  # never 0, so that it is looked up once
    if frame == _NOTHING or _BENEATH.search(name):
        return found
    made = name in ("__init__", "_apply", "convert", "cuda", "to", "empty") and _MODULE.search(file)
    for bit, holds in (
        (_TELLS, True),
        (_PYTHONIC, _PYTHON.search(file)),
        (_OPTIMIZER, _OPTIMIZER_FILE.search(file) and _OPTIMIZER_NAME.search(name)),
        (_AGAIN, _RECOMPUTE.search(file)),
        (_CACHED, _CACHE.search(file) or _CACHE.search(name)),
        (_COLLECTIVE, _COMMUNICATION.search(file) or _COMMUNICATION.search(name)),
        (_BACKWARD, name in ("backward", "_make_grads") or _BACKWARD_CODE.search(name)),
        (_INSIDE, _FORWARD.search(name)),
        (_MADE, made or _PARAMETER.search(name)),
    ):
        if holds:
            found |= bit
    return found
