"""A gain that follows the wrong level grows until fp16 cannot hold what it multiplies."""

from __future__ import annotations

from .fault import Case, Edit, Fault, Repair

OVERFLOW = Fault(
    name="overflow",
    rule="numerics/fp16-overflow",
    arguments=("--precision", "fp16"),
    message="Level the hidden activations for fp16\n\n"
    "GELU outputs have an RMS near 0.2. Bring them towards 1 with a slow gain,\n"
    "where fp16 resolves them best, and take the gain out after the second map.",
    edits=(
        Edit(
            "model.py",
            "class FeedForward(nn.Module):\n",
            '''class LevelledGELU(nn.Module):
    """GELU whose output is brought towards an RMS of 1 by a gain that follows it slowly."""

    gain: Tensor

    def __init__(self, rate: float = 0.05) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C], ``gain`` times the GELU of ``x``."""
        hidden = F.gelu(x)
        if self.training:
            with torch.no_grad():
                rms = hidden.float().square().mean().sqrt()
                self.gain.mul_(rms.clamp(min=1e-3) ** -self.rate)
        return hidden * self.gain


class FeedForward(nn.Module):
''',
        ),
        Edit("model.py", "self.act = nn.GELU()", "self.act = LevelledGELU()"),
        Edit(
            "model.py",
            "return self.down(self.act(self.up(x)))",
            "return self.down(self.act(self.up(x))) / self.act.gain",
        ),
    ),
    repair=Repair(
        message="Measure the level behind the gain\n\n"
        "The gain was steered by the RMS in front of it, which it cannot change, so\n"
        "it grew by a constant factor a step until fp16 could not hold the result.",
        edits=(
            Edit(
                "model.py",
                "rms = hidden.float().square().mean().sqrt()",
                "rms = (hidden.float() * self.gain).square().mean().sqrt()",
            ),
        ),
        test='''"""The levelled GELU settles, however long it runs."""

import unittest

import torch

from model import LevelledGELU


class LevelTest(unittest.TestCase):
    """A gain that follows its own output comes to rest."""

    def test_gain_settles(self) -> None:
        torch.manual_seed(0)
        act = LevelledGELU()
        x = 0.3 * torch.randn(4, 64)
        for _ in range(300):
            out = act(x)
        self.assertAlmostEqual(out.square().mean().sqrt().item(), 1.0, places=3)


if __name__ == "__main__":
    unittest.main()
''',
        test_node="tests/test_levelled_gelu.py::LevelTest::test_gain_settles",
        case=Case(
            id="levelled-gelu-runs-away",
            title="Hidden activations grow until fp16 overflows",
            keywords="fp16, overflow, Inf, NaN loss, gain, activation growth, 溢出, 半精度, 激活爆炸",
            root_cause="the gain of LevelledGELU was steered by the RMS in front of it instead of behind it, "
            "so it grew by a constant factor a step",
            trigger="the commit that levels hidden activations for fp16",
            prevention="a control loop gets a test that runs it until it rests; "
            "absmax per layer is watched against the range of its dtype",
        ),
    ),
)
