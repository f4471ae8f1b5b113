"""The format's document is enough: a writer and a reader made from it alone agree with ours."""

import json
import re
import struct
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from llmconsole import capsules
from llmconsole.capsules import Capsule, CapsuleWriter

DOCUMENT = (Path(capsules.__file__).parent / "README.md").read_text()
#: The two worked examples: scalars, then a norm.
EXAMPLES = [bytes.fromhex("".join(each.split())) for each in re.findall(r"```\n((?:[0-9a-f]{2}[ \n])+)```", DOCUMENT)]


def line(**record) -> bytes:
    """A JSON line as the document describes it."""
    body = json.dumps(record, separators=(",", ":"))[:-1] + ","
    return f'{body}"crc32":"{zlib.crc32(body.encode()):08x}"}}\n'.encode()


def block(kind: int, rows: list[bytes], order: int = 0, step: int = 0) -> bytes:
    """A block as the document describes it."""
    rest = struct.pack("<HHIIq", kind, len(rows[0]), len(rows), order, step) + b"".join(rows)
    return b"LCBK" + struct.pack("<I", zlib.crc32(rest)) + rest


class TestExamples:
    def test_the_first_is_two_scalars_of_step_3(self):
        header, rows = EXAMPLES[0][:28], EXAMPLES[0][28:]
        assert struct.unpack("<4sIHHIIq", header)[2:] == (1, 28, 2, 0, 0)
        assert zlib.crc32(EXAMPLES[0][8:]) == struct.unpack("<I", header[4:8])[0]
        first, second = struct.iter_unpack("<Iqdd", rows)
        assert first[:3] == (0, 3, 2.5)
        assert np.isnan(first[3])
        assert second == (1, 3, float("inf"), 1_700_000_000.0)

    def test_the_second_is_a_norm_of_step_3_and_order_17(self):
        rows = [struct.pack("<Ihhd", 4, 0, 0, 12.0)]
        assert EXAMPLES[1] == block(3, rows, order=17, step=3)

    def test_our_writer_writes_them(self, path):
        with CapsuleWriter(path) as w:
            w.norms(0, [(f"n{at}", "activation", "f", (1,), 0.0, 0, 0) for at in range(4)])
            w.norms(3, [("x", "activation", "float32", (4, 4), 12.0, 0, 0)], order=17)
        assert (path / "ranks/rank00000/stats.bin").read_bytes().endswith(EXAMPLES[1])

    def test_the_lines_carry_the_checksum_they_should(self):
        examples = re.findall(r'^(\{.*"crc32":"[0-9a-f]{8}"\})$', DOCUMENT, re.MULTILINE)
        assert len(examples) == 3
        for example in examples:
            record = json.loads(example)
            record.pop("crc32")
            assert line(**record).decode().strip() == example


