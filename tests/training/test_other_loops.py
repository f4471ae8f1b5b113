"""Loops in other styles than the laboratory's: honest ones raise no alarm, and a fault is named or nothing is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmconsole.analyzers.report import ALARMS, CapsuleReport
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, Recorder
from torch import Tensor, nn
from torch.nn import functional as F

V, WIDTH, LENGTH, ROWS, STEPS = 64, 16, 16, 4, 12
Loop = Callable[[Recorder, nn.Module, torch.optim.Optimizer], None]


class Tiny(nn.Module):
    """A causal model in the manner of nanoGPT: targets come shifted, and the forward returns logits and loss."""

    def __init__(self, columns: int = V) -> None:
        super().__init__()
        self.wte = nn.Embedding(V, WIDTH)
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, columns, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx)
        x = x + self.mix(self.ln_1(x).cumsum(1) / torch.arange(1, idx.shape[1] + 1)[:, None])
        logits = self.lm_head(self.ln_f(x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Rows of a language in which a token says much of the next; inputs and shifted targets [rows, LENGTH]."""
    tokens = torch.randint(4, V, (rows, LENGTH + 1))
    for at in range(1, LENGTH + 1):
        follows = torch.rand(rows) < 0.8
        tokens[:, at] = torch.where(follows, (tokens[:, at - 1] * 5 + 3) % (V - 4) + 4, tokens[:, at])
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def groups(model: nn.Module, kind: Any = torch.optim.AdamW, **settings: Any) -> Any:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    parts = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return kind(parts, **({"lr": 3e-3, "betas": (0.9, 0.95)} | settings))


def recorded(directory: Path, loop: Loop, model: nn.Module | None = None, make: Any = groups, **options: Any) -> Any:
    torch.manual_seed(5)
    model = Tiny() if model is None else model
    optimizer = make(model)
    with Recorder(directory, model=model, optimizer=optimizer, every=4, **options) as recorder:
        loop(recorder, model, optimizer)
    assert recorder.path is not None
    return recorder.path


def report_on(directory: Path, loop: Loop, **options: Any) -> CapsuleReport:
    report = analyze(Capsule.open(recorded(directory, loop, **options)))
    assert not report.errors
    return report


def alarms(report: CapsuleReport) -> dict[str, str]:
    return {each.rule: each.summary for each in report.findings if each.severity in ALARMS}


