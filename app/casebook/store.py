"""What a git repository holds, and the commit of single files and nothing else. All of git is asked through here.

User text never stands where git looks for an option; hooks and signing are the repository's own business and are left
on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from .gitcall import StoreError, run_git

#: Seconds between tries while another git process holds the index.
LOCK_DELAYS = (0.1, 0.2, 0.4, 0.8, 1.5)

_NO_HOOKS = ("-c", f"core.hooksPath={os.devnull}", "-c", "submodule.recurse=false")


def version() -> str:
    """Git's version.

    Raises:
        StoreError: there is no git.
    """
    return run_git(Path.cwd(), "version").decode("utf-8", "replace").removeprefix("git version ").strip()


def identity(directory: Path) -> str:
    """Who would commit in a directory, as ``Name <address>``.

    Raises:
        StoreError: git does not know.
    """
    return run_git(directory, "var", "GIT_COMMITTER_IDENT").decode("utf-8", "replace").rpartition(">")[0] + ">"


def create(directory: Path) -> Repository:
    """Make an existing directory a git repository of its own.

    Raises:
        StoreError: there is no git, or it refuses.
    """
    run_git(directory, "init", "--quiet")
    return Repository(directory)


class Repository:
    """A git work tree.

    Args:
        start: a directory in the work tree.

    Raises:
        StoreError: no git, no work tree, or git does not trust it.
    """

    def __init__(self, start: Path) -> None:
        if not start.is_dir():
            raise StoreError(f"{start} is no directory; give one inside a git repository")
        self._directory = start
        self.root = Path(os.fsdecode(self._git("rev-parse", "--show-toplevel").rstrip(b"\n")))
        self._directory = self.root
        self.git_directory = Path(os.fsdecode(self._git("rev-parse", "--absolute-git-dir").rstrip(b"\n")))

    def relative(self, path: Path) -> str:
        """``path`` seen from the root of the work tree.

        Raises:
            StoreError: it lies outside, or inside ``.git``.
        """
        try:
            relative = path.resolve().relative_to(self.root.resolve()).as_posix()
        except ValueError:
            raise StoreError(f"{path} lies outside the repository {self.root}") from None
        if relative == ".git" or relative.startswith(".git/"):
            raise StoreError(f"{path} lies inside .git")
        return relative

    def commit_id(self, revision: str) -> str | None:
        """Full id of the commit that ``revision`` names, or None; what looks like an option names nothing."""
        if not revision or revision.startswith("-") or "\x00" in revision:
            return None
        try:
            name = self._git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        except StoreError:
            return None
        return name.decode().strip()

    def subject(self, commit: str) -> str:
        """First line of a commit's message."""
        return self._git("log", "-1", "--format=%s", commit, "--").decode("utf-8", "replace").strip()

    def show(self, commit: str, relative: str, *, filtered: bool = False) -> bytes | None:
        """Content of a file at a commit, or None where it is not a file there.

        Args:
            commit: a full commit id.
            relative: path from the root.
            filtered: as it would lie in the work tree (line ends and other filters applied).
        """
        kind = ("--filters",) if filtered else ("blob",)
        try:
            return self._git("cat-file", *kind, f"{commit}:{relative}")
        except StoreError:
            return None

    def tracked(self, relative: str) -> bool:
        """Whether the index knows the file."""
        return bool(self._git("ls-files", "-z", "--", f":(top,literal){relative}"))

    def commit(
        self,
        paths: Path | Sequence[Path],
        message: str,
        delays: Sequence[float] = LOCK_DELAYS,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Commit files as they lie in the work tree, and only them; return the commit's id.

        Staged and unstaged changes of other files stay as they are. On failure the index is as it was.

        Args:
            paths: one file or several.
            message: the whole message.
            delays: seconds to wait between tries while another process holds the index.
            environment: variables by which git and its hooks can be found.

        Raises:
            StoreError: git refused; in its own words, or in ours where we know what to do.
        """
        names = [self.relative(path) for path in ([paths] if isinstance(paths, Path) else paths)]
        pathspecs = [f":(top,literal){name}" for name in names]
        new = [name for name in names if not self.tracked(name)]
        added = False
        try:
            if new:
                self._patiently(delays, "add", "--", *(f":(top,literal){name}" for name in new))
                added = True
            with tempfile.TemporaryFile() as text:
                text.write(message.encode("utf-8", "replace"))
                # The message is committed as it was shown, whatever commit.cleanup says of lines that begin with #.
                options = ("--quiet", "--cleanup=whitespace", "--file=-", "--only")
                self._patiently(delays, "commit", *options, "--", *pathspecs, text=text, env=environment)
        except BaseException:
            if added:
                self.forget(new, delays)
            raise
        return self._git("rev-parse", "--verify", "HEAD").decode().strip()

    def forget(self, names: Sequence[str], delays: Sequence[float] = LOCK_DELAYS) -> None:
        """Take files out of the index that no commit holds; what lies in the work tree stays."""
        pathspecs = [f":(top,literal){name}" for name in names]
        with contextlib.suppress(StoreError):  # forced, as a hook may have rewritten the file before it refused
            self._patiently(delays, "rm", "--cached", "--force", "--ignore-unmatch", "--quiet", "--", *pathspecs)

    def commit_all(self, message: str) -> str:
        """Commit everything in the work tree that no ignore rule excludes; return the commit's id.

        For a repository of our own (the demo's). In the user's, ``commit`` takes one file.

        Raises:
            StoreError: git refused.
        """
        self._git("add", "--all")
        with tempfile.TemporaryFile() as text:
            text.write(message.encode("utf-8", "replace"))
            text.seek(0)
            self._git("commit", "--quiet", "--file=-", text=text)
        return self._git("rev-parse", "--verify", "HEAD").decode().strip()

    def history(self) -> str:
        """One line a commit, newest first, as git tells it (``git log --oneline``)."""
        return self._git("log", "--oneline", "--no-color", "--").decode("utf-8", "replace")

    def date(self, commit: str) -> str:
        """Day on which a commit was made (``2026-11-29``)."""
        return self._git("log", "-1", "--format=%cs", commit, "--").decode("ascii", "replace").strip()

    def log_of_trailer(self, name: str, value: str) -> list[tuple[str, str, str]]:
        """Commits of HEAD that carry a trailer, newest first: full id, day, subject."""
        if self.commit_id("HEAD") is None:
            return []
        printed = self._git(
            "log", "--fixed-strings", f"--grep={name}: {value}", "--no-color", "-z",
            f"--format=%H%x09%cs%x09%s%x09%(trailers:key={name},valueonly,separator=%x2C)", "--",
        ).decode("utf-8", "replace")  # fmt: skip
        rows = [row.split("\t") for row in printed.split("\0") if row.count("\t") >= 3]
        # The pattern also finds longer values that begin like this one, and words in the body.
        return [(row[0], row[1], "\t".join(row[2:-1])) for row in rows if value in row[-1].strip().split(",")]

    def newest_without_trailer(self, name: str) -> str | None:
        """Full id of the newest commit of HEAD whose message has no line of that trailer, or None."""
        if self.commit_id("HEAD") is None:
            return None
        found = self._git("log", "-1", "--invert-grep", "--basic-regexp", f"--grep=^{name}:", "--format=%H", "--")
        return found.decode().strip() or None

    def trailers(self, commit: str) -> dict[str, str]:
        """The trailers of a commit's message, the last of each name."""
        printed = self._git("log", "-1", "--format=%(trailers:only,unfold)", commit, "--").decode("utf-8", "replace")
        pairs = (line.partition(":") for line in printed.splitlines())
        return {name.strip(): value.strip() for name, colon, value in pairs if colon}

    def newest_touching(self, relative: str) -> str | None:
        """Full id of the newest commit of HEAD that changed a file, or None."""
        if self.commit_id("HEAD") is None:
            return None
        found = self._git("log", "-1", "--format=%H", "--", f":(top,literal){relative}").decode().strip()
        return found or None

    def reachable(self, commit: str) -> bool:
        """Whether HEAD, a branch or a tag still leads to a commit."""
        if self.is_ancestor(commit, "HEAD"):
            return True
        with contextlib.suppress(StoreError):
            return bool(self._git("for-each-ref", "--count=1", "--contains", commit, "--format=%(refname)").strip())
        return False

    def is_ancestor(self, commit: str, of: str) -> bool:
        """Whether a commit is another one or comes before it in its history."""
        with contextlib.suppress(StoreError):  # it says no by its exit status
            self._git("merge-base", "--is-ancestor", commit, of)
            return True
        return False

    def authored(self, commit: str) -> float:
        """When a commit was first made, in Unix seconds: a rebase or cherry-pick keeps that of its author."""
        return float(min(map(int, self._git("log", "-1", "--format=%at %ct", commit, "--").split())))

    def differing(self, one: str, other: str, leaving_out: Sequence[str] = ()) -> list[str]:
        """Files that differ between two commits, but for paths below ``leaving_out``."""
        rows = self._git("diff-tree", "-r", "--no-renames", "--name-only", "-z", one, other, "--").split(b"\0")
        return _beside([os.fsdecode(row) for row in rows if row], leaving_out)

    def changes(self, leaving_out: Sequence[str] = ()) -> list[str]:
        """Tracked files whose content differs from HEAD, staged or not, but for paths below ``leaving_out``."""
        printed = self._git("status", "--porcelain=v1", "--untracked-files=no", "--no-renames", "-z")
        names = [os.fsdecode(row[3:]) for row in printed.split(b"\0") if len(row) > 3]
        return _beside(names, leaving_out)

    def add_worktree(self, path: Path, commit: str, environment: Mapping[str, str] | None = None) -> None:
        """Check a commit out into a new directory outside the work tree, on no branch.

        No hook runs: post-checkout is for the trees in which people work, and may change the repository.

        Args:
            path: of the new directory.
            commit: a full commit id.
            environment: variables by which the process can be found.

        Raises:
            StoreError: git refused.
        """
        self._git(*_NO_HOOKS, "worktree", "add", "--quiet", "--detach", "--", os.fspath(path), commit, env=environment)

    def carry(self, tree: Path, commit: str, relative: str) -> None:
        """Put a file or directory of a commit into another work tree of this repository, as git checks it out.

        Raises:
            StoreError: it is not in that commit, or cannot be written.
        """
        run_git(tree, *_NO_HOOKS, "checkout", "--quiet", commit, "--", f":(top,literal){relative}")

    def submodules(self, commit: str) -> dict[str, str]:
        """Submodules of a commit: path and the commit of theirs."""
        rows = self._git("ls-tree", "-r", "-z", "--full-tree", commit).split(b"\0")
        parts = [row.partition(b"\t") for row in rows if row.startswith(b"160000 ")]
        return {os.fsdecode(name): meta.split()[2].decode() for meta, _, name in parts}

    def remove_worktrees(self, directory: Path) -> None:
        """Remove the work trees that lie in a directory, those included that are half made or gone already."""
        inside = directory.resolve()
        for row in self._git("worktree", "list", "--porcelain").split(b"\n"):
            path = Path(os.fsdecode(row.removeprefix(b"worktree ")))
            if row.startswith(b"worktree ") and path.resolve().is_relative_to(inside):
                with contextlib.suppress(StoreError):
                    self._git("worktree", "remove", "--force", "--force", "--", os.fspath(path))

    def ignored(self, relative: str) -> bool:
        """Whether an ignore rule keeps a file, which the index does not know, out of a commit."""
        with contextlib.suppress(StoreError):  # it says no by its exit status
            return bool(self._git("check-ignore", "--", relative))
        return False

    def unfinished(self) -> str:
        """What has to be concluded before a commit of single files is possible (``merge``), or an empty string."""
        marks = {"MERGE_HEAD": "merge", "CHERRY_PICK_HEAD": "cherry-pick"}
        return next((word for mark, word in marks.items() if (self.git_directory / mark).exists()), "")

    def people(self, commit: str) -> set[str]:
        """Author and committer of a commit, as ``Name <address>``."""
        printed = self._git("log", "-1", "--no-mailmap", "--format=%an <%ae>%n%cn <%ce>", commit, "--")
        return set(printed.decode("utf-8", "replace").splitlines())

    def shallow(self) -> bool:
        """Whether the history was cut off when the repository was cloned."""
        return self._git("rev-parse", "--is-shallow-repository").strip() == b"true"

    def touched(self, commit: str) -> list[str]:
        """Paths that a commit changes against its first parent."""
        options = ("--no-renames", "--root", "--no-commit-id", "--name-only", "-r", "-z")
        rows = self._git("diff-tree", *options, "--diff-merges=first-parent", commit, "--").split(b"\0")
        return [os.fsdecode(row) for row in rows if row]

    def summary(self, commit: str) -> str:
        """What a commit is and touches, as git tells it (``git show --stat``)."""
        return self._git("show", "--stat", "--format=medium", "--no-color", commit, "--").decode("utf-8", "replace")

    @contextlib.contextmanager
    def locked(self, wait: float = 30.0) -> Generator[None]:
        """Hold the case log against other resolvers in this work tree.

        Raises:
            StoreError: another one held it for ``wait`` seconds.
        """
        path = self.git_directory / "llmconsole-cases.lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror}") from error
        try:
            deadline = time.monotonic() + wait
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise StoreError(f"another llmconsole holds {path}; try again when it is done") from None
                    time.sleep(0.05)
            yield
        finally:
            os.close(descriptor)

    def _patiently(
        self,
        delays: Sequence[float],
        *arguments: str,
        text: BinaryIO | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        for delay in (*delays, None):
            if text is not None:
                text.seek(0)
            try:
                self._git(*arguments, text=text, env=env)
                return
            except StoreError as error:
                if not error.held:
                    raise
                if delay is None:
                    raise StoreError(
                        f"another git process holds {self.git_directory / 'index.lock'}; "
                        "try again, or remove that file if none is running"
                    ) from None
                time.sleep(delay)

    def _git(self, *arguments: str, text: BinaryIO | None = None, env: Mapping[str, str] | None = None) -> bytes:
        return run_git(self._directory, *arguments, text=text, env=env)


def _beside(names: Sequence[str], leaving_out: Sequence[str]) -> list[str]:
    """The paths that are neither one of ``leaving_out`` nor below it."""
    return [name for name in names if not any(name == each or name.startswith(f"{each}/") for each in leaving_out)]


__all__ = ["LOCK_DELAYS", "Repository", "StoreError", "create", "identity", "version"]
