"""Event files: what TensorBoard's own reader finds in them is found, and what is torn costs nothing before it."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llmconsole.capsules import Capsule, EvidenceError
from llmconsole.capsules.importers import import_files, recognise
from llmconsole.capsules.importers.crc32c import crc32c, masked, masked_crc32c
from llmconsole.capsules.importers.tfrecord import Losses, pieces
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

REAL = Path(__file__).resolve().parents[4] / "shared" / "real" / "tensorboard"
STEPS = (0, 1, 5, 127, 128, 129, 16_383, 16_384, 2**21, 2**31, 2**40, 7, 7)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of torch's SummaryWriter: odd steps and values, a text, a histogram, two tags in turns."""
    folder = tmp_path_factory.mktemp("tensorboard")
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("note", "a text")
        for number, step in enumerate(STEPS):
            value = float("nan") if number == 3 else float("inf") if number == 4 else 3.0 / (number + 1)
            writer.add_scalar("train/loss", value, step, walltime=1000.0 + number)
            writer.add_scalar("my/metric", -value, step, walltime=2000.0 + number)
        writer.add_histogram("weights", np.arange(10.0), 3)
        writer.add_scalar("train/loss", 0.5, 2**40 + 1)
    return next(folder.iterdir())


def imported(tmp_path: Path, *files: Path) -> Capsule:
    return Capsule.open(import_files(files, tmp_path, attach=False))


def notes(capsule: Capsule) -> str:
    return "; ".join(note for file in capsule.manifest.raw["imported"]["files"] for note in file["notes"])


def write(path: Path, *events: Event) -> Path:
    """An event file by TensorBoard's own record writer."""
    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())
        for event in events:
            writer.write(event.SerializeToString())
    return path


def scalar(tag: str, step: int, value: float) -> Event:
    return Event(wall_time=10.0 + step, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))


def boundaries(data: bytes) -> Iterator[int]:
    """Where the records of a sound file begin, and where the last one ends."""
    at = 0
    while at < len(data):
        yield at
        at += struct.unpack_from("<Q", data, at)[0] + 16
    yield at


def test_the_checksum_is_that_of_the_standard() -> None:
    check = np.frombuffer(b"123456789", np.uint8)[None, :]
    assert int(crc32c(check)[0]) == 0xE3069283  # the check value of CRC-32C


@pytest.mark.parametrize("length", [0, 1, 3, 4, 8, 61, 1023, 1024, 1026, 3000])
def test_checksums_of_many_rows_are_those_of_tensorboards_own_code(length: int) -> None:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as theirs

    rows = np.random.default_rng(length).integers(0, 256, (2, length)).astype(np.uint8)
    expected = [theirs(row.tobytes()) for row in rows]
    assert [masked_crc32c(row.tobytes()) for row in rows] == expected
    assert masked(crc32c(np.repeat(rows, 40, axis=0))).tolist() == [each for each in expected for _ in range(40)]


def test_every_point_that_tensorboards_reader_finds_is_found(written: Path, tmp_path: Path) -> None:
    theirs = EventAccumulator(str(written), size_guidance={"scalars": 0})
    theirs.Reload()
    capsule = imported(tmp_path, written)
    assert {key.name for key in capsule.scalar_keys()} == {"loss", "my/metric"}
    for tag, name in (("train/loss", "loss"), ("my/metric", "my/metric")):
        points = sorted(theirs.Scalars(tag), key=lambda point: point.step)  # a series is in step order
        series = capsule.scalars(name)
        assert series.step.tolist() == [point.step for point in points]
        np.testing.assert_array_equal(series.value, [point.value for point in points])
        assert series.time is not None
        np.testing.assert_array_equal(series.time, [point.wall_time for point in points])
    assert capsule.manifest.config == {"note": "a text"}
    assert "histogram values are not imported" in notes(capsule)


def test_a_run_that_went_back_keeps_both_values_of_a_step(written: Path, tmp_path: Path) -> None:
    series = imported(tmp_path, written).scalars("loss")
    assert series.value[series.step == 7].tolist() == pytest.approx([3.0 / 12, 3.0 / 13])


