"""A harmless commit, which must not be blamed for anything."""

from __future__ import annotations

from .fault import Edit, Fault

NONE = Fault(
    name="none",
    rule=None,
    message="Name the width of the feed-forward\n\nThe factor of four was written twice.",
    edits=(
        Edit("model.py", "    max_positions: int = 128\n", "    max_positions: int = 128\n    expansion: int = 4\n"),
        Edit(
            "model.py",
            "Linear(config.hidden, 4 * config.hidden, config)",
            "Linear(config.hidden, config.expansion * config.hidden, config)",
        ),
        Edit(
            "model.py",
            "Linear(4 * config.hidden, config.hidden, config)",
            "Linear(config.expansion * config.hidden, config.hidden, config)",
        ),
        Edit("model.py", "four times as wide inside", "``expansion`` times as wide inside"),
    ),
)
