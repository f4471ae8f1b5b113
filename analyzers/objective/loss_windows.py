"""From a capsule to the windows whose loss can be computed again, and the numbers that the job reported for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from ..reference.token_ce import Floats
from ..rounding import UNIT_ROUNDOFF
from .loss_batch import NEXT_TOKEN_OBJECTIVES, micro_of
from .loss_case import Micro, RecordedSums, Window

if TYPE_CHECKING:
    from ...capsules import Capsule
    from ...capsules.batches import Batch

#: Windows used for one verdict; more add cost and no certainty.
MAX_WINDOWS = 6


@dataclass(frozen=True)
class Observed:
    """A number that the job reported for a window, and how exactly it is known."""

    window: Window
    value: float
    decimals: int | None
    value_roundoff: float
    input_roundoff: float


def observed_windows(capsule: Capsule) -> list[Observed]:
    """Every window whose loss can be computed again, thinned to ``MAX_WINDOWS`` spread over the run.

    A step is left out where its micro-batches are not all there, where its number is absent or not finite, or where
    labels and tokens do not match in a known layout (masked-language-model labels, say).
    """
    training = capsule.manifest.training
    objective = training.objective if training is not None else None
    if objective is not None and objective not in NEXT_TOKEN_OBJECTIVES:
        return []
    batches = [each for each in capsule.batches() if each.split in (None, "train")]
    by_step = [(step, list(group)) for step, group in groupby(batches, key=lambda each: each.step)]
    chosen = _spread(by_step, 2 * MAX_WINDOWS)
    expected = _recorded_micros(capsule, {step for step, _ in chosen})
    stepped = _at(capsule, "optimizer_step", "optimizer_step_skipped")
    unstepped = _at(capsule, "backward") - stepped
    loose = [each.reported_loss for each in batches if each.reported_loss is not None]
    decimals = printed_decimals(np.asarray(loose, dtype=np.float64))
    found: list[Observed] = []
    for step, group in chosen:
        configured = (training.accumulation_steps if training is not None else None) or 1
        if stepped and step not in stepped and len(group) < configured:
            continue  # the micro-batches left over at the end of a run, for which nobody stepped
        if step in unstepped and len(group) != configured:
            continue  # a window that nothing ended: how many micro-batches belong together is not known
        found.extend(_observe_step(capsule, step, group, expected, decimals))
        if len(found) >= 2 * MAX_WINDOWS:
            break
    return list(_spread(found, MAX_WINDOWS))


def _at(capsule: Capsule, *kinds: str) -> set[int]:
    """Steps that have an event of one of these kinds."""
    return {each["step"] for each in capsule.records("events") if each.get("kind") in kinds and "step" in each}


def _recorded_micros(capsule: Capsule, steps: set[int]) -> dict[tuple[int, int], set[int]]:
    """The micro-batches that were recorded to exist, by (step, rank)."""
    micros: dict[tuple[int, int], set[int]] = {}
    for record in capsule.records("microbatches"):
        if record.get("step") in steps:
            micros.setdefault((record["step"], record["rank"]), set()).add(record.get("micro") or 0)
    return micros


def _observe_step(
    capsule: Capsule,
    step: int,
    batches: Sequence[Batch],
    expected: Mapping[tuple[int, int], set[int]],
    decimals: int | None,
) -> Iterable[Observed]:
    """One observation a rank of this step; ``decimals`` stands in where a batch does not say how it was printed."""
    per_rank = {rank: list(group) for rank, group in groupby(batches, key=lambda each: each.rank)}
    complete = {
        rank: group for rank, group in per_rank.items() if _complete(capsule, group, expected.get((step, rank)))
    }
    numbers = {rank: _reported(capsule, step, rank, group, decimals) for rank, group in complete.items()}
    if not any(number is not None for number in numbers.values()):
        return
    micros: dict[int, tuple[Micro, ...]] = {}
    for rank, group in complete.items():
        built = [micro_of(capsule, batch) for batch in group]
        if all(each is not None for each in built):
            micros[rank] = tuple(each for each in built if each is not None)
    training, world = capsule.manifest.training, _world(capsule)
    configured = training.accumulation_steps if training is not None else None
    for rank, own in micros.items():
        number = numbers[rank]
        if number is None:
            continue
        others = [each for other, each in micros.items() if other != rank]
        whole = len(micros) == world
        yield Observed(
            window=Window(step, rank, (own, *others) if whole else (own,), configured, world),
            value=number[0],
            decimals=number[1],
            value_roundoff=_sum_roundoff(complete[rank][0], sum(int(each.supervised.sum()) for each in own)),
            input_roundoff=max(_input_roundoff(batch) for batch in complete[rank]),
        )


def recorded_windows(capsule: Capsule) -> list[Observed]:
    """Windows of several micro-batches or ranks known by the recorded loss sums and token counts alone.

    The other ranks count where every one of them is on record. A micro-batch without supervised tokens, or without a
    finite loss, takes its window out.
    """
    series = capsule.scalars("loss")
    if len(series) == 0:
        return []
    rank, world = series.rank or 0, _world(capsule)
    numbers = dict(zip(series.step.tolist(), series.value.tolist(), strict=True))
    windows: dict[int, dict[int, list[RecordedSums]]] = {}
    configured: dict[int, int] = {}
    for record in capsule.records("microbatches"):
        step, tokens = record.get("step"), record.get("tokens") or 0
        total, mean = record.get("loss_sum"), record.get("loss_mean")
        total = mean * tokens if total is None and mean is not None else total
        if step is None or total is None:
            continue
        sums = RecordedSums(total, tokens)
        windows.setdefault(step, {}).setdefault(record["rank"], []).append(sums)
        if record["rank"] == rank:
            configured[step] = record.get("window") or len(windows[step][rank])
    stepped, u = _at(capsule, "optimizer_step", "optimizer_step_skipped"), UNIT_ROUNDOFF["float32"]
    decimals = printed_decimals(np.asarray(series.value))
    found: list[Observed] = []
    for step, ranks in sorted(windows.items()):
        own = ranks.pop(rank, [])
        every = [own, *(ranks.values() if len(ranks) + 1 == world else ())]
        sums = [each for one in every for each in one]
        if not own or len(sums) < 2 or not all(each.tokens > 0 and np.isfinite(each.loss_sum) for each in sums):
            continue
        if not np.isfinite(numbers.get(step, np.nan)) or (
            stepped and step not in stepped and len(own) < configured[step]
        ):
            continue
        window = Window(step, rank, tuple(tuple(each) for each in every), configured[step], world)
        found.append(Observed(window, numbers[step], decimals, u, u))
    return list(_spread(found, MAX_WINDOWS))


def _world(capsule: Capsule) -> int:
    run = capsule.manifest.run
    return (run.world_size if run is not None else None) or len(capsule.ranks)


def _complete(capsule: Capsule, batches: Sequence[Batch], expected: set[int] | None) -> bool:
    """Whether every micro-batch of the window was captured, as far as the evidence tells."""
    if len({batch.micro for batch in batches}) < len(batches):
        return False
    if expected is not None:
        return len(expected) == len(batches)
    training = capsule.manifest.training
    configured = (training.accumulation_steps if training is not None else None) or 1
    # One batch of a longer window: the number may be the batch's or the window's, so nothing can be said.
    return len(batches) == configured or len(batches) > 1


def _reported(
    capsule: Capsule, step: int, rank: int, batches: Sequence[Batch], decimals: int | None
) -> tuple[float, int | None] | None:
    """(value, decimals) of the loss of the whole window, or None."""
    if len(batches) == 1 and batches[0].reported_loss is not None:
        printed = batches[0].reported_decimals
        number = (float(batches[0].reported_loss), decimals if printed is None else printed)
        return number if np.isfinite(number[0]) else None
    series = capsule.scalars("loss", rank=rank)
    at = np.flatnonzero(np.asarray(series.step) == step)
    if len(at) != 1 or not np.isfinite(series.value[at[0]]):
        return None
    return float(series.value[at[0]]), printed_decimals(np.asarray(series.value))


def printed_decimals(values: Floats, most: int = 6) -> int | None:
    """Decimals of a series that was printed and read back; None where the values have more than ``most``."""
    finite = [repr(float(value)) for value in values if np.isfinite(value)]
    if not finite or any("e" in text for text in finite):
        return None
    decimals = max(len(text.partition(".")[2].rstrip("0")) for text in finite)
    return decimals if decimals <= most else None


def _roundoff(*dtypes: str | None) -> float:
    """Unit roundoff of the first dtype that is known; of float32 where none is."""
    for dtype in dtypes:
        if dtype in UNIT_ROUNDOFF:
            return UNIT_ROUNDOFF[dtype]
    return UNIT_ROUNDOFF["float32"]


def _sum_roundoff(batch: Batch, tokens: int) -> float:
    """Of a loss that is a sum of ``tokens`` terms, added one after another at worst.

    Each addition rounds the partial sum: relative to the whole u · √tokens / 3, about twice what we allow a standard
    deviation. Sums of low-precision terms are accumulated in float32.
    """
    own = _roundoff(batch.loss_dtype, batch.logits_dtype)
    return float(np.hypot(own, min(own, UNIT_ROUNDOFF["float32"]) * np.sqrt(tokens) / 6.0))


def _input_roundoff(batch: Batch) -> float:
    """Of the dtype in which the scores were used; of the stored dtype where storing them lost something."""
    used = _roundoff(batch.loss_dtype, batch.logits_dtype)
    job = batch.logits_dtype
    # What storing rounds off is spread evenly over ± u: √3 times less than ± u itself.
    for name in ("logits", "logsumexp", "target_logits"):
        info = batch.arrays.get(name)
        if info is not None and info.dtype in UNIT_ROUNDOFF and info.dtype != job:
            used = max(used, UNIT_ROUNDOFF[info.dtype] / np.sqrt(3.0))
    return used


def _spread(items: Sequence[Any], most: int) -> Sequence[Any]:
    """At most ``most`` items, evenly spread, first and last kept."""
    if len(items) <= most:
        return items
    return [items[index] for index in np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))]
