"""Damaged and hostile capsules: one clear sentence or a damage entry, never anything else."""

import json
import os
import random
import shutil
import struct
from pathlib import Path
from zlib import crc32

import h5py
import numpy as np
import pytest
from llmconsole.capsules import Capsule, CapsuleWriter, EvidenceError
from llmconsole.capsules.blocks import HEADER, decode_table
from llmconsole.capsules.lines import decode_lines

IDS = np.arange(400).reshape(4, 100)
RANK = Path("ranks/rank00000")


def exercise(path) -> tuple:
    """Touch everything a capsule offers; return its damage. Only EvidenceError may leave it."""
    c = Capsule.open(path)
    for batch in c.batches():
        for name in batch.arrays:
            batch.array(name)
    for tensor in c.tensors():
        try:
            tensor.array()
        except EvidenceError as error:
            assert_one_line(error)
    for key in c.scalar_keys():
        c.scalars(key.name, rank=key.rank, side=key.side)
    stats = c.stats()
    _ = stats.name, stats.numel, stats.nonfinite, stats.shape, stats.log2_histogram, stats.mean
    for stream in c.record_streams():
        c.records(stream)
    for step in c.rng_steps():
        c.rng(step)
    assert c.status in ("recording", "sealed", "crashed", "stale")
    assert all(isinstance(each.present, bool) for each in c.replay_items())
    c.has("manifest.training.optimizer.lr|records.events.kind|stats.gradient")
    try:
        c.digest()
    except EvidenceError as error:
        assert_one_line(error)
    c.inventory()
    for entry in c.damage():
        assert "\n" not in entry.what + entry.where + entry.lost
    return c.damage()


def assert_one_line(error: EvidenceError) -> None:
    assert str(error)
    assert "\n" not in str(error)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Path:
    """A small capsule with everything in it."""
    path = tmp_path_factory.mktemp("healthy") / "run.capsule"
    with CapsuleWriter(path, title="t", manifest={"model": {"layers": 2}, "config": {"a": [1, 2]}}) as w:
        for step in range(20):
            w.scalar_row(step, {"loss": step / 2, "grad_norm": 1.0}, time=float(step))
            w.norms(step, [(f"l{at}", "activation", "float16", (2, 12), 1.0, 0, 0) for at in range(20)])
            w.record("events", {"step": step, "kind": "optimizer_step"})
        w.stats([{"step": 1, "name": "w", "role": "parameter", "shape": [3], "log2_histogram": {1: 2}}])
        w.batch(step=3, input_ids=IDS, labels=IDS, sample_ids=list("abcd"))
        w.tensor("attention/q", np.ones((50, 40), np.float32), step=3)
        w.rng(step=3, python=random.Random(0).getstate(), torch=b"\x01" * 500)
        w.attach("train.log", kind="log", data=b"line\n" * 100)
    assert exercise(path) == ()
    return path


@pytest.fixture
def capsule(healthy, path) -> Path:
    shutil.copytree(healthy, path)
    return path


def edit_manifest(path, **fields) -> None:
    raw = json.loads((path / "capsule.json").read_text())
    (path / "capsule.json").write_text(json.dumps(raw | fields))


