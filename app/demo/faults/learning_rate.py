"""The rate is multiplied by the batch size twice, and the warm-up is gone."""

from __future__ import annotations

from .fault import Case, Edit, Fault, Repair

LEARNING_RATE = Fault(
    name="learning-rate",
    rule="numerics/learning-rate",
    message="Let the learning rate follow the batch size\n\n"
    "Linear scaling: the configured rate is for one sample, the optimizer sees\n"
    "it times the batch. Warm-up did its scaling itself and is not needed then.",
    edits=(
        Edit(
            "train.py",
            '''    """Linear warm-up to ``config.learning_rate``, then half a cosine down to a tenth of it."""
    warmup = min(1.0, (step + 1) / config.warmup_steps)
''',
            '''    """The rate for the whole batch, then half a cosine down to a tenth of it."""
    peak = config.learning_rate * config.batch_size
''',
        ),
        Edit(
            "train.py",
            "return config.learning_rate * warmup * (0.55",
            "return peak * (0.55",
        ),
        Edit(
            "train.py",
            "    config = TrainConfig(steps=args.steps, seed=args.seed)\n",
            """    config = TrainConfig(steps=args.steps, seed=args.seed)
    config = dataclasses.replace(config, learning_rate=config.learning_rate * config.batch_size)
""",
        ),
    ),
    repair=Repair(
        message="Scale the learning rate once, and warm up again\n\n"
        "The rate was multiplied by the batch size in main() and in the schedule,\n"
        "64 times the tested value, from the first step on. The configured rate is\n"
        "the one for the batch of 8 again.",
        edits=(
            Edit(
                "train.py",
                '''    """The rate for the whole batch, then half a cosine down to a tenth of it."""
    peak = config.learning_rate * config.batch_size
''',
                '''    """Linear warm-up to the rate for this batch, then half a cosine down to a tenth of it."""
    warmup = min(1.0, (step + 1) / config.warmup_steps)
    peak = config.learning_rate * config.batch_size / 8
''',
            ),
            Edit("train.py", "return peak * (0.55", "return peak * warmup * (0.55"),
            Edit(
                "train.py",
                "    config = dataclasses.replace(config, learning_rate=config.learning_rate * config.batch_size)\n",
                "",
            ),
        ),
        test='''"""The schedule starts low, peaks at the configured rate and follows the batch size once."""

import unittest

from train import TrainConfig, learning_rate


class ScheduleTest(unittest.TestCase):
    """The rates that the optimizer is given."""

    def test_peak_is_the_configured_rate(self) -> None:
        config = TrainConfig(batch_size=8, learning_rate=1e-3)
        self.assertAlmostEqual(max(learning_rate(step, config) for step in range(200)), 1e-3)

    def test_first_step_is_small(self) -> None:
        config = TrainConfig(batch_size=8, learning_rate=1e-3)
        self.assertLess(learning_rate(0, config), 1e-4)


if __name__ == "__main__":
    unittest.main()
''',
        test_node="tests/test_schedule.py::ScheduleTest::test_peak_is_the_configured_rate",
        case=Case(
            id="learning-rate-scaled-twice",
            title="Loss jumps in the first steps and never comes back",
            keywords="learning rate, linear scaling, no warm-up, 学习率过高, 损失不降, 发散",
            root_cause="the learning rate was multiplied by the batch size twice and the warm-up was gone",
            trigger="the commit that lets the learning rate follow the batch size",
            prevention="a test of the schedule's first value and peak; log the update ratio of the first steps",
        ),
    ),
)
