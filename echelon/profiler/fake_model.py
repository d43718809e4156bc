"""A model without numbers: what its units return for a batch of any shape, and in which order forward calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from echelon.errors import EchelonError
from echelon.profiler.module_calls import UnitCall, intercept_unit_calls, list_unit_paths, trace_unit_calls
from echelon.tree import TreeSpec, tree_flatten, tree_map
from echelon.trials.deep_copies import deep_copy
from echelon.trials.random_state import preserve_random_states
from echelon.trials.shape_model import skip_value_checks

#: Invented numbers are tried in these sizes: a model whose calls or shapes follow from them cannot be cut into stages.
_WEIGHT_SCALES = (1.0, -1.0, 30.0)

#: What is returned is remembered for so many shapes of batches.
_MAX_CACHED_SHAPES = 64

#: Computes the loss, or what else is wanted, with a model on a batch.
ForwardFunction = Callable[[nn.Module, Any], Any]
ContextFactory = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class CallOutput:
    """What a visit returns for batches of one shape: the structure, and its leaves (tensors without numbers)."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    tensor_indices: tuple[int, ...]  #: places of tensors among the leaves


class FakeModel:
    """A copy of the whole model without numbers: it tells what every unit returns for a batch of any shape.

    Code that looks at values (a router that skips an expert nobody chose) does not run so. Then units are computed one at a time on
    invented weights: the shapes are what matters, and no more than one unit is held.
    """

    def __init__(self, model: nn.Module, device: torch.device, make_context: ContextFactory = nullcontext) -> None:
        """`make_context`: within it `forward` is called."""
        self._make_context = make_context
        # Operators whose output's size follows from values (nonzero, as in routers) get a size that is not known.
        shape_env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env, static_shapes=True)
        memo: dict[int, Any] = {}
        for value in (*model.parameters(), *model.buffers()):
            memo[id(value)] = self._make_fake(value, device)
        self.model = deep_copy(model, memo)
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):
                module.dropout = 0.0  # cuDNN draws a seed for it, which a tensor without numbers does not have
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
        """The calls of the model's units and whose values they read; empty: it cannot be cut."""
        if not self._materializes:
            try:
                with self._make_context(), self.fake_mode, skip_value_checks():
                    fakes = self._make_fake_batch(batch)
                    return trace_unit_calls(self.model, lambda: forward(self.model, fakes))
            except EchelonError:
                raise
            except Exception:  # whatever a user's forward does with values it does not have
                self._materializes = True
        return self._trace_materialized(forward, batch)

    def _trace_materialized(self, forward: ForwardFunction, batch: Any) -> list[UnitCall]:
        """The visits on invented numbers; none where other numbers lead to other calls or to other shapes."""
        unit_calls: list[UnitCall] = []
        expected_outputs: list[Any] | None = None
        for scale in _WEIGHT_SCALES:
            outputs: list[Any] = []

            def compute(
                path: str, forward_unit: Callable[..., Any], args: Any, kwargs: Any, collected: list[Any] = outputs
            ) -> Any:
                out = self._call_materialized(path, forward_unit, args, kwargs)
                collected.append((path, compute_shape_key(out)))
                return out

            scaled_batch = batch if scale == 1 else tree_map(partial(_scale_float_tensor, factor=scale), batch)
            self._weight_scale = scale
            try:
                with (
                    self._make_context(),
                    preserve_random_states(),
                    torch.no_grad(),
                    self._materialize_glue(list_unit_paths(self.model)),
                ):
                    traced = trace_unit_calls(
                        self.model, partial(forward, self.model, scaled_batch), compute, reads_values=True
                    )
            except EchelonError:
                raise
            except Exception:  # numbers that the model does not take
                if scale == 1:
                    raise
                continue
            finally:
                self._weight_scale = 1.0
            if expected_outputs is None:
                unit_calls, expected_outputs = traced, outputs
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
        """What each visit returns for a batch of this shape; the last entry is what `forward` itself does. `unit_calls` tell whose values
        depend on what is trained, where numbers are invented."""
        key = forward, compute_shape_key(batch), training
        self.model.train(training)
        if key not in self._outputs_by_shape:
            if len(self._outputs_by_shape) == _MAX_CACHED_SHAPES:
                del self._outputs_by_shape[next(iter(self._outputs_by_shape))]
            self._outputs_by_shape[key] = (
                self._compute_materialized_outputs(forward, batch, paths, unit_calls)
                if self._materializes
                else self._compute_fake_outputs(forward, batch, paths)
            )
        return self._outputs_by_shape[key]

    def list_unit_calls(self, forward: ForwardFunction, batch: Any, paths: Sequence[str]) -> list[str]:
        """The units that forward calls for a batch, in order."""
        called_paths: list[str] = []

        def handle_call(
            path: str, forward_unit: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
        ) -> Any:
            called_paths.append(path)
            return (
                self._call_materialized(path, forward_unit, args, kwargs)
                if self._materializes
                else forward_unit(*args, **kwargs)
            )

        with (
            self._make_context(),
            intercept_unit_calls(self.model, list(paths), handle_call),
            preserve_random_states(),
            skip_value_checks(),
        ):
            if self._materializes:
                with torch.no_grad(), self._materialize_glue(paths):
                    forward(self.model, batch)
            else:
                with self.fake_mode:
                    forward(self.model, self._make_fake_batch(batch))
        return called_paths

    def _compute_fake_outputs(self, forward: ForwardFunction, batch: Any, paths: Sequence[str]) -> list[CallOutput]:
        outputs: list[CallOutput] = []

        def handle_call(
            path: str, forward_unit: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
        ) -> Any:
            out = forward_unit(*args, **kwargs)
            leaves, spec = tree_flatten(out)
            tensor_indices = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
            detached = tuple(
                leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            )
            outputs.append(CallOutput(detached, spec, tensor_indices))
            return out

        with (
            self._make_context(),
            self.fake_mode,
            skip_value_checks(),
            intercept_unit_calls(self.model, list(paths), handle_call),
        ):
            final_output = _as_tuple(forward(self.model, self._make_fake_batch(batch)))
        return [*outputs, CallOutput(final_output, tree_flatten(final_output)[1], tuple(range(len(final_output))))]

    def _compute_materialized_outputs(
        self, forward: ForwardFunction, batch: Any, paths: Sequence[str], unit_calls: Sequence[UnitCall]
    ) -> list[CallOutput]:
        outputs: list[CallOutput] = []
        depends_on_training: list[bool] = []

        def handle_call(
            path: str, forward_unit: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
        ) -> Any:
            module = self.model.get_submodule(path)
            reads = unit_calls[len(outputs)].reads if len(outputs) < len(unit_calls) else set()
            is_trainable = any(value.requires_grad for value in module.parameters())
            depends_on_training.append(
                is_trainable
                or any(
                    depends_on_training[source_index]
                    for source_index, _ in reads
                    if source_index < len(depends_on_training)
                )
            )
            out = self._call_materialized(path, forward_unit, args, kwargs)
            outputs.append(self._make_fake_output(out, depends_on_training[-1]))
            return out

        with (
            self._make_context(),
            preserve_random_states(),
            torch.no_grad(),
            self._materialize_glue(paths),
            intercept_unit_calls(self.model, list(paths), handle_call),
        ):
            final_output = _as_tuple(forward(self.model, batch))
        return [*outputs, self._make_fake_output(final_output, True)]

    def _call_materialized(
        self, path: str, forward_unit: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        with materialized(self.model.get_submodule(path), self._weight_scale):
            return forward_unit(*args, **kwargs)

    def _materialize_glue(self, paths: Sequence[str]) -> AbstractContextManager[None]:
        return materialized(self.model, self._weight_scale, excluded_paths=paths)

    def _make_fake_output(self, out: Any, requires_grad: bool) -> CallOutput:
        leaves, spec = tree_flatten(out)
        indices = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))

        def make_empty_fake(leaf: Tensor) -> Tensor:
            with self.fake_mode:
                fake = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            return fake.requires_grad_(requires_grad and (leaf.is_floating_point() or leaf.is_complex()))

        return CallOutput(
            tuple(make_empty_fake(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves), spec, indices
        )

    def _make_fake_batch(self, batch: Any) -> Any:
        return tree_map(lambda leaf: self.fake_mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, batch)


@contextmanager
def materialized(module: nn.Module, scale: float = 1.0, excluded_paths: Sequence[str] = ()) -> Iterator[None]:
    """Inside, the tensors of `module` have numbers, small ones above zero, parameters `scale` times that; not those of the modules
    `excluded_paths` (paths) which it stands."""
    excluded = {id(inner) for path in excluded_paths for inner in module.get_submodule(path).modules()}
    original_tensors: list[tuple[dict[str, Any], str, Any]] = []
    materialized_tensors: dict[int, Tensor] = {}
    for inner in module.modules():
        if id(inner) in excluded:
            continue
        tensor_slots: tuple[dict[str, Any], ...] = (inner._parameters, inner._buffers)
        for slots in tensor_slots:
            for name, value in slots.items():
                if isinstance(value, FakeTensor) or isinstance(getattr(value, "data", None), FakeTensor):
                    original_tensors.append((slots, name, value))
                    slots[name] = materialized_tensors.setdefault(id(value), _make_random_tensor(value, scale))
    try:
        yield
    finally:
        for slots, name, value in original_tensors:
            slots[name] = value


def _make_random_tensor(value: Tensor, scale: float) -> Tensor:
    random_tensor = torch.rand(value.shape, device=value.device).mul_(0.1)
    if not isinstance(value, nn.Parameter):
        return random_tensor.to(value.dtype)
    return nn.Parameter(random_tensor.mul_(scale).to(value.dtype), value.requires_grad)


def _scale_float_tensor(leaf: Any, factor: float) -> Any:
    return leaf * factor if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def compute_shape_key(batch: Any) -> Any:
    """Equal for batches that lead to tensors of the same shapes everywhere. Texts and broken numbers change with each batch and say
    nothing of shapes."""
    leaves, spec = tree_flatten(batch)
    compared_types = (int, bool, type(None))
    return spec, tuple(
        (tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, compared_types)
        else type(leaf)
        for leaf in leaves
    )


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
