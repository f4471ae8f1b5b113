"""memory/serving-*: a small paged server is really run into the wall, once for each cause."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule

from tests.analyzers.conftest import rule_named

CANCELLED, PREFIX = "memory/serving-cancelled", "memory/serving-prefix-references"
ADMISSION, OUTPUT, PAGES = "memory/serving-admission", "memory/serving-output-limit", "memory/serving-pages"
ALL = (CANCELLED, PREFIX, ADMISSION, OUTPUT, PAGES)

Make = Callable[..., Capsule]


class Server:
    """A paged key-value pool with a shared prefix, one token a request and step, and the bug it is told to have.

    Args:
        pages: of 16 tokens.
        prefix: pages of a prefix that every request shares.
        keeps: ways out ("cancel", "finish") that forget what they hold: own pages, or references to the prefix.
        lag: steps after its end at which a request gives its pages back.
    """

    def __init__(self, pages: int, prefix: int = 0, keeps: str = "", lag: int = 0) -> None:
        self.free = list(range(prefix, pages))
        self.references = dict.fromkeys(range(prefix), 0)
        self.total, self.prefix, self.keeps, self.lag = pages, list(range(prefix)), keeps, lag
        self.running: dict[str, dict[str, Any]] = {}
        self.waiting: list[dict[str, Any]] = []
        self.leaving: list[tuple[int, str, list[int]]] = []
        self.events: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.step = 0

    def say(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, "engine_step": self.step, "t": float(self.step), **fields})

    def submit(self, prompt: int, output: int, limit: int | None, cancel_after: int | None = None) -> None:
        name = f"r{len(self.requests)}"
        request = {
            "id": name,
            "arrival": float(self.step),
            "prompt_tokens": prompt,
            "output_tokens": 0,
            "preemptions": 0,
        }
        self.requests.append(request | ({"max_tokens": limit} if limit is not None else {}))
        work = {"row": self.requests[-1], "output": output, "cancel": cancel_after, "blocks": []}
        self.waiting.append(work)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            for due, name, blocks in [each for each in self.leaving if each[0] <= self.step]:
                self.leaving.remove((due, name, blocks))
                self._give_back(name, blocks)
            self._admit()
            for name in list(self.running):
                if name in self.running:
                    self._decode(name)
        self.say("snapshot", free=len(self.free), referenced=self.total - len(self.free), cached=0)

    def _admit(self) -> None:
        while self.waiting:
            work = self.waiting[0]
            needed = -(-work["row"]["prompt_tokens"] // 16) - len(self.prefix)
            if needed > len(self.free):
                return
            self.waiting.pop(0)
            name = work["row"]["id"]
            self.say("admit", request=name, tokens=work["row"]["prompt_tokens"])
            if self.prefix:
                for block in self.prefix:
                    self.references[block] += 1
                self.say("share", request=name, blocks=self.prefix, refcount=list(self.references.values()))
            work["blocks"] = [self.free.pop() for _ in range(max(0, needed))]
            self.say("allocate", request=name, blocks=work["blocks"], total_blocks=self.total, block_size=16)
            work["row"].setdefault("first_token", float(self.step + 1))
            self.running[name] = work

    def _decode(self, name: str) -> None:
        work = self.running[name]
        row = work["row"]
        if work["cancel"] is not None and row["output_tokens"] >= work["cancel"]:
            self._leave(name, "cancel")
            return
        if row["output_tokens"] >= work["output"]:
            self._leave(name, "finish")
            return
        tokens = row["prompt_tokens"] + row["output_tokens"] + 1
        if tokens > 16 * (len(self.prefix) + len(work["blocks"])):
            if not self.free:
                victim = list(self.running)[-1]
                self.requests[int(victim[1:])]["preemptions"] += 1
                preempted = self.running.pop(victim)
                self._give_back(victim, preempted["blocks"])
                self.waiting.insert(0, preempted)
                if victim == name:
                    return
            work["blocks"].append(self.free.pop())
            self.say("allocate", request=name, blocks=work["blocks"][-1:])
        row["output_tokens"] += 1

    def _leave(self, name: str, how: str) -> None:
        work = self.running.pop(name)
        work["row"] |= {"finished": float(self.step), "status": how}
        self.say(how, request=name)
        if how == "cancel" and self.keeps == "cancel":
            return
        if how == "finish" and self.keeps == "finish":
            self.free += work["blocks"]
            self.say("free", request=name, blocks=list(work["blocks"]))
            return
        self.leaving.append((self.step + self.lag, name, work["blocks"]))

    def _give_back(self, name: str, blocks: list[int]) -> None:
        for block in self.prefix:
            self.references[block] -= 1
        self.free += blocks
        self.say("free", request=name, blocks=[*self.prefix, *blocks])


def recorded(build: Make, server: Server, *more: dict[str, Any], **manifest: Any) -> Capsule:
    def fill(writer: Any) -> None:
        writer.records("kv_events", server.events)
        writer.records("requests", server.requests)
        for event in more:
            writer.record("events", event)

    return build(fill, manifest)


def said(capsule: Capsule) -> dict[str, Finding]:
    report = analyze(capsule, [rule_named(rule) for rule in ALL])
    assert not report.errors
    return {each.rule: each for each in report.findings if each.severity != "info"}


def values(finding: Finding) -> dict[str, Any]:
    return {each.name: each.value for each in finding.evidence}


def busy(server: Server, seed: int, count: int = 60, cancelled: float = 0.0, every: int = 4) -> Server:
    """Requests of 64 to 128 prompt and 16 to 64 output tokens, one each so many steps."""
    draw = random.Random(seed)
    for _ in range(count):
        output = draw.randint(16, 64)
        cancel = draw.randint(2, output - 1) if draw.random() < cancelled else None
        server.submit(draw.randint(64, 128), output, 64, cancel)
        server.run(every)
    server.run(200)
    return server


@pytest.mark.fires(CANCELLED)
@pytest.mark.recorded(CANCELLED)
def test_cancelled_requests_that_keep_their_pages(build: Make):
    server = busy(Server(400, keeps="cancel"), 1, cancelled=0.2)
    found = said(recorded(build, server))
    assert set(found) == {CANCELLED}
    gone = [each for each in server.requests if each.get("status") == "cancel"]
    assert values(found[CANCELLED])["requests"] == len(gone)
    assert values(found[CANCELLED])["blocks"] == 400 - len(server.free)
    assert found[CANCELLED].confidence == "likely"


@pytest.mark.fires(PREFIX)
@pytest.mark.recorded(PREFIX)
def test_references_to_a_prefix_that_never_fall(build: Make):
    server = busy(Server(400, prefix=4, keeps="finish"), 2)
    found = said(recorded(build, server))
    assert set(found) == {PREFIX}
    assert values(found[PREFIX])["blocks"] == 4
    assert values(found[PREFIX])["references not given back"] == 4 * values(found[PREFIX])["requests"]
    assert found[PREFIX].confidence == "likely"


@pytest.mark.quiet(CANCELLED)
@pytest.mark.quiet(PREFIX)
@pytest.mark.quiet(PAGES)
@pytest.mark.quiet(OUTPUT)
@pytest.mark.quiet(ADMISSION)
@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_server_with_prefixes_cancellations_and_late_frees_is_quiet(build: Make, seed: int):
    server = busy(Server(400, prefix=4, lag=3), seed, cancelled=0.2)
    assert len(server.free) == 396
    assert not said(recorded(build, server))


@pytest.mark.quiet(PAGES)
@pytest.mark.quiet(OUTPUT)
def test_a_few_percent_of_preemptions_are_healthy(build: Make):
    server = busy(Server(96), 3, count=120)
    preempted = sum(each["preemptions"] > 0 for each in server.requests)
    assert 0 < preempted <= 0.1 * len(server.requests)
    assert not said(recorded(build, server))


@pytest.mark.quiet(PREFIX)
def test_a_log_that_holds_no_frees_or_only_those_of_own_blocks_names_no_leak(build: Make):
    server = busy(Server(400, prefix=4), 5)
    server.events = [each for each in server.events if each["kind"] != "free"]
    report = analyze(recorded(build, server), [rule_named(PREFIX)])
    assert [each.rule for each in report.skipped] == [PREFIX]

    server = busy(Server(400, prefix=4), 5)
    for event in server.events:
        event.pop("refcount", None)
        if event["kind"] == "free":
            event["blocks"] = [block for block in event["blocks"] if block >= 4]
        if event["kind"] == "snapshot":
            event.update(free=400, referenced=0)
    found = said(recorded(build, server))
    assert {each.confidence for each in found.values()} <= {"undetermined"}


@pytest.mark.fires(PAGES)
@pytest.mark.recorded(PAGES)
def test_a_pool_that_is_too_small_for_the_mix(build: Make):
    server = busy(Server(40), 6, count=80, every=2)
    assert sum(each["preemptions"] > 0 for each in server.requests) > 0.1 * len(server.requests)
    found = said(recorded(build, server))
    assert set(found) == {PAGES}
    assert values(found[PAGES])["pages needed"] > 40


@pytest.mark.fires(OUTPUT)
@pytest.mark.recorded(OUTPUT)
def test_outputs_without_a_limit_that_fill_the_pool(build: Make):
    server = Server(120)
    draw = random.Random(7)
    for at in range(60):
        endless = at % 15 == 3
        server.submit(draw.randint(64, 128), 5000 if endless else draw.randint(16, 64), None if endless else 64)
        server.run(8)
    server.run(60)
    found = said(recorded(build, server))
    assert set(found) == {OUTPUT}
    assert found[OUTPUT].where.request in {"r3", "r18", "r33", "r48"}
    assert found[OUTPUT].confidence == "likely"

    unlimited = [{name: value for name, value in each.items() if name != "max_tokens"} for each in server.requests]
    server.requests = unlimited
    assert said(recorded(build, server))[OUTPUT].confidence == "undetermined"


@pytest.mark.fires(ADMISSION)
@pytest.mark.recorded(ADMISSION)
def test_a_burst_of_prompts_in_one_step(build: Make):
    server = busy(Server(4000), 8, count=40)
    for _ in range(20):
        server.submit(2000, 16, 64)
    server.run(1)
    event = {"kind": "oom", "t": float(server.step), "phase": "prefill", "requested": 1 << 30, "free": 1 << 20}
    found = said(recorded(build, server, event))
    assert set(found) == {ADMISSION}
    assert values(found[ADMISSION])["prompt tokens in prefill"] == 40_000

    server.events.clear()  # by the requests alone
    assert set(said(recorded(build, server, event))) == {ADMISSION}


@pytest.mark.quiet(ADMISSION)
def test_a_failure_in_decode_or_among_usual_prompts_is_no_admission(build: Make):
    server = busy(Server(400), 9, count=40)
    quiet = {"kind": "oom", "t": float(server.step), "requested": 1 << 30, "free": 1 << 20}
    assert ADMISSION not in said(recorded(build, server, quiet | {"phase": "decode"}))
    assert ADMISSION not in said(recorded(build, server, quiet | {"phase": "prefill", "t": 30.0}))


@pytest.mark.parametrize("rule", ALL)
def test_odd_events_raise_nothing(build: Make, rule: str):
    def fill(writer: Any) -> None:
        events = [{}, {"kind": "free"}, {"kind": "free", "blocks": [1, "a"]}, {"kind": "snapshot", "free": 3}]
        events += [{"kind": "cancel", "request": "x"}, {"kind": "share", "request": "y", "refcount": {"1": 3}}]
        events += [{"kind": "admit", "request": "y", "tokens": [1, 2], "engine_step": 2}, {"kind": "reject"}]
        writer.records("kv_events", events)
        writer.records("requests", [{}, {"arrival": float("nan")}, {"arrival": 1.0, "finished": 0.5, "preemptions": 9}])
        writer.records("events", [{"kind": "oom", "phase": "prefill"}, {"kind": "oom", "phase": "decode"}])
        writer.record("memory", {"phase": "prefill"})

    report = analyze(build(fill), [rule_named(rule)])
    assert not report.errors
