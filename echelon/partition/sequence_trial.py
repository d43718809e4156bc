"""A model on one rank's part of the sequence, held against what it gave on the whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from echelon.partition.block_chains import iterate_tensor_arguments
from echelon.partition.reference_pass import TrialMismatchError, get_first_output, map_argument, map_first_output
from echelon.plan.placement import compute_shard_sizes
from echelon.profiler.sample_coupling import first_line
from echelon.trials.trial_run import are_tensors_close

if TYPE_CHECKING:
    from echelon.partition.find_sequence_parallel import _ChainTrial


def module_kind(path: str) -> str:
    """Modules in the same place of their blocks are of one kind."""
    return re.sub(r"\d+", "*", path)


class RankTrial:
    """The model as one rank would run it."""

    def __init__(self, chain_trial: _ChainTrial, rank: int) -> None:
        self.chain_trial, self.rank = chain_trial, rank
        shard_sizes = compute_shard_sizes(chain_trial.sequence_length, chain_trial.tp_size)
        self.shard_start, self.shard_size = sum(shard_sizes[:rank]), shard_sizes[rank]
        self.pending_row = ""  #: the row that is on its way
        self.gathers: dict[str, set[str]] = {}
        self.parameter_gradients: dict[str, Tensor] = {}
        self.wrong_gradient_paths: list[str] = []  #: rows whose gradients were other ones

    def iterate_replaced_forwards(self) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """Modules and what they compute meanwhile, each once."""
        chain_trial, model = self.chain_trial, self.chain_trial.model
        gathering_modules = {
            path: row
            for row, choices in chain_trial.gather_choices.items()
            for path in choices[min(chain_trial.choice_index[module_kind(row)], len(choices) - 1)]
        }
        recorded_others = [path for path in chain_trial.unpaired_modules if path in chain_trial.reference.outputs]
        for path in dict.fromkeys((*gathering_modules, *chain_trial.rows, *recorded_others, *chain_trial.chain.units)):
            module = model.get_submodule(path)
            forward: Callable[..., Any] = module.forward
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
        """This rank's part of `tensor`; empty where it is no sequence."""
        has_full_sequence = (
            tensor.dim() == 3 and tensor.shape[self.chain_trial.sequence_dim] == self.chain_trial.sequence_length
        )
        return (
            tensor.narrow(self.chain_trial.sequence_dim, self.shard_start, self.shard_size)
            if has_full_sequence
            else tensor.new_empty(0)
        )

    def _take_shard(self, tensor: Tensor, path: str) -> Tensor:
        return _TakeShard.apply(tensor, self, path)

    def _gather_inputs(self, path: str, row: str, original_forward: Callable[..., Any]) -> Callable[..., Any]:
        reference_inputs = self.chain_trial.reference.inputs[path]

        def gather_input(name: str, value: Any) -> Any:
            reference_value = reference_inputs.get(name)
            if not isinstance(value, Tensor) or reference_value is None or are_tensors_close(value, reference_value):
                return value
            if are_tensors_close(value, self.local_shard(reference_value)):
                self.gathers.setdefault(path, set()).add(name)
                return _SubstituteFullSequence.apply(value, reference_value, self)
            raise TrialMismatchError(
                f"what reaches {path} is no part of what reached it on the whole sequence", row=self.pending_row
            )

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.pending_row = row
            args = tuple(gather_input(str(position), value) for position, value in enumerate(args))
            return original_forward(*args, **{name: gather_input(name, value) for name, value in kwargs.items()})

        return forward

    def _check_unpaired(self, path: str, original_forward: Callable[..., Any]) -> Callable[..., Any]:
        """A module that works position by position gives its part of what it gave; one that does not needs the whole."""
        reference_inputs, reference_output = (
            self.chain_trial.reference.inputs[path],
            self.chain_trial.reference.outputs[path],
        )
        regathers = module_kind(path) in self.chain_trial.regathered_kinds
        gathered_forward = self._gather_inputs(path, "", original_forward)

        def forward(*args: Any, **kwargs: Any) -> Any:
            inputs = dict(iterate_tensor_arguments(args, kwargs))
            sharded_inputs = [
                name
                for name, tensor in inputs.items()
                if name in reference_inputs and are_tensors_close(tensor, self.local_shard(reference_inputs[name]))
            ]
            full_inputs = [name for name in inputs.keys() - set(sharded_inputs) if name in reference_inputs]
            if (
                not sharded_inputs
                or inputs.keys() != reference_inputs.keys()
                or not all(are_tensors_close(inputs[name], reference_inputs[name]) for name in full_inputs)
            ):
                return original_forward(*args, **kwargs)
            if regathers:
                return map_first_output(
                    gathered_forward(*args, **kwargs), lambda tensor: self._take_shard(tensor, path)
                )
            try:
                out = original_forward(*args, **kwargs)
            except TrialMismatchError:
                raise
            except Exception as error:
                raise TrialMismatchError(f"{path}: {type(error).__name__}: {first_line(error)}", module=path) from error
            if not isinstance(get_first_output(out), Tensor) or not are_tensors_close(
                get_first_output(out), self.local_shard(reference_output)
            ):
                raise TrialMismatchError(
                    f"what {path} gives is no part of what it gave on the whole sequence", module=path
                )
            return out

        return forward

    def _check_row(self, path: str, original_forward: Callable[..., Any]) -> Callable[..., Any]:
        reference_inputs = self.chain_trial.reference.inputs[path]

        def forward(*args: Any, **kwargs: Any) -> Any:
            inputs = dict(iterate_tensor_arguments(args, kwargs))
            if inputs.keys() != reference_inputs.keys() or not all(
                are_tensors_close(inputs[name], reference_inputs[name]) for name in reference_inputs
            ):
                raise TrialMismatchError(
                    f"what reaches {path} is another value where a part of the sequence comes in", row=path
                )
            out = original_forward(*args, **kwargs)
            self.pending_row = ""
            if not self.local_shard(get_first_output(out)).numel():
                raise TrialMismatchError(f"what {path} gives is no hidden states")
            return map_first_output(out, lambda tensor: self._take_shard(tensor, path))

        return forward

    def _check_block(self, path: str, original_forward: Callable[..., Any]) -> Callable[..., Any]:
        chain, reference_output = self.chain_trial.chain, self.chain_trial.reference.outputs[path]

        def check_output(tensor: Tensor) -> Tensor:
            if not are_tensors_close(tensor, self.local_shard(reference_output)):
                raise TrialMismatchError(f"what {path} gives is no part of what it gave on the whole sequence")
            return _SubstituteFullSequence.apply(tensor, reference_output, self) if path == chain.units[-1] else tensor

        def forward(*args: Any, **kwargs: Any) -> Any:
            if path == chain.units[0]:
                args, kwargs = map_argument(args, kwargs, chain.argument, lambda tensor: self._take_shard(tensor, ""))
            return map_first_output(original_forward(*args, **kwargs), check_output)

        return forward


class _TakeShard(torch.autograd.Function):
    """One rank's part; backward the gradient that the whole had, of which the part's must be a part."""

    @staticmethod
    def forward(ctx: Any, full_tensor: Tensor, rank_trial: RankTrial, path: str) -> Tensor:
        ctx.rank, ctx.path, ctx.shape = rank_trial, path, full_tensor.shape
        return rank_trial.local_shard(full_tensor).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        reference_gradient = ctx.rank.chain_trial.reference.output_gradients.get(ctx.path)
        if reference_gradient is None:
            return grads[0].new_zeros(ctx.shape), None, None
        if not are_tensors_close(
            grads[0], ctx.rank.local_shard(reference_gradient), float(reference_gradient.abs().max())
        ):
            ctx.rank.wrong_gradient_paths.append(ctx.path)
        return reference_gradient, None, None


class _SubstituteFullSequence(torch.autograd.Function):
    """The whole in place of a part; backward the part of its gradient."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, full_tensor: Tensor, rank_trial: RankTrial) -> Tensor:
        ctx.rank = rank_trial
        return full_tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.rank.local_shard(grads[0]).clone(), None, None
