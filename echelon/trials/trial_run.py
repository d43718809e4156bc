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
from echelon.trials.determinism import DeterministicMode, TorchCallRewriter, randomness_disabled
from echelon.trials.random_state import preserve_random_states, seed_all


@contextmanager
def deterministic_training(model: nn.Module) -> Iterator[None]:
    """Inside, the model trains and its modules draw nothing. Afterwards it is as it was."""
    had_fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it calls no modules
    try:
        with (
            preserve_random_states(),
            randomness_disabled(model),
            training_mode(model, training=True),
            _ModuleCallRewriter() as rewriter,
            rewriter.track_running(model),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(had_fastpath)


class _ModuleCallRewriter(TorchCallRewriter):
    """Holds random numbers still while a module runs, which a part of its input may reach. The loss is given real ones: weights
    that are all alike would hide much."""

    def __init__(self) -> None:
        super().__init__(DeterministicMode(fix_random=True))
        self._num_running = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (
            super().__torch_function__(func, types, args, kwargs)
            if self._num_running
            else func(*args, **(kwargs or {}))
        )

    @contextmanager
    def track_running(self, model: nn.Module) -> Iterator[None]:
        """Know which modules run."""

        def enter(*_: Any) -> None:
            self._num_running += 1

        def leave(*_: Any) -> None:
            self._num_running -= 1

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
def training_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Inside, the model trains or is evaluated."""
    original_modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in original_modes:
            module.training = was_training


@contextmanager
def copied_buffers(model: nn.Module, initial_values: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Inside, the model has copies of its buffers, with the values of `initial_values` where it has them; those themselves stay as they are."""
    original_buffers = [
        (path, module, dict(module._buffers)) for path, module in model.named_modules() if module._buffers
    ]
    copies: dict[int, Tensor] = {}
    try:
        for path, module, own_buffers in original_buffers:
            for name, value in own_buffers.items():
                if value is not None:
                    initial_value = (initial_values or {}).get(f"{path}.{name}" if path else name, value)
                    module._buffers[name] = copies.setdefault(id(value), initial_value.clone())
        yield
    finally:
        for _, module, own_buffers in original_buffers:
            module._buffers.update(own_buffers)


def make_repeatable(model: nn.Module, run_step: Callable[[], Any]) -> Callable[[], tuple[Any, dict[str, Tensor]]]:
    """`run_step`, which starts from the same state each time: its loss, and the buffers as it leaves them."""

    def run() -> tuple[Any, dict[str, Tensor]]:
        with copied_buffers(model):
            seed_all(0)
            return run_step(), dict(model.named_buffers())

    return run


def find_random_modules(model: nn.Module, run_step: Callable[[], Any]) -> set[str]:
    """The modules, by path, that draw random numbers while they run in training. Not while it is rehearsed: then nobody does."""
    random_paths: set[str] = set()
    rng_states: list[Tensor] = []

    def push_rng_state(*_: Any) -> None:
        rng_states.append(torch.random.get_rng_state())

    def make_compare_hook(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if not torch.equal(rng_states.pop(), torch.random.get_rng_state()):
                random_paths.add(path)

        return hook

    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(push_rng_state, prepend=True))
        hooks.append(module.register_forward_hook(make_compare_hook(path), always_call=True))
    try:
        with preserve_random_states(), training_mode(model, training=True):
            make_repeatable(model, run_step)()
    finally:
        for hook in hooks:
            hook.remove()
    return random_paths


def find_data_dependent_modules(model: nn.Module, run_step: Callable[[], Any]) -> set[str]:
    """The modules, by path, that look at numbers while they run in training, or hold one that does: what they compute may be something
    else for other numbers, which no trial has seen."""
    running_paths: list[str] = []

    def pop_path(*_: Any) -> None:
        running_paths.pop()

    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, path=path: running_paths.append(path), prepend=True))
        hooks.append(module.register_forward_hook(pop_path, always_call=True))
    try:
        with (
            preserve_random_states(),
            training_mode(model, training=True),
            _ValueReadRecorder(running_paths) as recorder,
        ):
            make_repeatable(model, run_step)()
    finally:
        for hook in hooks:
            hook.remove()
    return recorder.reading_paths


class _ValueReadRecorder(TorchFunctionMode):
    """Notes who was running when Python asked a tensor for its numbers."""

    _VALUE_READS = frozenset(
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

    def __init__(self, running_paths: Sequence[str]) -> None:
        super().__init__()
        self._running_paths, self.reading_paths = running_paths, set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self._VALUE_READS:
            self.reading_paths.update(self._running_paths)
        return func(*args, **(kwargs or {}))


# Two runs side by side


@contextmanager
def replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """`module` computes something else for a while."""
    original_forward = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if original_forward is None:
            del module.__dict__["forward"]
        else:
            module.forward = original_forward


def copy_tree(tree: Any) -> Any:
    """Tensors copied, so that what happens later does not change them; anything else copied if it can be."""

    def copy_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        try:
            return copy.copy(leaf)
        except Exception:  # not ours: kept as it is
            return leaf

    return tree_map(copy_leaf, tree)


def are_trees_close(first: Any, second: Any) -> bool:
    """Whether two trees hold the same tensors but for rounding."""
    first_leaves, second_leaves = tree_leaves(first), tree_leaves(second)
    return len(first_leaves) == len(second_leaves) and all(
        isinstance(first_leaf, Tensor)
        and isinstance(second_leaf, Tensor)
        and are_tensors_close(first_leaf, second_leaf)
        for first_leaf, second_leaf in zip(first_leaves, second_leaves, strict=True)
        if isinstance(first_leaf, Tensor) or isinstance(second_leaf, Tensor)
    )


def are_tensors_close(actual: Tensor, expected: Tensor, scale: float = 0.0) -> bool:
    """Whether two tensors are the same but for rounding, by the size of the second or `scale`."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if torch.equal(actual, expected) or not (
        actual.is_floating_point() or actual.is_complex()
    ):  # masks hold infinities
        return torch.equal(actual, expected)
    magnitude = expected.abs().max().clamp(min=max(scale, 1e-30))
    tolerance = 1e-9 if expected.dtype is torch.float64 else 1e-5
    return bool((actual - expected).abs().max() <= tolerance * magnitude)
