"""A fake-tensor copy of a model: what its units return for a batch of any shape, and in which order forward calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from echelon.errors import EchelonError
from echelon.profiler.module_calls import CallHandler, UnitCall, intercept_unit_calls, list_unit_paths, trace_unit_calls
from echelon.tree import TreeSpec, map_tensors, tree_flatten
from echelon.trials.deep_copies import deep_copy
from echelon.trials.random_state import preserve_random_states
from echelon.trials.shape_model import skip_value_checks

#: Scales of random values: a model whose calls or shapes depend on them cannot be split into stages.
_WEIGHT_SCALES = (1.0, -1.0, 30.0)
_MAX_CACHED_SHAPES = 64

#: Computes the loss, or anything else, with a model on a batch.
ForwardFunction = Callable[[nn.Module, Any], Any]
ContextFactory = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class CallOutput:
    """What a call returns for batches of one shape: the structure, and its leaves (fake tensors)."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    tensor_indices: tuple[int, ...]  #: indices of tensors among the leaves


class FakeModel:
    """A fake-tensor copy of the model.

    Code that looks at values (a router that skips an unused expert) does not run on it. Then units are computed one at a time with random
    weights: only shapes matter, and memory is needed for one unit.
    """

    def __init__(self, model: nn.Module, device: torch.device, make_context: ContextFactory = nullcontext) -> None:
        """`forward` is called inside `make_context()`."""
        self._make_context = make_context
        # Operators whose output size depends on values (nonzero, as in routers) get an unknown size.
        shape_env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env, static_shapes=True)
        memo: dict[int, Any] = {}
        for value in (*model.parameters(), *model.buffers()):
            memo[id(value)] = self._make_fake(value, device)
        self.model = deep_copy(model, memo)
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):
                module.dropout = 0.0  # cuDNN draws a seed for it, which a fake tensor does not have
        self._outputs_by_shape: dict[Any, list[CallOutput]] = {}
        self._materializes = False
        self._weight_scale = 1.0

    def _make_fake(self, value: Tensor, device: torch.device) -> Tensor:
        with self.fake_mode:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        if isinstance(value, nn.Parameter):
            return nn.Parameter(fake, value.requires_grad)
        return fake

    def trace_calls(self, forward: ForwardFunction, batch: Any) -> list[UnitCall]:
        """The calls of the model's units and whose values they read; empty: it cannot be split."""
        if not self._materializes:
            try:
                with self._make_context(), self.fake_mode, skip_value_checks():
                    fakes = map_tensors(self.fake_mode.from_tensor, batch)
                    return trace_unit_calls(self.model, lambda: forward(self.model, fakes))
            except EchelonError:
                raise
            except Exception:  # a user's forward may do anything with missing values
                self._materializes = True
        return self._trace_materialized(forward, batch)

    def _trace_materialized(self, forward: ForwardFunction, batch: Any) -> list[UnitCall]:
        unit_calls: list[UnitCall] = []
        expected_outputs: list[Any] | None = None
        outputs: list[Any] = []

        def compute(path: str, forward_unit: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            out = self._call_unit(path, forward_unit, args, kwargs)
            outputs.append((path, compute_shape_key(out)))
            return out

        def scale_tensor(tensor: Tensor) -> Tensor:
            return tensor * self._weight_scale if tensor.is_floating_point() else tensor

        for scale in _WEIGHT_SCALES:
            self._weight_scale = scale
            outputs.clear()
            run_step = partial(forward, self.model, map_tensors(scale_tensor, batch))
            try:
                with self._make_context(), preserve_random_states(), torch.no_grad(), self._materialize_glue():
                    traced = trace_unit_calls(self.model, run_step, compute, reads_values=True)
            except EchelonError:
                raise
            except Exception:  # values that the model does not accept
                if expected_outputs is None:  # not even the first
                    raise
                continue
            finally:
                self._weight_scale = 1.0
            if expected_outputs is None:
                unit_calls, expected_outputs = traced, outputs.copy()
            elif outputs != expected_outputs:
                return []
        return unit_calls

    def compute_outputs(
        self,
        forward: ForwardFunction,
        batch: Any,
        paths: Sequence[str],
        *,
        training: bool,
        unit_calls: Sequence[UnitCall] = (),
    ) -> list[CallOutput]:
        """What each unit call returns for a batch of this shape; the last entry is the result of `forward`. `unit_calls`: for models with random
        values, whose outputs depend on trained parameters."""
        key = forward, compute_shape_key(batch), training
        self.model.train(training)
        if key not in self._outputs_by_shape:
            if len(self._outputs_by_shape) == _MAX_CACHED_SHAPES:
                del self._outputs_by_shape[next(iter(self._outputs_by_shape))]
            self._outputs_by_shape[key] = self._compute_outputs(forward, batch, paths, unit_calls)
        return self._outputs_by_shape[key]

    def list_unit_calls(self, forward: ForwardFunction, batch: Any, paths: Sequence[str]) -> list[str]:
        """The units that forward calls for a batch, in order."""
        called_paths: list[str] = []

        def handle_call(path: str, *call: Any) -> Any:
            called_paths.append(path)
            return self._call_unit(path, *call)

        self._run_forward(forward, batch, paths, handle_call)
        return called_paths

    def _compute_outputs(
        self, forward: ForwardFunction, batch: Any, paths: Sequence[str], unit_calls: Sequence[UnitCall]
    ) -> list[CallOutput]:
        outputs: list[CallOutput] = []
        depends_on_training: list[bool] = []

        def handle_call(path: str, *call: Any) -> Any:
            index = len(outputs)
            reads = unit_calls[index].reads if index < len(unit_calls) else set()
            is_trainable = any(value.requires_grad for value in self.model.get_submodule(path).parameters())
            depends_on_training.append(is_trainable or any(depends_on_training[i] for i, _ in reads if i < index))
            out = self._call_unit(path, *call)
            outputs.append(self._make_fake_output(out, depends_on_training[-1]))
            return out

        final_output = self._run_forward(forward, batch, paths, handle_call)
        final_output = final_output if isinstance(final_output, tuple) else (final_output,)
        return [*outputs, self._make_fake_output(final_output, True)]

    def _run_forward(self, forward: ForwardFunction, batch: Any, paths: Sequence[str], handle_call: CallHandler) -> Any:
        with ExitStack() as stack:
            stack.enter_context(self._make_context())
            stack.enter_context(preserve_random_states())
            stack.enter_context(skip_value_checks())
            if self._materializes:
                stack.enter_context(torch.no_grad())
                stack.enter_context(self._materialize_glue(paths))
            else:
                stack.enter_context(self.fake_mode)
                batch = map_tensors(self.fake_mode.from_tensor, batch)
            stack.enter_context(intercept_unit_calls(self.model, list(paths), handle_call))
            return forward(self.model, batch)

    def _call_unit(self, path: str, forward_unit: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        if not self._materializes:
            return forward_unit(*args, **kwargs)
        with materialized(self.model.get_submodule(path), self._weight_scale):
            return forward_unit(*args, **kwargs)

    def _materialize_glue(self, paths: Sequence[str] | None = None) -> AbstractContextManager[None]:
        return materialized(self.model, self._weight_scale, list_unit_paths(self.model) if paths is None else paths)

    def _make_fake_output(self, out: Any, requires_grad: bool) -> CallOutput:
        leaves, spec = tree_flatten(out)
        tensor_indices = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))

        def make_fake(leaf: Tensor) -> Tensor:
            if not self._materializes:
                return leaf.detach().requires_grad_(leaf.requires_grad)
            with self.fake_mode:
                fake = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            return fake.requires_grad_(requires_grad and (leaf.is_floating_point() or leaf.is_complex()))

        fakes = tuple(make_fake(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return CallOutput(fakes, spec, tensor_indices)


@contextmanager
def materialized(module: nn.Module, scale: float = 1.0, excluded_paths: Sequence[str] = ()) -> Iterator[None]:
    """Inside, the fake tensors of `module` have small positive values, parameters `scale` times that; not those in `excluded_paths`."""
    excluded = {id(inner) for path in excluded_paths for inner in module.get_submodule(path).modules()}
    originals: list[tuple[dict[str, Any], str, Any]] = []
    materialized_tensors: dict[int, Tensor] = {}
    for inner in module.modules():
        all_slots: tuple[dict[str, Any], ...] = (inner._parameters, inner._buffers) if id(inner) not in excluded else ()
        for slots in all_slots:
            for name, value in slots.items():
                if isinstance(value, FakeTensor) or isinstance(getattr(value, "data", None), FakeTensor):
                    originals.append((slots, name, value))
                    slots[name] = materialized_tensors.setdefault(id(value), _make_random_tensor(value, scale))
    try:
        yield
    finally:
        for slots, name, value in originals:
            slots[name] = value


def _make_random_tensor(value: Tensor, scale: float) -> Tensor:
    random_tensor = torch.rand(value.shape, device=value.device).mul_(0.1)
    if not isinstance(value, nn.Parameter):
        return random_tensor.to(value.dtype)
    return nn.Parameter(random_tensor.mul_(scale).to(value.dtype), value.requires_grad)


def compute_shape_key(batch: Any) -> Any:
    """Equal for batches that lead to the same shapes everywhere. Strings and floats change with each batch and do not affect shapes."""
    leaves, spec = tree_flatten(batch)

    def leaf_key(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.dtype
        return leaf if isinstance(leaf, int | bool | None) else type(leaf)

    return spec, tuple(map(leaf_key, leaves))