class TestDamagedFiles:
    @pytest.mark.parametrize("name", ["scalars.bin", "stats.bin"])
    def test_a_flipped_bit_costs_one_block_and_the_rest_is_read(self, capsule, name):
        file = capsule / RANK / name
        data = bytearray(file.read_bytes())
        block = len(data) // 20 if name == "scalars.bin" else HEADER.size + 20 * 16
        data[block * 7 + 40] ^= 0x10
        file.write_bytes(data)
        c = Capsule.open(capsule)
        if name == "scalars.bin":
            assert c.scalars("loss").step.tolist() == [at for at in range(20) if at != 7]
        else:
            assert sorted(set(c.stats(role="activation").step.tolist())) == [at for at in range(20) if at != 7]
        (damage,) = exercise(capsule)
        assert damage.what == "a block is damaged"
        assert damage.where == f"{RANK}/{name} at byte {block * 7:,}"
        assert damage.lost == f"{block:,} bytes"

    @pytest.mark.parametrize("seed", range(15))
    def test_a_cut_table_loses_its_last_block_only(self, capsule, seed):
        file = capsule / RANK / "scalars.bin"
        size = file.stat().st_size
        kept = random.Random(seed).randrange(1, size)
        os.truncate(file, kept)
        block = HEADER.size + 2 * 28
        assert len(Capsule.open(capsule).scalars("loss")) == kept // block
        damage = exercise(capsule)
        assert [each.what for each in damage] == ["last block is torn"] * bool(kept % block)

    @pytest.mark.parametrize("seed", range(20))
    def test_random_bytes_anywhere_in_a_table_never_break_a_reader(self, capsule, seed):
        rng = random.Random(seed)
        for name in ("scalars.bin", "stats.bin"):
            file = capsule / RANK / name
            data = bytearray(file.read_bytes())
            for _ in range(rng.randrange(1, 30)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            file.write_bytes(data)
        assert exercise(capsule)

    def test_crafted_headers_do_not_make_reading_slow(self):
        fake = HEADER.pack(b"LCBK", 1, 1, 28, 30_000, 0, 0)  # announces 840,000 bytes, checksum wrong
        table = decode_table(fake * 100_000)
        assert table.rows == {}
        assert len(table.gaps) == 1

    @pytest.mark.parametrize("name", ["records/events.jsonl", "names.jsonl", "arrays.jsonl"])
    def test_a_damaged_or_torn_line_is_dropped_and_counted(self, capsule, name):
        file = capsule / RANK / name
        lines = file.read_bytes().splitlines(keepends=True)
        lines[1] = lines[1].replace(b":", b";", 1)
        lines[-1] = lines[-1][:-9]
        file.write_bytes(b"".join(lines))
        found = {each.where: each.what for each in exercise(capsule)}
        assert found[f"{RANK}/{name} line 2"] == "checksum of the line does not match"
        assert found[f"{RANK}/{name}"] == "last line is torn"

    @pytest.mark.parametrize("name", ["records/events.jsonl", "names.jsonl", "arrays.jsonl"])
    def test_a_hole_that_a_file_system_left_is_told_and_hides_no_line_behind_it(self, capsule, name):
        file = capsule / RANK / name
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(lines[0] + bytes(4096) + b"".join(lines[1:]))
        (found,) = exercise(capsule)
        assert (found.where, found.what) == (f"{RANK}/{name} line 2", "a hole of 4,096 NUL bytes")
        assert found.kept == f"{len(lines):,} lines"

    @pytest.mark.parametrize("line", [b"[" * 100_000, b'{"a":' * 100_000 + b"}" * 100_000, b"9" * 9_999, b"\xff", b"3"])
    def test_a_hostile_line_costs_only_itself(self, capsule, line):
        for name in ("records/events.jsonl", "names.jsonl", "arrays.jsonl"):
            file = capsule / RANK / name
            file.write_bytes(line + b"\n" + file.read_bytes())
        damage = exercise(capsule)
        assert [each.where for each in damage] == [
            f"{RANK}/{name} line 1" for name in ("arrays.jsonl", "names.jsonl", "records/events.jsonl")
        ]
        c = Capsule.open(capsule)
        assert (len(c.scalars("loss")), len(c.records("events")), len(c.batches())) == (20, 20, 1)

    def test_rows_whose_name_is_lost_are_counted(self, capsule):
        (capsule / RANK / "names.jsonl").unlink()
        found = {each.where: each for each in exercise(capsule)}
        assert found[f"{RANK}/scalars.bin"].what == "rows have no name in names.jsonl"
        assert found[f"{RANK}/scalars.bin"].lost == "40 rows of 2 ids"

    @pytest.mark.parametrize("seed", range(50))
    def test_an_arrays_file_cut_anywhere_is_reported_and_the_others_are_read(self, capsule, seed):
        rng = random.Random(seed)
        files = sorted((capsule / RANK / "arrays").iterdir())
        cut = files[seed % len(files)]
        os.truncate(cut, rng.randrange(cut.stat().st_size))
        if seed % 2:  # without the index HDF5 itself meets the cut file
            (capsule / RANK / "arrays.jsonl").unlink()
        c = Capsule.open(capsule)
        assert len(c.batches()) + len(c.tensors()) + len(c.rng_steps()) == 2
        (damage,) = exercise(capsule)
        assert damage.where == f"{RANK}/arrays/{cut.name}"
        assert ("is cut" in damage.what) if seed % 2 == 0 else ("HDF5 cannot read it" in damage.what)

    @pytest.mark.parametrize("seed", range(40))
    def test_flipped_bytes_in_an_arrays_file_never_break_a_reader(self, capsule, seed):
        rng = random.Random(seed)
        for file in (capsule / RANK / "arrays").iterdir():
            data = bytearray(file.read_bytes())
            for _ in range(rng.choice([1, 3, 200])):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
        if seed % 2:
            (capsule / RANK / "arrays.jsonl").unlink()
        damage = exercise(capsule)
        if seed % 2 == 0:
            assert ["differs from its checksum" in each.what for each in damage] == [True] * 3

    def test_a_flipped_value_is_caught_by_the_chunk_checksum_where_the_index_is_gone(self, capsule):
        (capsule / RANK / "arrays.jsonl").unlink()
        file = capsule / RANK / "arrays/3-1.h5"
        data = bytearray(file.read_bytes())
        at = data.find(np.ones(64, np.float32).tobytes())
        data[at + 10] ^= 1
        file.write_bytes(data)
        c = Capsule.open(capsule)
        (tensor,) = c.tensors()
        with pytest.raises(EvidenceError, match="the array cannot be read"):
            tensor.array()
        assert "HDF5 cannot read it" in c.damage()[0].what

    def test_an_arrays_file_that_lost_its_line_is_read_by_its_own_description(self, capsule):
        (capsule / RANK / "arrays.jsonl").unlink()
        c = Capsule.open(capsule)
        assert c.batches()[0].sample_ids == list("abcd")
        np.testing.assert_array_equal(c.batches()[0].labels, IDS)
        assert c.damage() == ()

    def test_a_missing_arrays_file_is_named(self, capsule):
        (capsule / RANK / "arrays/3-0.h5").unlink()
        (damage,) = exercise(capsule)
        assert (damage.what, damage.lost) == ("arrays file is missing", "input_ids, labels")

    @pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b'{"status": 3}', b"null", b"1" * 10_000])
    def test_a_spoilt_heartbeat_costs_only_itself(self, capsule, data):
        (capsule / RANK / "rank.json").write_bytes(data)
        damage = exercise(capsule)
        assert {each.where for each in damage} == {f"{RANK}/rank.json"}

    def test_a_changed_or_missing_original_is_named(self, capsule):
        (capsule / "files/train.log").write_bytes(b"LINE\n" * 100)
        assert [each.what for each in exercise(capsule)] == ["attached file differs from its SHA-256"]
        (capsule / "files/train.log").write_bytes(b"line\n")
        assert [each.what for each in exercise(capsule)] == ["attached file has 5 bytes instead of 500"]
        (capsule / "files/train.log").unlink()
        assert [each.what for each in exercise(capsule)] == ["attached file is missing"]

    def test_ten_thousand_bad_lines_are_summed_up(self, capsule):
        with (capsule / RANK / "records/events.jsonl").open("a") as file:
            file.write("{nonsense}\n" * 10_000)
        damage = exercise(capsule)
        assert len(damage) == 21
        assert damage[-1].what == "9,980 further damaged places"

    def test_a_file_of_nothing_but_bad_lines_is_given_up(self):
        lines = decode_lines(b"x\n" * 500_000)
        assert len(lines.bad) == 20_001
        assert lines.bad[-1] == (20_001, "after so many damaged lines the rest is not read")


