"""Runs of a model that can be held against each other, so that what a trial changes is all that differs.

The model trains: a penalty or a branch that is there in training only is seen. Its modules draw nothing (still.py); around them the job
draws the same each time. Each run starts from the same buffers: batch norms count, codebooks move, queues fill while a model trains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from echelon.tree import tree_leaves, tree_map
from echelon.trials.determinism import Hold, Stillness, silenced
from echelon.trials.random_state import random_states, seed_all


@contextmanager
def rehearsing(model: nn.Module) -> Iterator[None]:
    """Inside, the model trains and its modules draw nothing. Afterwards it is as it was."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it calls no modules
    try:
        with random_states(), silenced(model), mode(model, training=True), _HoldModules() as hold, hold.watching(model):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _HoldModules(Hold):
    """Holds random numbers still while a module runs, which a part of its input may reach. The loss is given real ones: weights
    that are all alike would hide much."""

    def __init__(self) -> None:
        super().__init__(Stillness(random=True))
        self._running = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs) if self._running else func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Know which modules run."""

        def enter(*_: Any) -> None:
            self._running += 1

        def leave(*_: Any) -> None:
            self._running -= 1

        hooks = []
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(enter, prepend=True))
            hooks.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Inside, the model trains or is evaluated."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, flag in before:
            module.training = flag


@contextmanager
def on_copies(model: nn.Module, start: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Inside, the model has copies of its buffers, with the values of `start` where it has them; those themselves stay as they are."""
    before = [(path, module, dict(module._buffers)) for path, module in model.named_modules() if module._buffers]
    copies: dict[int, Tensor] = {}
    try:
        for path, module, own in before:
            for name, value in own.items():
                if value is not None:
                    begun = (start or {}).get(f"{path}.{name}" if path else name, value)
                    module._buffers[name] = copies.setdefault(id(value), begun.clone())
        yield
    finally:
        for _, module, own in before:
            module._buffers.update(own)


def alike(model: nn.Module, step: Callable[[], Any]) -> Callable[[], tuple[Any, dict[str, Tensor]]]:
    """`step`, which starts from the same state each time: its loss, and the buffers as it leaves them."""

    def run() -> tuple[Any, dict[str, Tensor]]:
        with on_copies(model):
            seed_all(0)
            return step(), dict(model.named_buffers())

    return run


def drawing(model: nn.Module, step: Callable[[], Any]) -> set[str]:
    """The modules, by path, that draw random numbers while they run in training. Not while it is rehearsed: then nobody does."""
    found: set[str] = set()
    states: list[Tensor] = []

    def before(*_: Any) -> None:
        states.append(torch.random.get_rng_state())

    def after(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if not torch.equal(states.pop(), torch.random.get_rng_state()):
                found.add(path)

        return hook

    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(before, prepend=True))
        hooks.append(module.register_forward_hook(after(path), always_call=True))
    try:
        with random_states(), mode(model, training=True):
            alike(model, step)()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def deciding(model: nn.Module, step: Callable[[], Any]) -> set[str]:
    """The modules, by path, that look at numbers while they run in training, or hold one that does: what they compute may be something
    else for other numbers, which no trial has seen."""
    running: list[str] = []

    def after(*_: Any) -> None:
        running.pop()

    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, path=path: running.append(path), prepend=True))
        hooks.append(module.register_forward_hook(after, always_call=True))
    try:
        with random_states(), mode(model, training=True), _Looks(running) as looks:
            alike(model, step)()
    finally:
        for hook in hooks:
            hook.remove()
    return looks.found


class _Looks(TorchFunctionMode):
    """Notes who was running when Python asked a tensor for its numbers."""

    _WAYS = frozenset(
        [
            "__bool__",
            "__int__",
            "__float__",
            "__index__",
            "__contains__",
            "item",
            "tolist",
            "numpy",
            "equal",
            "allclose",
            "is_nonzero",
        ]
    )

    def __init__(self, running: Sequence[str]) -> None:
        super().__init__()
        self._running, self.found = running, set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self._WAYS:
            self.found.update(self._running)
        return func(*args, **(kwargs or {}))


# Two runs side by side


@contextmanager
def calling(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """`module` computes something else for a while."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.forward = before


def copied(tree: Any) -> Any:
    """Tensors copied, so that what happens later does not change them; anything else copied if it can be."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        try:
            return copy.copy(leaf)
        except Exception:  # not ours: kept as it is
            return leaf

    return tree_map(one, tree)


def same(new: Any, old: Any) -> bool:
    """Whether two trees hold the same tensors but for rounding."""
    here, there = tree_leaves(new), tree_leaves(old)
    return len(here) == len(there) and all(
        isinstance(a, Tensor) and isinstance(b, Tensor) and equal(a, b)
        for a, b in zip(here, there, strict=True)
        if isinstance(a, Tensor) or isinstance(b, Tensor)
    )


def equal(a: Tensor, b: Tensor, scale: float = 0.0) -> bool:
    """Whether two tensors are the same but for rounding, by the size of the second or `scale`."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b) or not (a.is_floating_point() or a.is_complex()):  # masks hold infinities
        return torch.equal(a, b)
    size = b.abs().max().clamp(min=max(scale, 1e-30))
    bound = 1e-9 if b.dtype is torch.float64 else 1e-5
    return bool((a - b).abs().max() <= bound * size)
