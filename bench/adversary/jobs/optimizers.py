"""Optimizers that draw, look across elements, keep odd state or edit what they are given."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from bench.adversary.kit import CLASSES, SAMPLES, WIDTH, integers, net, plain, sgd
from bench.adversary.spec import Spec, job


class Base(Optimizer):
    """One rule per parameter: `update(parameter, gradient, state, group)`."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.05} | defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


def using(kind: Callable[..., Any], **changes: Any) -> Spec:
    return Spec(**plain(optimizer=lambda params: kind(params), **changes))


# Those that draw


class Sgld(Base):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(g, alpha=-group["lr"]).add_(torch.randn_like(p), alpha=0.01)


@job("SGLD: noise from torch's generator in every step", owner="optim")
def langevin() -> Spec:
    return Spec(**plain(optimizer=Sgld), check="consistent")


class NumpyNoise(Base):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        noise = torch.from_numpy(numpy.asarray(numpy.random.standard_normal(tuple(p.shape)))).to(p.dtype)
        p.add_(g + 0.05 * noise, alpha=-group["lr"])


@job("gradient noise from NumPy", owner="optim")
def numpy_noise() -> Spec:
    return Spec(**plain(optimizer=NumpyNoise), check="consistent")


class PythonNoise(Base):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(g, alpha=-group["lr"] * random.choice([0.5, 1.0, 1.5]))


@job("a learning rate per tensor drawn from Python's random", owner="optim")
def python_noise() -> Spec:
    return Spec(**plain(optimizer=PythonNoise), check="consistent")


class OwnGenerator(Base):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(11)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(g, alpha=-group["lr"])
        p.add_(torch.randn(p.shape, generator=self.generator, dtype=p.dtype), alpha=0.01)


@job("noise from the optimizer's own seeded generator: whole tensors, in order", owner="optim", refusable="resume")
def own_generator() -> Spec:
    return using(OwnGenerator)


# Those that look across elements


class Lars(Base):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        trust = p.norm() / (g.norm() + 1e-9) if p.norm() > 0 and g.norm() > 0 else 1.0
        p.add_(g * trust, alpha=-0.01)


@job("LARS: a trust ratio of two norms per tensor", owner="optim")
def lars() -> Spec:
    return using(Lars)


class LateLars(Base):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        trust = p.norm() / (g.norm() + 1e-9) if state["step"] > 5 else 1.0
        p.add_(g * trust, alpha=-0.01)


@job("LARS that begins at step 6: two trial steps do not show it", owner="optim")
def late_lars() -> Spec:
    return using(LateLars)


class Lamb(Base):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["m"], state["v"], state["step"] = torch.zeros_like(p), torch.zeros_like(p), 0
        state["step"] += 1
        state["m"].mul_(0.9).add_(g, alpha=0.1)
        state["v"].mul_(0.99).addcmul_(g, g, value=0.01)
        step = state["m"] / (1 - 0.9 ** state["step"]) / ((state["v"] / (1 - 0.99 ** state["step"])).sqrt() + 1e-6)
        ratio = p.norm() / (step.norm() + 1e-9)
        p.add_(step * ratio.clamp(0, 10), alpha=-0.02)


@job("LAMB", owner="optim")
def lamb() -> Spec:
    return using(Lamb)


class LambItem(Base):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(g, alpha=-0.01 * min(p.norm().item() / (g.norm().item() + 1e-9), 10.0))


@job("a trust ratio through .item(): a float that a shard computes from its part", owner="optim")
def trust_by_item() -> Spec:
    return using(LambItem)


class MeanItem(Base):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if bool(g.abs().mean() > 0.02):
            g = g / (float(g.abs().max()) + 1.0)
        p.add_(g, alpha=-0.05)


@job("bool() and float() of reductions decide the update", owner="optim")
def branches_on_mean() -> Spec:
    return using(MeanItem)


class Muon(Base):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.dim() != 2:
            p.add_(g, alpha=-0.05)
            return
        x = g / (g.norm() + 1e-9)
        for _ in range(5):
            a = x @ x.T
            x = 1.5 * x - 0.5 * a @ x
        p.add_(x, alpha=-0.02)


@job("Muon: Newton-Schulz on whole matrices", owner="optim")
def muon() -> Spec:
    return using(Muon)


@job("torch.optim.Muon for matrices and SGD for the rest: two optimizers", owner="optim", refusable="")
def torch_muon() -> Spec:
    def optimizers(params: Any) -> list[Optimizer]:
        params = list(params)
        return [
            torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.01),
            torch.optim.SGD([p for p in params if p.dim() != 2], lr=0.05),
        ]

    return Spec(**plain(optimizer=optimizers), tolerance=2e-2)


