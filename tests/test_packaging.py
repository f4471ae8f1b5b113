"""The product installs as a wheel in an environment that knows nothing of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("app", "capsules", "analyzers")


def test_every_sub_package_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    present = {
        "llmconsole." + ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    folders_with_code = {
        "llmconsole." + ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert listed == present == folders_with_code


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, as a release would be: sdist first, wheel from the sdist."""
    import shutil

    work = tmp_path_factory.mktemp("build")
    source = work / "source"
    shutil.copytree(
        ROOT,
        source,
        symlinks=True,
        ignore=shutil.ignore_patterns(".venv", ".git", "build", "*.egg-info", "__pycache__"),
    )
    build = "from setuptools import build_meta as b; import sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"
    subprocess.run(
        [sys.executable, "-c", build, "build_sdist", str(work)], cwd=source, check=True, capture_output=True, text=True
    )
    [sdist] = work.glob("*.tar.gz")
    shutil.unpack_archive(sdist, work / "unpacked", filter="data")
    [unpacked] = (work / "unpacked").iterdir()
    subprocess.run(
        [sys.executable, "-c", build, "build_wheel", str(work)],
        cwd=unpacked,
        check=True,
        capture_output=True,
        text=True,
    )
    [wheel] = work.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds only the wheel; third-party libraries come from the test environment by path."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    python = home / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True
    )
    # A path added by a .pth file brings packages but runs no .pth file of its own: the editable install stays out.
    [site] = home.glob("lib/python*/site-packages")
    (site / "third-party.pth").write_text(
        "\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *_base_site_packages()}) + "\n"
    )
    return home


def _base_site_packages() -> list[str]:
    """Where the environment is layered on a base that has torch, its packages too."""
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


def run(home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "LLMCONSOLE"))}
    return subprocess.run(
        [str(home / "bin" / command[0]), *command[1:]], cwd=home, env=clean, capture_output=True, text=True, timeout=100
    )


def test_the_wheel_holds_the_seed_cases_as_a_real_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        seed = archive.read("llmconsole/app/casebook/seed/debug-cases.md")
    assert seed == (ROOT / "debug-cases.md").read_bytes()


def test_the_wheel_puts_only_llmconsole_into_site_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"llmconsole"}


def test_help_works_outside_the_checkout(installed: Path) -> None:
    done = run(installed, "llmconsole", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "analyze" in done.stdout


def test_the_recorder_imports_outside_the_checkout(installed: Path) -> None:
    code = "from llmconsole.capsules import Recorder; import llmconsole.capsules as c; print(c.__file__)"
    done = run(installed, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(installed)


def test_seed_cases_are_found_outside_the_checkout(installed: Path) -> None:
    done = run(installed, "llmconsole", "cases", "search", "复读机")
    assert done.returncode == 0, done.stderr
    assert "parrot" in done.stdout
