"""Overview, layers and batch of a run that the recorder wrote, driven by keys as a person would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmconsole.app import paths
from llmconsole.app.ui.app import Console
from llmconsole.app.ui.screens.home import HomeScreen
from llmconsole.app.ui.views.batch import BatchView
from llmconsole.app.ui.views.layers import LayersView
from llmconsole.app.ui.views.overview import OverviewView, outline
from llmconsole.app.ui.widgets.rows import Rows
from llmconsole.capsules import CapsuleWriter, Recorder
from textual.widgets import Static

Until = Callable[..., Any]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte model trained for four steps whose loss compares each position with its own token."""
    directory = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.tensor([list(b"the cat sat on the mat!"), list(b"a dog\nran off the road.")])
    manifest = {"training": {"objective": "causal-lm", "reduction": "token-mean"}, "tokenizer": {"vocab_size": 256}}
    with Recorder(str(directory), model=model, optimizer=optimizer, manifest=manifest, every=2) as recorder:
        for _ in range(4):
            with recorder.step(batch={"input_ids": ids, "labels": ids}, sample_ids=["cat", "dog"]):
                logits = model(ids)
                loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 256), ids.reshape(-1))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return directory


def drawn(console: Console, selector: str) -> str:
    """The text of a widget as drawn."""
    widget = console.screen.query_one(selector)
    lines = range(max(1, widget.size.height))
    return "\n".join("".join(segment.text for segment in widget.render_line(y)) for y in lines)


async def opened(console: Console, pilot: Any, until: Until) -> None:
    """From home into the only capsule."""
    await until(pilot, lambda: len(console.screen.query_one("#capsules", Rows)) == 1, "listed")
    await pilot.press("enter")
    await until(pilot, lambda: bool(console.screen.query(OverviewView)), "it opens on the overview")
    await until(pilot, lambda: "labels-not-shifted" in drawn(console, "#findings"), "the report is there")


def test_the_overview_leads_from_the_ladder_to_numbers_documentation_and_copy(recorded: Path, until: Until) -> None:
    async def scenario() -> None:
        console = Console(recorded, remember=False)
        async with console.run_test(size=(80, 24)) as pilot:
            await opened(console, pilot, until)
            assert "objective✗" in drawn(console, "#ladder")
            first, *others = drawn(console, "#findings").splitlines()
            assert first.startswith(" ✗ objective/labels-not-shifted")
            assert any(line.startswith(" – ") for line in others)
            await pilot.press("enter")
            await until(pilot, lambda: "▸ labels-not-shifted" in drawn(console, "#body"), "the candidates are shown")
            body = drawn(console, "#body")
            assert "reported" in body
            assert "healthy" in body
            assert "not testable here" in body
            await pilot.press("C")
            copied = (paths.state_directory() / "copied.txt").read_text(encoding="utf-8")
            assert "▸ labels-not-shifted" in copied
            assert console.clipboard == copied
            await until(pilot, lambda: bool(console.screen.query_one(OverviewView)._rules), "rules are known")
            await pilot.press("d")
            await until(pilot, lambda: "How it decides" in drawn(console, "#body"), "the documentation is shown")
            await pilot.press("escape")
            assert console.screen.query_one("#ladder").display
            await pilot.press("escape")
            await until(pilot, lambda: isinstance(console.screen, HomeScreen), "back home")

    asyncio.run(scenario())