def plain(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        x, y = batch()
        with recorder.step(batch=(x, y)):
            model(x, y)[1].backward()
            optimizer.step()
            optimizer.zero_grad()


class Adam8(torch.optim.Optimizer):
    """Decoupled decay and 16-bit moments under a name of its own, as 8-bit optimizers have them."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "state1": p.bfloat16() * 0, "state2": p.bfloat16() * 0}
                state["step"] += 1
                m = state["state1"].float().lerp(p.grad, 1 - first)
                v = state["state2"].float().lerp(p.grad.square(), 1 - second)
                state["state1"].copy_(m)
                state["state2"].copy_(v)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                m, v = m / (1 - first ** state["step"]), v / (1 - second ** state["step"])
                p.sub_(group["lr"] * m / (v.sqrt() + group["eps"]))


def by_hand(recorder: Recorder, model: nn.Module, optimizer: Any) -> None:
    """No optimizer at all."""
    for _ in range(STEPS):
        x, y = batch()
        with recorder.step(batch=(x, y)):
            model.zero_grad()
            model(x, y)[1].backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad  # type: ignore[operator]


def unscaled_by_hand(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for _ in range(STEPS):
        x, y = batch()
        with recorder.step(batch=(x, y)):
            scaler.scale(model(x, y)[1]).backward()
            for p in model.parameters():
                p.grad /= scaler.get_scale()  # type: ignore[operator]
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scaler.update(2.0**12)
            optimizer.zero_grad()


def unfrozen_late(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.mix.requires_grad_(False)  # type: ignore[operator]
    for _ in range(2):
        plain(recorder, model, optimizer)
        model.mix.requires_grad_(True)  # type: ignore[operator]


def rollouts(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Several steps on each set of samples, whose old log-probabilities come from a forward without gradients."""
    for _ in range(4):
        x, y = batch()
        advantage = torch.randn(ROWS, 1)
        with torch.no_grad():
            old = -F.cross_entropy(model(x)[0].transpose(1, 2), y, reduction="none")
        for _ in range(3):
            with recorder.step(batch={"input_ids": x, "labels": y}):
                new = -F.cross_entropy(model(x)[0].transpose(1, 2), y, reduction="none")
                (-((new - old).exp() * advantage).mean()).backward()
                optimizer.step()
                optimizer.zero_grad()


def tags(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        x, _ = batch()
        with recorder.step(batch=(x, x % 7)):
            F.cross_entropy(model(x)[0].flatten(0, 1), (x % 7).flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()


def one_batch(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, y = batch()
    for _ in range(2 * STEPS):
        with recorder.step(batch=(x, y)):
            model(x, y)[1].backward()
            optimizer.step()
            optimizer.zero_grad()


class Copies(nn.Module):
    """Two inputs, of which the second is what is to come out, moved by one: an encoder-decoder on a copying task."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, WIDTH), nn.Linear(WIDTH, V)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return self.head(self.embedding(src) + self.embedding(tgt))


def copying(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        x, _ = batch()
        moved = F.pad(x[:, :-1], (1, 0), value=1)
        with recorder.step(batch={"src": x, "tgt": moved, "labels": x}):
            F.cross_entropy(model(x, moved).flatten(0, 1), x.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()


def adam(model: nn.Module) -> Any:
    return groups(model, Adam8)


def adafactor(model: nn.Module) -> Any:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


HONEST: dict[str, tuple[Loop, dict[str, Any]]] = {
    "an optimizer of one's own": (plain, {"make": adam}),
    "weights moved by hand": (by_hand, {"make": lambda model: None}),
    "gradients unscaled by hand": (unscaled_by_hand, {}),
    "a layer unfrozen late": (unfrozen_late, {}),
    "several steps on a set of rollouts": (rollouts, {}),
    "tags for tokens": (tags, {"model": Tiny(7)}),
    "one batch on purpose": (one_batch, {}),
    "an encoder-decoder that copies": (copying, {"model": Copies()}),
}


@pytest.mark.quiet(
    "data/duplicate-batch", "data/split-leak", "data/token-out-of-vocabulary", "objective/labels-not-shifted",
    "objective/reduction", "objective/vocabulary-mismatch", "optimizer/gradient-chain-cut", "optimizer/order",
    "optimizer/step-mismatch",
)  # fmt: skip
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_loop_raises_no_alarm(name: str, tmp_path: Path):
    loop, options = HONEST[name]
    report = report_on(tmp_path, loop, **options)
    assert alarms(report) == {}


def test_an_optimizer_with_two_epsilons_is_described(tmp_path: Path):
    training = Capsule.open(recorded(tmp_path, plain, make=adafactor)).manifest.training
    assert training is not None
    assert training.optimizer is not None
    assert (training.optimizer.name, training.optimizer.lr, training.optimizer.eps) == ("Adafactor", 1e-2, None)


def zeroed_too_early(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        x, y = batch()
        with recorder.step(batch=(x, y)):
            model(x, y)[1].backward()
            optimizer.zero_grad()
            optimizer.step()


def stepped_twice(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        x, y = batch()
        with recorder.step(batch=(x, y)):
            model(x, y)[1].backward()
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()


def never_stepped(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        x, y = batch()
        with recorder.step(batch=(x, y)):
            model(x, y)[1].backward()
            optimizer.zero_grad()


def rows_exchanged(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        x, y = batch()
        y = y.roll(1, 0)
        with recorder.step(batch=(x, y)):
            model(x, y)[1].backward()
            optimizer.step()
            optimizer.zero_grad()


ADAM_FOR_ADAMW = {"training": {"optimizer": {"name": "AdamW"}}}
NO_SCHEDULE = {"training": {"schedule": {"name": "cosine", "warmup_steps": 4, "total_steps": 24}}}


def l2(model: nn.Module) -> Any:
    return groups(model, torch.optim.Adam)


def long(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    plain(recorder, model, optimizer)
    plain(recorder, model, optimizer)


FAULTS: dict[str, tuple[str, Loop, dict[str, Any]]] = {
    "zeroed before the step": ("optimizer/order", zeroed_too_early, {}),
    "stepped twice": ("optimizer/order", stepped_twice, {}),
    "never stepped": ("optimizer/not-owned", never_stepped, {}),
    "labels of other rows": ("data/labels-misaligned", rows_exchanged, {}),
    "Adam where AdamW was meant": ("optimizer/step-mismatch", plain, {"make": l2, "manifest": ADAM_FOR_ADAMW}),
    "a schedule that nobody steps": ("numerics/learning-rate", long, {"manifest": NO_SCHEDULE}),
}


@pytest.mark.recorded("optimizer/order", "optimizer/not-owned", "data/labels-misaligned", "optimizer/step-mismatch")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_nothing_else(name: str, tmp_path: Path):
    rule, loop, options = FAULTS[name]
    report = report_on(tmp_path, loop, **options)
    assert report.first_divergence is not None
    assert report.first_divergence.rule == rule
    found = [each for each in report.findings if each.severity in ALARMS]
    assert {each.rule for each in found if each.caused_by != rule} == {rule}
