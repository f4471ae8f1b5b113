"""Foreign pickles are read as plain data; whatever else is in one is refused with one line, and nothing runs."""

import gc
import os
import pickle
import random
import resource
import subprocess
import sys

import pytest
from llmconsole.capsules import plain_pickle
from llmconsole.capsules.errors import EvidenceError
from llmconsole.capsules.plain_pickle import integer, load_plain, looks_like_pickle, text, top_level_keys

DUMP = {
    "version": "2.10",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "entries": [{"record_id": 0, "process_group": ("0", "default_pg"), "input_sizes": [[3, 4]], "timeout_ms": None}],
}


def long(count: int) -> bytes:
    return count.to_bytes(8, "little")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_comes_back_as_it_was(protocol):
    value = [DUMP, b"bytes" if protocol > 2 else "", 1.5, float("inf"), 2**80, -1, True, "ünï\ud800"]
    assert load_plain(pickle.dumps(value, protocol)) == value


def test_one_written_by_torchs_own_pickler():
    # What torch's C++ code writes: every string with a four-byte length, short ones memoised, a tuple without a memo.
    data = b"\x80\x02}(X\x07\x00\x00\x00versionq\x00X\x03\x00\x00\x002.9q\x01X\x02\x00\x00\x00pgq\x02h\x00h\x01\x86u."
    assert load_plain(data) == {"version": "2.9", "pg": ("version", "2.9")}
    assert top_level_keys(data) == ("version", "pg")


class Planted:
    """An object whose unpickling leaves a mark."""

    def __reduce__(self):
        return os.mkdir, ("planted-by-a-pickle",)


