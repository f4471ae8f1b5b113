"""Files of the four structured formats with bytes changed at random: one clear line, or what could be read."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from llmconsole.capsules import EvidenceError
from llmconsole.capsules.importers import import_job
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


def events(path: Path) -> None:
    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())
        for step in range(60):
            value = Summary.Value(tag="loss" if step % 2 else "a longer tag", simple_value=step / 8)
            writer.write(Event(wall_time=2.0, step=step, summary=Summary(value=[value])).SerializeToString())


def run_file(path: Path) -> None:
    """A W&B file by hand: a run record, then rows of history with a step, a loss and a text."""
    from struct import pack
    from zlib import crc32

    def field(number: int, content: bytes) -> bytes:
        assert len(content) < 128
        return bytes([number << 3 | 2, len(content)]) + content

    def item(key: bytes, value: bytes) -> bytes:
        return field(1, field(1, key) + b"\x82\x01" + bytes([len(value)]) + value)  # field 16 is value_json

    bodies = [b"\x08\x01\x8a\x01\x05" + field(1, b"abc")]
    for step in range(50):
        row = item(b"_step", b"%d" % step) + item(b"loss", b"%.3f" % (3 / (step + 1))) + item(b"note", b'"text"')
        bodies.append(b"\x08" + bytes([step + 2]) + field(2, row))
    parts = (pack("<IHB", crc32(body, crc32(b"\x01")), len(body), 1) + body for body in bodies)
    path.write_bytes(b":W&B\xe1\xbe\x00" + b"".join(parts))


def state(path: Path) -> None:
    rows = [{"epoch": step / 10, "loss": 3.5 - step / 20, "step": step} for step in range(40)]
    path.write_text(json.dumps({"global_step": 39, "log_history": rows, "max_steps": 40}, indent=2))


def golden(path: Path) -> None:
    values = {str(step): 10.5 - step / 8 for step in range(40)}
    path.write_text(json.dumps({"lm loss": {"start_step": 0, "step_interval": 1, "values": values}}, indent=2))


@pytest.mark.parametrize("make", [events, run_file, state, golden])
def test_changed_bytes_are_one_clear_line_or_less_evidence(make, tmp_path: Path) -> None:
    path = tmp_path / "file"
    make(path)
    sound = path.read_bytes()
    assert not import_job([path], tmp_path / "sound", attach=False).problems
    random.seed(8)
    for _ in range(25):
        data = bytearray(sound)
        for _ in range(random.choice((1, 1, 3, 20))):
            at = random.randrange(len(data))
            kind = random.randrange(4)
            if kind == 0:
                data[at] = random.randrange(256)
            elif kind == 1:
                data[at : at + 1] = random.randbytes(random.randrange(12))
            elif kind == 2:
                del data[at : at + random.randrange(40)]
            else:
                data[at:at] = data[max(0, at - 30) : at]
            data = data or bytearray(b"\0")
        path.write_bytes(data)
        try:
            problems = import_job([path], tmp_path / "out", attach=False).problems
        except EvidenceError as error:
            problems = (str(error),)
        assert not any("unexpected" in problem for problem in problems), problems
