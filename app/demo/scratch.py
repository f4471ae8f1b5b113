"""The demo's own git repository: a healthy job, an ordinary commit that breaks it, later the one that mends it."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from .. import paths
from ..casebook.store import Repository, create
from .corpus import write_corpus
from .faults import Fault, Repair
from .training import TestRun, run_tests

_JOB = {"train.py": "train.py", "model.py": "model.py", "data.py": "data.py", "test_model.py": "tests/test_model.py"}

_README = """\
# byte-gpt

A byte-level GPT trained on a directory of text, with the recorder of llmconsole attached.

    python train.py                       # capsules go to runs/
    llmconsole analyze runs
    python -m unittest discover -s tests -t .
"""

#: Whoever runs the demo need not have told git who they are, and their hooks and signing keys are not for it.
_GIT_ENVIRONMENT = {
    "GIT_AUTHOR_NAME": "llmconsole demo",
    "GIT_AUTHOR_EMAIL": "demo@llmconsole.invalid",
    "GIT_COMMITTER_NAME": "llmconsole demo",
    "GIT_COMMITTER_EMAIL": "demo@llmconsole.invalid",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "0",
}

#: Names that would point git, or the case log, at a repository of the user's.
_ELSEWHERE = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_COMMON_DIR",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_NAMESPACE",
    "GIT_TEMPLATE_DIR",
    "LLMCONSOLE_CASES",
)


@dataclass(frozen=True)
class Scratch:
    """The repository with its two commits: the job as it should be, and as the fault left it."""

    directory: Path
    repository: Repository
    healthy: str
    broken: str


@dataclass(frozen=True)
class Repaired:
    """The fixing commit, and what its regression test said before and after it."""

    commit: str
    before: TestRun
    after: TestRun


@contextlib.contextmanager
def own_git() -> Generator[None]:
    """Let git in this process and its children know the demo alone; the environment is restored afterwards."""
    saved = dict(os.environ)
    for name in _ELSEWHERE:
        os.environ.pop(name, None)
    os.environ.update(_GIT_ENVIRONMENT)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def new_directory() -> Path:
    """A fresh directory among llmconsole's own files, or a temporary one where those cannot be written."""
    home = paths.state_directory() / "demo"
    name = time.strftime("%Y%m%d-%H%M%S")
    with contextlib.suppress(OSError):
        home.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=home))
    return Path(tempfile.mkdtemp(prefix=f"llmconsole-demo-{name}-"))


def build(directory: Path, fault: Fault) -> Scratch:
    """Make ``directory``, which is empty, the repository of the job, with the healthy commit and the fault's.

    Raises:
        StoreError: git refused.
        OSError: the directory cannot be written.
    """
    (directory / "tests").mkdir()
    job = files("llmconsole.app.demo.job")
    for source, target in _JOB.items():
        (directory / target).write_text(job.joinpath(source).read_text(encoding="utf-8"), encoding="utf-8")
    (directory / "tests" / "__init__.py").touch()
    (directory / "README.md").write_text(_README, encoding="utf-8")
    (directory / ".gitignore").write_text("runs/\n__pycache__/\n", encoding="utf-8")
    write_corpus(directory / "corpus")
    repository = create(directory)
    healthy = repository.commit_all("Train a byte-level GPT")
    for edit in fault.edits:
        edit.apply(directory)
    return Scratch(directory, repository, healthy, repository.commit_all(fault.message))


def repair(scratch: Scratch, work: Repair) -> Repaired:
    """Write the regression test, see it fail on the broken tree, mend the tree, see it pass, and commit both.

    Raises:
        StoreError: git refused.
        OSError: the directory cannot be written.
    """
    (scratch.directory / work.test_file).write_text(work.test, encoding="utf-8")
    before = run_tests(scratch.directory, work.test_file.removesuffix(".py").replace("/", "."))
    for edit in work.edits:
        edit.apply(scratch.directory)
    after = run_tests(scratch.directory)
    return Repaired(scratch.repository.commit_all(work.message), before, after)
