"""What holds for every test."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Take signals as a job in the foreground does.

    A suite started in the background (``make test &``, nohup, some runners) inherits ignored signals, and so would
    every process that a test starts and interrupts.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