def test_layers_go_through_steps_and_passes_with_the_shared_cursor(recorded: Path, until: Until) -> None:
    async def scenario() -> None:
        console = Console(recorded, remember=False)
        async with console.run_test(size=(80, 24)) as pilot:
            await opened(console, pilot, until)
            await pilot.press("3")
            await until(pilot, lambda: bool(console.screen.query(LayersView)), "the view is there")
            await until(pilot, lambda: "step 0 (1 of 4 recorded)" in drawn(console, "#step"), "at the finding's step")

            def names() -> list[str]:
                return [line.split()[0] for line in drawn(console, "#sheet").splitlines() if line.strip()]

            await until(pilot, lambda: names()[:2] == ["0", "1"], "embedding, then the linear map")
            await pilot.press("right")
            await until(pilot, lambda: "step 1 (2 of 4" in drawn(console, "#step"), "the next step")
            norms = "norms only; full statistics at step 0 and 2"
            await until(pilot, lambda: norms in drawn(console, "#notes"), "where the full ones are")
            await pilot.press("n")
            await until(pilot, lambda: "step 2 (3 of 4" in drawn(console, "#step"), "the next full step")
            await pilot.press("b")
            await until(pilot, lambda: "backward pass  step 2" in drawn(console, "#step"), "gradients")
            await until(pilot, lambda: drawn(console, "#sheet").split()[0] == "1", "the last module comes first")
            await pilot.press("4")
            await until(pilot, lambda: bool(console.screen.query(BatchView)), "the batch view")
            await until(pilot, lambda: "step 2" in drawn(console, "#which"), "it stands at the shared cursor")

    asyncio.run(scenario())


def test_the_batch_shows_bytes_as_characters_and_what_the_fault_scores(recorded: Path, until: Until) -> None:
    async def scenario() -> None:
        console = Console(recorded, remember=False)
        async with console.run_test(size=(80, 24)) as pilot:
            await opened(console, pilot, until)
            await pilot.press("4")
            await until(pilot, lambda: bool(console.screen.query(BatchView)), "the view is there")
            await until(pilot, lambda: "the␣cat␣sat␣on␣the␣mat!" in drawn(console, "#samples"), "text is readable")
            assert "a␣dog⏎ran" in drawn(console, "#samples")
            assert "under its own token" in drawn(console, "#notes")
            await pilot.press("x")
            await until(pilot, lambda: "→t→h→e" in drawn(console, "#samples"), "each token is scored on itself")
            assert "labels-not-shifted:" in drawn(console, "#notes")
            await pilot.press("x", "w")
            await until(pilot, lambda: "worst:" in drawn(console, "#notes"), "the worst token is named")
            await pilot.press("w")
            await until(pilot, lambda: "2. worst:" in drawn(console, "#notes"), "and the next worst")
            await pilot.press("home", "down")
            await until(pilot, lambda: "sample 2 of 2" in drawn(console, "#which"), "the second sample")
            assert "the␣cat" not in drawn(console, "#samples")

    asyncio.run(scenario())


def test_five_hundred_layers_open_at_the_bad_one_and_only_what_is_on_screen_is_made(
    tmp_path: Path, until: Until
) -> None:
    usual = {"role": "activation", "dtype": "bfloat16", "shape": [4], "numel": 4, "posinf": 0, "neginf": 0, "rms": 1.0}
    with CapsuleWriter(tmp_path / "big.capsule", title="big", phase="training", manifest={}) as writer:
        for step in range(3):
            rows = [
                {
                    **usual,
                    "step": step,
                    "order": at,
                    "name": f"layers.{at}",
                    "absmax": 1.0,
                    "nan": step // 2 * (at > 399),
                }
                for at in range(500)
            ]
            writer.stats(rows, rank=0)

    async def scenario() -> None:
        console = Console(tmp_path, remember=False)
        async with console.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: len(console.screen.query_one("#capsules", Rows)) == 1, "listed")
            await pilot.press("enter", "3")  # the key is not lost while the capsule opens
            await until(pilot, lambda: bool(console.screen.query(LayersView)), "the view is there")
            await until(pilot, lambda: "✗ layers.400 " in drawn(console, "#sheet"), "the first bad tensor is in view")
            assert "layers.399" in drawn(console, "#sheet")  # and the last good one above it
            await until(pilot, lambda: "layers.400" in drawn(console, "#exact"), "its numbers in full")
            await pilot.press("left")
            await until(pilot, lambda: "step 1 (2 of 3" in drawn(console, "#step"), "the step before")
            await until(pilot, lambda: "layers.400" in drawn(console, "#exact"), "the cursor stays on its tensor")
            assert "✗" not in drawn(console, "#sheet")
            await pilot.press("w")
            await until(pilot, lambda: "✗ layers.400 " in drawn(console, "#sheet"), "w goes back to it")

    asyncio.run(scenario())


