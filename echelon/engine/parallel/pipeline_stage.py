"""A pipeline stage: the model's own forward, of which only some units are computed.

Nothing is traced into a graph and no code is replaced. Every stage runs the model's forward as it is written; a unit of another
stage is not computed: what it would return is either received from the stage before, or absent. An absent value is a fake tensor: it has a
shape and no numbers, whatever is computed from it is absent too, and asking for its value is an error. So masks, positions and
other things that follow from the batch are there on every stage without being sent, and a short batch, evaluation mode or a dict
of outputs need no care.

Random numbers follow from their place in forward (the micro-batch, the visits so far, the draws since the last one), not from what was
drawn before: a stage skips what others compute, and what several stages compute for themselves (noise that is added first and is the
target in the end) must be one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

#: Makes random numbers begin anew, for a place in forward.
SeedFunction = Callable[..., None]


class _StageFinished(BaseException):
    """This stage's last unit is computed: the rest of forward is other stages' work. Not an Exception: models may catch those."""


class Stage(nn.Module):
    """Visits `first_call` to `end_call` (exclusive) of a model. `stage(*received, batch=...)` gives what later stages read, or the loss."""

    def __init__(
        self,
        model: nn.Module,
        fake_model: FakeModel,
        unit_calls: list[UnitCall],
        first_call: int,
        end_call: int,
    ) -> None:
        super().__init__()
        self.model = model
        self._fake_model, self._unit_calls = fake_model, unit_calls
        self.first_call, self.end_call = first_call, end_call
        self._unit_paths = list(dict.fromkeys(call.path for call in unit_calls if call.path))
        self.incoming = find_crossing_values(unit_calls, first_call)
        #: Whether it gives the loss.
        self.is_last = end_call == len(unit_calls)
        #: What the stages after this one read.
        self.outgoing = [] if self.is_last else find_crossing_values(unit_calls, end_call)

    def forward(self, *received: Tensor, batch: Any, forward: ForwardFunction, seed: SeedFunction) -> Any:
        """The outgoing values, in order; on the last stage what `forward` gives. `seed(*place)` is told the place in forward."""
        values: dict[UnitOutput, Tensor] = dict(zip(self.incoming, received, strict=True))
        # A value that was received is given away as a copy, and one that will be sent is kept as a copy: what stands between units may
        # change values in place, and does so on every stage that needs them.
        stage_forward = _StageForward(self, values, self._fake_outputs(batch, forward), _GlueSeeder(seed))
        with (
            stage_forward.capture_outputs(),
            intercept_unit_calls(self.model, self._unit_paths, stage_forward.intercept_call),
            stage_forward.seeder,
        ):
            try:
                result = forward(self.model, batch)
            except _StageFinished:
                return tuple(
                    values[value].clone(memory_format=torch.contiguous_format)
                    if value in self.incoming
                    else values[value].contiguous()
                    for value in self.outgoing
                )
        return result

    def _fake_outputs(self, batch: Any, forward: ForwardFunction) -> list[CallOutput]:
        return self._fake_model.compute_outputs(
            forward, batch, self._unit_paths, training=self.model.training, unit_calls=self._unit_calls
        )

    def boundary_meta_tensors(
        self, batch: Any, forward: ForwardFunction
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What comes in and goes out for a batch of this shape, as tensors on the meta device."""
        fake_outputs = self._fake_outputs(batch, forward)

        def to_meta(values: Sequence[UnitOutput]) -> tuple[Tensor, ...]:
            fakes = [
                fake_outputs[call_index].leaves[fake_outputs[call_index].tensor_indices[tensor_index]]
                for call_index, tensor_index in values
            ]
            return tuple(
                torch.empty(fake.shape, dtype=fake.dtype, device="meta", requires_grad=fake.requires_grad)
                for fake in fakes
            )

        outgoing = (
            [(len(fake_outputs) - 1, i) for i in range(len(fake_outputs[-1].leaves))] if self.is_last else self.outgoing
        )
        return to_meta(self.incoming), to_meta(outgoing)


