"""Rates of the rules on collectives over random faults of many ranks: a small form of ``benchmarks/distributed.py``.

Through dumps on disk, as a user has them. A third of the incidents carry no fault, or one that dumps cannot show.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_job

from tests.analyzers.sweep import flight_faults, flight_verdicts

SEEDS = range(3)


def judged(fault: str, seed: int, place: Path) -> tuple[flight_faults.Incident, flight_verdicts.Verdict]:
    incident = flight_faults.incident(seed, fault, small=True)
    done = import_job(flight_faults.write(incident, place / f"{fault}-{seed}"), place / "capsules", attach=False)
    assert done.problems == ()
    capsule = Capsule.open(done.path)
    assert capsule.damage() == ()
    return incident, flight_verdicts.of_capsule(capsule)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[str, bool, str]]:
    """(fault, seed) → outcome, whether three ranks decide, and what was said."""
    place = tmp_path_factory.mktemp("sweep")
    found: dict[tuple[str, int], tuple[str, bool, str]] = {}
    for fault in (*flight_faults.NAMED, *flight_faults.QUIET, *flight_faults.OUTSIDE):
        for seed in SEEDS:
            incident, verdict = judged(fault, seed, place)
            outcome = flight_verdicts.outcome(incident.truth, verdict, incident.missing_dumps)
            found[fault, seed] = outcome, incident.truth.deciding, verdict.said
    return found


def test_where_three_ranks_decide_the_rank_and_the_call_are_named(outcomes) -> None:
    decided = {key: each for key, each in outcomes.items() if each[1] and key[0] in flight_faults.NAMED}
    count = Counter(outcome for outcome, _, _ in decided.values())
    assert len(decided) > 12
    assert count["exact"] >= 0.9 * len(decided), {key: each for key, each in decided.items() if each[0] != "exact"}


def test_no_rank_is_named_that_did_nothing_wrong(outcomes) -> None:
    wrong = {key: each for key, each in outcomes.items() if each[0] == "wrong rank"}
    assert not wrong


def test_two_ranks_that_differ_decide_nothing(tmp_path) -> None:
    for seed in range(40):
        incident = flight_faults.incident(seed, "dtype", small=True)
        if incident.job.world == 2:
            _, verdict = judged("dtype", seed, tmp_path)
            assert not verdict.sure
            assert verdict.said
            return
    pytest.fail("no incident of two ranks")
