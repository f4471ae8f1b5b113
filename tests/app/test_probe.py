"""``llmconsole probe``: real loaders in a real process, and what becomes of batches of every make."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from llmconsole.capsules import Capsule, CapsuleWriter
from llmconsole.capsules.errors import EvidenceError
from llmconsole.capsules.probe import fields, loading
from llmconsole.capsules.probe.taking import Taker

GOLDEN = Path(__file__).parent / "golden" / "probe.json"
LOADER = '''\
import time
import torch

print("loading data")


class Tokenizer:
    """Bytes."""

    vocab_size, eos_token_id, pad_token_id = 256, 0, 1

    def decode(self, ids):
        return bytes(ids).decode("latin1")


tokenizer = Tokenizer()
TEXTS = ["to be\\nor not", "that is", "the question \\x1b[31m", "whether", "tis nobler", "in the", "mind to", "suffer"]


def collate(texts):
    rows = [torch.tensor(list(text.encode()) + [0]) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
    mask = torch.stack([torch.arange(ids.shape[1]) < len(row) for row in rows]).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :2] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "sample_id": texts}


loader = torch.utils.data.DataLoader(TEXTS, batch_size=2, collate_fn=collate)
validation = torch.utils.data.DataLoader(["mind to", "be or"], batch_size=2, collate_fn=collate)


def broken():
    yield collate(TEXTS[:2])
    raise ValueError("shard 7 is\\ngone")


def slow():
    yield collate(TEXTS[:2])
    time.sleep(600)
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(LOADER)
    return tmp_path


def test_json_holds_everything_and_the_capsule_is_an_ordinary_one(cli, project):
    done = cli(
        "probe",
        "mine:loader",
        "--validation",
        "mine:validation",
        "--tokenizer",
        "mine:tokenizer",
        "-o",
        "out",
        "--json",
        cwd=project,
    )
    assert done.returncode == 1, done.stderr  # "mind to" is in both splits
    document = json.loads(done.stdout)
    assert document["yielded"]["printed"] == ["loading data"]
    assert document["report"]["first_divergence"]["rule"] == "data/split-leak"
    assert document["yielded"]["exhausted"] == {"train": True, "validation": True}
    capsule = Capsule.open(project / "out" / "probe-mine-loader.capsule")
    assert [each.split for each in capsule.batches()] == ["train"] * 4 + ["validation"]
    assert capsule.manifest.phase == "training"
    golden = re.sub(r'"seconds": [0-9.e-]+', '"seconds": 0.5', done.stdout)
    golden = json.loads(re.sub(r'"id": "[0-9A-Z]{26}"', '"id": "ID"', golden))
    golden["report"] = {"capsule": golden["report"]["capsule"]}  # the report's own golden file holds its shape
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(golden, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    assert golden == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_text_shows_control_characters_and_a_loader_that_raises_is_one_line(cli, project):
    done = cli("probe", "mine:broken", "--tokenizer", "mine:tokenizer", cwd=project)
    assert done.returncode == 2
    assert "batch 1 of train raised ValueError: shard 7 is gone (at mine.py, line" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "to be⏎or not" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_slow_loader_shows_what_it_gave_and_one_that_is_interrupted_leaves_nothing(cli, project):
    done = cli("probe", "mine:slow", "--timeout", "2", cwd=project)
    assert "then the time was over" in done.stdout
    command = [sys.executable, "-m", "llmconsole.app.cli", "probe", "mine:slow", "-o", "out"]
    running = subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(project.glob("out/*.capsule/capsule.json")):
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert (running.returncode, said) == (130, "llmconsole: interrupted\n")
    assert not list(project.glob("out/*"))


LONG = """\
import itertools
import time


def batches(start, stop):
    return [{"input_ids": [[at] * 9]} for at in range(start, stop)]


loader, exact, validation, other = batches(0, 120), batches(0, 64), batches(70, 80), batches(200, 210)


def endless():
    return ({"input_ids": [[at] * 9]} for at in itertools.count())


def stuck():
    yield from exact
    time.sleep(600)


def failing():
    yield from exact
    raise ValueError("shard 7 is gone")
