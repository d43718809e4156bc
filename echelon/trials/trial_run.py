"""Comparable runs of a model: they differ only by what a trial changes.

The model is in training mode, so that penalties and branches that only run there are seen. Its modules draw no random numbers
(determinism.py), the job draws the same ones each time, and each run starts from the same buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from echelon.tree import tree_leaves, tree_map
from echelon.trials.determinism import DeterministicMode, TorchCallRewriter, randomness_disabled
from echelon.trials.module_tree import module_hooks
from echelon.trials.random_state import preserve_random_states, seed_all
from echelon.trials.torch_patches import patch_attribute

#: Computes a model's loss.
RunStep = Callable[[], Any]
Forward = Callable[..., Any]


@contextmanager
def deterministic_training(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in training mode and its modules draw no random numbers."""
    had_fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it calls no modules
    try:
        with (
            preserve_random_states(),
            randomness_disabled(model),
            training_mode(model, training=True),
            _ModuleCallRewriter() as rewriter,
            module_hooks(model, rewriter.running_paths.append, lambda *_: rewriter.running_paths.pop()),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(had_fastpath)


class _ModuleCallRewriter(TorchCallRewriter):
    """Fixes random numbers while a module runs. The loss gets real ones: equal weights would hide much."""

    def __init__(self) -> None:
        super().__init__(DeterministicMode(fix_random=True))
        self.running_paths: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.running_paths:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


@contextmanager
def training_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    original_modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in original_modes:
            module.training = was_training


@contextmanager
def copied_buffers(model: nn.Module, initial_values: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Inside, the model has copies of its buffers, which start from `initial_values` where these have one of that name."""
    original_buffers = [(path, module, dict(module._buffers)) for path, module in model.named_modules()]
    copies: dict[int, Tensor] = {}
    try:
        for path, module, buffers in original_buffers:
            for name, value in buffers.items():
                if value is not None:
                    initial_value = (initial_values or {}).get(f"{path}.{name}" if path else name, value)
                    module._buffers[name] = copies.setdefault(id(value), initial_value.clone())
        yield
    finally:
        for _, module, buffers in original_buffers:
            module._buffers.update(buffers)


def make_repeatable(model: nn.Module, run_step: RunStep) -> Callable[[], tuple[Any, dict[str, Tensor]]]:
    """`run_step`, started from the same state each time; returns its loss, and the buffers as it leaves them."""

    def run() -> tuple[Any, dict[str, Tensor]]:
        with copied_buffers(model):
            seed_all(0)
            return run_step(), dict(model.named_buffers())

    return run


def find_random_modules(model: nn.Module, run_step: RunStep) -> set[str]:
    """The paths of modules that draw random numbers in training. Under `deterministic_training` none does."""
    random_paths: set[str] = set()
    rng_states: list[Tensor] = []

    def compare_state(path: str, _: Any) -> None:
        if not torch.equal(rng_states.pop(), torch.random.get_rng_state()):
            random_paths.add(path)

    with (
        module_hooks(model, lambda _: rng_states.append(torch.random.get_rng_state()), compare_state),
        preserve_random_states(),
        training_mode(model, training=True),
    ):
        make_repeatable(model, run_step)()
    return random_paths


def find_data_dependent_modules(model: nn.Module, run_step: RunStep) -> set[str]:
    """The paths of modules that read values in training, or whose submodules do: with values that no trial has seen they may branch."""
    running: list[str] = []
    with (
        module_hooks(model, running.append, lambda *_: running.pop()),
        preserve_random_states(),
        training_mode(model, training=True),
        _ValueReadRecorder(running) as recorder,
    ):
        make_repeatable(model, run_step)()
    return recorder.reading_paths


class _ValueReadRecorder(TorchFunctionMode):
    """Records which modules were running when Python asked a tensor for its values."""

    _VALUE_READS = (
        "__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "numpy", "equal", "allclose", "is_nonzero"
    )  # fmt: skip

    def __init__(self, running_paths: Sequence[str]) -> None:
        super().__init__()
        self._running_paths, self.reading_paths = running_paths, set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self._VALUE_READS:
            self.reading_paths.update(self._running_paths)
        return func(*args, **(kwargs or {}))


def replaced_forward(module: nn.Module, forward: Forward) -> AbstractContextManager[None]:
    """Inside, `module` computes `forward`."""
    return patch_attribute(module, "forward", forward)


@contextmanager
def wrapped_forwards(model: nn.Module, paths: Iterable[str], wrap: Callable[[str, Any], Forward]) -> Iterator[None]:
    with ExitStack() as stack:
        for path in paths:
            module = model.get_submodule(path)
            stack.enter_context(replaced_forward(module, wrap(path, module)))
        yield


def copy_tree(tree: Any) -> Any:
    """A copy of the tensors, and of other leaves that can be copied."""

    def copy_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        try:
            return copy.copy(leaf)
        except Exception:  # a user's object
            return leaf

    return tree_map(copy_leaf, tree)


def are_trees_close(first: Any, second: Any) -> bool:
    """Whether two trees hold the same tensors but for rounding."""
    leaves, others = tree_leaves(first), tree_leaves(second)
    return len(leaves) == len(others) and all(
        isinstance(a, Tensor) and isinstance(b, Tensor) and are_tensors_close(a, b)
        for a, b in zip(leaves, others, strict=True)
        if isinstance(a, Tensor) or isinstance(b, Tensor)
    )


def are_tensors_close(actual: Tensor, expected: Tensor, scale: float = 0.0) -> bool:
    """Whether two tensors are the same but for rounding, by the size of the second or `scale`."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if torch.equal(actual, expected):  # masks hold infinities
        return True
    if not (actual.is_floating_point() or actual.is_complex()):
        return False
    magnitude = expected.abs().max().clamp(min=max(scale, 1e-30))
    tolerance = 1e-9 if expected.dtype is torch.float64 else 1e-5
    return bool((actual - expected).abs().max() <= tolerance * magnitude)