class TestManifests:
    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "not valid JSON"),
            (b"{", "not valid JSON"),
            (b"[]", "expected a JSON object, found list"),
            (b"\xff\xfe{}", "not valid JSON"),
            (b"{}", "format is None, expected llmconsole.capsule/1"),
            (b'{"format": "llmconsole.capsule/2"}', "format version 2 is newer than 1, the newest this program reads"),
            (b'{"format": "llmconsole.capsule/2"}', "; upgrade llmconsole"),
            (b'{"format": "llmconsole.capsule/99999999999"}', "expected llmconsole.capsule/1"),
            (b'{"format": "llmconsole.report/1"}', "format is 'llmconsole.report/1', expected llmconsole.capsule/1"),
            (b'{"format": 1}', "format is 1, expected"),
            (b"[" * 100_000, "nested deeper than 64 levels"),
            (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested deeper than 64 levels"),
            (b'{"format": "llmconsole.capsule/1", "a": ' + b"[" * 80 + b"]" * 80 + b"}", "nested deeper than 64"),
            (b'{"format": "llmconsole.capsule/1", "a": ' + b"9" * 100_000 + b"}", "not valid JSON"),
            (b'{"format": "' + b"x" * (17 << 20) + b'"}', "is larger than 16,777,216"),
        ],
    )
    def test_one_that_cannot_be_used_is_refused_in_one_line(self, path, data, message):
        path.mkdir()
        (path / "capsule.json").write_bytes(data)
        with pytest.raises(EvidenceError) as error:
            Capsule.open(path)
        assert message in str(error.value)
        assert "capsule.json" in str(error.value)
        assert len(str(error.value)) < 400
        assert_one_line(error.value)

    def test_what_is_no_capsule_is_said_to_be_none(self, tmp_path):
        for path, message in [
            (tmp_path / "absent", "there is no such directory"),
            (tmp_path, "is no capsule: it has no capsule.json"),
        ]:
            with pytest.raises(EvidenceError, match=message):
                Capsule.open(path)
        (tmp_path / "file").write_text("x")
        with pytest.raises(EvidenceError):
            Capsule.open(tmp_path / "file")

    @pytest.mark.parametrize(
        "wrong", [None, True, -1, 1e400, "x", [], [[3]], {}, {"a": {"b": 3}}, 10**30, "NaN", [None]]
    )
    def test_a_wrong_type_in_any_field_costs_only_that_field(self, healthy, path, wrong):
        from llmconsole.capsules.manifest import Manifest

        shutil.copytree(healthy, path)
        raw = json.loads((path / "capsule.json").read_text())
        for field in set(Manifest.__struct_fields__) - {"format"}:
            (path / "capsule.json").write_text(json.dumps(raw | {field: wrong}))
            c = Capsule.open(path)
            assert c.manifest.format == "llmconsole.capsule/1"
            if field != "model":
                assert c.manifest.model.layers == 2
            assert {each.where for each in c.damage()} <= {"capsule.json", *_paths(wrong)}

    @pytest.mark.parametrize("wrong", ["x", -5, {"layers": "two", "rope": {"style": 3, "theta": "NaN"}, "hidden": 8}])
    def test_a_wrong_type_in_a_part_is_named_with_its_path(self, capsule, wrong):
        edit_manifest(capsule, model=wrong)
        c = Capsule.open(capsule)
        said = [each.what for each in c.damage()]
        if isinstance(wrong, dict):
            assert said == [
                "field model.layers is 'two', expected int",
                "field model.rope.style is 3, expected half or interleaved",
            ] or said == ["field model.layers is 'two', expected int", "field model.rope.style is 3, expected str"]
            assert c.manifest.model.hidden == 8
            assert np.isnan(c.manifest.model.rope.theta)
        else:
            assert said == [f"field model is {wrong!r}, expected object"]
            assert c.manifest.model is None

    def test_a_thousand_wrong_fields_are_still_one_manifest(self, capsule):
        files = [{"path": 3, "bytes": "x"} for _ in range(1000)]
        edit_manifest(capsule, files=files, run={"world_size": -1})
        c = Capsule.open(capsule)
        assert c.manifest.title == "t"
        assert exercise(capsule)


