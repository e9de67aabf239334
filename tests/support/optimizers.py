"""Optimizers as people write them: most of them look across parameters, each in another way."""

import random
from typing import Any

import torch
from torch import Tensor


class _Each(torch.optim.Optimizer):
    """Loops over the parameters that have a gradient."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def each(self) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter


class GlobalNorm(_Each):
    """As LAMB with `max_grad_norm`: gradients above a norm over all of them are scaled down before moments take them."""

    limit = 0.05

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = torch.stack([parameter.grad.norm() for _, parameter in self.each()]).norm()
        scale = (self.limit / norm).clamp(max=1.0)
        for group, parameter in self.each():
            moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
            moment.mul_(0.9).add_(parameter.grad * scale)
            ratio = parameter.norm() / moment.norm().clamp(min=1e-6)
            parameter.sub_(moment * ratio.clamp(0.1, 1.0), alpha=group["lr"])


class ClipsLargeNorms(GlobalNorm):
    """Never clips what a trial with ordinary numbers would show it."""

    limit = 1e3


class GlobalCount(_Each):
    """Corrects a bias by one count for all, in the state of no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        count = self.state["global"]["step"] = self.state["global"].get("step", 0) + 1
        for group, parameter in self.each():
            parameter.sub_(parameter.grad, alpha=group["lr"] / count)


class Langevin(_Each):
    """SGLD: noise in each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter in self.each():
            parameter.sub_(parameter.grad, alpha=group["lr"]).add_(torch.randn_like(parameter), alpha=1e-3)


class PythonNoise(_Each):
    """Noise from Python's own generator."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter in self.each():
            parameter.sub_(parameter.grad, alpha=group["lr"] * random.uniform(0.5, 1.0))


class MuonAndAdamW(torch.optim.Optimizer):
    """Matrices by Muon, all else by AdamW, as trainers write it."""

    def __init__(self, parameters: Any) -> None:
        every = list(parameters)
        super().__init__(every, {})
        self.muon = torch.optim.Muon([p for p in every if p.ndim == 2], lr=0.02)
        self.rest = [torch.optim.AdamW([p for p in every if p.ndim != 2], lr=0.01)]

    def step(self, closure: Any = None) -> None:
        for inner in (self.muon, *self.rest):
            inner.step()


class Lookahead(torch.optim.Optimizer):
    """Slow weights around AdamW; never calls `Optimizer.__init__`, and its groups are the inner one's."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = torch.optim.AdamW(parameters, lr=0.05)
        self.count = 0
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % 2 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for slow, parameter in zip(self.slow, fast, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


class Centralized(_Each):
    """Gradient centralization: each matrix's gradient loses its mean over the inputs, written in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter in self.each():
            if parameter.grad.dim() > 1:
                parameter.grad.sub_(parameter.grad.mean(dim=tuple(range(1, parameter.grad.dim())), keepdim=True))
            parameter.sub_(parameter.grad, alpha=group["lr"])


class SharedStep(_Each):
    """Adam's bias correction by one step tensor in the group, that each `step()` moves once for all parameters."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["step"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
                    moment.lerp_(parameter.grad, 0.1)
                    parameter.sub_(moment / (1 - 0.9 ** group["step"]), alpha=group["lr"])


class LayerTrust(_Each):
    """LAMB by layers: one trust ratio for weight and bias, which lie side by side in the group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [parameter for _, parameter in self.each()]
        for weight, bias in zip(every[::2], every[1::2], strict=False):
            ratio = (weight.norm() ** 2 + bias.norm() ** 2).sqrt() / (
                weight.grad.norm() ** 2 + bias.grad.norm() ** 2
            ).sqrt().clamp(min=1e-12)
            for parameter in (weight, bias):
                parameter.sub_(parameter.grad * ratio.clamp(0.01, 10.0), alpha=0.1 * self.defaults["lr"])


class SamOfLast(_Each):
    """Sharpness-aware without a closure: the ascent of one step is that of the last one's gradients, over all of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = torch.stack([parameter.grad.norm() for _, parameter in self.each()]).norm().clamp(min=1e-12)
        for group, parameter in self.each():
            state = self.state[parameter]
            if "ascent" in state:
                parameter.sub_(state["ascent"])
            parameter.sub_(parameter.grad, alpha=group["lr"])
            state["ascent"] = parameter.grad * (0.05 / norm)
            parameter.add_(state["ascent"])


class Lars(_Each):
    """A trust ratio for each parameter of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter in self.each():
            ratio = parameter.norm() / parameter.grad.norm().clamp(min=1e-12)
            moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
            moment.mul_(0.9).add_(parameter.grad * torch.where(ratio > 0, ratio, 1.0))
            parameter.sub_(moment, alpha=0.1 * group["lr"])


class SkipsInfinite(_Each):
    """Leaves everything as it is where any gradient is infinite."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if all(parameter.grad.isfinite().all() for _, parameter in self.each()):
            for group, parameter in self.each():
                parameter.sub_(parameter.grad, alpha=group["lr"])


class LaterNorm(_Each):
    """Divides by the norm over all gradients, but only from its fifth step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm: Tensor | float = torch.stack([parameter.grad.norm() for _, parameter in self.each()]).norm()
        for group, parameter in self.each():
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            parameter.sub_(parameter.grad / (norm if state["count"] > 4 else 1.0), alpha=group["lr"])


class ByPosition(_Each):
    """Lowers the rate from group to group: each group's place among the others counts."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for place, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / (1 + place))


def by_position(parameters: Any) -> torch.optim.Optimizer:
    return ByPosition([{"params": [parameter]} for parameter in parameters])


class WritesGradients(_Each):
    """Clips in place, over all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [parameter for _, parameter in self.each()]
        torch.nn.utils.clip_grad_norm_(every, 0.1)
        for group, parameter in self.each():
            parameter.sub_(parameter.grad, alpha=group["lr"])


class Sam(torch.optim.Optimizer):
    """Sharpness-aware: computes the loss again within its step."""

    def __init__(self, parameters: Any) -> None:
        self.base = torch.optim.SGD(parameters, lr=0.1)
        super().__init__(self.base.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is None:
            raise AssertionError("Sharpness Aware Minimization requires closure")
        with torch.enable_grad():
            closure()
        self.base.step()


class AcceleratedOptimizer(torch.optim.Optimizer):
    """As Accelerate's: never calls `Optimizer.__init__`; its properties, and their setters, pass on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.scaler: Any = None

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        self.optimizer.zero_grad(set_to_none is not False)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


class Renamed(AcceleratedOptimizer):
    """The same of a library that nobody has heard of, told apart by no name."""


Renamed.__bases__ = (torch.optim.Optimizer,)
for _name, _part in vars(AcceleratedOptimizer).items():
    if not _name.startswith("__") or _name == "__init__":
        setattr(Renamed, _name, _part)

ACROSS: dict[str, Any] = {
    "global norm": GlobalNorm,
    "clips large norms": ClipsLargeNorms,
    "global count": GlobalCount,
    "langevin": Langevin,
    "python noise": PythonNoise,
    "muon and adamw": MuonAndAdamW,
    "lookahead": Lookahead,
    "skips infinite": SkipsInfinite,
    "later norm": LaterNorm,
    "by position": by_position,
    "writes gradients": WritesGradients,
    "shared step": SharedStep,
    "layer trust": LayerTrust,
    "sam of last": SamOfLast,
    "unknown wrapper": lambda parameters: Renamed(torch.optim.AdamW(parameters, lr=0.1)),
}