class Shampoo(Base):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        for dim in range(g.dim()):
            flat = g.transpose(0, dim).reshape(g.shape[dim], -1)
            key = f"h{dim}"
            state[key] = state.get(key, torch.eye(len(flat), dtype=g.dtype)) + flat @ flat.T
            values, vectors = torch.linalg.eigh(state[key])
            root = vectors @ torch.diag(values.clamp(min=1e-6) ** (-0.5 / g.dim())) @ vectors.T
            g = torch.tensordot(root, g.transpose(0, dim), dims=1).transpose(0, dim)
        p.add_(g, alpha=-0.05)


@job("Shampoo: a matrix per dimension of each tensor", owner="optim")
def shampoo() -> Spec:
    return using(Shampoo)


@job("torch.optim.Adafactor: rows and columns", owner="optim")
def adafactor() -> Spec:
    return Spec(**plain(optimizer=lambda params: torch.optim.Adafactor(params, lr=0.02)))


class Centralised(Base):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if g.dim() > 1:
            g = g - g.mean(tuple(range(1, g.dim())), keepdim=True)
        p.add_(g, alpha=-0.05)


@job("gradient centralisation: the mean of each row", owner="optim")
def centralised() -> Spec:
    return using(Centralised)


class ClipInside(Base):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.add_(p.grad * (0.5 / norm.clamp(min=0.5)), alpha=-0.1)


@job("clipping over all parameters inside step()", owner="optim")
def clips_inside() -> Spec:
    return using(ClipInside)


class ClipUtility(Base):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.5)
        super().step()

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(g, alpha=-0.1)


@job("torch.nn.utils.clip_grad_norm_ called by step(), which edits p.grad", owner="optim")
def clips_by_utility() -> Spec:
    return using(ClipUtility)


class DAdapt(Base):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        group = self.param_groups[0]
        d, up, down = group.setdefault("d", 1e-2), 0.0, 0.0
        for p in group["params"]:
            if p.grad is None:
                continue
            s = self.state[p].setdefault("s", torch.zeros_like(p))
            s.add_(p.grad, alpha=d)
            up += float((p.grad * s).sum())
            down += float(s.abs().sum())
            p.add_(p.grad, alpha=-d * 5)
        group["d"] = max(d, min(d * 1.5, up / (down + 1e-9)))


@job("D-adaptation: the step size follows sums over all parameters", owner="optim")
def d_adaptation() -> Spec:
    return using(DAdapt)


class LateGlobal(Base):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(p.grad.pow(2).sum()) for p in params) ** 0.5 if self.steps > 6 else 1.0
        for p in params:
            p.add_(p.grad, alpha=-0.05 / norm)


@job(
    "the norm over all parameters counts from step 7 on, with the step number outside of every state",
    owner="optim",
    refusable="resume",
)
def late_global_norm() -> Spec:
    return using(LateGlobal)


class Sam(Base):
    """Sharpness-aware: a first step uphill, undone with the next gradient; its norm is over all parameters."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm() + 1e-12
        for p in params:
            old = self.state[p].get("old")
            if old is not None:
                p.sub_(old)
            p.add_(p.grad, alpha=-0.05)
            self.state[p]["old"] = p.grad * (0.01 / norm)
            p.add_(self.state[p]["old"])


@job("sharpness-aware steps with one gradient per step", owner="optim")
def sharpness_aware() -> Spec:
    return using(Sam)


# Those with odd state or habits


class Lookahead(Base):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["slow"], state["step"] = p.detach().clone(), 0
        state["step"] += 1
        p.add_(g, alpha=-group["lr"])
        if state["step"] % 3 == 0:
            state["slow"].add_(p - state["slow"], alpha=0.5)
            p.copy_(state["slow"])


@job("lookahead: slow weights begin as a copy of the parameters", owner="optim")
def lookahead() -> Spec:
    return using(Lookahead)


class LateState(Base):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 4:
            m = state.setdefault("m", torch.zeros_like(p))
            m.mul_(0.9).add_(g)
            g = m
        p.add_(g, alpha=-0.02)


@job("momentum whose state appears at step 5", owner="ckpt")
def late_state() -> Spec:
    return using(LateState)


class EditsGradient(Base):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        g.add_(p, alpha=0.01)
        g.mul_(0.5)
        p.sub_(g, alpha=0.1)


@job("step() edits p.grad in place", owner="verifier")
def edits_gradient() -> Spec:
    return using(EditsGradient)


class ListState(Base):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        past = state.setdefault("past", [])
        past.append(g.clone())
        del past[:-3]
        p.add_(sum(past) / len(past), alpha=-0.1)


@job("state that is a list of tensors", owner="ckpt")
def list_state() -> Spec:
    return using(ListState)


class GlobalState(Base):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        shared = self.state["shared"]
        shared["count"] = shared.get("count", 0) + 1
        p.add_(g, alpha=-0.1 / (1 + shared["count"] / 50))


@job("state under a string key: optimizer.state['shared']", owner="ckpt", refusable="pp tp")
def string_state() -> Spec:
    return using(GlobalState)


class OwnStateDict(Base):
    """Its momentum is kept by itself and saved by its own state_dict."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.steps = 0

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(g, alpha=-0.1 / (1 + self.steps / 5))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        super().step()
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "steps"})


