"""Every fault of the demo under several seeds: what the report names first, and how long the whole takes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from llmconsole.app.demo.faults import FAULTS

SEEDS = range(5)


def main(seeds: range = SEEDS) -> None:
    row = "{:14} {:>4}  {:32} {:>4}  {:20} {:>6} {:>7}"
    print(row.format("fault", "seed", "first divergence", "step", "other alarms", "steps", "seconds"))
    right, longest = 0, 0.0
    for name in FAULTS:
        for seed in seeds:
            outcome = play(name, seed)
            first = outcome["first_divergence"] or {"rule": "–", "where": {"step": "–"}}
            alarms = [rule for rule in outcome["alarms"] if rule != first["rule"]]
            right += outcome["correct"]
            longest = max(longest, outcome["seconds"]["total"])
            print(
                row.format(
                    name,
                    seed,
                    first["rule"] + ("" if outcome["correct"] else "  WRONG"),
                    first["where"]["step"],
                    ", ".join(rule.partition("/")[2] for rule in alarms) or "–",
                    outcome["steps"],
                    f"{outcome['seconds']['total']:.1f}",
                ),
                flush=True,
            )
    print(f"{right} of {len(FAULTS) * len(seeds)} right, the longest in {longest:.0f} s")


def play(fault: str, seed: int) -> dict:
    """One demo in a temporary directory, as its JSON tells it."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--fault", fault, "--seed", str(seed), "--dir", str(Path(folder, "demo")), "--headless", "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "llmconsole.app.cli", "demo", *options], capture_output=True, text=True
        )
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
