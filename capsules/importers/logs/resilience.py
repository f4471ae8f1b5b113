"""What Megatron-LM's watchers report beside its iterations: stragglers, and results that were computed again.

The straggler report names, of each quantity, the rank with the least and the rank with the most; those ranks get a
point of a series, which is a mean over the logging interval.
"""

from __future__ import annotations

import math
import re
from typing import Any

from .log import Log, Stateless, count, number

FORMAT = ""
NEEDED = b""
SIGN = (
    rb"\bMnRtt/Rnk: [\d.]|\bnode=\S{1,200} device=\S{1,40} jobID=\S{1,200} rank=\d{1,9} iteration=\d"
    rb"|Unexpected result [^\n]{1,80} on rank \d{1,9} at iteration #\d"
)

_UNEXPECTED = re.compile(
    r"Unexpected result (.{1,80}?) on rank (\d{1,9}) at iteration #(\d{1,18})(?: invocation #(\d+))?"
)
_MESSAGE = re.compile(r"message='([^']{0,500})'")
#: The rerun state machine's verdicts, in its words.
_RERUN = re.compile(r"(?:First|Second) rerun: unexpected result is|Possible (?:transient|persistent) error!")
#: What the tracker file calls them.
_STATES = {
    "first_rerun_reproducible": "reproducible",
    "first_rerun_not_reproducible": "transient",
    "second_rerun_reproducible": "reproducible",
    "second_rerun_not_reproducible": "persistent",
}
_ON_RANK = re.compile(r"\b[Oo]n rank (\d{1,9})\b|\brank[ =](\d{1,9})\b")
_FIELD = re.compile(r"\b(ts|node|device|jobID|rank|iteration|status|result|message)=('[^']{0,1000}'|\S{1,400})")
_EXTREME = re.compile(r"\b(Mn|Mx)(Rtt|DRtt|Pwr|Tmp|Utl|Clk|Etpt)/Rnk: ([-+.\de]{1,40}) ?([A-Za-z%]{0,6})/(\d{1,9})")
_BOTH_ENDS = re.compile(r"\^\^\^\^ (?:Bottom|Top) {1,8}\d{1,9} Ranks with (?:lowest|highest) {1,4}Etpt\(TF\):(.*)")
_AT_RANK = re.compile(r"([.\d]{1,40})(?:TF)?/(\d{1,9})")
#: Series of each quantity with its unit and the factor to it by the unit that is printed.
_SERIES: dict[str, tuple[str, str, dict[str, float]]] = {
    "Rtt": ("round_trip_time", "s", {"ms": 1e-3, "s": 1.0}),
    "DRtt": ("data_time", "s", {"ms": 1e-3, "s": 1.0}),
    "Pwr": ("gpu_power", "W", {"W": 1.0, "mW": 1e-3}),
    "Tmp": ("gpu_temperature", "°C", {"C": 1.0}),
    "Utl": ("gpu_utilization", "", {"%": 0.01}),
    "Clk": ("gpu_clock", "MHz", {"MHz": 1.0}),
    "Etpt": ("estimated_throughput", "TFLOP/s", {"TF": 1.0}),
}
#: Watts that no device draws: the report calls milliwatts so.
_NO_WATTS = 10_000


class Lines(Stateless):
    """Reads them."""

    marks = (b"/Rnk:", b"^^^^", b"iteration", b"rerun", b"Possible ", b"status=")

    def __init__(self, log: Log) -> None:
        self._log = log
        self._reports = 0
        self._unexpected: tuple[int | None, int | None] = (None, None)  # rank and step of the last result

    def take(self, line: str) -> bool:
        """Use one line."""
        if "MnRtt/Rnk:" in line:
            return self._straggler(line)
        if (ends := _BOTH_ENDS.search(line)) is not None:
            for value, rank in _AT_RANK.findall(ends[1]):
                self._point("Etpt", value, "TF", int(rank))
            return True
        if (found := _UNEXPECTED.search(line)) is not None:
            message = _MESSAGE.search(line)
            fields = {
                "result": found[1],
                "invocation": count(found[4] or ""),
                "reason": message[1] if message else None,
            }
            rank, step = self._unexpected = count(found[2]), count(found[3])
            value = number(found[1])
            if "loss" in str(fields["reason"]) and value is not None and not math.isfinite(value) and step is not None:
                self._log.run.scalar("loss", step, value, self._log.time(line), rank=rank)
            return self._rerun(line, rank, step, **fields)
        if "status=" in line and (said := dict(_FIELD.findall(line))).keys() >= {"rank", "iteration", "status"}:
            return self._tracked(line, said)
        if _RERUN.search(line) is not None:
            named, (rank, step) = _ON_RANK.search(line), self._unexpected
            rank = count(named[1] or named[2]) if named else rank
            return self._rerun(line, rank, step, verdict=_verdict(line))
        return False

    def _straggler(self, line: str) -> bool:
        """One report: the ranks at both ends of each quantity."""
        self._reports += 1
        ends: dict[str, Any] = {}
        for end, quantity, value, unit, rank in _EXTREME.findall(line):
            if (measured := self._point(quantity, value, unit, int(rank))) is not None:
                name = _SERIES[quantity][0]
                ends.setdefault(name, {})["least" if end == "Mn" else "most"] = {"rank": int(rank), "value": measured}
        fields: dict[str, Any] = {
            "level": "info",
            "logger": "straggler",
            "message": line.strip()[:2000],
            "extremes": ends or None,
        }
        self._log.event("log", t=self._log.time(line), **fields)
        return True

    def _point(self, quantity: str, text: str, unit: str, rank: int) -> float | None:
        name, kept, factors = _SERIES[quantity]
        value, factor = number(text), factors.get(unit)
        if value is None or factor is None:
            return None
        value *= factor
        if quantity == "Pwr" and value > _NO_WATTS:
            value /= 1e3
        step = self._log.step if self._log.step is not None else self._reports
        self._log.run.scalar(name, step, value, None, kept, None, rank)
        return value

    def _rerun(self, line: str, rank: int | None, step: int | None, **fields: Any) -> bool:
        fields = {
            "level": "error",
            "logger": "rerun",
            "message": line.strip()[:2000],
            "t": self._log.time(line),
            **fields,
        }
        self._log.event("log", rank=rank, step=step, **fields)
        return True

    def _tracked(self, line: str, said: dict[str, str]) -> bool:
        """A line of the tracker file: what a result was when it was computed again, on which machine."""
        rank, step = count(said["rank"]), count(said["iteration"])
        if rank is None or step is None:
            return False
        words = {name: text.strip("'") for name, text in said.items()}
        if words.get("node"):
            self._log.run.record("ranks", {"host": words["node"]}, rank)
        device = count(words.get("device", ""))
        fields = {"status": words["status"], "result": words.get("result"), "reason": words.get("message")}
        fields["verdict"] = _STATES.get(words["status"])
        return self._rerun(line, rank, step, device=device, **fields)


def _verdict(line: str) -> str | None:
    """What a second computation tells: ``reproducible``, ``transient`` or ``persistent`` errors of a device."""
    if "ersistent error" in line or ("Second rerun" in line and "not reproducible" in line):
        return "persistent"
    if "ransient error" in line or "not reproducible" in line:
        return "transient"
    return "reproducible" if "reproducible" in line else None