def _paths(wrong) -> set[str]:
    return {"(no path)"} if wrong in ([None], [{}]) else set()


class TestPaths:
    @pytest.mark.parametrize(
        "where",
        [
            *(
                "files/../../secret",
                "../secret",
                "/etc/passwd",
                "files//etc/passwd",
                "files/..",
                "files/",
                "secret",
                "",
            ),
            *("files/a\0b", "files\\..\\x", "files/" + "a" * 5000),
        ],
    )
    def test_an_attached_path_that_leaves_the_capsule_is_not_opened(self, capsule, tmp_path, where):
        (tmp_path / "secret").write_text("s")
        edit_manifest(capsule, files=[{"path": where, "kind": "log", "bytes": 1}])
        (damage,) = exercise(capsule)
        assert (
            "refused" in damage.what or "leaves the capsule" in damage.what or "missing" in damage.what or damage.what
        )
        assert "instead of" not in damage.what  # nothing was read

    @pytest.mark.parametrize(
        "part",
        [
            *("capsule.json", "ranks", f"{RANK}", f"{RANK}/scalars.bin", f"{RANK}/arrays", f"{RANK}/arrays/3-0.h5"),
            *(f"{RANK}/records", f"{RANK}/records/events.jsonl", f"{RANK}/rank.json", "files", "files/train.log"),
        ],
    )
    def test_a_symbolic_link_anywhere_is_not_followed(self, capsule, healthy, part):
        target = capsule / part
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        target.symlink_to(healthy / part)
        if part == "capsule.json":
            with pytest.raises(EvidenceError, match="is a symbolic link; refused"):
                Capsule.open(capsule)
            return
        damage = exercise(capsule)
        assert any("is a symbolic link" in each.what for each in damage), damage
        with pytest.raises(EvidenceError):
            Capsule.open(capsule).digest()

    @pytest.mark.parametrize(
        "part", ["capsule.json", f"{RANK}/scalars.bin", f"{RANK}/arrays/3-0.h5", "files/train.log"]
    )
    def test_a_pipe_in_place_of_a_file_does_not_hang_a_reader(self, capsule, part):
        (capsule / part).unlink()
        os.mkfifo(capsule / part)
        if part == "capsule.json":
            with pytest.raises(EvidenceError, match="is not a regular file"):
                Capsule.open(capsule)
            return
        assert any("is not a regular file" in each.what for each in exercise(capsule))

    def test_an_index_line_cannot_name_a_file_elsewhere(self, capsule):
        file = capsule / RANK / "arrays.jsonl"
        first = json.loads(file.read_text().splitlines()[0])
        del first["crc32"]
        file.write_text(json.dumps(first | {"file": "../../../x.h5"}) + "\n")
        assert any("'../../../x.h5' is refused" in each.what for each in exercise(capsule))


