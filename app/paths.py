"""The one place that knows where things lie: capsule directory, case log, seed cases, state of our own."""

from __future__ import annotations

import os
from pathlib import Path

CASE_FILE_NAME = "debug-cases.md"


def capsule_directory(given: str | None = None) -> Path:
    """The directory that holds the capsules: the one given, else ``LLMCONSOLE_DIR``, else the working directory."""
    return Path(given or os.environ.get("LLMCONSOLE_DIR") or ".")


def repository_root(start: Path | None = None) -> Path | None:
    """The nearest directory at or above ``start`` that holds ``.git`` (a file in linked worktrees), or None."""
    here = (start or Path.cwd()).resolve()
    for directory in (here, *here.parents):
        if (directory / ".git").exists():
            return directory
    return None


def case_file(start: Path | None = None) -> Path:
    """The user's case log: ``LLMCONSOLE_CASES`` (a file, or a directory that holds it), else in the repository's root.

    Outside any repository it is the file in ``start`` (the working directory) itself. The file need not exist.
    """
    override = os.environ.get("LLMCONSOLE_CASES")
    if override:
        path = Path(override).expanduser()
        return path / CASE_FILE_NAME if path.is_dir() else path
    return (repository_root(start) or start or Path.cwd()) / CASE_FILE_NAME


def seed_cases() -> str:
    """Text of the cases that ship with the product, read beside the user's file."""
    from importlib.resources import files

    return files("llmconsole.app.casebook.seed").joinpath(CASE_FILE_NAME).read_text(encoding="utf-8")


def config_directory() -> Path:
    """Where a user's own settings lie: ``keys.toml`` of the console."""
    import platformdirs

    return Path(platformdirs.user_config_dir("llmconsole"))


def state_directory() -> Path:
    """Where llmconsole may keep files of its own (the demo's runs); created by whoever writes first."""
    import platformdirs

    return Path(platformdirs.user_state_dir("llmconsole"))
