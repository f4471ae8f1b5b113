"""How long the console keeps its user waiting: CPU time of each handler and each redraw, and capsules large enough.

CPU time of the thread, not the clock on the wall, and against a loop whose time on a free machine is known: other
work on the machine must not decide what is measured here.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from llmconsole.capsules import CapsuleWriter
from textual.app import App
from textual.screen import Screen

#: Limits of what the console promises, in milliseconds.
TURN_MS, REDRAW_MS = 50.0, 20.0

#: What ``_loop`` takes on a free core of the machine that the limits were set on.
_LOOP_MS = 13.0


@dataclass
class Watch:
    """Milliseconds of every turn of the event loop and of every redraw, on the scale of a free machine."""

    turns: list[float] = field(default_factory=list)
    redraws: list[float] = field(default_factory=list)
    slowness: float = 1.0

    def turn(self) -> float:
        """The longest turn: a key pressed while it runs waits that long."""
        return max(self.turns, default=0.0) / self.slowness

    def redraw(self, share: float = 1.0) -> float:
        """The longest redraw, or a quantile of them."""
        ordered = sorted(self.redraws)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / self.slowness if ordered else 0.0

    def clear(self) -> None:
        """Forget what was measured so far."""
        self.turns.clear()
        self.redraws.clear()


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Measures every callback of the event loop, and every update of the screen including its escape sequences."""
    gc.collect()
    gc.freeze()  # what other tests left behind is not to be searched here
    watch = Watch(slowness=max(1.0, statistics.median(_loop() for _ in range(5)) / _LOOP_MS))
    run, redraw, display = asyncio.Handle._run, Screen._compositor_refresh, App._display

    def timed_run(handle: asyncio.Handle) -> None:
        begin = time.thread_time()
        run(handle)
        watch.turns.append((time.thread_time() - begin) * 1e3)

    def timed_redraw(screen: Screen[Any]) -> None:
        begin = time.thread_time()
        redraw(screen)
        watch.redraws.append((time.thread_time() - begin) * 1e3)

    def rendering_display(app: App[Any], screen: Screen[Any], renderable: Any) -> None:
        display(app, screen, renderable)
        if hasattr(renderable, "render_segments"):  # without a terminal Textual leaves this out
            renderable.render_segments(app.console)

    asyncio.Handle._run = timed_run
    Screen._compositor_refresh, App._display = timed_redraw, rendering_display
    try:
        yield watch
    finally:
        asyncio.Handle._run = run
        Screen._compositor_refresh, App._display = redraw, display


def _loop() -> float:
    begin, total = time.thread_time(), 0
    for number in range(300_000):
        total += number * number % 7
    return (time.thread_time() - begin) * 1e3


# -- capsules


def many_capsules(directory: Path, count: int = 3000) -> Path:
    """A directory of small capsules."""
    first = directory / "0000.capsule"
    with CapsuleWriter(first, title="run 0000", phase="training", manifest={"run": {"name": "sft"}}) as writer:
        writer.scalars("loss", step=[0, 1, 2], value=[3.0, 2.0, 1.0], rank=0)
    manifest = json.loads((first / "capsule.json").read_text())
    for number in range(1, count):
        path = directory / f"{number:04}.capsule"
        shutil.copytree(first, path)
        own = {**manifest, "id": f"{number:032x}", "title": f"run {number:04}"}
        (path / "capsule.json").write_text(json.dumps(own))
    return directory


def many_layers(directory: Path, layers: int = 500, steps: int = 20) -> Path:
    """Activation and gradient of each layer at each step."""
    common = {"dtype": "float16", "shape": [8, 128, 64], "stride": [8192, 64, 1], "device": "cuda:0", "micro": 0}
    counts = {"numel": 65536, "nan": 0, "posinf": 0, "neginf": 0, "zeros": 0, "subnormals": 0, "call": 0}
    values = {"min": -9e3, "max": 6e3, "absmean": 40.0, "mean": 0.1, "std": 300.0, "rms": 300.0}
    with CapsuleWriter(directory / "layers.capsule", title="500 layers", phase="training") as writer:
        for step in range(steps):
            writer.stats(
                [
                    {**common, **counts, **values, "step": step, "order": order, "role": role,
                     "name": f"model.layers.{order}.mlp.down_proj", "absmax": 10.0 + order * step}
                    for role in ("activation", "gradient")
                    for order in range(layers)
                ],
                rank=0,
            )  # fmt: skip
    return directory


def long_series(directory: Path, steps: int = 10**6) -> Path:
    """Three noisy series with one spike and one NaN."""
    rng, step = np.random.default_rng(0), np.arange(steps)
    with CapsuleWriter(directory / "series.capsule", title="a million steps", phase="training") as writer:
        for name in ("loss", "grad_norm", "learning_rate"):
            value = 2 + np.exp(-step / 1e5) + 0.1 * rng.standard_normal(steps)
            value[steps // 2], value[steps // 3] = 50.0, np.nan
            writer.scalars(name, step=step, value=value, rank=0)
    return directory


def many_ranks(directory: Path, ranks: int = 64, collectives: int = 1200) -> Path:
    """Ranks of which number 37 never comes to the last collective."""
    common = {"group": "dp", "group_ranks": list(range(ranks)), "op": "all_reduce", "dtype": "bfloat16"}
    with CapsuleWriter(directory / "ranks.capsule", title="64 ranks", phase="training") as writer:
        writer.records(
            "collectives",
            (
                {**common, "rank": rank, "seq": seq, "state": "completed" if seq < collectives - 1 else "started"}
                for rank in range(ranks)
                for seq in range(collectives - (rank == 37))
            ),
        )
    return directory