def forge(capsule, build, description=None, indexed=False) -> Path:
    """Replace the tensor's file by one that ``build`` makes."""
    file = capsule / RANK / "arrays/3-1.h5"
    file.unlink()
    text = description or {
        "kind": "tensor",
        "step": 3,
        "name": "x/y",
        "arrays": {"data": {"dtype": "float32", "shape": [4]}},
    }
    raw = np.frombuffer(json.dumps(text).encode(), np.uint8)
    with h5py.File(file, "w") as opened:
        opened.create_dataset("description", data=raw, chunks=raw.shape, fletcher32=True)
        build(opened.create_group("arrays"))
    lines = (capsule / RANK / "arrays.jsonl").read_text().splitlines(keepends=True)
    (capsule / RANK / "arrays.jsonl").write_text("".join(line for line in lines if '"3-1.h5"' not in line))
    return file


class TestHdf5:
    def refused(self, capsule, message):
        damage = exercise(capsule)
        assert [each.where for each in damage] == [f"{RANK}/arrays/3-1.h5"]
        assert message in damage[0].what
        assert Capsule.open(capsule).tensors() == []

    def test_a_file_of_another_writer_is_read(self, capsule):
        forge(capsule, lambda g: g.create_dataset("data", data=np.arange(4, dtype="<f4")))
        assert exercise(capsule) == ()
        assert Capsule.open(capsule).tensors()[0].array().tolist() == [0, 1, 2, 3]

    def test_an_external_link_is_refused(self, capsule, tmp_path):
        with h5py.File(tmp_path / "other.h5", "w") as other:
            other["secret"] = np.arange(4, dtype="<f4")

        def build(group):
            group["data"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/secret")

        forge(capsule, build)
        self.refused(capsule, "arrays/data is reached through a link of kind external")

    def test_a_soft_link_is_refused(self, capsule):
        def build(group):
            group["real"] = np.arange(4, dtype="<f4")
            group["data"] = h5py.SoftLink("/arrays/real")

        forge(capsule, build)
        self.refused(capsule, "arrays/data is reached through a link of kind soft")

    def test_external_storage_is_refused(self, capsule, tmp_path):
        (tmp_path / "raw").write_bytes(b"s" * 16)
        forge(capsule, lambda g: g.create_dataset("data", (4,), "<f4", external=[(str(tmp_path / "raw"), 0, 16)]))
        self.refused(capsule, "arrays/data keeps its data outside the file")

    def test_a_virtual_dataset_is_refused(self, capsule, tmp_path):
        with h5py.File(tmp_path / "other.h5", "w") as other:
            other["secret"] = np.arange(4, dtype="<f4")

        def build(group):
            layout = h5py.VirtualLayout(shape=(4,), dtype="<f4")
            layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "secret", shape=(4,))
            group.create_virtual_dataset("data", layout)

        forge(capsule, build)
        self.refused(capsule, "arrays/data is a virtual dataset")

    @pytest.mark.parametrize("options", [{"compression": "gzip"}, {"shuffle": True}, {"compression": "lzf"}])
    def test_another_filter_is_refused(self, capsule, options):
        forge(capsule, lambda g: g.create_dataset("data", data=np.zeros(4, "<f4"), chunks=(4,), **options))
        self.refused(capsule, "arrays/data uses a filter other than fletcher32")

    @pytest.mark.parametrize("elements", [10**12, 10**9])
    def test_a_header_that_announces_more_than_the_file_holds_is_refused_before_memory_is_taken(
        self, capsule, elements
    ):
        text = {
            "kind": "tensor",
            "step": 3,
            "name": "x/y",
            "arrays": {"data": {"dtype": "float32", "shape": [elements]}},
        }
        forge(capsule, lambda g: g.create_dataset("data", (elements,), "<f4", chunks=(1024,)), text)
        (damage,) = exercise(capsule)
        assert "is beyond the size limit" in damage.what

    def test_so_is_one_whose_description_lies_about_it(self, capsule):
        forge(capsule, lambda g: g.create_dataset("data", (10**12,), "<f4", chunks=(1024,)))
        self.refused(capsule, "arrays/data announces 4,000,000,000,000 bytes, more than the file holds")

    def test_so_is_a_huge_chunk(self, capsule):
        forge(capsule, lambda g: g.create_dataset("data", (4,), "<f4", chunks=(10**8,), maxshape=(None,)))
        self.refused(capsule, "arrays/data announces 400,000,000 bytes, more than the file holds")

    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (
                lambda g: g.create_dataset("data", data=np.zeros(5, "<f4")),
                "has shape (5,) and its description says (4,)",
            ),
            (lambda g: g.create_dataset("data", data=np.zeros(4, "<f8")), "has dtype float64, expected float32"),
            (lambda g: g.create_dataset("data", data=np.zeros(4, ">f4")), "has dtype >f4, expected float32"),
            (lambda g: g.create_dataset("data", data=["a"] * 4, dtype=h5py.string_dtype()), "dtype object"),
            (lambda g: g.create_group("data"), "arrays/data is no dataset"),
            (lambda g: None, "array arrays/data is missing"),
            (lambda g: g.create_dataset("data", data=h5py.Empty("f4")), "has shape None"),
        ],
    )
    def test_a_dataset_that_is_not_what_was_described_is_refused(self, capsule, build, message):
        forge(capsule, build)
        self.refused(capsule, message)

    @pytest.mark.parametrize(
        ("description", "message"),
        [
            ({"kind": "tensor", "step": -1}, "description of an arrays file"),
            (
                {"kind": "tensor", "step": 0, "arrays": {"../x": {"dtype": "int8"}}},
                "array '../x' of dtype 'int8' is none",
            ),
            (
                {"kind": "tensor", "step": 0, "arrays": {"x": {"dtype": "object"}}},
                "array 'x' of dtype 'object' is none",
            ),
            ({"kind": "tensor", "step": 0, "arrays": {"x": {"dtype": "int8", "shape": [1] * 40}}}, "length <= 32"),
            (
                {"kind": "tensor", "step": 0, "arrays": {f"k{at}": {"dtype": "int8"} for at in range(5000)}},
                "5,000 arrays",
            ),
            ([1], "expected a JSON object"),
        ],
    )
    def test_a_description_that_makes_no_sense_is_refused(self, capsule, description, message):
        forge(capsule, lambda g: None, description)
        self.refused(capsule, message)

    @pytest.mark.parametrize("text", [b"[", b'["a"]', b'{"a": 1}', b'[["a"], "b"]', b"[" * 10_000])
    def test_names_that_are_no_list_of_texts_are_refused(self, capsule, text):
        described = {"kind": "tensor", "step": 3, "name": "x/y", "arrays": {"data": {"dtype": "string", "shape": [2]}}}
        forge(capsule, lambda g: g.create_dataset("data", data=np.frombuffer(text, np.uint8)), described)
        (damage,) = exercise(capsule)
        assert "array data is no list of texts" in damage.what

    def test_states_that_are_none_are_no_states(self, capsule):
        for state in ({"tuple": 3}, {"a": 1, "b": 2}, {"bytes": "nothing"}, {}, {"int": [1]}, {"dict": []}):
            text = {"kind": "rng", "step": 9, "attributes": {"torch": state}}
            if not (capsule / RANK / "arrays/3-1.h5").exists():
                (capsule / RANK / "arrays/3-1.h5").touch()
            forge(capsule, lambda g: None, text)
            c = Capsule.open(capsule)
            assert c.rng(9) is None
            assert len(c.damage()) == 1

    def test_a_batch_whose_attributes_have_wrong_types_is_read_without_them(self, capsule):
        attributes = {"sample_ids": "abc", "reported_loss": "4.8", "split": 3, "label_layout": [], "note": "NaN"}
        text = {"kind": "batch", "step": 1, "attributes": attributes}
        forge(capsule, lambda g: None, text)
        c = Capsule.open(capsule)
        batch = c.batches(step=1)[0]
        assert (batch.sample_ids, batch.reported_loss, batch.split, batch.label_layout) == (None, None, None, None)
        assert len(c.damage()) == 4