@job("a counter that only its own state_dict holds", owner="ckpt")
def own_state_dict() -> Spec:
    return using(OwnStateDict)


class NoClosure(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad)


@job("step(self) without a closure argument", owner="optim")
def no_closure() -> Spec:
    return using(NoClosure)


class ThroughData(Base):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.data = p.data - 0.1 * g.data


@job("step() replaces p.data instead of writing in place", owner="optim")
def replaces_data() -> Spec:
    return using(ThroughData)


class GroupState(Base):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * (1 + group["k"] / 10))


@job("a step counter in param_groups", owner="ckpt")
def counter_in_group() -> Spec:
    return using(GroupState)


@job("learning rate by the number of elements of each parameter", owner="optim")
def rate_by_size() -> Spec:
    def optimizer(params: Any) -> Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": 1.0 / (10 + p.numel())} for p in params], lr=0.1)

    return Spec(**plain(optimizer=optimizer))


@job("weight decay for matrices only, by the number of dimensions", owner="optim")
def decay_by_dimension() -> Spec:
    def optimizer(params: Any) -> Optimizer:
        params = list(params)
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.01)

    return Spec(**plain(optimizer=optimizer))


@job("only the head is given to the optimizer", owner="optim")
def part_of_parameters() -> Spec:
    return Spec(**plain(optimizer=lambda params: torch.optim.SGD(list(params)[-2:], lr=0.1)))


@job("NAdam with decoupled decay and a momentum schedule in its state", owner="ckpt")
def nadam() -> Spec:
    return Spec(
        **plain(
            optimizer=lambda params: torch.optim.NAdam(params, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True)
        )
    )


@job("ASGD, which averages weights in its state and counts in tensors", owner="ckpt")
def averaged_sgd() -> Spec:
    return Spec(**plain(optimizer=lambda params: torch.optim.ASGD(params, lr=0.05, t0=3)))


@job("Rprop: signs of gradients; a rounding error flips a step", owner="optim")
def rprop() -> Spec:
    return Spec(**plain(optimizer=lambda params: torch.optim.Rprop(params, lr=0.01)), tolerance=1e-6)


@job("two optimizers over halves of the parameters", owner="optim")
def two_optimizers() -> Spec:
    def optimizers(params: Any) -> list[Optimizer]:
        params = list(params)
        return [torch.optim.Adam(params[::2], lr=0.01), torch.optim.SGD(params[1::2], lr=0.1, momentum=0.9)]

    return Spec(**plain(optimizer=optimizers))


@job("clipping that binds at every step, with momentum and Nesterov", owner="optim")
def clipped() -> Spec:
    return Spec(**plain(optimizer=sgd(0.1, momentum=0.9, nesterov=True), clip_norm=0.2))


@job("a hook of the optimizer clamps gradients before step()", owner="optim")
def hooked() -> Spec:
    def clamp(optimizer: Optimizer, *arguments: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.clamp_(-0.05, 0.05)

    def optimizer(params: Any) -> Optimizer:
        made = torch.optim.SGD(params, lr=0.1)
        made.register_step_pre_hook(clamp)
        return made

    return Spec(**plain(optimizer=optimizer))


@job("SparseAdam, which takes sparse gradients alone, beside Adam", owner="optim", refusable="dp zero shares tp pp")
def sparse_adam() -> Spec:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, WIDTH, sparse=True, dtype=torch.float64)
            self.net = net()()

        def forward(self, words: Tensor) -> Tensor:
            return self.net(self.table(words).mean(1))

    def optimizer(params: Any) -> list[Optimizer]:
        table, *rest = params
        return [torch.optim.SparseAdam([table], lr=0.05), torch.optim.Adam(rest, lr=0.01)]

    data = TensorDataset(integers(20, SAMPLES, 3, seed=4), integers(CLASSES, SAMPLES))
    return Spec(**plain(model=Words, optimizer=optimizer, data=data, eval_data=None, metrics={}))