class _GlueSeeder(TorchFunctionMode):
    """Between units: each draw has a seed of its own, as a stage on which its size is absent draws nothing."""

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
        """What a unit gives, which draws in its own way."""
        self._seed(self._finished_calls, -1)
        is_active_mode = (
            _get_current_function_mode() is self
        )  # else the model has put one of its own upon it (`with torch.device`)
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
        """A visit is over, here or on another stage."""
        self._finished_calls, self._draws_since_call = self._finished_calls + 1, 0
        self._seed(self._finished_calls, 0)  # for what does not ask torch: Python's and NumPy's


class _StageForward:
    """One forward of a stage: which visit comes next, and what is known of the values so far."""

    def __init__(
        self, stage: Stage, values: dict[UnitOutput, Tensor], fake_outputs: list[CallOutput], seeder: _GlueSeeder
    ) -> None:
        self._stage, self._values, self._fake_outputs, self.seeder = stage, values, fake_outputs, seeder
        self._values_to_send = set(stage.outgoing)
        self._next_call = 0
        #: The visit that was just computed, until its hooks have run.
        self._computed_call: int | None = None

    @contextmanager
    def capture_outputs(self) -> Iterator[None]:
        """Look at what this stage's units return after every other hook on them (fully_shard has some)."""
        stage = self._stage
        paths = {call.path for call in stage._unit_calls[stage.first_call : stage.end_call] if call.path}
        hooks = [
            stage.model.get_submodule(path).register_forward_hook(partial(self._capture_output, path)) for path in paths
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def intercept_call(
        self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        call_index, stage = self._next_call, self._stage
        self._next_call += 1
        planned_path = stage._unit_calls[call_index].path if call_index < len(stage._unit_calls) else ""
        if planned_path != path:
            raise DivergenceError(
                f"pp: the model called {path} where {planned_path or 'the loss'} was planned: its calls change while it trains (layer drop, layers "
                "that join later, samples that decide), so that it cannot be cut into stages; use pp=1 (dp with zero=3 also shares the memory)"
            )
        if not stage.first_call <= call_index < stage.end_call:
            self.seeder.finish_call()
            return self._output_of_other_stage(call_index)
        fake_leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, FakeTensor)]
        if fake_leaves:
            raise TrainingError(
                f"pp: {path} reads a value that no stage sends ({tuple(fake_leaves[0].shape)}): a bug in echelon, please report"
            )
        out = self.seeder.run_unit(lambda: forward(*args, **kwargs))
        self.seeder.finish_call()
        self._computed_call = call_index
        return out

    def _capture_output(self, path: str, _: nn.Module, __: Any, out: Any) -> None:
        call_index, stage = self._computed_call, self._stage
        if call_index is None or stage._unit_calls[call_index].path != path:
            return  # part of another unit
        self._computed_call = None
        leaves = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
        for tensor_index, leaf in enumerate(leaves):
            if (call_index, tensor_index) in self._values_to_send:
                self._values[call_index, tensor_index] = leaf if call_index == stage.end_call - 1 else leaf.clone()
        if call_index == stage.end_call - 1 and not stage.is_last:
            raise _StageFinished

    def _output_of_other_stage(self, call_index: int) -> Any:
        """What a visit of another stage returned: received, or absent."""
        fake_output = self._fake_outputs[call_index]
        leaves = list(fake_output.leaves)
        for tensor_index, leaf_index in enumerate(fake_output.tensor_indices):
            received = self._values.get((call_index, tensor_index))
            # An absent one takes no part in backward: models may change it in place, which a leaf of a graph does not allow.
            leaves[leaf_index] = leaves[leaf_index].detach() if received is None else received.clone()
        return tree_unflatten(leaves, fake_output.spec)