def test_hostile_text_stays_text(tmp_path: Path, until: Until) -> None:
    hostile = "[red]x[/red]\x1b[31m\u202e"
    with CapsuleWriter(tmp_path / "hostile.capsule", title="hostile", phase="training", manifest={}) as writer:
        row = {"step": 0, "order": 0, "name": hostile, "role": "activation", "dtype": "float16", "shape": [4]}
        writer.stats([{**row, "numel": 4, "nan": 1, "posinf": 0, "neginf": 0, "absmax": 1.0, "rms": 1.0}], rank=0)
        writer.batch(step=0, rank=0, input_ids=[[1, 2]], sample_ids=[hostile])

    async def scenario() -> None:
        console = Console(tmp_path, remember=False)
        async with console.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: len(console.screen.query_one("#capsules", Rows)) == 1, "listed")
            await pilot.press("enter")
            shown = r"[red]x[/red]\x1b[31m\u202e"
            await until(pilot, lambda: bool(console.screen.query(OverviewView)), "the overview")
            await until(pilot, lambda: shown in drawn(console, "#body"), "in the finding")
            await pilot.press("3")
            await until(
                pilot, lambda: bool(console.screen.query("#exact")) and shown in drawn(console, "#exact"), "row"
            )
            await pilot.press("4")
            await until(pilot, lambda: bool(console.screen.query("#samples")), "the batch")
            await until(pilot, lambda: shown in drawn(console, "#samples"), "in the sample's id")

    asyncio.run(scenario())


def test_every_finding_is_listed_once_and_stands_under_its_cause() -> None:
    from llmconsole.analyzers.finding import Finding, Where
    from llmconsole.analyzers.report import CapsuleName, CapsuleReport, FirstDivergence

    def finding(rule: str, step: int, severity: Any = "critical", caused_by: str | None = None) -> Finding:
        place = Where(step=step)
        return Finding(rule=rule, title=rule, summary="", severity=severity, where=place, caused_by=caused_by)

    findings = (
        finding("data/lengths", 0, "info"),
        finding("numerics/loss-spike", 7, "warning", "data/poison-sample"),
        finding("numerics/explosion", 8, "warning", "numerics/loss-spike"),
        finding("data/poison-sample", 6),
        finding("objective/uniform-guess", 9, "warning"),
    )
    report = CapsuleReport(
        capsule=CapsuleName(id="a", title="a", path="a"),
        first_divergence=FirstDivergence(rule="data/poison-sample", stage="data", where=Where(step=6), summary=""),
        findings=findings,
        ladder=(),
        quiet=(),
        skipped=(),
        errors=(),
    )
    assert [(each.rule, depth) for each, depth in outline(report)] == [
        ("data/poison-sample", 0),
        ("numerics/loss-spike", 1),
        ("numerics/explosion", 2),
        ("objective/uniform-guess", 0),
        ("data/lengths", 0),
    ]


def test_a_view_without_its_evidence_says_what_to_capture(tmp_path: Path, make_capsule: Any, until: Until) -> None:
    make_capsule("bare")

    async def scenario() -> None:
        console = Console(tmp_path, remember=False)
        async with console.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: len(console.screen.query_one("#capsules", Rows)) == 1, "listed")
            await pilot.press("enter", "3")
            await until(pilot, lambda: bool(console.screen.query(".teach")), "layers were not captured")
            assert "every=50" in str(console.screen.query_one(".teach", Static).render())

    asyncio.run(scenario())
