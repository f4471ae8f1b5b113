"""What analysing many dumps costs, in things that are made and looked at: seconds would depend on the machine."""

from __future__ import annotations

from typing import Any

from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_job
from llmconsole.capsules.record_columns import Packed

from tests.analyzers.sweep import flight_faults


def test_no_rule_makes_a_dictionary_of_each_call_in_a_dump(tmp_path, monkeypatch) -> None:
    made = Packed.records

    def records(self: Packed) -> list[dict[str, Any]]:
        assert len(self) == 1, "a dictionary was made of each call"  # one is the state of a rank
        return made(self)

    monkeypatch.setattr(Packed, "records", records)
    judged: set[str] = set()
    for seed in range(4):
        incident = flight_faults.incident(seed, "missing", small=True)
        files = flight_faults.write(incident, tmp_path / str(seed))
        report = analyze(Capsule.open(import_job(files, tmp_path / "capsules", attach=False).path))
        assert report.errors == ()
        judged |= {*report.quiet, *(each.rule for each in report.findings)}
    assert {"distributed/missing-rank", "distributed/straggler", "distributed/timeout-raised"} <= judged
