"""The reference run for trials on shards of the sequence: inputs and outputs of modules, loss, gradients and buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.partition.block_chains import BlockChain, iterate_tensor_arguments
from echelon.partition.per_column_rng import DrawSizeRecorder
from echelon.tree import tree_tensors
from echelon.trials.random_state import preserve_random_states
from echelon.trials.trial_run import (
    Forward,
    RunStep,
    are_tensors_close,
    make_repeatable,
    replaced_forward,
    training_mode,
    wrapped_forwards,
)


class TrialMismatchError(Exception):
    """A failed trial: at the columns of a row, or at a module that needs the full sequence."""

    def __init__(self, message: str, *, row: str = "", module: str = "") -> None:
        super().__init__(message)
        self.row, self.module = row, module


class ReferencePass:
    """One run of the model with its gradients."""

    def __init__(
        self, model: nn.Module, run_step: RunStep, chain: BlockChain, paired: Sequence[str], unpaired: Sequence[str]
    ) -> None:
        """`paired`: modules of pairs, which must be called once; `unpaired`: modules of the blocks without one of a pair."""
        self.model, self.run_step, self.chain = model, run_step, chain
        self.parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.inputs: dict[str, dict[str, Any]] = {}
        self.outputs: dict[str, Tensor] = {}
        self.output_gradients: dict[str, Tensor | None] = {}
        self._run_recorded(paired, unpaired)

    def _run_recorded(self, paired_modules: Sequence[str], unpaired_modules: Sequence[str]) -> None:
        watched_outputs = dict[str, Tensor]()
        recorded_paths = {*paired_modules, *unpaired_modules, *self.chain.units}
        recorded_paths |= {enclosing_path for path in paired_modules for enclosing_path in self.enclosing_modules(path)}
        calls: Counter[str] = Counter()

        def make_recording_forward(path: str, module: Any) -> Forward:
            original_forward = module.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                calls[path] += 1
                tensors = iterate_tensor_arguments(args, kwargs)
                self.inputs[path] = {name: value.detach().clone() for name, value in tensors}
                if path == self.chain.units[0]:
                    hidden = self.chain.argument
                    args, kwargs = map_argument(args, kwargs, hidden, lambda tensor: record_output("", tensor.clone()))
                return map_first_output(original_forward(*args, **kwargs), lambda tensor: record_output(path, tensor))

            def record_output(path: str, tensor: Tensor) -> Tensor:
                if path not in self.chain.units:
                    watched_outputs[path] = tensor
                    tensor = tensor.clone()  # others may read it, or change it in place
                if path:
                    self.outputs[path] = tensor.detach().clone()
                return tensor

            return forward

        with wrapped_forwards(self.model, recorded_paths, make_recording_forward), torch.enable_grad():
            loss, self.buffers = self.run_step()
            total = sum_loss(loss)
            if not total.requires_grad:
                raise TrialMismatchError("its loss has no gradient")
            differentiable = {path: tensor for path, tensor in watched_outputs.items() if tensor.requires_grad}
            sources = [*self.parameters.values(), *differentiable.values()]
            gradients = torch.autograd.grad(total, sources, allow_unused=True)
        repeated_path = next((path for path in paired_modules if calls[path] != 1), None)
        if repeated_path is not None:
            raise TrialMismatchError(f"{repeated_path} is called {calls[repeated_path]} times")
        named_gradients = zip(self.parameters, gradients, strict=False)
        self.parameter_gradients = {name: gradient for name, gradient in named_gradients if gradient is not None}
        output_gradients = zip(differentiable, gradients[len(self.parameters) :], strict=True)
        self.output_gradients = dict.fromkeys(watched_outputs) | dict(output_gradients)
        self.loss_value = float(total.detach())

    def enclosing_modules(self, path: str) -> Iterator[str]:
        """The modules around `path` that lie in its block, innermost first."""
        block = self.block_of(path)
        while (path := path.rpartition(".")[0]) != block:
            yield path

    def block_of(self, path: str) -> str:
        """The block that a module or parameter is in."""
        return next(block for block in self.chain.units if path.startswith(block + "."))

    def hidden_states(self, block: str) -> Tensor:
        """A block's input."""
        hidden_states: Tensor = self.inputs[block][self.chain.argument]
        return hidden_states

    def mixes_positions(self, dim: int) -> bool:
        """Whether the first block mixes positions along `dim`, which it never does with samples."""
        first_block = self.chain.units[0]
        module, outputs = self.model.get_submodule(first_block), list[Tensor]()
        original_forward = module.forward
        hidden = self.hidden_states(first_block)
        odd_positions, even_positions = (torch.arange(start, hidden.shape[dim], 2) for start in (1, 0))
        perturbed = hidden.index_copy(dim, odd_positions, -hidden.roll(1, -1).index_select(dim, odd_positions))

        def forward(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = map_argument(args, kwargs, self.chain.argument, lambda _: perturbed)
            out = original_forward(*args, **kwargs)
            outputs.append(get_first_output(out).detach())
            return out

        with replaced_forward(module, forward):
            self.run_step()
        perturbed_output, original = outputs[0], self.outputs[first_block]
        kept, expected = (output.index_select(dim, even_positions) for output in (perturbed_output, original))
        return not are_tensors_close(kept, expected)


def record_draw_sizes(model: nn.Module, run_step: RunStep, blocks: Sequence[str]) -> dict[str, list[int]]:
    """How many random numbers each operator of the blocks draws in training; not for use inside `deterministic_training`."""
    recorders = {block: DrawSizeRecorder() for block in blocks}
    with (
        preserve_random_states(),
        training_mode(model, training=True),
        wrapped_forwards(model, recorders, lambda block, module: recorders[block].wrap_forward(module.forward)),
    ):
        make_repeatable(model, run_step)()
    return {block: recorder.sizes for block, recorder in recorders.items()}


def sum_loss(loss: Any) -> Tensor:
    """A loss as a scalar."""
    first_tensor = tree_tensors(loss)[0]
    return first_tensor if first_tensor.dim() == 0 else first_tensor.sum()


def get_first_output(output: Any) -> Any:
    """The first of several outputs, or the one."""
    return output[0] if type(output) in (list, tuple) and output else output


def map_first_output(output: Any, change: Callable[[Tensor], Any]) -> Any:
    """An output with its first tensor changed, if it is a tensor or begins with one."""
    first = get_first_output(output)
    if not isinstance(first, Tensor):
        return output
    return change(output) if first is output else type(output)([change(first), *output[1:]])


def map_argument(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], argument: str, change: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the one of that name or position changed."""
    changed = tuple(change(value) if str(position) == argument else value for position, value in enumerate(args))
    return changed, {name: change(value) if name == argument else value for name, value in kwargs.items()}
