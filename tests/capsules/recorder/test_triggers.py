"""When a window is kept whole, and the near twins in which nothing may fire."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from llmconsole.capsules.recorder.triggers import Limits, OddSample, Spike
from torch import Tensor, nn


def fires(losses: list[float]) -> list[int]:
    spike = Spike()
    return [step for step, loss in enumerate(losses) if spike.add(loss) is not None]


class TestSpikeOfTheLoss:
    def test_a_jump_to_twice_the_level_fires_once_at_its_step(self) -> None:
        assert fires([3.0 + 0.01 * (step % 5) for step in range(40)] + [6.0] + [3.0] * 30) == [40]

    @pytest.mark.parametrize("seed", range(20))
    def test_the_noisy_descent_of_a_young_run_is_no_spike(self, seed: int) -> None:
        noise = random.Random(seed)
        descent = [2.0 + 9.0 * math.exp(-step / 30) + noise.gauss(0, 0.25) for step in range(400)]
        assert fires(descent) == []

    @pytest.mark.parametrize("seed", range(20))
    def test_single_sentence_batches_scatter_without_firing(self, seed: int) -> None:
        noise = random.Random(seed)
        assert fires([max(0.1, noise.gauss(3.0, 0.7)) for _ in range(400)]) == []

    def test_jitter_of_a_loss_near_zero_is_no_spike(self) -> None:
        noise = random.Random(1)
        learnt = [5.0 * math.exp(-step / 10) for step in range(60)]
        assert fires(learnt + [0.001 * math.exp(noise.gauss(0, 1)) for _ in range(200)]) == []

    def test_nothing_fires_before_there_is_a_history(self) -> None:
        assert fires([1.0, 100.0, 1.0, 1e6]) == []


class TestLimits:
    def test_a_broken_run_fires_once_and_again_only_after_it_was_healthy(self) -> None:
        limits = Limits()
        assert [limits.allow("nonfinite") for _ in range(5)] == [True, False, False, False, False]
        for _ in range(20):
            limits.healthy("nonfinite")
        assert limits.allow("nonfinite")

    def test_exceptions_and_requests_are_not_held_back_by_their_neighbours(self) -> None:
        limits = Limits()
        assert [limits.allow("manual") for _ in range(3)] == [True] * 3


class Spoiled(nn.Module):
    """Multiplies, and spoils one element in the forward or the backward pass of one call."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_value: float | None = None
        self.backward_value: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        if self.forward_value is not None:
            y = torch.where(torch.arange(y.shape[-1]) == 3, self.forward_value, y)
        if self.backward_value is not None:
            value = self.backward_value
            y.register_hook(lambda g: torch.where(torch.arange(g.shape[-1]) == 3, value, g))
        return y


class WithSpoiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.first = nn.Embedding(50, 8), nn.Linear(8, 8)
        self.middle, self.last = Spoiled(), nn.Linear(8, 50)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.middle(self.first(self.tokens(ids))))


class TestNonFinite:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_bad_activation_names_the_interval_in_execution_order(self, run: Any, gpt: Any, value: float) -> None:
        recording = run(WithSpoiled())
        recording.model.middle.forward_value = None
        recording.train(3)
        recording.model.middle.forward_value = value
        recording.train(2)
        capsule = recording.capsule()
        assert (capsule.trigger.kind, capsule.trigger.step, capsule.trigger.signal) == ("nonfinite", 3, "activation")
        assert "last finite activation first" in capsule.trigger.message
        assert "first bad activation middle" in capsule.trigger.message
        stats = capsule.stats(step=3, role="activation")
        at = list(stats.name).index("middle")
        assert bool(stats.full[at])
        rows = 4 * 12  # one element of each position's eight
        assert int(stats.nan[at] if math.isnan(value) else stats.posinf[at]) == rows
        assert not bool(stats.full[list(stats.name).index("first")])
        assert [batch.step for batch in capsule.batches()] == [0, 1, 2, 3, 4]

    def test_a_bad_gradient_names_the_interval_in_autograd_order(self, run: Any) -> None:
        recording = run(WithSpoiled())
        recording.train(3)
        recording.model.middle.backward_value = math.nan
        recording.train(1)
        trigger = recording.capsule().trigger
        assert (trigger.kind, trigger.step, trigger.signal) == ("nonfinite", 3, "gradient")
        assert trigger.message.startswith("backward: last finite gradient last.weight")
        # the spoiling hook came first on that tensor, so the recorder's hook already sees what it made
        assert "first bad gradient middle (float32)" in trigger.message

    def test_a_loss_that_alone_is_nan_is_named(self, run: Any) -> None:
        recording = run()
        recording.train(4, spoil=lambda step, loss: loss * math.nan if step == 3 else loss)
        trigger = recording.capsule().trigger
        assert (trigger.kind, trigger.step, trigger.signal) == ("nonfinite", 3, "loss")
        assert "last finite logits (float32) → first bad loss" in trigger.message

    def test_recording_goes_on_and_a_broken_run_fires_once(self, run: Any) -> None:
        recording = run()
        recording.train(10, spoil=lambda step, loss: loss * math.nan if step >= 3 else loss)
        capsule = recording.capsule()
        assert len(capsule.scalars("loss")) == 10
        fired = [event for event in capsule.records("events") if "nonfinite:" in str(event.get("message"))]
        assert [event["step"] for event in fired] == [3]


