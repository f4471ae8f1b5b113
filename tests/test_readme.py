"""The tables of the README are made from the registries; ``LLMCONSOLE_UPDATE_README=1`` writes them anew."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from llmconsole.analyzers.registry import all_rules
from llmconsole.app.cli import COMMANDS
from llmconsole.app.ui.actions import ACTIONS
from llmconsole.app.ui.screens.help import key_names

README = Path(__file__).resolve().parent.parent / "README.md"


def rules_table() -> str:
    rows = [f"| `{each.id}` | {each.severity} | {each.title} |" for each in all_rules()]
    return "\n".join(["| rule | severity at most | what it says |", "|---|---|---|", *rows])


def keys_table() -> str:
    rows = [
        f"| {each.scope} | `{key_names(each.keys)}` | {each.description} | `{each.id}` |"
        for each in ACTIONS
        if each.keys and not re.fullmatch(r"capsule\.view-\d", each.id)
    ]
    return "\n".join(["| where | key | what it does | name in `keys.toml` |", "|---|---|---|---|", *rows])


@pytest.mark.parametrize(("name", "table"), [("rules", rules_table), ("keys", keys_table)])
def test_the_table_is_the_registry(name: str, table: object) -> None:
    text = README.read_text(encoding="utf-8")
    wanted = f"<!-- {name} -->\n{table()}\n<!-- /{name} -->"  # type: ignore[operator]
    pattern = re.compile(rf"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
    assert pattern.search(text), f"the README has lost its {name} table"
    if os.environ.get("LLMCONSOLE_UPDATE_README"):
        README.write_text(pattern.sub(lambda _: wanted, text), encoding="utf-8")
    else:
        assert wanted in text


def test_every_command_the_readme_names_exists() -> None:
    named = set(re.findall(r"llmconsole ([a-z]+)(?=[ `\n])", README.read_text(encoding="utf-8")))
    assert named - {"runs", "is", "reads"} <= set(COMMANDS)


def test_every_file_the_readme_links_exists() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / link).exists(), link
