"""Find by trial runs where sequence parallelism works (plan/sequence_segment.py).

The model runs once as a reference, with gradients. Then it runs as one rank would: a chain of blocks receives that rank's shard of the hidden states,
modules that need the full sequence receive their reference inputs (of which exactly this rank's shard must have reached them), rows return this
rank's shard of their reference output. The hidden states of every block and their gradients must be this rank's shard of the reference, and every
buffer equal. Parameter gradients must be complete on each rank, or add up over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from echelon.errors import first_line
from echelon.partition.block_chains import REDUCING_CUTS, BlockChain, find_block_chains
from echelon.partition.reference_pass import ReferencePass, TrialMismatchError, record_draw_sizes, sum_loss
from echelon.partition.sequence_trial import RankTrial, module_kind
from echelon.partition.trial_values import iterate_parameter_values
from echelon.plan.placement import Placement
from echelon.plan.profile import find_fsdp_units, is_within
from echelon.plan.sequence_segment import SequenceGather, SequenceSegment
from echelon.trials.module_tree import list_modules
from echelon.trials.trial_run import (
    RunStep,
    are_tensors_close,
    are_trees_close,
    deterministic_training,
    find_data_dependent_modules,
    make_repeatable,
    replaced_forward,
    training_mode,
)

_FULL_INPUT_CUTS = ("column", "attention")  #: cuts that need their full input


@dataclass(frozen=True, slots=True)
class SequenceSegments:
    """The segments, how modules are cut for them, and why there are none."""

    segments: tuple[SequenceSegment, ...]
    placements: tuple[Placement, ...]
    reason: str = ""


def find_segments(
    model: nn.Module, run_step: RunStep, tp_size: int, placements: Sequence[Placement]
) -> SequenceSegments:
    """The segments of `model` (real numbers), cut by `placements` over `tp_size` ranks; `run_step()` computes its loss."""
    draw_sizes = record_draw_sizes(model, run_step, find_fsdp_units(list_modules(model)))
    data_dependent = find_data_dependent_modules(model, run_step)
    reason = "it has no repeated blocks that pass on hidden states of samples, positions and channels"
    segments: list[SequenceSegment] = []
    with deterministic_training(model):
        repeatable = make_repeatable(model, run_step)
        for chain in list(find_block_chains(model, repeatable, placements)):
            make_trial = partial(_ChainTrial, model, repeatable, tp_size, placements, chain, draw_sizes)
            try:
                if any(unit in data_dependent for unit in chain.units):
                    raise TrialMismatchError("it reads values, and other values may need the full sequence")
                segment, placements = _try_chain(model, repeatable, tp_size, make_trial)
                segments.append(segment)
            except TrialMismatchError as error:
                reason = f"{chain.units[0]}: {error}"
    return SequenceSegments(tuple(segments), tuple(placements), "" if segments else reason)


def _try_chain(
    model: nn.Module, run_step: RunStep, tp_size: int, make_trial: Callable[[], _ChainTrial]
) -> tuple[SequenceSegment, Sequence[Placement]]:
    accepted: tuple[_ChainTrial, SequenceSegment, Sequence[Placement]] | None = None
    for trial_index, values_name in enumerate(iterate_parameter_values(model, run_step)):
        if accepted is not None and values_name == "initial":
            continue
        try:
            trial = make_trial()
        except TrialMismatchError:
            raise
        except Exception:  # a model that does not accept such parameters; the next differ
            if values_name == "initial":
                raise
            continue
        if not math.isfinite(trial.reference.loss_value) and values_name != "initial":
            continue
        if accepted is not None:
            trial.check_at_values(accepted[0], accepted[1], rank=(tp_size - 1) * (trial_index % 2))
            continue
        accepted = trial, *trial.find_segment()
        with training_mode(model, training=False):
            if _has_evaluation_loss(run_step) and make_trial().find_segment() != accepted[1:]:
                raise TrialMismatchError("it works on a part of the sequence otherwise in evaluation than in training")
    if accepted is None:
        raise TrialMismatchError("its loss is not a number")
    return accepted[1:]


def _has_evaluation_loss(run_step: RunStep) -> bool:
    try:
        loss, _ = run_step()
        return sum_loss(loss).requires_grad
    except Exception:
        return False


class _ChainTrial:
    def __init__(
        self,
        model: nn.Module,
        run_step: RunStep,
        tp_size: int,
        placements: Sequence[Placement],
        chain: BlockChain,
        draw_sizes: Mapping[str, list[int]],
    ) -> None:
        self.model, self.run_step, self.tp_size = model, run_step, tp_size
        self.placements, self.chain = placements, chain
        inside = [placement for placement in placements if self._is_in_chain(placement.path)]
        self.rows = [placement.path for placement in inside if placement.cut in REDUCING_CUTS]
        self.columns = [placement.path for placement in inside if placement.cut in _FULL_INPUT_CUTS]
        paired = (*self.rows, *self.columns)
        submodules = (path for unit in chain.units for path, _ in model.get_submodule(unit).named_modules(prefix=unit))
        #: Modules of the blocks without one of a pair.
        self.unpaired_modules = [
            path for path in submodules if path not in chain.units and not any(is_within(p, path) for p in paired)
        ]
        self.reference = ReferencePass(model, run_step, chain, paired, self.unpaired_modules)
        self.parameters = self.reference.parameters
        self.sequence_dim = 0 if self.reference.mixes_positions(0) and not self.reference.mixes_positions(1) else 1
        self.sequence_length = self.reference.hidden_states(chain.units[0]).shape[self.sequence_dim]
        if self.sequence_length < 2 * tp_size:
            raise TrialMismatchError(f"samples of {self.sequence_length} positions are too short for {tp_size} ranks")
        sizes = [size for unit in chain.units for size in draw_sizes[unit]]
        if any(size % self.sequence_length for size in sizes):
            raise TrialMismatchError("it draws random numbers per sample, of which each shard would draw its own")
        self.draws_random = bool(sizes)
        #: Row -> the modules that may receive the full sequence for it: its columns, or one that holds them.
        self.gather_choices = self._list_gather_choices()
        self.choice_index = dict.fromkeys(map(module_kind, self.rows), 0)
        self.regathered_kinds: set[str] = set()  #: kinds of modules that need the full sequence

    def find_segment(self) -> tuple[SequenceSegment, Sequence[Placement]]:
        """The segment, and how modules are cut for it."""
        gathers = self._find_gathers()
        rank_gradients = [self._run_rank(rank, with_gradients=True).parameter_gradients for rank in range(self.tp_size)]
        placements = {entry.path: entry for entry in self.placements}
        placement_of = {f"{entry.path}.{part.name}": entry for entry in self.placements for part in entry.slices}
        partial_parameters: list[str] = []
        for name in self.parameters:
            placement = placement_of.get(name)
            if placement is not None and placement.cut in ("column", "between", "row", "attention"):
                continue
            reducing_rows = {name.removesuffix(".bias"), name.removesuffix(".out_proj.bias")} & set(self.rows)
            if reducing_rows or self._is_partial_gradient(name, [grads.get(name) for grads in rank_gradients]):
                partial_parameters.append(name)
                if placement is not None:
                    # Ranks with different shards of a sequence cannot share a layer's outputs: its weight is gathered instead, while the
                    # block runs. Not only while the layer runs: which positions call it may differ between ranks.
                    block = self.reference.block_of(name)
                    placements[placement.path] = replace(placement, cut="stored", gathered_in=block)
        regathered = {path: module_kind(path) in self.regathered_kinds for path in gathers}
        segment = SequenceSegment(
            blocks=self.chain.units, argument=self.chain.argument, dim=self.sequence_dim, uses_rng=self.draws_random,
            partial_gradients=tuple(partial_parameters),
            gathers=tuple(
                SequenceGather(path=path, arguments=tuple(sorted(names)), returns_sequence=regathered[path]) for path, names in gathers.items()
            ),
        )  # fmt: skip
        return segment, tuple(placements.values())

    def check_at_values(self, first_trial: _ChainTrial, segment: SequenceSegment, rank: int) -> None:
        """Test the segment of `first_trial` at these parameter values on one rank."""
        if self.sequence_dim != first_trial.sequence_dim:
            raise TrialMismatchError("which dimension holds the positions depends on its weights")
        self.choice_index, self.regathered_kinds = first_trial.choice_index, first_trial.regathered_kinds
        rank_trial = self._run_rank(rank, with_gradients=True)
        known_arguments = {gather.path: set(gather.arguments) for gather in segment.gathers}
        if any(arguments - known_arguments.get(path, set()) for path, arguments in rank_trial.gathers.items()):
            raise TrialMismatchError("which modules need the whole sequence depends on its weights")

    def _is_partial_gradient(self, name: str, rank_gradients: Sequence[Tensor | None]) -> bool:
        full_gradient = self.reference.parameter_gradients.get(name)
        has_gradients = any(gradient is not None for gradient in rank_gradients)
        if full_gradient is None or not has_gradients:
            if full_gradient is None and not has_gradients:
                return False
            raise TrialMismatchError(f"the gradient of {name} is another one on a part of the sequence")
        gradients = [torch.zeros_like(full_gradient) if gradient is None else gradient for gradient in rank_gradients]
        references = self.reference.parameter_gradients.values()
        scale = max((float(gradient.abs().max()) for gradient in references if gradient.numel()), default=0.0)
        if self._is_in_chain(name) and are_tensors_close(torch.stack(gradients).sum(0), full_gradient, scale):
            return True
        if all(are_tensors_close(gradient, full_gradient, scale) for gradient in gradients):
            return False
        raise TrialMismatchError(f"the gradient of {name} does not add up from those on parts of the sequence")

    def _is_in_chain(self, name: str) -> bool:
        return any(is_within(name, unit) for unit in self.chain.units)

    def _list_gather_choices(self) -> dict[str, list[list[str]]]:
        choices: dict[str, list[list[str]]] = {}
        columns: list[str] = []
        for path in self.reference.inputs:  # in the order of the calls
            columns += [path] if path in self.columns else []
            if path in self.rows:
                enclosing = [set(self.reference.enclosing_modules(column)) for column in columns or [path]]
                ancestors = sorted(set.intersection(*enclosing) & self.reference.inputs.keys(), key=len, reverse=True)
                choices[path] = [columns, *([ancestor] for ancestor in ancestors)]
                columns = []
        return choices

    def _find_gathers(self) -> dict[str, set[str]]:
        """Modules that receive the full sequence, with the arguments that arrive as shards."""
        while True:
            try:
                gathers: dict[str, set[str]] = {}
                for rank in {0, self.tp_size - 1}:
                    for path, arguments in self._run_rank(rank).gathers.items():
                        gathers.setdefault(path, set()).update(arguments)
                return gathers
            except TrialMismatchError as error:
                if error.module and module_kind(error.module) not in self.regathered_kinds:
                    self.regathered_kinds.add(module_kind(error.module))
                    continue
                row_kind = module_kind(error.row)
                num_choices = [len(c) for row, c in self.gather_choices.items() if module_kind(row) == row_kind]
                if not error.row or self.choice_index[row_kind] + 1 >= max(num_choices, default=0):
                    raise
                self.choice_index[row_kind] += 1

    def _run_rank(self, rank: int, *, with_gradients: bool = False) -> RankTrial:
        trial = RankTrial(self, rank)
        with ExitStack() as stack, torch.set_grad_enabled(True):
            for module, forward in trial.iterate_replaced_forwards():
                stack.enter_context(replaced_forward(module, forward))
            try:
                loss, buffers = self.run_step()
                total = sum_loss(loss)
            except TrialMismatchError:
                raise
            except Exception as error:  # whatever the code raises, it does not work on a part of the sequence
                row = trial.pending_row
                problem = f"{type(error).__name__} on a part of the sequence: {first_line(error)}"
                raise TrialMismatchError(f"{row}: {problem}" if row else problem, row=row) from error
            if not are_tensors_close(total.detach(), torch.tensor(self.reference.loss_value, dtype=total.dtype)):
                raise TrialMismatchError("the loss differs")
            for name, value in self.reference.buffers.items():
                if not are_trees_close(buffers.get(name), value):
                    path = name.rpartition(".")[0]
                    raise TrialMismatchError(f"{name} differs", module=path if path in self.unpaired_modules else "")
            if with_gradients:
                gradients = torch.autograd.grad(total, list(self.parameters.values()), allow_unused=True)
                named = zip(self.parameters, gradients, strict=True)
                trial.parameter_gradients = {name: gradient for name, gradient in named if gradient is not None}
                if trial.wrong_gradient_paths:
                    path = trial.wrong_gradient_paths[0] or self.chain.units[0]
                    raise TrialMismatchError(f"the gradient of the input of {path} differs")
        return trial
