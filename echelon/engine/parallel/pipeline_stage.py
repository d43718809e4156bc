"""A pipeline stage: the model's own forward, of which this stage computes some units.

Nothing is traced. Every stage runs the model's forward as written, and skips the units of other stages: what such a unit would return is received
from the stage before, or is a fake tensor (a shape without values), and so is all that is computed from it. So masks, positions and everything
else that follows from the batch exist on every stage without being sent.

Random numbers depend on their place in forward (the micro-batch, the unit calls so far, the draws since the last one), not on what was drawn
before: stages skip each other's draws, and what several stages draw for themselves must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from echelon.errors import DivergenceError, TrainingError
from echelon.profiler.fake_model import CallOutput, FakeModel, ForwardFunction
from echelon.profiler.module_calls import UnitCall, UnitOutput, find_crossing_values, intercept_unit_calls
from echelon.tree import tree_flatten, tree_unflatten
from echelon.trials.determinism import RANDOM_FUNCTIONS

#: Seeds the random generators for a place in forward.
SeedFunction = Callable[..., None]


class _StageFinished(BaseException):
    """Ends forward after this stage's last unit. Not an Exception: models may catch those."""


def list_called_units(unit_calls: Iterable[UnitCall]) -> list[str]:
    """The paths of the units that are called, each once."""
    return list(dict.fromkeys(call.path for call in unit_calls if call.path))


class Stage:
    """Unit calls `first_call` to `end_call` (exclusive) of a model."""

    def __init__(self, model: nn.Module, fake_model: FakeModel, calls: list[UnitCall], first: int, end: int) -> None:
        self.model, self._fake_model, self.unit_calls = model, fake_model, calls
        self.first_call, self.end_call, self.is_last = first, end, end == len(calls)
        #: The units that it computes.
        self.unit_paths = list_called_units(calls[first:end])
        #: The values that it reads from earlier stages, and those that later stages read.
        self.incoming = find_crossing_values(calls, first)
        self.outgoing = [] if self.is_last else find_crossing_values(calls, end)

    def run(self, *received: Tensor, batch: Any, forward: ForwardFunction, seed: SeedFunction) -> Any:
        """The outgoing values, in order; on the last stage the result of `forward`. `seed(*place)` seeds a place in forward."""
        values: dict[UnitOutput, Tensor] = dict(zip(self.incoming, received, strict=True))
        # Received values are passed on, and values to send are kept, as copies: code between units may change them in place, and runs on
        # every stage that needs them.
        stage_forward = _StageForward(self, values, self.compute_fake_outputs(batch, forward), _GlueSeeder(seed))
        intercepted = intercept_unit_calls(self.model, list_called_units(self.unit_calls), stage_forward.intercept_call)
        with stage_forward.capture_outputs(), intercepted, stage_forward.seeder:
            try:
                return forward(self.model, batch)
            except _StageFinished:
                outputs = [values[v].clone() if v in self.incoming else values[v] for v in self.outgoing]
                return tuple(output.contiguous() for output in outputs)

    def compute_fake_outputs(self, batch: Any, forward: ForwardFunction) -> list[CallOutput]:
        """What each unit call of the model returns for a batch of this shape, without values."""
        calls, training = self.unit_calls, self.model.training
        paths = list_called_units(calls)
        return self._fake_model.compute_outputs(forward, batch, paths, training=training, unit_calls=calls)

    def boundary_meta_tensors(self, batch: Any, forward: ForwardFunction) -> tuple[list[Tensor], list[Tensor]]:
        """Meta tensors of what comes in and goes out, for a batch of this shape."""
        outputs = self.compute_fake_outputs(batch, forward)

        def to_meta(values: Iterable[UnitOutput]) -> list[Tensor]:
            fakes = [outputs[call].leaves[outputs[call].tensor_indices[index]] for call, index in values]
            return [torch.empty(f.shape, dtype=f.dtype, device="meta", requires_grad=f.requires_grad) for f in fakes]

        results = ((len(outputs) - 1, index) for index in range(len(outputs[-1].leaves)))
        return to_meta(self.incoming), to_meta(results if self.is_last else self.outgoing)


