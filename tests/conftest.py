"""What holds for every test."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# One thread a process, here and in every process that a test starts: two processes of two threads each wait for one
# another on two cores, spinning, and small models take five times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

#: Tests that drive a screen, or several processes of a job, side by side. On an overloaded machine an answer may come
#: between two looks of a test; such a test is run again, and the run says so (R).
SCREENS = Path(__file__).parent / "app" / "ui"
JOBS = (Path(__file__).parent / "distributed", Path(__file__).parent / "capsules" / "recorder" / "test_distributed")

#: Whole demos and pictures of every screen take minutes each.
LONGEST = (Path(__file__).parent / "end_to_end", SCREENS)


def pytest_configure() -> None:
    """Take signals as a job in the foreground does.

    A suite started in the background (``make test &``, nohup, some runners) inherits ignored signals, and so would
    every process that a test starts and interrupts.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two more tries for tests of screens and jobs; the longest files first, so that two processes end together."""
    items.sort(key=lambda item: next((at for at, each in enumerate(LONGEST) if item.path.is_relative_to(each)), 9))
    for item in items:
        if str(item.path).startswith(tuple(map(str, (SCREENS, *JOBS)))):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=1))
