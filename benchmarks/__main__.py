"""Runs every benchmark and prints its table: ``python -m benchmarks [NAME…]``."""

from __future__ import annotations

import importlib
import platform
import sys

NAMES = (
    "recorder",
    "engine",
    "optimizer_engine",
    "training",
    "curves",
    "importers",
    "traces",
    "memory",
    "distributed",
    "cases",
    "demo",
    "console",
    "memory_model",
)


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    print(f"Python {platform.python_version()}, {platform.machine()}, {platform.system()}")
    for name in names or NAMES:
        print(f"\n== {name}", flush=True)
        importlib.import_module(f"benchmarks.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