def test_scalars_written_as_tensors_are_read_in_each_dtype(tmp_path: Path) -> None:
    def event(tag: str, tensor: TensorProto) -> Event:
        tensor.tensor_shape.CopyFrom(TensorShapeProto())
        return Event(wall_time=1.0, step=3, summary=Summary(value=[Summary.Value(tag=tag, tensor=tensor)]))

    path = write(
        tmp_path / "events",
        event("float list", TensorProto(dtype=1, float_val=[0.5])),
        event("float bytes", TensorProto(dtype=1, tensor_content=struct.pack("<f", 0.25))),
        event("double list", TensorProto(dtype=2, double_val=[0.1])),
        event("double bytes", TensorProto(dtype=2, tensor_content=struct.pack("<d", 0.2))),
        event("half", TensorProto(dtype=19, tensor_content=struct.pack("<e", 1.5))),
        event("bfloat16", TensorProto(dtype=14, tensor_content=b"\x80\x3f")),
        event("int64", TensorProto(dtype=9, int64_val=[-7])),
        event("int32 bytes", TensorProto(dtype=3, tensor_content=struct.pack("<i", -9))),
        Event(
            wall_time=1.0,
            step=3,
            summary=Summary(
                value=[
                    Summary.Value(
                        tag="a vector",
                        tensor=TensorProto(
                            dtype=1,
                            float_val=[1.0, 2.0],
                            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=2)]),
                        ),
                    )
                ]
            ),
        ),
    )
    capsule = imported(tmp_path / "out", path)
    found = {key.name: capsule.scalars(key.name).value.tolist() for key in capsule.scalar_keys()}
    assert found == {
        "float list": [0.5],
        "float bytes": [0.25],
        "double list": [0.1],
        "double bytes": [0.2],
        "half": [1.5],
        "bfloat16": [1.0],
        "int64": [-7.0],
        "int32 bytes": [-9.0],
    }


def test_several_values_of_one_event_are_all_read(tmp_path: Path) -> None:
    events = [
        Event(
            wall_time=1.0,
            step=step,
            summary=Summary(value=[Summary.Value(tag=f"tag {at}", simple_value=step + at / 4) for at in range(3)]),
        )
        for step in range(300)
    ]
    capsule = imported(tmp_path / "out", write(tmp_path / "events", *events))
    for at in range(3):
        assert capsule.scalars(f"tag {at}").value.tolist() == [step + at / 4 for step in range(300)]


def test_units_and_names_of_known_producers_become_standard(tmp_path: Path) -> None:
    tags = (
        "loss_metrics/global_avg_loss",
        "memory/max_reserved(GiB)",
        "throughput(tps)",
        "iteration-time",
        "throughput",
    )
    capsule = imported(tmp_path / "out", write(tmp_path / "events", *(scalar(tag, 1, 2.0) for tag in tags)))
    found = {key.name: (key.unit, capsule.scalars(key.name).value[0]) for key in capsule.scalar_keys()}
    assert found == {
        "loss": ("nats/token", 2.0),
        "memory_reserved": ("B", 2.0 * 2**30),
        "throughput": ("tokens/s", 2.0),
        "step_time": ("s", 2.0),
        "throughput (TFLOP/s/GPU)": ("TFLOP/s/GPU", 2.0),  # Megatron's is no number of tokens
    }


def test_two_tags_of_one_meaning_do_not_share_a_series(tmp_path: Path) -> None:
    path = write(tmp_path / "events", scalar("loss", 1, 2.0), scalar("train/loss", 1, 3.0))
    capsule = imported(tmp_path / "out", path)
    assert capsule.scalars("loss").value.tolist() == [2.0]
    assert capsule.scalars("train/loss").value.tolist() == [3.0]


def test_the_order_and_the_size_in_which_the_file_arrives_do_not_matter(written: Path) -> None:
    data = written.read_bytes()

    def rows(size: int) -> list[bytes]:
        chunks = [data[at : at + size] for at in range(0, len(data), size)]
        return sorted(bytes(row) for groups in pieces(chunks, Losses()) for group in groups for row in group.rows)

    assert rows(1) == rows(7) == rows(len(data))


def test_cut_anywhere_it_keeps_all_whole_records(written: Path, tmp_path: Path) -> None:
    data = written.read_bytes()
    ends = list(boundaries(data))
    everything = imported(tmp_path / "whole", written)
    total = sum(len(everything.scalars(key.name)) for key in everything.scalar_keys())
    # The first records are the version, the text and one event a point; the histogram stands before the last.
    points_at = [0, 0, 0, *range(1, total), total - 1, total]
    assert len(points_at) == len(ends)
    random.seed(4)
    for number in range(50):
        cut = random.randrange(len(data))
        path = tmp_path / f"cut-{number}"
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends) - 1
        try:
            capsule = imported(tmp_path / "out", path)
        except EvidenceError:
            assert whole == 0
            continue
        kept = sum(len(capsule.scalars(key.name)) for key in capsule.scalar_keys())
        assert kept == points_at[whole]
        assert ("the last record is torn" in notes(capsule)) == (cut not in ends)


