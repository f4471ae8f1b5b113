"""Where a gate's commands run: temporary work trees of the revisions, time limits, output kept in part."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from ..store import Repository, StoreError
from .janitor import JOURNAL, TOKEN, Journal
from .plan import arguments

#: Bytes of a command's output that are kept: its end.
KEPT = 16_384

#: Lines that are passed on at most of what was printed at once: a flood must not slow the command down.
_HEARD = 100

#: Seconds in which the rest of the output is read once a command has ended.
_DRAIN = 1.0


@dataclass(frozen=True)
class Ran:
    """A command that ended, or was ended: ``status`` is None where the time ran out or it could not start.

    Attributes:
        problem: why there is no status, in words.
        output: the end of what it printed, both streams together.
    """

    status: int | None
    seconds: float
    output: str
    problem: str = ""


class Workshop:
    """A directory of work trees. Leaving it, or dying in it, ends every command and removes every tree.

    Args:
        repository: whose revisions are checked out.
        heard: gets each line that a command prints.
    """

    def __init__(self, repository: Repository, heard: Callable[[str], None] = lambda _: None) -> None:
        self.repository = repository
        self._heard = heard
        self._token = secrets.token_hex(16)
        #: Environment by which the processes of this gate are found.
        self.mark = {TOKEN: self._token}
        self._trees: dict[str, Path] = {}

    def __enter__(self) -> Self:
        """Make the directory, and the process that will clean it up."""
        self.directory = Path(tempfile.mkdtemp(prefix="llmconsole-gate-"))
        module = f"{__package__}.janitor"
        words = [sys.executable, "-m", module, os.fspath(self.directory), self._token]
        nothing = subprocess.DEVNULL
        try:
            self._janitor = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True
            )
        except OSError:
            self.directory.rmdir()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Have it cleaned, and wait for that."""
        assert self._janitor.stdin is not None
        with contextlib.suppress(OSError):
            self._janitor.stdin.close()
        self._janitor.wait()

    def tree(self, commit: str) -> Path:
        """A work tree of a commit, made on first use.

        Raises:
            StoreError: git cannot make it.
        """
        if commit not in self._trees:
            path = self.directory / f"{len(self._trees)}-{commit[:12]}"
            self._check_out(self.repository, commit, path)
            self._trees[commit] = path
        return self._trees[commit]

    def _check_out(self, repository: Repository, commit: str, path: Path) -> None:
        """A work tree with its submodules, as far as they are checked out where the user works; no network is asked."""
        self._tell(f"repository {os.fspath(repository.root)}")
        repository.add_worktree(path, commit, self.mark)
        for name, theirs in repository.submodules(commit).items():
            source = repository.root / name
            if not (source / ".git").exists():
                continue
            if (inner := Repository(source)).commit_id(theirs) is None:
                raise StoreError(f"the submodule {source} does not have {theirs[:12]}; git submodule update fetches it")
            self._check_out(inner, theirs, path / name)

    def _tell(self, line: str) -> None:
        """What the cleaning process must know."""
        assert self._janitor.stdin is not None
        with contextlib.suppress(OSError):
            self._janitor.stdin.write(line.encode("utf-8", "surrogateescape") + b"\n")
            self._janitor.stdin.flush()

    @contextlib.contextmanager
    def restoring(self, before: Mapping[Path, bytes | None], sign: Path) -> Generator[None]:
        """While the block runs, being killed restores these files, unless a commit holds ``sign`` as it lies there."""
        new = [name for path in before if not self.repository.tracked(name := self.repository.relative(path))]
        journal = Journal(
            root=os.fspath(self.repository.root),
            sign=self.repository.relative(sign),
            files=[(os.fspath(path), content) for path, content in before.items()],
            new=new,
        )
        path = self.scratch(JOURNAL)
        path.write_bytes(msgspec.msgpack.encode(journal))
        try:
            yield
        finally:
            path.unlink()

    def scratch(self, name: str) -> Path:
        """A path outside the trees for a file of ours."""
        return self.directory / name

    def run(self, command: str, tree: Path, timeout: float, environment: dict[str, str] | None = None) -> Ran:
        """Run a command in a tree, without a shell, in a session of its own; nothing of it outlives the call.

        Args:
            command: its words.
            tree: the working directory; also first on Python's path, as the package may be installed from elsewhere.
            timeout: seconds.
            environment: variables beside those of this process.
        """
        words = arguments(command)
        if "/" in words[0] and not os.path.isabs(words[0]) and not (tree / words[0]).exists():
            words[0] = os.fspath(self.repository.root / words[0])  # an environment that no revision holds
        before = time.monotonic()
        try:
            process = subprocess.Popen(
                words,
                cwd=tree,
                env=self._environment(tree) | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Ran(None, 0.0, "", f"{words[0]} cannot be started ({error.strerror}); name it with its path")
        self._tell(f"group {process.pid}")
        try:
            output, in_time = self._listen(process, before + timeout)
        finally:
            with contextlib.suppress(OSError):  # what it left running
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = time.monotonic() - before
        text = output.decode("utf-8", "replace")
        if not in_time:
            return Ran(None, seconds, text, f"timed out after {timeout:g} s")
        return Ran(process.returncode, seconds, text)

    def _listen(self, process: subprocess.Popen[bytes], until: float) -> tuple[bytes, bool]:
        """The end of the output, and whether the command ended in time; children that hold the pipe do not count."""
        assert process.stdout is not None
        kept, pending, drained = bytearray(), b"", math.inf
        with selectors.DefaultSelector() as selector, process.stdout as stream:
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
            while True:
                ended = process.poll() is not None
                if ended:  # a child that it left behind may go on writing for ever
                    drained = min(drained, time.monotonic() + _DRAIN)
                ready = selector.select(0 if ended else min(0.1, max(0.0, until - time.monotonic())))
                chunk = os.read(stream.fileno(), 1 << 16) if ready else b""
                kept += chunk
                del kept[: max(0, len(kept) - KEPT)]
                *lines, pending = (pending + chunk)[-KEPT:].split(b"\n")
                for line in lines[-_HEARD:]:
                    self._heard(line.decode("utf-8", "replace"))
                if ended and (not chunk or time.monotonic() >= drained):
                    return bytes(kept), True
                if ready and not chunk:  # it closed its output and goes on
                    selector.unregister(stream)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(max(0.0, until - time.monotonic()))
                    return bytes(kept), process.poll() is not None
                if time.monotonic() >= until and not ended:
                    return bytes(kept), False

    def _environment(self, tree: Path) -> dict[str, str]:
        """This process's variables, with the tree first on Python's path."""
        found = dict(os.environ)
        places = [tree, *(path for path in (tree / "src",) if path.is_dir())]
        found["PYTHONPATH"] = os.pathsep.join([*map(os.fspath, places), *filter(None, [found.get("PYTHONPATH")])])
        return found | self.mark | {"PYTHONDONTWRITEBYTECODE": "1"}
