"""A place for the capsule of a test."""

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the test's capsule goes."""
    return tmp_path / "run.capsule"
