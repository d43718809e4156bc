"""A model on one rank's shard of the sequence, compared with the full run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from echelon.errors import describe_error
from echelon.partition.block_chains import iterate_tensor_arguments
from echelon.partition.reference_pass import TrialMismatchError, get_first_output, map_argument, map_first_output
from echelon.plan.placement import compute_shard_sizes
from echelon.trials.trial_run import Forward, are_tensors_close, are_trees_close

if TYPE_CHECKING:
    from echelon.partition.find_sequence_parallel import _ChainTrial


def module_kind(path: str) -> str:
    """The same for modules at the same place in their blocks."""
    return re.sub(r"\d+", "*", path)


class RankTrial:
    """The model as run by one rank."""

    def __init__(self, chain_trial: _ChainTrial, rank: int) -> None:
        self.chain_trial, self.rank = chain_trial, rank
        shard_sizes = compute_shard_sizes(chain_trial.sequence_length, chain_trial.tp_size)
        self.shard_start, self.shard_size = sum(shard_sizes[:rank]), shard_sizes[rank]
        self.pending_row = ""  #: the row whose columns have been called
        self.gathers: dict[str, set[str]] = {}
        self.parameter_gradients: dict[str, Tensor] = {}
        self.wrong_gradient_paths: list[str] = []  #: rows whose gradients differ

    def iterate_replaced_forwards(self) -> Iterator[tuple[nn.Module, Forward]]:
        """Modules and their forward during the trial, each once."""
        chain_trial, model = self.chain_trial, self.chain_trial.model
        gathering_modules: dict[str, str] = {}
        for row, choices in chain_trial.gather_choices.items():
            choice = choices[min(chain_trial.choice_index[module_kind(row)], len(choices) - 1)]
            gathering_modules |= dict.fromkeys(choice, row)
        recorded_others = [path for path in chain_trial.unpaired_modules if path in chain_trial.reference.outputs]
        for path in dict.fromkeys((*gathering_modules, *chain_trial.rows, *recorded_others, *chain_trial.chain.units)):
            module = model.get_submodule(path)
            forward: Forward = module.forward
            if path in recorded_others and path not in gathering_modules:
                forward = self._check_unpaired(path, forward)
            if path in chain_trial.rows:
                forward = self._check_row(path, forward)
            if path in gathering_modules:
                forward = self._gather_inputs(path, gathering_modules[path], forward)
            if path in chain_trial.chain.units:
                forward = self._check_block(path, forward)
            yield module, forward

    def local_shard(self, tensor: Tensor) -> Tensor:
        """This rank's shard of `tensor`; empty if it is no sequence."""
        dim = self.chain_trial.sequence_dim
        if tensor.dim() != 3 or tensor.shape[dim] != self.chain_trial.sequence_length:
            return tensor.new_empty(0)
        return tensor.narrow(dim, self.shard_start, self.shard_size)

    def _take_shard(self, tensor: Tensor, path: str) -> Tensor:
        return _TakeShard.apply(tensor, self, path)

    def _gather_inputs(self, path: str, row: str, original_forward: Forward) -> Forward:
        reference_inputs = self.chain_trial.reference.inputs[path]

        def gather_input(name: str, value: Any) -> Any:
            reference_value = reference_inputs.get(name)
            if not isinstance(value, Tensor) or reference_value is None or are_tensors_close(value, reference_value):
                return value
            if are_tensors_close(value, self.local_shard(reference_value)):
                self.gathers.setdefault(path, set()).add(name)
                return _SubstituteFullSequence.apply(value, reference_value, self)
            raise TrialMismatchError(f"the input of {path} is no shard of its full input", row=self.pending_row)

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.pending_row = row
            args = tuple(gather_input(str(position), value) for position, value in enumerate(args))
            return original_forward(*args, **{name: gather_input(name, value) for name, value in kwargs.items()})

        return forward

    def _check_unpaired(self, path: str, original_forward: Forward) -> Forward:
        """A module that works position by position returns its shard of the reference; otherwise it needs the full sequence."""
        reference_inputs = self.chain_trial.reference.inputs[path]
        reference_output = self.chain_trial.reference.outputs[path]
        regathers = module_kind(path) in self.chain_trial.regathered_kinds
        gathered_forward = self._gather_inputs(path, "", original_forward)

        def forward(*args: Any, **kwargs: Any) -> Any:
            inputs = dict(iterate_tensor_arguments(args, kwargs))
            known = {name: reference_inputs[name] for name in inputs if name in reference_inputs}
            sharded_inputs = {name for name, x in known.items() if are_tensors_close(inputs[name], self.local_shard(x))}
            others = known.keys() - sharded_inputs
            others_are_full = all(are_tensors_close(inputs[name], known[name]) for name in others)
            if not sharded_inputs or inputs.keys() != reference_inputs.keys() or not others_are_full:
                return original_forward(*args, **kwargs)
            if regathers:
                out = gathered_forward(*args, **kwargs)
                return map_first_output(out, lambda tensor: self._take_shard(tensor, path))
            try:
                out = original_forward(*args, **kwargs)
            except TrialMismatchError:
                raise
            except Exception as error:
                raise TrialMismatchError(f"{path}: {describe_error(error)}", module=path) from error
            first = get_first_output(out)
            if not isinstance(first, Tensor) or not are_tensors_close(first, self.local_shard(reference_output)):
                raise TrialMismatchError(f"the output of {path} is no shard of its full output", module=path)
            return out

        return forward

    def _check_row(self, path: str, original_forward: Forward) -> Forward:
        reference_inputs = self.chain_trial.reference.inputs[path]

        def forward(*args: Any, **kwargs: Any) -> Any:
            inputs = dict(iterate_tensor_arguments(args, kwargs))
            if inputs.keys() != reference_inputs.keys() or not are_trees_close(inputs, reference_inputs):
                raise TrialMismatchError(f"the input of {path} differs for a shard of the sequence", row=path)
            out = original_forward(*args, **kwargs)
            self.pending_row = ""
            if not self.local_shard(get_first_output(out)).numel():
                raise TrialMismatchError(f"the output of {path} is not hidden states")
            return map_first_output(out, lambda tensor: self._take_shard(tensor, path))

        return forward

    def _check_block(self, path: str, original_forward: Forward) -> Forward:
        chain, reference_output = self.chain_trial.chain, self.chain_trial.reference.outputs[path]

        def check_output(tensor: Tensor) -> Tensor:
            if not are_tensors_close(tensor, self.local_shard(reference_output)):
                raise TrialMismatchError(f"the output of {path} is no shard of its full output")
            return _SubstituteFullSequence.apply(tensor, reference_output, self) if path == chain.units[-1] else tensor

        def forward(*args: Any, **kwargs: Any) -> Any:
            if path == chain.units[0]:
                args, kwargs = map_argument(args, kwargs, chain.argument, lambda tensor: self._take_shard(tensor, ""))
            return map_first_output(original_forward(*args, **kwargs), check_output)

        return forward


class _TakeShard(torch.autograd.Function):
    """One rank's shard; backward returns the full gradient, and checks that it received a shard of it."""

    @staticmethod
    def forward(ctx: Any, full_tensor: Tensor, rank_trial: RankTrial, path: str) -> Tensor:
        ctx.rank, ctx.path, ctx.shape = rank_trial, path, full_tensor.shape
        return rank_trial.local_shard(full_tensor).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        reference_gradient = ctx.rank.chain_trial.reference.output_gradients.get(ctx.path)
        if reference_gradient is None:
            return grads[0].new_zeros(ctx.shape), None, None
        expected, scale = ctx.rank.local_shard(reference_gradient), float(reference_gradient.abs().max())
        if not are_tensors_close(grads[0], expected, scale):
            ctx.rank.wrong_gradient_paths.append(ctx.path)
        return reference_gradient, None, None


class _SubstituteFullSequence(torch.autograd.Function):
    """The full sequence in place of a shard; backward returns the shard of its gradient."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, full_tensor: Tensor, rank_trial: RankTrial) -> Tensor:
        ctx.rank = rank_trial
        return full_tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.rank.local_shard(grads[0]).clone(), None, None