class _GlueSeeder(TorchFunctionMode):
    """Seeds every draw between units: a stage that does not know its size draws nothing."""

    def __init__(self, seed: SeedFunction) -> None:
        super().__init__()
        self._seed = seed
        self._finished_calls = self._draws_since_call = 0
        self._is_between_units = True
        seed(0, 0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_between_units and func in RANDOM_FUNCTIONS:
            self._draws_since_call += 1
            self._seed(self._finished_calls, self._draws_since_call)
        return func(*args, **(kwargs or {}))

    def run_unit(self, compute: Callable[[], Any]) -> Any:
        """Run a unit, which draws with its own seed."""
        self._seed(self._finished_calls, -1)
        # Not where the model entered another one (`with torch.device`).
        is_active_mode = _get_current_function_mode() is self
        if is_active_mode:
            self.__exit__(None, None, None)
        self._is_between_units = False
        try:
            return compute()
        finally:
            self._is_between_units = True
            if is_active_mode:
                self.__enter__()

    def finish_call(self) -> None:
        """Count a unit call, computed here or on another stage."""
        self._finished_calls, self._draws_since_call = self._finished_calls + 1, 0
        self._seed(self._finished_calls, 0)  # for Python's and NumPy's generators


class _StageForward:
    """One forward of a stage: the next unit call, and the values known so far."""

    def __init__(
        self, stage: Stage, values: dict[UnitOutput, Tensor], fake_outputs: list[CallOutput], seeder: _GlueSeeder
    ) -> None:
        self._stage, self._values, self._fake_outputs, self.seeder = stage, values, fake_outputs, seeder
        self._values_to_send = set(stage.outgoing)
        self._next_call = 0
        #: The call that was just computed, until its hooks have run.
        self._computed_call: int | None = None

    @contextmanager
    def capture_outputs(self) -> Iterator[None]:
        """Read the outputs of this stage's units after all other hooks on them (fully_shard's)."""
        with ExitStack() as stack:
            for path in self._stage.unit_paths:
                module = self._stage.model.get_submodule(path)
                stack.callback(module.register_forward_hook(partial(self._capture_output, path)).remove)
            yield

    def intercept_call(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        call_index, stage = self._next_call, self._stage
        self._next_call += 1
        planned_path = stage.unit_calls[call_index].path if call_index < len(stage.unit_calls) else ""
        if planned_path != path:
            raise DivergenceError(
                f"pp: the model called {path} where {planned_path or 'the loss'} was planned: its calls change while it trains (layer drop, layers "
                "added later, data-dependent branches), so it cannot be split into stages; use pp=1 (dp with zero=3 also shares the memory)"
            )
        if not stage.first_call <= call_index < stage.end_call:
            self.seeder.finish_call()
            return self._output_of_other_stage(call_index)
        fake_leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, FakeTensor)]
        if fake_leaves:
            raise TrainingError(
                f"pp: {path} reads a value of shape {tuple(fake_leaves[0].shape)} that no stage sends: a bug in echelon, please report it"
            )
        out = self.seeder.run_unit(lambda: forward(*args, **kwargs))
        self.seeder.finish_call()
        self._computed_call = call_index
        return out

    def _capture_output(self, path: str, _: nn.Module, __: Any, out: Any) -> None:
        call_index, stage = self._computed_call, self._stage
        if call_index is None or stage.unit_calls[call_index].path != path:
            return  # an inner module
        self._computed_call = None
        leaves = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
        for tensor_index, leaf in enumerate(leaves):
            if (call_index, tensor_index) in self._values_to_send:
                self._values[call_index, tensor_index] = leaf if call_index == stage.end_call - 1 else leaf.clone()
        if call_index == stage.end_call - 1 and not stage.is_last:
            raise _StageFinished

    def _output_of_other_stage(self, call_index: int) -> Any:
        """What a call of another stage returned: received, or fake."""
        fake_output = self._fake_outputs[call_index]
        leaves = list(fake_output.leaves)
        for tensor_index, leaf_index in enumerate(fake_output.tensor_indices):
            received = self._values.get((call_index, tensor_index))
            # Fakes are detached: models may change them in place, which a leaf of a graph does not allow.
            leaves[leaf_index] = leaves[leaf_index].detach() if received is None else received.clone()
        return tree_unflatten(leaves, fake_output.spec)
