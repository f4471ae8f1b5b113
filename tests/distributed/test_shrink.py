"""``llmconsole shrink``: the two-rank script is really run, and hangs or fails as the job did."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llmconsole.analyzers.distributed.reproduction import Call, Reproduction
from llmconsole.app.cli import main
from llmconsole.app.looks.ranks import ranks
from llmconsole.app.two_ranks import NotWritable, script
from llmconsole.capsules import CapsuleWriter

from tests.distributed.lab.launch import Started

GOLDEN = Path(__file__).resolve().parents[1] / "app" / "golden" / "shrink.json"
UPDATE = bool(os.environ.get("LLMCONSOLE_UPDATE_GOLDEN"))

FOUND = "distributed/collective-mismatch"


def call(
    op: str = "all_reduce", dtype: str | None = "float32", shape: tuple[int, ...] = (4,), group: str = "0"
) -> Call:
    return Call(op, dtype, (shape,), group)


def found(
    kind: str, a: tuple[Call, ...], b: tuple[Call, ...], frame: str | None = "train.py:44 in step"
) -> Reproduction:
    return Reproduction(kind, a, b, (0, 5), frame, FOUND)  # type: ignore[arg-type]


#: kind → what two ranks call, and a word of how Gloo fails over it.
KINDS: dict[str, tuple[Reproduction, str]] = {
    "missing": (found("missing", (call(op="nccl:_all_gather_base"),), ()), "Timed out"),
    "shape": (found("shape", (call(shape=(195_812_480,)),), (call(shape=(51_123_456,)),)), "SIGABRT"),
    "dtype": (found("dtype", (call(dtype="float16"),), (call(dtype="bfloat16"),)), "wrong numbers"),
    "order": (found("order", (call(group="1"), call(group="2")), (call(group="2"), call(group="1"))), "Timed out"),
}
EXTRA = found("extra", (), (call(op="broadcast"),))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[int, str]]]:
    """Status and words of each script; all of them are started at once, for most only wait."""
    folder = tmp_path_factory.mktemp("scripts")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    with Started() as started:

        def start(name: str, text: str, *launcher: str) -> tuple[subprocess.Popen[bytes], Path]:
            path = folder / f"{name}.py"
            path.write_text(text)
            said = path.with_suffix(".txt")
            return started.start([sys.executable, *launcher, str(path)], folder, said), said

        running = {kind: start(kind, script(each, "run.capsule")) for kind, (each, _) in KINDS.items()}
        running["extra"] = start("extra", script(EXTRA, "run.capsule"), *torchrun)
        running["mended"] = start("mended", script(KINDS["shape"][0], "run.capsule").replace("64,", "128,"))

        def outcome(name: str) -> tuple[int, str]:
            process, said = running[name]
            return process.wait(), said.read_text()

        yield outcome
        for process, _ in running.values():
            process.wait()
        assert started.left() == []


class TestTheScript:
    @pytest.mark.parametrize("kind", KINDS)
    def test_hangs_or_fails_as_the_job_did(self, kind: str, outcome: Callable[[str], tuple[int, str]]):
        status, words = outcome(kind)
        assert (status, words.splitlines()[-1]) == (1, "reproduced"), words
        assert KINDS[kind][1] in words

    def test_runs_under_torchrun_too(self, outcome: Callable[[str], tuple[int, str]]):
        status, words = outcome("extra")
        assert status == 1
        assert "Timed out" in words

    def test_ends_well_once_both_ranks_call_the_same(self, outcome: Callable[[str], tuple[int, str]]):
        status, words = outcome("mended")
        assert (status, words.splitlines()[-1]) == (0, "not reproduced: both ranks made their calls")


class TestWhatIsWritten:
    def test_finding_ranks_and_site_are_named(self):
        text = script(KINDS["shape"][0], "nightly.capsule")
        assert FOUND in text
        assert "'nightly.capsule'" in text
        assert "0 and 5 of the job are 0 and 1 here" in text
        assert "'train.py:44 in step'" in text
        assert "gives up after 5 s" in text

    def test_large_shapes_become_small_and_stay_different(self):
        lines = script(
            found("shape", (call(shape=(8, 4096, 50257)),), (call(shape=(8, 4096, 50304)),)), "c"
        ).splitlines()
        calls = [line.strip() for line in lines if line.startswith("    all_reduce(")]
        assert calls == [
            "all_reduce((64,), torch.float32, groups[0])",
            "all_reduce((128,), torch.float32, groups[0])",
        ]

    def test_small_shapes_are_kept(self):
        assert "all_reduce((3, 1, 5), torch.int64, groups[0])" in script(
            found("missing", (call(dtype="int64", shape=(3, 1, 5)),), ()), "c"
        )

    def test_the_rank_that_waits_is_the_one_that_waited(self):
        """The root of a broadcast does not wait: the other one has to, the rank that makes the call alone."""
        assert "broadcast((4,), torch.float32, groups[0], 1)" in script(
            found("missing", (call(op="broadcast"),), ()), "c"
        )
        assert "broadcast((4,), torch.float32, groups[0], 0)" in script(
            found("extra", (), (call(op="broadcast"),)), "c"
        )

    @pytest.mark.parametrize(
        ("a", "b", "reason"),
        [
            (call(op="os.system('x')"), call(), "is none that two ranks over Gloo know"),
            (call(dtype="__import__('os')"), call(), "is none that two ranks over Gloo know"),
            (call(dtype="int16"), call(dtype="float16"), "Gloo cannot tell float16 from int16"),
            (call(), call(), "both ranks would do the same"),
        ],
    )
    def test_what_cannot_be_written_is_refused(self, a: Call, b: Call, reason: str):
        with pytest.raises(NotWritable, match=reason):
            script(found("op", (a,), (b,)), "c")

    @settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        text=st.text(max_size=60), op=st.sampled_from(["all_reduce", "send", "barrier"]) | st.text(max_size=20),
        dtype=st.none() | st.sampled_from(["float32", "Half"]) | st.text(max_size=20),
        shape=st.lists(st.integers(-(2**70), 2**70), max_size=9),
    )  # fmt: skip
    def test_hostile_evidence_only_ever_becomes_comments_and_literals(
        self, text: str, op: str, dtype: str | None, shape: list[int]
    ):
        odd = Call(op, dtype, (tuple(shape),), text)
        try:
            written = script(Reproduction(text, (odd,), (), (0, 1), text, text), text)  # type: ignore[arg-type]
        except NotWritable:
            return
        assert written.isascii()
        tree = ast.parse(written)
        kept = [each for each in tree.body if not (isinstance(each, ast.FunctionDef) and each.name in (op, "rank_0"))]
        plain = ast.parse(script(found("missing", (call(),), ()), "c")).body
        rest = [
            each for each in plain if not (isinstance(each, ast.FunctionDef) and each.name in ("all_reduce", "rank_0"))
        ]
        assert [ast.dump(each) for each in kept] == [ast.dump(each) for each in rest]
        (made,) = next(each.body for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "rank_0")
        assert ast.unparse(made).startswith((f"{op}((", f"{op}((), "))


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def shrink(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """``shrink(arguments)``: status, standard output and standard error of the command, run in the test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLMCONSOLE_DIR", raising=False)

    def shrink(*arguments: str) -> tuple[int, str, str]:
        status = main(["shrink", *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return shrink


@pytest.fixture
def capsule(tmp_path: Path) -> Path:
    """Four ranks of which rank 2 reduces five elements where the others reduce four, at the third call."""
    path = tmp_path / "odd.capsule"
    with CapsuleWriter(path, title="odd", phase="training", manifest={"run": {"world_size": 4}}) as writer:
        for rank in range(4):
            for seq in (1, 2, 3):
                size = 5 if (rank, seq) == (2, 3) else 4
                writer.record(
                    "collectives",
                    {
                        "rank": rank, "group": "0", "group_ranks": [0, 1, 2, 3], "seq": seq, "order": seq,
                        "op": "all_reduce", "dtype": "float32", "shapes_in": [[size]], "shapes_out": [[size]],
                        "state": "scheduled" if seq == 3 else "completed", "t_created": 1e9 + seq,
                        "frames": [{"name": "step", "file": "train.py", "line": 44}],
                    },
                )  # fmt: skip
    return path


def ring(path: Path, healthy: bool) -> Path:
    """Four ranks that send to the next one; rank 3 leaves its second receive out, unless all is well."""
    with CapsuleWriter(path, title="ring", phase="training", manifest={"run": {"world_size": 4}}) as writer:
        for rank in range(4):
            order = 0
            for turn in (1, 2):
                for op, peer in (("send", (rank + 1) % 4), ("recv", (rank - 1) % 4)):
                    if (rank, op, turn) == (3, "recv", 2) and not healthy:
                        continue
                    late = turn == 2 and not healthy and (rank, op) in ((2, "send"), (0, "recv"))
                    order += 1
                    writer.record(
                        "collectives",
                        {
                            "rank": rank, "group": "0", "group_ranks": [0, 1, 2, 3], "seq": turn, "order": order,
                            "op": op, "peer": peer, "p2p": True, "dtype": "float32", "shapes_in": [[4]],
                            "state": "started" if late else "completed", "t_created": 1e9 + turn,
                        },
                    )  # fmt: skip
            exit = {"kind": "ok" if healthy else "hang", "t": 1e9 + 700}
            writer.record("ranks", {"rank": rank, "steps": 2} | ({"exit": exit} if healthy or rank == 2 else {}))
    return path


class TestTheCommand:
    @pytest.mark.parametrize(
        ("healthy", "words"),
        [
            (False, "distributed/missing-rank was found, but no script can be made of it: what is at fault is a send"),
            (True, "ranks that made different calls or left one out were not found"),
        ],
    )
    def test_a_fault_among_sends_is_said_to_be_one(self, shrink: Run, tmp_path: Path, healthy: bool, words: str):
        path = ring(tmp_path / "ring.capsule", healthy)
        status, _, said = shrink(str(path))
        assert (status, words in said) == (2, True), said
        grid = ranks(str(path), columns=9, rows=9)
        assert grid.note.endswith(" sends and receives are not in the grid" if healthy else "at fault is among them")

    def test_prints_the_script_or_writes_it(self, shrink: Run, capsule: Path, tmp_path: Path):
        status, printed, _ = shrink(str(capsule))
        assert status == 0
        compile(printed, "printed", "exec")
        assert shrink(str(capsule), "-o", "again.py")[:2] == (0, "again.py\n")
        assert (tmp_path / "again.py").read_text() == printed

    def test_a_file_that_is_there_is_replaced_only_by_force(self, shrink: Run, capsule: Path, tmp_path: Path):
        mine = tmp_path / "mine.py"
        mine.write_text("mine")
        refusal = "llmconsole: mine.py is there already; --force replaces it\n"
        assert shrink(str(capsule), "-o", "mine.py") == (2, "", refusal)
        assert mine.read_text() == "mine"
        assert shrink(str(capsule), "-o", "mine.py", "--force")[0] == 0
        assert "dist.all_reduce" in mine.read_text()

    def test_the_document_is_the_golden_one(self, shrink: Run, capsule: Path):
        document = json.loads(shrink(str(capsule), "--json")[1])
        assert document["script"].startswith("# Two ranks")
        document |= {"capsule": "odd.capsule", "script": "SCRIPT"}
        if UPDATE:
            GOLDEN.write_text(json.dumps(document, indent=2) + "\n")
        assert document == json.loads(GOLDEN.read_text())

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["healthy.capsule"], "healthy.capsule: ranks that made different calls or left one out were not found"),
            (["healthy.capsule", "--entry", "m:f"], "shrinking by running your own code (--entry) comes in a later"),
            (["nowhere.capsule"], "nowhere.capsule: no such file or directory"),
            (["odd.capsule", "-o", "no/where.py"], "no/where.py: cannot be written (No such file or directory)"),
            (["."], ".: holds 2 jobs; name one of them"),
        ],
    )
    def test_what_cannot_be_done_is_said_in_a_line(
        self, arguments: list[str], words: str, shrink: Run, capsule: Path, tmp_path: Path
    ):
        with CapsuleWriter(tmp_path / "healthy.capsule", title="healthy") as writer:
            writer.scalars("loss", step=[0, 1, 2], value=[2.5, 2.4, 2.3], rank=0)
        status, printed, said = shrink(*arguments)
        assert (status, printed) == (2, "")
        (line,) = said.splitlines()
        assert words in line
