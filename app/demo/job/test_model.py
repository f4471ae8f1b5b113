"""What must hold of the model whatever it has learnt."""

import unittest

import torch
from model import GPT, ModelConfig


class ModelTest(unittest.TestCase):
    """Shapes, and that nothing looks ahead."""

    def setUp(self) -> None:
        """Build a small model."""
        torch.manual_seed(0)
        self.config = ModelConfig(layers=2, heads=2, hidden=32, max_positions=16)
        self.model = GPT(self.config)

    def test_one_row_of_logits_for_every_byte(self) -> None:
        """[B, T] -> [B, T, V]."""
        assert self.model(torch.zeros(2, 16, dtype=torch.long)).shape == (2, 16, self.config.vocab_size)

    def test_no_position_sees_the_next_byte(self) -> None:
        """A change of the last byte leaves every earlier position as it was."""
        self.model.eval()
        bytes_ = torch.arange(16)[None]
        other = bytes_.clone()
        other[0, -1] = 99
        torch.testing.assert_close(self.model(bytes_)[:, :-1], self.model(other)[:, :-1])


if __name__ == "__main__":
    unittest.main()
