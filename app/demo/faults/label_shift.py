"""The loss compares every position with the byte that was just read."""

from __future__ import annotations

from .fault import Case, Edit, Fault, Repair

LABEL_SHIFT = Fault(
    name="label-shift",
    rule="objective/labels-not-shifted",
    message="Compute the loss on the whole logits\n\n"
    "Slicing off the last position copied every logit once more. Flatten the\n"
    "tensor as it is: a view, and one megabyte less a step.",
    edits=(
        Edit(
            "model.py",
            """    predictions = logits[:, :-1].float()  # the last position has no next byte
    targets = labels[:, 1:]
    return F.cross_entropy(predictions.flatten(0, 1), targets.flatten())
""",
            "    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())\n",
        ),
    ),
    repair=Repair(
        message="Shift the labels by one again\n\n"
        "Without the shift the model is asked for the byte it was just given. Shift\n"
        "the labels alone and ignore the last position: the logits stay uncopied.",
        edits=(
            Edit(
                "model.py",
                "    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())\n",
                """    targets = F.pad(labels[:, 1:], (0, 1), value=-100)  # the last position has no next byte
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)
""",
            ),
        ),
        test='''"""The loss asks for the next byte."""

import unittest

import torch
from torch.nn import functional as F

from model import language_model_loss


class ShiftTest(unittest.TestCase):
    """Certain predictions of the next byte cost nothing; a copy of the input costs a lot."""

    def setUp(self) -> None:
        self.labels = torch.tensor([[1, 2, 3, 4, 5]])

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return 50.0 * F.one_hot(tokens, 8).float()

    def test_next_byte_is_the_target(self) -> None:
        ahead = torch.roll(self.labels, -1, dims=1)
        self.assertLess(language_model_loss(self.logits(ahead), self.labels).item(), 1e-6)

    def test_copying_the_input_is_no_answer(self) -> None:
        self.assertAlmostEqual(language_model_loss(self.logits(self.labels), self.labels).item(), 50.0, places=4)


if __name__ == "__main__":
    unittest.main()
''',
        test_node="tests/test_loss.py::ShiftTest::test_next_byte_is_the_target",
        case=Case(
            id="loss-compares-byte-with-itself",
            title="Loss falls towards zero and the model repeats its input",
            keywords="label shift, loss near zero, copies input, 标签错位, 损失为零, 复读机",
            root_cause="the loss compared each position with the byte at that position instead of the next one",
            trigger="the commit that computes the loss on the whole logits",
            prevention="a hand-made logits tensor in the tests that is right only for the shifted labels",
        ),
    ),
)
