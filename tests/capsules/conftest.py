"""A place for the capsule of a test, and processes to write it."""

import multiprocessing
from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the test's capsule goes."""
    return tmp_path / "run.capsule"


@pytest.fixture(scope="session")
def processes():
    """Starts real processes, forked from a server that has imported the writer and nothing of the test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["llmconsole.capsules.writer", "h5py"])
    return context
