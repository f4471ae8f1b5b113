"""What a capsule of many ranks costs for each of them, counted in files."""

from llmconsole.capsules import Capsule, CapsuleWriter, rank_reader


def test_a_process_keeps_one_reserve_whatever_number_of_ranks_it_writes(path):
    with CapsuleWriter(path, rank=1) as writer:
        for rank in range(4):
            writer.record("ranks", {"host": "a"}, rank=rank)
        assert [each.parent.name for each in path.rglob(".tmp-*")] == ["rank00001"]
    assert not list(path.rglob(".tmp-*"))
    assert Capsule.open(path).damage() == ()


def test_a_reader_opens_no_file_of_a_rank_that_is_not_there(path, monkeypatch):
    with CapsuleWriter(path) as writer:
        for rank in range(3):
            writer.columns("collectives", 1, {"seq": [rank]}, rank=rank)
        writer.scalars("loss", [0], [1.0], rank=2)
    opened: list[str] = []
    read = rank_reader.read_tail

    def read_tail(root, relative, limit):
        opened.append(relative)
        return read(root, relative, limit)

    monkeypatch.setattr(rank_reader, "read_tail", read_tail)
    capsule = Capsule.open(path)
    assert capsule.damage() == ()
    assert capsule.scalars("loss", rank=2).value.tolist() == [1.0]
    assert len(capsule.stats()) == 0
    assert [each for each in opened if not (path / each).exists()] == []
    assert [each["seq"] for each in capsule.records("collectives")] == [0, 1, 2]
