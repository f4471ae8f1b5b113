"""Logs as jobs leave them: torn, coloured, interleaved, full of other programs' lines, and very long."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmconsole.capsules import Capsule
from llmconsole.capsules.importers import import_files, recognise, text_log

from .conftest import Imports, Points, Source, Trained, notes, points, values

MIXED = Path(__file__).parent / "fixtures" / "mixed.log"
CUTS = 50


def cut_everywhere(path: Path, tmp_path: Path, most: int = 1 << 30, *, bars: bool = False) -> None:
    """Of a file cut at random places, all points of its complete lines are read, and nothing else happens."""
    data = path.read_bytes()[:most]
    target = tmp_path / "cut.log"
    target.write_bytes(data)
    whole = points(text_log, target)
    everything = Counter(whole)
    random_ = random.Random(path.name)
    for _ in range(CUTS):
        at = random_.randrange(1, len(data))
        target.write_bytes(data[: data.rfind(b"\n", 0, at) + 1])
        complete = points(text_log, target)
        target.write_bytes(data[:at])
        read = points(text_log, target)
        assert not Counter(complete) - Counter(read), at
        # Of a bar that is painted again the last painting counts, which a cut may have taken away.
        assert bars or not Counter(complete) - everything, at


class TestCutAnywhere:
    def test_lines_of_every_program(self, tmp_path: Path):
        cut_everywhere(MIXED, tmp_path, bars=True)

    def test_the_trainers_real_output(self, trained: Trained, tmp_path: Path):
        cut_everywhere(trained.log, tmp_path)

    @pytest.mark.parametrize(
        "name", ["torchtitan/autoresearch/run35.log", "llm.c/main.log", "bigscience/meg_ds_3d_gpt2_perf_n16-ds-on.out"]
    )
    def test_real_logs(self, real: Path, tmp_path: Path, name: str):
        cut_everywhere(real / "text_logs" / name, tmp_path, most=24_000)

    def test_through_the_writer_too(self, tmp_path: Path):
        data = MIXED.read_bytes()
        random_ = random.Random(0)
        for turn in range(10):
            path = tmp_path / f"{turn}.log"
            path.write_bytes(data[: random_.randrange(300, len(data))])
            capsule = Capsule.open(import_files([path], tmp_path / "out", attach=False))
            assert values(capsule, "model.parameters") == []
            assert not capsule.damage()


class TestOddBytes:
    def test_a_torn_last_line_is_left_out_and_said(self, imported: Imports):
        capsule = imported("s:1 trl:9.5\ns:2 trl:9.4")  # was to become 9.4127, or 9.4 e9
        assert values(capsule, "loss") == [(1, 9.5)]
        assert "no end" in notes(capsule)

    def test_a_last_line_that_is_closed_is_complete(self, imported: Imports):
        assert values(imported("{'loss': 1.5, 'epoch': 0.5}"), "loss") == [(1, 1.5)]

    def test_nul_bytes_and_carriage_returns(self, imported: Imports):
        capsule = imported(b"s:1 trl:9.5\r\n\0\0\0\0s:2 tr\0l:9.4\n\0\0")
        assert values(capsule, "loss") == [(1, 9.5), (2, 9.4)]
        assert "NUL" in notes(capsule)

    def test_utf_16_of_another_shell(self, imported: Imports):
        assert values(imported("s:1 trl:9.5\r\ns:2 trl:9.4\r\n".encode("utf-16")), "loss") == [(1, 9.5), (2, 9.4)]

    def test_a_very_long_line_costs_itself_only(self, imported: Imports):
        capsule = imported("s:1 trl:9.5\n" + "loss step " * 300_000 + "\ns:2 trl:9.4\n")
        assert values(capsule, "loss") == [(1, 9.5), (2, 9.4)]
        assert "cut" in notes(capsule)

    def test_steps_beyond_any_count_are_left_out(self, imported: Imports):
        capsule = imported("s:99999999999999999999999 trl:1.0\ns:3 trl:2.0\n")
        assert values(capsule, "loss") == [(3, 2.0)]

    def test_text_that_quotes_a_log_in_json_is_no_log(self, tmp_path: Path):
        path = tmp_path / "chat.json"
        path.write_text(
            '{"messages": [{"content": "s:1 trl:9.5 \\n step 3 loss 2.0 Traceback (most recent call last):"}]}'
        )
        assert recognise(path) is None

    def test_numbers_that_grep_puts_before_lines_are_no_ranks(self, imported: Imports):
        capsule = imported("853: s:1 trl:9.5\n863: s:2 trl:9.4\n865: s:3 trl:9.3\n")
        assert values(capsule, "loss", rank=0) == [(1, 9.5), (2, 9.4), (3, 9.3)]

    def test_the_time_a_container_puts_before_lines_is_theirs(self, imported: Imports):
        capsule = imported("2026-05-01T12:00:00.500000000Z s:1 trl:9.5\n2026-05-01T12:00:01.5Z s:2 trl:9.4\n")
        assert values(capsule, "loss") == [(1, 9.5), (2, 9.4)]
        time_ = capsule.scalars("loss").time
        assert time_ is not None
        assert time_[1] - time_[0] == 1.0

    def test_prose_is_no_log(self, tmp_path: Path):
        path = tmp_path / "README"
        path.write_text("The loss is computed in a later step. Run train.py for 100 iterations.\n" * 50)
        assert recognise(path) is None


class TestAnyText:
    LINES = MIXED.read_text().splitlines()

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_no_line_however_damaged_stops_the_reading(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ):
        lines: list[str] = []
        for line in data.draw(st.lists(st.sampled_from(self.LINES), max_size=8)):
            at = data.draw(st.integers(0, len(line)))
            until = data.draw(st.integers(at, len(line)))
            lines.append(line[:at] + data.draw(st.text(max_size=6)) + line[until:])
        path = tmp_path_factory.getbasetemp() / "any.log"
        path.write_bytes("\n".join([*lines, "s:7 trl:1.25", ""]).encode("utf-8", "surrogatepass"))
        found = Points()
        text_log.read(Source(path), found)
        assert ("loss", 0, 7, "1.25") in found.found

    @settings(max_examples=30, deadline=None)
    @given(st.binary(max_size=400))
    def test_no_bytes_stop_it_either(self, tmp_path_factory: pytest.TempPathFactory, noise: bytes):
        path = tmp_path_factory.getbasetemp() / "noise.log"
        path.write_bytes(noise)
        text_log.sniff(Source(path))
        text_log.read(Source(path), Points())


class TestLongLogs:
    def test_memory_does_not_grow_with_the_file(self, tmp_path: Path):
        line = (
            " iteration {step:8d}/ 8000000 | consumed samples: 216640 | elapsed time per iteration (ms): 7624.3 | "
            "learning rate: 6.676E-06 | lm loss: 7.072597E-01 | loss scale: 1.0 | grad norm: 0.741 | "
            "number of nan iterations:   0 |\n"
        )
        small, large = tmp_path / "small.log", tmp_path / "large.log"
        small.write_text("".join(line.format(step=step) for step in range(12_000)))
        large.write_text("".join(line.format(step=step) for step in range(30_000)))
        program = """
            import sys
            from llmconsole.capsules import Capsule
            from llmconsole.capsules.importers import import_files
            peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
            import_files([sys.argv[1]], sys.argv[3], attach=False)
            before = peak()
            path = import_files([sys.argv[2]], sys.argv[3], attach=False)
            grown = peak() - before
            print(grown, len(Capsule.open(path).scalars("loss")))
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), str(small), str(large), str(tmp_path / "out")],
            capture_output=True,
            text=True,
            check=True,
        )
        grown, kept = done.stdout.split()
        assert int(kept) == 30_000
        assert float(grown) < 4  # MiB, for 5 MB more of text and 5 MB more of rows