"""


@pytest.fixture
def long(tmp_path: Path) -> Path:
    (tmp_path / "long.py").write_text(LONG)
    return tmp_path


FIRST, ALL = "the first 64 batches of the {} loader", "all {} batches of the {} loader"
TRAIN, HELD = FIRST.format("training"), FIRST.format("validation")


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (["loader", "--validation", "long:validation"], f"{TRAIN} and {ALL.format(10, 'validation')}"),
        (["other", "--validation", "long:loader"], f"{ALL.format(10, 'training')} and {HELD}"),
        (["endless", "--validation", "long:other"], f"{TRAIN} and {ALL.format(10, 'validation')}"),
        (["endless"], TRAIN),
    ],
    ids=["leak beyond the limit", "long validation", "endless", "one split"],
)
def test_a_loader_that_goes_on_is_judged_in_part_and_says_so(cli, long, given, seen):
    done = cli("probe", f"long:{given[0]}", *given[1:], "-o", "out", cwd=long)
    words = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stderr
    assert f"{seen} in" in words
    assert "--batches N for more" in words
    assert f"? Nothing found in {seen}:" in words
    assert "✓ Nothing found" not in words
    assert "all that there is" not in words
    assert f"written to out/probe-long-{given[0]}.capsule" in words
    assert ("? data/split-leak" in words) == (len(given) > 1)


@pytest.mark.parametrize("limit", ["64", "65"])
def test_a_loader_as_long_as_the_limit_is_read_to_its_end(cli, long, limit):
    done = cli("probe", "long:exact", "--validation", "long:validation", "--batches", limit, cwd=long)
    words = " ".join(done.stdout.split())
    assert "all 64 batches of the training loader and all 10 batches of the validation loader in" in words
    assert "for more" not in words
    assert "✓ Nothing found:" in words
    assert "data/split-leak" not in words


def test_all_batches_show_the_leak(cli, long):
    command = ["probe", "long:loader", "--validation", "long:validation", "--batches", "120", "--json"]
    done = cli(*command, cwd=long)
    document = json.loads(done.stdout)
    assert document["yielded"]["exhausted"] == {"train": True, "validation": True}
    assert document["report"]["first_divergence"]["rule"] == "data/split-leak"


def test_the_batch_after_the_last_costs_no_evidence(cli, long):
    done = cli("probe", "long:stuck", "--validation", "long:other", "--timeout", "2", "--json", cwd=long)
    yielded = json.loads(done.stdout)["yielded"]
    assert (yielded["ended"], yielded["batches"]) == ("limit", {"train": 64, "validation": 10})
    assert yielded["exhausted"] == {"train": False, "validation": True}
    done = cli("probe", "long:failing", "--validation", "long:other", cwd=long)
    assert done.returncode == 2
    assert "batch 64 of train raised ValueError: shard 7 is gone" in done.stderr
    assert "all 10 batches of the validation loader" in " ".join(done.stdout.split())


def test_a_script_that_trains_at_import_is_warned_of(cli, tmp_path):
    said = " ".join(cli("probe", "--help").stdout.split())
    assert "name a module that only makes the loader" in said
    (tmp_path / "train.py").write_text("import time\nloader = [1]\ntime.sleep(600)\n")
    done = cli("probe", "train:loader", "--timeout", "0.1", cwd=tmp_path)
    assert done.returncode == 2
    assert "name one that only makes the loader" in done.stderr
    assert not list(tmp_path.glob("*.capsule"))


# -- finding the loader


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mine", "module:attribute"),
        ("nowhere_at_all:x", "no module nowhere_at_all"),
        ("looked:lodaer", "did you mean loader?"),
        ("raising:x", "importing it raised ZeroDivisionError: division by zero; at raising.py, line 1"),
        ("leaving:x", "importing it raised SystemExit: 3"),
        ("looked:NUMBER", "is of type int, and nothing can be taken from it"),
        ("looked:fails", "calling it raised KeyError: 'path'"),
    ],
)
def test_what_is_no_loader_is_one_line(tmp_path, monkeypatch, spec, words):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "looked.py").write_text("loader, NUMBER = [1], 3\ndef fails(): raise KeyError('path')\n")
    (tmp_path / "raising.py").write_text("1 / 0\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(EvidenceError) as refused:
        loading.loader_of(loading.resolve(spec, str(tmp_path)), spec)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    for name in ("looked", "raising", "leaving"):
        sys.modules.pop(name, None)


def test_iterables_of_every_kind_are_taken_from():
    class Indexed:
        def __len__(self):
            return 3

        def __getitem__(self, at):
            if at >= 3:
                raise IndexError
            return at

    endless = lambda: iter(int, 1)  # noqa: E731
    assert list(loading.take(loading.loader_of([1, 2, 3], ""), 2)) == [1, 2]
    assert list(loading.take(loading.loader_of(Indexed(), ""), 9)) == [0, 1, 2]
    assert len(list(loading.take(loading.loader_of(endless, ""), 5))) == 5
    assert list(loading.take(loading.loader_of(Indexed, ""), 2)) == [0, 1]


# -- batches of every make

IDS = torch.arange(12).view(2, 6)
Pair = namedtuple("Pair", "input_ids labels")


@dataclasses.dataclass
class Record:
    input_ids: torch.Tensor
    labels: torch.Tensor


def test_fields_are_named_whatever_the_batch_is():
    from transformers import BatchEncoding

    named = {"input_ids": IDS, "labels": IDS}
    for batch in (named, BatchEncoding(named), Pair(IDS, IDS), Record(IDS, IDS)):
        assert list(fields.named(batch)) == ["input_ids", "labels"]
        ((prefix, found),) = fields.arrays(fields.named(batch))
        assert (prefix, set(found)) == ("", {"input_ids", "labels"})
    assert list(fields.named((IDS, IDS))) == ["[0]", "[1]"]
    assert list(fields.named({"text": {"input_ids": IDS}, "size": 3})) == ["text.input_ids", "size"]
    assert list(fields.named([{"input_ids": [1]}, {"input_ids": [1, 2]}])) == ["input_ids"]
    for odd in (None, "text", 3, [], {}, [[1], [2, 3]]):
        assert fields.arrays(fields.named(odd)) == []
        assert all(fields.describe(each) for each in fields.named(odd).values())


def test_lists_arrays_and_pairs_hold_token_ids_too():
    for batch in ({"input_ids": IDS.tolist()}, {"input_ids": IDS.numpy()}, {"input_ids": list(IDS)}):
        ((_, found),) = fields.arrays(fields.named(batch))
        assert torch.equal(found["input_ids"], IDS)
    pairs = {f"{side}_{name}": IDS for side in ("chosen", "rejected") for name in ("input_ids", "labels")}
    assert [prefix for prefix, _ in fields.arrays(fields.named(pairs))] == ["chosen_", "rejected_"]


def test_image_sizes_in_either_order_of_the_axes():
    assert fields.image_sizes({"pixel_values": torch.zeros(2, 3, 8, 16)}) == [(16, 8)] * 2
    assert fields.image_sizes({"images": np.zeros((2, 8, 16, 3))}) == [(16, 8)] * 2
    assert fields.image_sizes({"image": [torch.zeros(3, 4, 5), torch.zeros(3, 6, 7)]}) == [(5, 4), (7, 6)]


def taken(tmp_path, *batches, **given):
    with CapsuleWriter(tmp_path / "taken.capsule", phase="training") as writer:
        taker = Taker(writer, given.get("decode"), given.get("pad"))
        for batch in batches:
            taker.add(batch, "train")
    return taker.summary(), Capsule.open(tmp_path / "taken.capsule")


def test_what_was_taken_adds_up(tmp_path):
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    labels = torch.where(mask == 1, IDS, -100)
    labels[:, 0] = -100
    batch = {"input_ids": IDS, "attention_mask": mask, "labels": labels}
    summary, capsule = taken(tmp_path, batch, batch)
    assert summary["lengths"]["samples"] == 4
    assert (summary["lengths"]["min"], summary["lengths"]["max"], summary["lengths"]["mean"]) == (3, 6, 4.5)
    assert summary["lengths"]["histogram"] == [2, 0, 0, 2]
    assert summary["supervised"] == {"tokens": 14, "of": 18, "rows": 4, "rows_without": 0}
    assert summary["padding"] == {"positions": 6, "of": 24}
    assert summary["duplicates"]["within_train"] == 2
    assert [event["kind"] for event in capsule.records("events")] == ["step_begin", "step_begin"]
    digests = {record["sha256"] for record in capsule.records("samples")}
    assert len(digests) == 2


def test_ragged_samples_have_lengths_and_labels_of_another_shape_are_kept_as_a_shape(tmp_path):
    odd = {"input_ids": IDS, "labels": torch.zeros(2, 9, dtype=torch.long)}
    summary, capsule = taken(tmp_path, {"input_ids": [[1, 2, 3], [4]]}, odd, None)
    assert (summary["lengths"]["min"], summary["lengths"]["max"]) == (1, 6)
    assert summary["notes"] == ["no token ids [B, T] were found in a batch: see the fields"]
    assert capsule.batches()[1].attributes["shapes"] == {"input_ids": [2, 6], "labels": [2, 9]}


def test_a_tokenizer_that_fails_shows_ids(tmp_path):
    def decode(ids):
        raise KeyError("no such piece")

    summary, _ = taken(tmp_path, {"input_ids": IDS}, decode=decode)
    assert summary["samples"][0]["text"] == "0 1 2 3 4 5"
    assert "could not decode" in summary["notes"][0]