class TestNumbers:
    def test_absurd_numbers_in_tables_are_just_numbers(self, path):
        w = CapsuleWriter(path)
        w.scalar_row(0, {"x": 1.0})
        w.norms(0, [("a", "activation", "float16", (2**40, 2**40), 1.0, 0, 0)])
        w.close()
        rows = struct.pack("<Iqdd", 0, 2**63 - 1, 1e308, -1e308) + struct.pack("<Iqdd", 0, -(2**63), 0.0, 0.0)
        checked = struct.pack("<HHIIq", 1, 28, 2, 2**32 - 1, 2**63 - 1)
        with (path / RANK / "scalars.bin").open("ab") as file:
            file.write(b"LCBK" + struct.pack("<I", crc32(checked + rows)) + checked + rows)
        assert exercise(path) == ()
        c = Capsule.open(path)
        assert c.scalars("x").step.tolist() == [-(2**63), 0, 2**63 - 1]
        assert c.stats().numel.tolist() == [2**63 - 1]


def test_of_thousands_of_streams_the_known_ones_are_read(capsule):
    for number in range(1100):
        (capsule / RANK / f"records/a{number}.jsonl").touch()
    c = Capsule.open(capsule)
    assert len(c.records("events")) == 20
    assert len(c.record_streams()) == 1024
    assert [each.lost for each in c.damage()] == [f"{1101 - 1024} files"]


def test_of_thousands_of_damaged_files_the_first_thousand_are_listed(capsule):
    edit_manifest(capsule, files=[{"path": f"files/{number}"} for number in range(1500)])
    damage = Capsule.open(capsule).damage()
    assert len(damage) == 1001
    assert damage[-1].what == "500 further damaged places"
