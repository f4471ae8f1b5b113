"""Train a small model until it breaks, name the place, and file the case.

A byte-level GPT is trained on this package's own text in a git repository of the demo's own, whose last commit may
have broken it. The recorder is attached as in any training loop; the report, the fixing commit with its test and the
entry in the case log are real. Exit status: 0 the injected fault is the first divergence (none: nothing is found),
1 it is not, 2 the demo cannot run.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Literal, TextIO

import msgspec

from ...analyzers.finding import Where
from ...analyzers.report import ALARMS, CapsuleReport, FirstDivergence
from .. import terminal
from ..analysis import analyze_capsule, capsules_in
from ..casebook import store
from ..casebook.incident import IncidentError
from ..casebook.resolve import ResolveError, Statement, commit, describe, plan
from ..demo.faults import FAULTS, Fault, Repair
from ..demo.scratch import Repaired, Scratch, build, new_directory, own_git, repair
from ..demo.training import TrainedStep, TrainingError, train
from ..output import FOUND, OK, CommandError, console, narrate, print_json
from ..render import print_report
from ..text import visible
from ..worker import Worker, WorkerError
from .incident import show_plan

RANDOM = "random"

#: Steps between two lines of progress.
_PROGRESS = 20


class Guess(msgspec.Struct, frozen=True, kw_only=True):
    """What the user took the fault to be after reading the report, and the seconds that it took."""

    fault: str
    correct: bool
    seconds: float


class RegressionTest(msgspec.Struct, frozen=True, kw_only=True):
    """The test of the fixing commit, and how it ended on the broken and on the fixed tree."""

    node: str
    broken: str
    fixed: str


class Commits(msgspec.Struct, frozen=True, kw_only=True):
    """The commits of the demo's repository; ``fix`` and ``case`` are null where there was nothing to resolve."""

    healthy: str
    broken: str
    fix: str | None
    case: str | None


class Seconds(msgspec.Struct, frozen=True, kw_only=True):
    """Wall time of the parts, and of the whole without the time that the user thought."""

    training: float
    analysis: float
    total: float