class Masked(nn.Module):
    """Attention whose scores, masked with -Inf as usual, are a module's output; so are the masked logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.scores, self.head = nn.Embedding(50, 8), Scores(), nn.Linear(8, 50)
        self.mask = MaskedLogits()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.mask(self.head(torch.softmax(self.scores(x), -1) @ x))


class Scores(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        return (x @ x.transpose(1, 2)).masked_fill(future, -math.inf)


class MaskedLogits(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return logits.masked_fill(torch.arange(50) >= 48, -math.inf)


class TestLawfulInfinities:
    def test_masked_scores_and_logits_trigger_nothing_but_are_counted(self, run: Any, gpt: Any) -> None:
        recording = run(Masked())
        for step in range(5):
            inputs, targets = gpt.shifted(step)
            with recording.recorder.step(batch=(inputs, targets)):
                gpt.cross_entropy(recording.model(inputs % 48), targets % 48).backward()
                recording.optimizer.step()
                recording.optimizer.zero_grad()
        capsule = recording.capsule()
        assert capsule.trigger is None
        scores = capsule.stats(name="scores", role="activation", step=2)
        assert (int(scores.neginf[0]), int(scores.nan[0])) == (4 * (12 * 11 // 2), 0)

    def test_a_step_that_the_scaler_leaves_out_triggers_nothing(self, run: Any, gpt: Any) -> None:
        recording = run()
        # A float32 gradient overflows under this scale, as float16 ones do while the scale is searched.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
        for step in range(3):
            inputs, targets = gpt.shifted(step)
            with recording.recorder.step(batch=(inputs, targets)):
                scaler.scale(50 * gpt.cross_entropy(recording.model(inputs), targets)).backward()
                scaler.step(recording.optimizer)
                scaler.update()
                recording.optimizer.zero_grad()
        capsule = recording.capsule()
        assert capsule.trigger is None
        assert capsule.scalars("overflow").value[0] == 1.0
        assert capsule.scalars("loss_scale").value[0] == 2.0**127
        kinds = [event["kind"] for event in capsule.records("events") if event["step"] == 0]
        assert kinds == [
            "step_begin",
            "backward",
            "unscale",
            "finite_check",
            "optimizer_step_skipped",
            "scaler_update",
            "zero_grad",
        ]

    def test_the_same_overflow_without_a_scaler_is_an_incident(self, run: Any, gpt: Any) -> None:
        recording = run()
        recording.train(2, spoil=lambda step, loss: loss * 2.0**127 * 50 if step == 1 else loss)
        trigger = recording.capsule().trigger
        assert (trigger.kind, trigger.step) == ("nonfinite", 1)


class TestAskedFor:
    def test_a_manual_trigger_keeps_the_window_with_its_message(self, run: Any) -> None:
        recording = run(every=1000)
        recording.train(3)
        recording.recorder.trigger("manual", message="looked odd")
        capsule = recording.capsule()
        assert (capsule.trigger.kind, capsule.trigger.message, capsule.trigger.step) == ("manual", "looked odd", 2)

    def test_a_spike_is_recorded_with_the_threshold_it_passed(self, run: Any) -> None:
        recording = run(every=1000)
        recording.train(30, spoil=lambda step, loss: loss * 10 if step == 25 else loss)
        trigger = recording.capsule().trigger
        assert (trigger.kind, trigger.step, trigger.signal) == ("spike", 25, "loss")

    def test_a_healthy_run_has_no_trigger(self, run: Callable[..., Any]) -> None:
        recording = run()
        recording.train(60)
        capsule = recording.capsule()
        assert capsule.trigger is None
        assert capsule.status == "sealed"


class TestOddSample:
    def test_a_sample_far_beyond_all_before_is_worth_keeping(self) -> None:
        odd = OddSample()
        ordinary = [odd.add([2.5, 2.8, 3.0 + 0.1 * (step % 3)]) for step in range(20)]
        assert not any(ordinary)
        assert odd.add([2.6, 8.0, 2.7])

    def test_what_was_seen_once_is_not_odd_again(self) -> None:
        odd = OddSample()
        for _ in range(10):
            odd.add([2.5, 3.0])
        assert odd.add([2.5, 8.0])
        assert not odd.add([2.5, 8.5])

    def test_a_young_run_and_a_batch_of_one_say_nothing(self) -> None:
        young, single = OddSample(), OddSample()
        assert not any(young.add([2.0, 2.0 * 1.5**step]) for step in range(6))
        assert not any(single.add([2.0]) for _ in range(10))
        assert not single.add([9.0])

    def test_a_run_full_of_oddities_does_not_fill_the_disk(self) -> None:
        odd = OddSample()
        kept = sum(odd.add([1.0, 2.0 * 1.3**step]) for step in range(100))
        assert kept == 16