HOSTILE = {
    "a call (REDUCE)": pickle.dumps({"entries": [Planted()]}, 2),
    "a call (REDUCE, protocol 4)": pickle.dumps({"entries": [Planted()]}, 4),
    "GLOBAL": b"\x80\x02cos\nsystem\n.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "INST": b"\x80\x02(X\x02\x00\x00\x00idios\nsystem\n.",
    "OBJ": b"\x80\x02(]o.",
    "NEWOBJ": b"\x80\x02])\x81.",
    "NEWOBJ_EX": b"\x80\x04])}\x92.",
    "REDUCE of data": b"\x80\x02X\x02\x00\x00\x00id)R.",
    "BUILD": b"\x80\x02}}b.",
    "BUILD with slots": b"\x80\x02]N}X\x06\x00\x00\x00appendK\x01s\x86b.",
    "EXT1": b"\x80\x02\x82\x01.",
    "EXT4": b"\x80\x02\x84\x01\x00\x00\x00.",
    "PERSID": b"\x80\x02Pthing\n.",
    "BINPERSID": b"\x80\x02K\x01Q.",
    "NEXT_BUFFER": b"\x80\x05\x97.",
    "a memo of four thousand million places": b"\x80\x02Nr\xff\xff\xff\xff.",
    "the same in text": b"\x80\x02Np4000000000\n.",
    "a byte array of a terabyte": b"\x80\x05\x96" + long(1 << 40) + b"abc.",
    "bytes of a terabyte": b"\x80\x04\x8e" + long(1 << 40) + b"abc.",
    "a string of 8 GiB": b"\x80\x04\x8d" + long(1 << 33) + b"abc.",
    "a string longer than a machine can address": b"\x80\x04\x8d" + long(1 << 63) + b"abc.",
    "a frame of a terabyte": b"\x80\x04\x95" + long(1 << 40) + b"N.",
    "an integer of 2 GiB": b"\x80\x02\x8b\xff\xff\xff\x7fab.",
    "an integer of 100,000 digits": b"\x80\x02I" + b"9" * 100_000 + b"\n.",
    "a deep tuple as a key": b"\x80\x02}N" + b"\x85" * 500_000 + b"Ns.",
    "the same with a memo": b"\x80\x02}N" + b"\x85q\x00" * 500_000 + b"Ns.",
    "the same, made from marks": b"\x80\x02}" + b"(" * 500_000 + b"t" * 500_000 + b"Ns.",
    "a key with 2 ** 60 paths through it": b"\x80\x02}N" + b"2\x86" * 60 + b"Ns.",
    "the same through a memo": b"\x80\x02}N" + b"q\x00h\x00\x86" * 60 + b"Ns.",
    "more lists than its size allows": b"\x80\x02(" + b"]" * 24_000_000 + b"l.",
    "a list as a key": b"\x80\x02}]Ns.",
    "torn": pickle.dumps(DUMP, 2)[:-9],
    "torn in a frame": pickle.dumps(DUMP, 4)[:-9],
    "no end": b"\x80\x02}",
    "trailing data": pickle.dumps(DUMP, 2) + b"more",
    "two pickles": pickle.dumps(DUMP, 4) * 2,
    "nothing on the stack": b"\x80\x02.",
    "an opcode that is none": b"\x80\x02\xff.",
    "protocol 0": b"(dp0\n.",
    "protocol 6": b"\x80\x06N.",
    "empty": b"",
}


@pytest.mark.timeout(60)  # what doubles takes hours
@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_everything_else_is_refused_with_one_line(data, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    limit, collecting = resource.getrlimit(resource.RLIMIT_AS), gc.isenabled()
    with pytest.raises(EvidenceError) as refused:
        load_plain(data, "rank_3")
    assert str(refused.value).startswith("rank_3: ")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400
    assert (resource.getrlimit(resource.RLIMIT_AS), gc.isenabled()) == (limit, collecting)
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr().err == ""


def test_an_extension_that_another_module_registered_is_refused_too():
    code = (
        "import copyreg, os\n"
        "from llmconsole.capsules.plain_pickle import load_plain\n"
        "copyreg.add_extension('os', 'system', 5)\n"
        "try: load_plain(b'\\x80\\x02\\x82\\x05.')\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "os.system" in done.stdout
    assert done.stderr == ""


def test_what_shares_and_contains_itself_is_read_and_harmless():
    itself = load_plain(b"\x80\x02]q\x00h\x00a.")
    assert itself[0] is itself
    shared = load_plain(b"\x80\x02(]q\x00" + b"h\x00" * 1_000_000 + b"l.")
    assert len(shared) == 1_000_001
    assert shared[0] is shared[-1]
    deep = load_plain(b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".")
    assert type(deep[0][0]) is list


def test_a_file_too_large_for_the_free_memory_is_refused_before_it_is_read(monkeypatch):
    data = pickle.dumps(DUMP, 2)
    monkeypatch.setattr(plain_pickle, "spare_memory", lambda: 19 * len(data))
    with pytest.raises(EvidenceError, match="half of what is free"):
        load_plain(data)
    monkeypatch.setattr(plain_pickle, "spare_memory", lambda: 21 * len(data))
    assert load_plain(data) == DUMP


def test_spare_memory_keeps_within_the_limit_of_the_process():
    code = (
        "import resource\n"
        "from llmconsole.capsules.plain_pickle import spare_memory\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, resource.RLIM_INFINITY))\n"
        "print(spare_memory())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert 0 < int(done.stdout) < 3 << 30


def test_mutated_dumps_are_read_or_refused():
    draw = random.Random(5)
    seeds = [pickle.dumps(DUMP, protocol) for protocol in (2, 4, 5)]
    outcomes = {"read": 0, False: 0, True: 0}
    for _ in range(4000):
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.randint(1, 6)):
            at = draw.randrange(2, len(data))
            match draw.randrange(3):
                case 0:
                    data[at] = draw.randrange(256)
                case 1:
                    del data[at : at + draw.randint(1, 9)]
                case _:
                    data[at:at] = draw.randbytes(draw.randint(1, 9))
        top_level_keys(bytes(data))
        try:
            load_plain(bytes(data))
            outcomes["read"] += 1
        except EvidenceError as refusal:
            outcomes["\n" in str(refusal)] += 1
    assert outcomes[True] == 0
    assert outcomes["read"] > 40
    assert outcomes[False] > 1000


def test_the_keys_of_a_dump_are_seen_in_its_head():
    for protocol in (2, 3, 4, 5):
        assert top_level_keys(pickle.dumps(DUMP, protocol)) == ("version", "pg_config", "entries")
        assert top_level_keys(pickle.dumps(DUMP, protocol)[:60])[:1] == ("version",)
    assert top_level_keys(pickle.dumps({"entries": 1}, 2)) == ("entries",)
    assert top_level_keys(pickle.dumps({3: "three", "four": {"inner": 4}, "five": 5})) == ("four", "five")
    assert top_level_keys(pickle.dumps(["version", "entries"])) == ()
    assert top_level_keys(b"\x80\x02}(") == top_level_keys(b"{}") == ()


@pytest.mark.parametrize("data", [b"", b"\x80", b"{}", b"\x80\x01}", b"\x80\x06}", b"\x80\x04\x95\x01", b"\x80\x02X"])
def test_other_heads_do_not_look_like_a_pickle(data):
    assert not looks_like_pickle(data)


def test_texts_and_integers_of_anything():
    assert [text(each) for each in ("a" * 9, 3, b"b\xff", True, None, [1], 2**70)] == [
        "a" * 9, "3", "b\ufffd", None, None, None, None,
    ]  # fmt: skip
    assert text("abcdef", most=3) == "abc"
    assert [integer(each) for each in (3, "4", " -1", 5.0)] == [3, 4, -1, 5]
    assert {integer(each) for each in (5.5, True, None, "x", "9" * 30, float("nan"), float("inf"), 2**70)} == {None}
