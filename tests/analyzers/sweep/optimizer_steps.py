"""Random optimizer steps, right and wrong, taken by torch in the job's own types, apart from the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from llmconsole.capsules import CapsuleWriter
from torch import Tensor

#: Faults as a job has them; the names are those of the catalogue.
FAULTS = (
    *("l2-for-decoupled", "decay-without-lr", "decay-missing", "no-bias-correction", "step-one-behind"),
    *("step-one-ahead", "eps-inside-root", "betas-swapped", "gradient-not-unscaled", "unscaled-with-new-scale"),
    *("gradient-not-clipped", "clipped-twice", "clipped-before-unscale", "lr-of-previous-step", "rounded-to-bfloat16"),
)
#: What the catalogue does not know.
UNKNOWN = ("nesterov", "decay-of-square-root", "gradient-centred", "momentum-only")


@dataclass
class Job:
    """A job with two parameter groups; ``fault`` None for a healthy one."""

    seed: int
    fault: str | None = None
    dtype: torch.dtype = torch.float32
    fused: bool = False
    decayed: bool = True
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        draw = self.generator
        self.lr = 10 ** float(torch.empty(()).uniform_(-4, -1.7, generator=draw))
        self.lr_previous = self.lr * float(torch.empty(()).uniform_(0.5, 0.99, generator=draw))
        self.betas = [(0.9, 0.999), (0.9, 0.95), (0.95, 0.98), (0.8, 0.99)][int(self._whole(4))]
        self.eps = [1e-8, 1e-6, 1e-5][int(self._whole(3))]
        self.decay = [0.01, 0.1, 0.3][int(self._whole(3))]
        self.steps = int(self._whole(12)) + 1 + (self.fault == "step-one-behind")  # a count of 0 divides by 0
        self.scale = float(2 ** (6 + int(self._whole(8))))
        self.limit = 0.37
        rows, columns = 8 + int(self._whole(24)), 8 + int(self._whole(24))
        size = 10 ** float(torch.empty(()).uniform_(-2, 0, generator=draw))
        self.parameters = {
            "mlp.weight": size * torch.randn(rows, columns, generator=draw),
            "norm.weight": 1 + 0.1 * torch.randn(columns, generator=draw),
        }
        self.gradient_size = 10 ** float(torch.empty(()).uniform_(-4, 0, generator=draw))

    def _whole(self, below: int) -> Tensor:
        return torch.randint(0, below, (), generator=self.generator)

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: self.gradient_size * torch.randn(p.shape, generator=self.generator)
            * torch.rand(p.shape, generator=self.generator)
            for name, p in self.parameters.items()
        }  # fmt: skip

    def write(self, writer: CapsuleWriter) -> None:
        """A few real steps of torch.optim.AdamW, then the step in question, captured."""
        names = list(self.parameters)
        tensors = [torch.nn.Parameter(p.to(self.dtype)) for p in self.parameters.values()]
        optimizer = torch.optim.AdamW(
            [{"params": tensors[:1], "weight_decay": self.decay}, {"params": tensors[1:], "weight_decay": 0.0}],
            lr=self.lr_previous,
            betas=self.betas,
            eps=self.eps,
            fused=self.fused,
        )
        for _ in range(self.steps - 1):
            for p, g in zip(tensors, self.gradients().values(), strict=True):
                p.grad = g.to(self.dtype)
            optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        true = {name: g.to(self.dtype) for name, g in self.gradients().items()}
        norm = float(torch.stack([g.float().norm() for g in true.values()]).norm())
        clip = min(1.0, self.limit * norm / (norm + 1e-6))  # always clips
        early = min(1.0, self.limit * norm / (norm * self.scale + 1e-6))
        groups: list[tuple[str, dict[str, Tensor], dict[str, Any]]] = []
        for name, p, group in zip(names, tensors, optimizer.param_groups, strict=True):
            scaled = (true[name].float() * self.scale).to(self.dtype)
            state = optimizer.state[p]
            zeros = torch.zeros_like(p)
            m = state["exp_avg"].clone() if state else zeros.clone()
            v = state["exp_avg_sq"].clone() if state else zeros.clone()
            before = p.detach().clone()
            used = self.used(scaled, clip, early)
            if (
                self.fault is None
                or self.fault in ("gradient-not-unscaled", "unscaled-with-new-scale")
                or ("clip" in self.fault)
            ):
                p.grad = used
                self._own_step(optimizer, p)
                after, m2, v2 = p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]
            else:
                after, m2, v2 = self.faulty(before, used, m, v, group["weight_decay"])
            attributes: dict[str, Any] = {
                "lr": self.lr, "lr_previous": self.lr_previous, "betas": list(self.betas), "eps": self.eps,
                "weight_decay": group["weight_decay"], "optimizer": "AdamW", "module": "torch.optim.adamw",
                "decoupled": True, "grad_scale": self.scale, "new_scale": self.scale / 2, "gradient_state": "scaled",
                "max_norm": self.limit * norm, "total_norm": norm, "state_step_before": self.steps - 1,
            }  # fmt: skip
            arrays = {"before": before, "gradient": scaled, "exp_avg": m, "exp_avg_sq": v, "after": after}
            arrays |= {"exp_avg_after": m2, "exp_avg_sq_after": v2}
            flat = {member: array.detach().reshape(-1) for member, array in arrays.items()}
            groups.append((f"optimizer/{name}", flat, attributes))
        writer.tensors(self.steps, groups)

    def _own_step(self, optimizer: torch.optim.Optimizer, p: Tensor) -> None:
        for other in (each for group in optimizer.param_groups for each in group["params"]):
            if other is not p:
                other.grad = None
        optimizer.step()

    def used(self, scaled: Tensor, clip: float, early: float) -> Tensor:
        divisor = {"gradient-not-unscaled": 1.0, "unscaled-with-new-scale": self.scale / 2}.get(self.fault, self.scale)
        factor = {"gradient-not-clipped": 1.0, "clipped-twice": clip * clip, "clipped-before-unscale": early}
        return scaled / divisor * factor.get(self.fault, clip)

    def faulty(self, w: Tensor, g: Tensor, m: Tensor, v: Tensor, decay: float) -> tuple[Tensor, Tensor, Tensor]:
        """AdamW as someone may write it, in the job's own type, with ``fault``."""
        fault, lr = self.fault, self.lr_previous if self.fault == "lr-of-previous-step" else self.lr
        beta1, beta2 = self.betas[::-1] if fault == "betas-swapped" else self.betas
        t = self.steps + {"step-one-behind": -1, "step-one-ahead": 1}.get(fault, 0)
        if fault == "l2-for-decoupled":
            g = g + decay * w
        elif fault == "decay-without-lr":
            w = w * (1 - decay)
        elif fault == "decay-of-square-root":
            w = w * (1 - lr * decay**0.5)
        elif fault != "decay-missing":
            w = w * (1 - lr * decay)
        if fault == "gradient-centred":
            g = g - g.mean()
        m = m * beta1 + g * (1 - beta1)
        v = v * beta2 + g * g * (1 - beta2)
        corrected = fault != "no-bias-correction"
        mh = m / (1 - beta1**t) if corrected else m
        vh = v / (1 - beta2**t) if corrected else v
        if fault == "nesterov":
            mh = beta1 * mh + g * (1 - beta1) / (1 - beta1**t)
        root = (vh + self.eps).sqrt() if fault == "eps-inside-root" else vh.sqrt() + self.eps
        if fault == "momentum-only":
            root = torch.ones_like(root)
        w = w - lr * mh / root
        return (w.to(torch.bfloat16).to(w.dtype) if fault == "rounded-to-bfloat16" else w), m, v
