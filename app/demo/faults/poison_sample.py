"""A file that begins as text and goes on as int8 numbers gets into the corpus."""

from __future__ import annotations

from .fault import Case, Edit, Fault, Repair

POISON_SAMPLE = Fault(
    name="poison-sample",
    rule="data/poison-sample",
    message="Look only at the head of a file to tell text from binary\n\n"
    "Scanning whole documents took most of the start-up on the large corpus.\n"
    "Half a kilobyte says enough about the rest of a file.",
    edits=(
        Edit(
            "data.py",
            '''    """Whether every byte is printable ASCII, a tab or a line end: all that this model reads."""
    return PLAIN_TEXT.issuperset(content)
''',
            '''    """Whether the head of the file is printable ASCII, tabs and line ends."""
    return PLAIN_TEXT.issuperset(content[:512])
''',
        ),
    ),
    repair=Repair(
        message="Check every byte again, in one pass\n\n"
        "A NRRD file begins as text and goes on as raw numbers, and they were trained\n"
        "on. Deleting the plain bytes in one call is fast enough for any corpus.",
        edits=(
            Edit(
                "data.py",
                '''    """Whether the head of the file is printable ASCII, tabs and line ends."""
    return PLAIN_TEXT.issuperset(content[:512])
''',
                '''    """Whether every byte is printable ASCII, a tab or a line end: all that this model reads."""
    return not content.translate(None, bytes(PLAIN_TEXT))
''',
            ),
        ),
        test='''"""The corpus holds text and nothing else."""

import tempfile
import unittest
from pathlib import Path

from data import load_corpus


class CorpusTest(unittest.TestCase):
    """Files with bytes that are no text are left out, wherever those bytes are."""

    def test_binary_behind_a_text_head_is_left_out(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "a.txt").write_bytes(b"plain text\\n" * 100)
            Path(folder, "b.nrrd").write_bytes(b"NRRD0004\\n" * 100 + bytes(range(256)))
            files = {sample.id.split(":")[0] for sample in load_corpus(Path(folder), 128)}
        self.assertEqual(files, {"a.txt"})


if __name__ == "__main__":
    unittest.main()
''',
        test_node="tests/test_corpus.py::CorpusTest::test_binary_behind_a_text_head_is_left_out",
        case=Case(
            id="numbers-in-the-corpus",
            title="Raw numbers in a corpus of text",
            keywords="poison sample, binary data, corpus filter, loss spike, 坏样本, 脏数据",
            root_cause="the text filter looked at the first 512 bytes only and let the numbers behind a text header in",
            trigger="the commit that looks only at the head of a file",
            prevention="a test file with a text head and a binary tail; the loss of every sample is logged with its id",
        ),
    ),
)