def test_a_damaged_payload_costs_its_own_point_and_is_noted(tmp_path: Path) -> None:
    path = write(tmp_path / "events", *(scalar("loss", step, float(step)) for step in range(20)))
    data = bytearray(path.read_bytes())
    at = list(boundaries(bytes(data)))[8]  # the version, then steps 0 to 6
    data[at + 20] ^= 0x40
    path.write_bytes(data)
    capsule = imported(tmp_path / "out", path)
    assert capsule.scalars("loss").step.tolist() == [step for step in range(20) if step != 7]
    assert "damaged records" in notes(capsule)


def test_after_a_damaged_length_the_next_record_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "events", *(scalar("loss", step, float(step)) for step in range(20)))
    data = bytearray(path.read_bytes())
    at = list(boundaries(bytes(data)))[8]
    data[at : at + 8] = b"\xff" * 8
    path.write_bytes(data)
    capsule = imported(tmp_path / "out", path)
    assert capsule.scalars("loss").step.tolist() == [step for step in range(20) if step != 7]
    assert "damaged records" in notes(capsule)


@pytest.mark.parametrize(
    "tail", [bytes(300_000), random.Random(1).randbytes(300_000), b"\xff" * 9], ids=["zeros", "random", "short"]
)
def test_garbage_behind_the_records_costs_none_of_them(tmp_path: Path, tail: bytes) -> None:
    path = write(tmp_path / "events", scalar("loss", 1, 2.0))
    path.write_bytes(path.read_bytes() + tail)
    assert imported(tmp_path / "out", path).scalars("loss").value.tolist() == [2.0]


def test_files_of_a_restarted_run_are_one_series(tmp_path: Path) -> None:
    first = write(tmp_path / "events.1", *(scalar("loss", step, 10.0 + step) for step in range(5)))
    second = write(tmp_path / "events.2", *(scalar("loss", step, 20.0 + step) for step in range(3, 7)))
    capsule = imported(tmp_path / "out", first, second)
    series = capsule.scalars("loss")
    assert series.step.tolist() == [0, 1, 2, 3, 3, 4, 4, 5, 6]
    assert series.value[3:7].tolist() == [13.0, 23.0, 14.0, 24.0]
    assert [event["step"] for event in capsule.records("events")] == [3]


def test_a_file_of_training_records_is_no_event_file(tmp_path: Path) -> None:
    path = tmp_path / "data.tfrecord"
    with path.open("wb") as file:
        RecordWriter(file).write(b"\x0a\x03abc")
    assert recognise(path) is None


def test_megatrons_file_of_a_job_that_died_early_says_so(tmp_path: Path) -> None:
    found = sorted((REAL / "megatron").glob("*")) if REAL.is_dir() else []
    if not found:
        pytest.skip("no ../shared/real/tensorboard")
    capsule = imported(tmp_path, found[0])
    assert not capsule.scalar_keys()
    assert "before its first report" in capsule.records("events")[0]["message"]


def test_megatrons_file_has_each_metric_by_step_and_by_samples(tmp_path: Path) -> None:
    found = sorted((REAL / "megatron").glob("*")) if REAL.is_dir() else []
    if not found:
        pytest.skip("no ../shared/real/tensorboard")
    capsule = imported(tmp_path, found[1])
    loss, by_samples = capsule.scalars("loss"), capsule.scalars("lm loss vs samples")
    assert loss.step.tolist() == [1, 2, 3, 4, 5, 6]
    assert by_samples.step.tolist() == [16, 32, 48, 64, 80, 96]
    assert loss.value.tolist() == by_samples.value.tolist()
    training, model = capsule.manifest.training, capsule.manifest.model
    assert training is not None
    assert model is not None
    assert (training.precision, training.accumulation_steps, training.micro_batch) == ("bf16-mixed", 2, 2)
    assert (model.layers, model.hidden, model.heads, model.tied_embeddings) == (2, 2048, 20, False)


def test_trackios_file_is_read(tmp_path: Path) -> None:
    if not REAL.is_dir():
        pytest.skip("no ../shared/real/tensorboard")
    capsule = imported(tmp_path, next((REAL / "trackio").iterdir()))
    np.testing.assert_allclose(capsule.scalars("loss").value, 1 / np.arange(1, 11), rtol=1e-6)
    assert len(capsule.scalars("accuracy")) == 10