def test_a_capsule_written_from_the_document_alone_is_read(path):
    rank = path / "ranks/rank00012"
    (rank / "records").mkdir(parents=True)
    (rank / "arrays").mkdir()
    manifest = {"format": "llmconsole.capsule/1", "id": "X", "title": "by hand", "status": "sealed", "trigger": None}
    (path / "capsule.json").write_text(json.dumps(manifest))
    (rank / "rank.json").write_text(json.dumps({"format": "llmconsole.rank/1", "rank": 12, "status": "sealed"}))
    names = [
        {"id": 0, "table": "scalars", "name": "loss", "unit": "nats/token"},
        {
            "id": 9,
            "table": "stats",
            "name": "l0",
            "role": "activation",
            "dtype": "bfloat16",
            "shape": [4, 4],
            "unit": None,
        },
    ]
    (rank / "names.jsonl").write_bytes(
        b"".join(line(**each) for each in names) + b'{"id":7,"table":"stats","name":"u"}\n'
    )
    # A wider row of a later version, and a block of a kind nobody knows yet.
    wide = struct.pack("<Iqdd", 0, 5, 1.5, 2.0) + b"later"
    (rank / "scalars.bin").write_bytes(block(1, [wide]) + block(77, [b"new"]) + EXAMPLES[0])
    full = struct.pack("<Iiiiq6q7d", 9, 3, -1, -1, 6, 16, 1, -1, -1, -1, -1, -1.0, 2.0, 2.0, 1.0, 0.5, 0.1, 0.7)
    bins = [struct.pack("<Iiiiqiq", 9, 3, -1, -1, 6, exponent, 10 + exponent) for exponent in (-2, 1)]
    norms = [struct.pack("<Ihhd", 9, 0, 0, 8.0), struct.pack("<Ihhd", 7, 0, 1, float("inf"))]
    (rank / "stats.bin").write_bytes(block(2, [full]) + block(4, bins) + block(3, norms, order=1, step=6))
    (rank / "records/events.jsonl").write_bytes(line(kind="log", t="NaN") + b'{"kind": "oom", "free": 3}\n')
    description = {
        "kind": "tensor",
        "step": 6,
        "name": "attention/q",
        "arrays": {"data": {"dtype": "bfloat16", "shape": [2]}, "none": {"dtype": "int8", "shape": [0, 3]}},
        "attributes": {"causal": True},
    }
    with h5py.File(rank / "arrays/6-0.h5", "w") as file:
        raw = np.frombuffer(json.dumps(description).encode(), np.uint8)
        file.create_dataset("description", data=raw, chunks=True, fletcher32=True)
        bits = np.array([0x3F80, 0xFF80], "<u2")  # 1.0 and -Inf
        file.create_dataset("arrays/data", data=bits, chunks=True, fletcher32=True)
    content = (rank / "arrays/6-0.h5").read_bytes()
    index = description | {"file": "6-0.h5", "bytes": len(content), "checksum": f"{zlib.crc32(content):08x}"}
    (rank / "arrays.jsonl").write_bytes(line(**index))

    c = Capsule.open(path)
    assert (c.title, c.status, c.ranks, c.trigger) == ("by hand", "sealed", (12,), None)
    loss = c.scalars("loss")
    assert loss.step.tolist() == [3, 5]
    assert loss.value.tolist() == [2.5, 1.5]
    stats = c.stats()
    assert stats.order.tolist() == [1, 2, 3]
    assert stats.rms.tolist() == [8.0 / 4.0, float("inf"), 0.7]
    assert stats.nan.tolist() == [-1, -1, 1]
    assert stats.name.tolist() == ["l0", "u", "l0"]
    assert stats.log2_histogram == [None, None, {-2: 8, 1: 11}]
    first, second = c.records("events")
    assert np.isnan(first["t"])
    assert (second["free"], second["rank"]) == (3, 12)
    (tensor,) = c.tensors("attention/q")
    assert tensor.array().tolist() == [1.0, -float("inf")]
    assert tensor.attributes == {"causal": True}
    # id 1 of the example has no name here
    assert [each.lost for each in c.damage()] == ["1 rows of 1 ids"]


def test_what_our_writer_writes_is_what_the_document_says(path):
    with CapsuleWriter(path, manifest={"mine": float("nan")}) as w:
        w.scalar_row(3, {"loss": 2.5, "x": float("inf")})
        w.record("requests", {"ttft": float("-inf")})
        w.tensor("a/b", np.arange(6, dtype=np.int16).reshape(2, 3), step=3, order=1)
    rank = path / "ranks/rank00000"
    assert json.loads((path / "capsule.json").read_text())["mine"] == "NaN"
    for name in ("names.jsonl", "records/requests.jsonl", "arrays.jsonl"):
        for each in (rank / name).read_bytes().splitlines(keepends=True):
            assert each[-20:-11] == b'"crc32":"'
            assert int(each[-11:-3], 16) == zlib.crc32(each[:-20])
    assert (rank / "scalars.bin").read_bytes() == block(
        1, [struct.pack("<Iqdd", 0, 3, 2.5, float("nan")), struct.pack("<Iqdd", 1, 3, float("inf"), float("nan"))]
    )
    index = json.loads((rank / "arrays.jsonl").read_text())
    content = (rank / "arrays" / index["file"]).read_bytes()
    assert (index["bytes"], index["checksum"]) == (len(content), f"{zlib.crc32(content):08x}")
    with h5py.File(rank / "arrays" / index["file"]) as file:
        assert set(file) == {"arrays", "description"}
        assert json.loads(file["description"][...].tobytes())["arrays"]["data"]["shape"] == [2, 3]
        assert file["arrays/data"].fletcher32
        assert file["arrays/data"][...].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("word", ["2,000,000", "16,384", "4,096", "20 entries"])
def test_the_limits_in_the_document_are_those_of_the_code(word):
    from llmconsole.capsules import limits

    values = {f"{value:,}" for value in vars(limits).values() if isinstance(value, int)}
    assert word in DOCUMENT
    assert word.split()[0] in values