class Demo(msgspec.Struct, frozen=True, kw_only=True):
    """``llmconsole.demo/1``: what was injected, what was found, and what became of it."""

    format: Literal["llmconsole.demo/1"] = "llmconsole.demo/1"
    fault: str
    expected_rule: str | None
    first_divergence: FirstDivergence | None
    correct: bool
    alarms: tuple[str, ...]
    steps: int
    last_loss: float
    seconds: Seconds
    directory: str
    capsule: str
    commits: Commits
    regression_test: RegressionTest | None
    guess: Guess | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--fault",
        choices=(*FAULTS, RANDOM),
        default=next(iter(FAULTS)),
        metavar="NAME",
        help=f"what breaks: {', '.join(FAULTS)}, or {RANDOM}, which asks for your guess (default: %(default)s)",
    )
    parser.add_argument("--headless", action="store_true", help="ask nothing")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON (llmconsole.demo/1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and data order (default: 0)")
    parser.add_argument(
        "--dir", metavar="DIR", help="where the repository goes: new or empty (default: among our files)"
    )


def run(args: argparse.Namespace) -> int:
    """Play the whole story once and return the exit status."""
    hidden = args.fault == RANDOM
    fault = (
        FAULTS[random.choice([name for name, each in FAULTS.items() if each.rule])] if hidden else FAULTS[args.fault]
    )
    try:
        with own_git():
            with Worker() as worker:
                outcome = _play(fault, args, worker, hidden=hidden)
            if not (args.headless or args.json or terminal.obstacle()):
                _open_console(outcome)
    except (store.StoreError, TrainingError, WorkerError, ResolveError, IncidentError) as error:
        raise CommandError(error) from error
    except OSError as error:
        raise CommandError(f"{error.filename or 'the demo'}: {error.strerror or error}") from error
    if args.json:
        print_json(outcome)
    return OK if outcome.correct else FOUND


def _open_console(outcome: Demo) -> None:
    """End where the user will start the next time: in the console, on the capsule of this run."""
    from ..ui.app import run as run_console

    print(
        "The console opens on this run: ? lists its keys, q leaves it. Press enter.",
        end="",
        file=sys.stderr,
        flush=True,
    )
    sys.stdin.readline()
    capsule = Path(outcome.capsule)
    run_console(capsule.parent, capsule, repository=Path(outcome.directory))
    narrate(f"to come back: llmconsole {capsule.parent}")


def _play(fault: Fault, args: argparse.Namespace, worker: Worker, *, hidden: bool) -> Demo:
    started = time.monotonic()
    store.version()  # no directory is made where there is no git to fill it
    scratch = build(_directory(args.dir), fault)
    narrate(f"{scratch.directory} is the repository of this demo; it is yours to keep or to delete")
    for line in scratch.repository.history().splitlines():
        narrate(line)

    training = time.monotonic()
    steps = _train(scratch.directory, [*fault.arguments, "--seed", str(args.seed)])
    capsule = _capsule(scratch.directory / "runs")
    analysing = time.monotonic()
    report = analyze_capsule(worker, capsule)
    analysed = time.monotonic()
    if not args.json:
        print()
        print_report(report, console())
        print(flush=True)

    guess = None if args.headless or not hidden else ask(fault, sys.stdin)
    correct = _is_right(report, fault)
    _tell(fault, report, correct=correct)
    repaired, case = None, None
    if correct and fault.repair is not None:
        repaired = _repair(scratch, fault.repair)
        case = _resolve(worker, scratch, capsule, fault.repair, repaired, quietly=args.json)
    thought = guess.seconds if guess else 0.0
    narrate(f"look around: llmconsole show {capsule}")
    return Demo(
        fault=fault.name,
        expected_rule=fault.rule,
        first_divergence=report.first_divergence,
        correct=correct,
        alarms=_alarms(report),
        steps=len(steps),
        last_loss=steps[-1].loss,
        seconds=Seconds(
            training=round(analysing - training, 2),
            analysis=round(analysed - analysing, 2),
            total=round(time.monotonic() - started - thought, 2),
        ),
        directory=str(scratch.directory),
        capsule=str(capsule),
        commits=Commits(
            healthy=scratch.healthy, broken=scratch.broken, fix=repaired.commit if repaired else None, case=case
        ),
        regression_test=_regression_test(fault.repair, repaired),
        guess=guess,
    )


def _directory(given: str | None) -> Path:
    if given is None:
        return new_directory()
    directory = Path(given).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise CommandError(f"{directory} is not empty; name a new directory with --dir")
    return directory


def _train(directory: Path, arguments: list[str]) -> list[TrainedStep]:
    """Train to the end, telling how it goes."""
    # Not the arguments: they would give away a fault that is to be guessed.
    narrate("training a byte-level GPT with the recorder attached (train.py)")
    steps: list[TrainedStep] = []
    with closing(train(directory, *arguments)) as run:
        for each in run:
            steps.append(each)
            if each.step % _PROGRESS == 0:
                narrate(_progress(each))
    if not steps:
        raise CommandError(f"train.py in {directory} ended without a step")
    narrate(f"{_progress(steps[-1])}; the run has ended")
    return steps


def _progress(step: TrainedStep) -> str:
    return f"step {step.step}: loss {step.loss:.4f}, learning rate {step.learning_rate:.2e}"


def _capsule(runs: Path) -> Path:
    found = capsules_in(runs) if runs.is_dir() else []
    if len(found) != 1:
        raise CommandError(f"{runs} should hold the one capsule of the training run and holds {len(found)}")
    return found[0]


def _alarms(report: CapsuleReport) -> tuple[str, ...]:
    """Rules with a finding of severity warning or above, in the order of the report."""
    return tuple(dict.fromkeys(each.rule for each in report.findings if each.severity in ALARMS))


def _is_right(report: CapsuleReport, fault: Fault) -> bool:
    """Whether the report says what was done: the fault's rule first, or nothing at all where there was no fault."""
    if fault.rule is None:
        return not _alarms(report)
    return report.first_divergence is not None and report.first_divergence.rule == fault.rule


def ask(fault: Fault, answers: TextIO) -> Guess | None:
    """Ask which fault it was, by name or number, and time it; None where ``answers`` ends without one."""
    names = [name for name, each in FAULTS.items() if each.rule]
    choices = ", ".join(f"{number} {name}" for number, name in enumerate(names, 1))
    started = time.monotonic()
    while True:
        print(f"Which fault was it? {choices}: ", end="", file=sys.stderr, flush=True)
        answer = answers.readline()
        if not answer:
            print(file=sys.stderr)
            narrate("nobody answered on standard input, so there is no guess")
            return None
        word = answer.strip().lower()
        name = names[int(word) - 1] if word.isdecimal() and 1 <= int(word) <= len(names) else word
        if name in names:
            guess = Guess(fault=name, correct=name == fault.name, seconds=round(time.monotonic() - started, 1))
            narrate(f"your guess after {guess.seconds:g} s is {'right' if guess.correct else 'wrong'}: {name}")
            return guess


def _tell(fault: Fault, report: CapsuleReport, *, correct: bool) -> None:
    first = report.first_divergence
    where = first.where if first else Where()
    found = f"{first.rule}" + (f" at step {where.step}" if where.step is not None else "") if first else "nothing"
    if fault.rule is None:
        narrate("no fault was injected, and " + ("none was found" if correct else f"yet: {', '.join(_alarms(report))}"))
    else:
        verdict = "as it should be" if correct else f"where {fault.rule} was expected"
        narrate(f"the injected fault is {fault.name}; the first divergence is {found}, {verdict}")


def _repair(scratch: Scratch, work: Repair) -> Repaired:
    """Commit the fix with its test, and tell what the test said on both trees."""
    narrate(f"fixing it, with a test: {work.test_node}")
    repaired = repair(scratch, work)
    narrate(f"broken {scratch.broken[:12]}: {repaired.before.outcome}, {repaired.before.summary}")
    narrate(f"fixed  {repaired.commit[:12]}: {repaired.after.outcome}, {repaired.after.summary}")
    if (repaired.before.outcome, repaired.after.outcome) != ("failed", "passed"):
        raise CommandError(f"{work.test_node} should fail on the broken tree and pass on the fixed one")
    return repaired


def _resolve(
    worker: Worker, scratch: Scratch, capsule: Path, work: Repair, repaired: Repaired, *, quietly: bool
) -> str:
    """Write the case into the repository's debug-cases.md, commit it, and show the commit."""
    case = work.case
    statement = Statement(
        case=case.id,
        title=case.title,
        case_class="not-converging",
        root_cause=case.root_cause,
        trigger=f"{case.trigger} ({scratch.broken[:12]})",
        fix_commit=repaired.commit,
        regression_test=work.test_node,
        prevention=case.prevention,
        keywords=case.keywords,
    )
    planned = plan(statement, describe(worker, capsule), repo=scratch.directory)
    if not quietly:
        show_plan(planned)
    sha = commit(planned)
    if not quietly:
        print(visible(scratch.repository.summary(sha), keep="\n").rstrip())
        print()
        print(visible(scratch.repository.history(), keep="\n").rstrip(), flush=True)
    narrate(f"the case is in {planned.file}")
    return sha


def _regression_test(work: Repair | None, repaired: Repaired | None) -> RegressionTest | None:
    if work is None or repaired is None:
        return None
    return RegressionTest(node=work.test_node, broken=repaired.before.outcome, fixed=repaired.after.outcome)
