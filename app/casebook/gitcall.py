"""One call of git: a process that has ended when the call returns, and its complaint as one line of words."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ..text import one_line

#: Housekeeping in the background would outlive the call; the others change what ``git log`` prints.
_SETTINGS = tuple(
    word
    for setting in ("gc.auto=0", "maintenance.auto=false", "log.showSignature=false", "log.follow=false")
    for word in ("-c", setting)
)

#: What git tells its hooks of the repository they run in. Each call here names its own, perhaps another one.
OF_HOOKS = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_COMMON_DIR",
    "GIT_PREFIX",
    "GIT_NAMESPACE",
)


class StoreError(Exception):
    """Git, or the repository, refuses; one line that says what, where, and what to do.

    Attributes:
        held: another git process holds the index, so that a later try may succeed.
    """

    def __init__(self, message: str, *, held: bool = False) -> None:
        super().__init__(message)
        self.held = held


def run_git(
    directory: Path, *arguments: str, text: BinaryIO | None = None, env: Mapping[str, str] | None = None
) -> bytes:
    """Run git to its end in a directory and return what it printed."""
    # Without this, importing GitPython fails where there is no git, before it can be said in our words.
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    import git

    for name in OF_HOOKS:
        os.environ.pop(name, None)
    try:
        process: Any = git.Git().execute(
            ["git", "-C", os.fspath(directory), *_SETTINGS, *arguments],
            istream=text,
            as_process=True,
            env={"GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", **(env or {})},
        )
    except git.GitCommandNotFound:
        raise StoreError("git is not on the PATH; install it") from None
    try:
        output, printed = _ended(process)
    except BaseException:
        process.terminate()  # interrupted: git takes its locks along and commits nothing later on
        process.proc.wait()
        raise
    if process.returncode:
        errors = printed.decode("utf-8", "replace")
        command = next(word for word in arguments if not word.startswith("-c") and "=" not in word)
        raise StoreError(_reason(errors, command, directory), held="index.lock': File exists" in errors)
    return output


def _ended(process: Any) -> tuple[bytes, bytes]:
    """What a process printed. A child that a hook left in the background may hold the pipes; it is not waited for."""
    while True:
        ended = process.poll() is not None
        try:
            return process.communicate(timeout=0.5)
        except subprocess.TimeoutExpired as late:
            if ended:
                return late.output or b"", late.stderr or b""


def _reason(errors: str, command: str, directory: Path) -> str:
    """Git's complaint as one line; where the way out is known, that."""
    if "tell me who you are" in errors or "empty ident name" in errors or "unable to auto-detect email" in errors:
        return (
            "git does not know who commits: git config --global user.name NAME and user.email ADDRESS, "
            "or set GIT_AUTHOR_NAME, GIT_AUTHOR_EMAIL, GIT_COMMITTER_NAME and GIT_COMMITTER_EMAIL"
        )
    if "not a git repository" in errors:
        return f"{directory} is not inside a git repository; give one with --repo, or run git init"
    if "this operation must be run in a work tree" in errors:
        return f"{directory} is a bare repository; give a work tree with --repo"
    lines = [line for line in errors.splitlines() if line.strip() and not line.startswith("hint:")]
    return f"git {command}: {one_line(' · '.join(lines) or 'failed without a word', 600)}"
