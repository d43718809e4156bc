"""Comparable runs of a model: what a trial changes is all that differs.

The model trains, so that a penalty or a branch of training alone is seen. Its modules draw no random numbers (determinism.py), and the job
draws the same each time. Each run starts from the same buffers: batch norms count, codebooks move, queues fill while a model trains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from echelon.tree import tree_leaves, tree_map
from echelon.trials.determinism import DeterministicMode, TorchCallRewriter, randomness_disabled
from echelon.trials.random_state import preserve_random_states, seed_all

#: Computes a model's loss.
RunStep = Callable[[], Any]
Forward = Callable[..., Any]


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
            module_hooks(model, lambda _: rewriter.count_running(1), lambda _: rewriter.count_running(-1)),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(had_fastpath)


class _ModuleCallRewriter(TorchCallRewriter):
    """Fixes random numbers while a module runs. The loss gets real ones: equal weights would hide much."""

    def __init__(self) -> None:
        super().__init__(DeterministicMode(fix_random=True))
        self._num_running = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._num_running:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))

    def count_running(self, change: int) -> None:
        """Of the modules that run now."""
        self._num_running += change


@contextmanager
def module_hooks(model: nn.Module, before: Callable[[str], Any], after: Callable[[str], Any]) -> Iterator[None]:
    """Inside, `before(path)` and `after(path)` run around every module's forward."""
    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, path=path: _call(before, path), prepend=True))
        hooks.append(module.register_forward_hook(lambda *_, path=path: _call(after, path), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _call(function: Callable[[str], Any], path: str) -> None:
    function(path)  # a hook that returns something would replace the module's input or output


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
    original_buffers = [(path, module, dict(module._buffers)) for path, module in model.named_modules()]
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


def make_repeatable(model: nn.Module, run_step: RunStep) -> Callable[[], tuple[Any, dict[str, Tensor]]]:
    """`run_step`, started from the same state each time: its loss, and the buffers as it leaves them."""

    def run() -> tuple[Any, dict[str, Tensor]]:
        with copied_buffers(model):
            seed_all(0)
            return run_step(), dict(model.named_buffers())

    return run


def find_random_modules(model: nn.Module, run_step: RunStep) -> set[str]:
    """The modules, by path, that draw random numbers in training. Not under `deterministic_training`: there none does."""
    random_paths: set[str] = set()
    rng_states: list[Tensor] = []

    def compare_state(path: str) -> None:
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
    """The modules, by path, that read values in training, or hold one that does: with other values, which no trial has seen, they may
    compute something else."""
    running: list[str] = []
    with (
        module_hooks(model, running.append, lambda _: running.pop()),
        preserve_random_states(),
        training_mode(model, training=True),
        _ValueReadRecorder(running) as recorder,
    ):
        make_repeatable(model, run_step)()
    return recorder.reading_paths


class _ValueReadRecorder(TorchFunctionMode):
    """Records which modules were running when Python asked a tensor for its values."""

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


@contextmanager
def replaced_forward(module: Any, forward: Forward) -> Iterator[None]:
    """Inside, `module` computes `forward`."""
    original_forward = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if original_forward is None:
            del module.__dict__["forward"]
        else:
            module.forward = original_forward


@contextmanager
def wrapped_forwards(model: nn.Module, paths: Iterable[str], wrap: Callable[[str, Any], Forward]) -> Iterator[None]:
    """Inside, each module computes `wrap(path, module)`."""
    with ExitStack() as stack:
        for path in paths:
            module = model.get_submodule(path)
            stack.enter_context(replaced_forward(module, wrap(path, module)))
        yield


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
    if torch.equal(actual, expected) or not (
        actual.is_floating_point() or actual.is_complex()
    ):  # masks hold infinities
        return torch.equal(actual, expected)
    magnitude = expected.abs().max().clamp(min=max(scale, 1e-30))
    tolerance = 1e-9 if expected.dtype is torch.float64 else 1e-5
    return bool((actual - expected).abs().max() <= tolerance * magnitude)
