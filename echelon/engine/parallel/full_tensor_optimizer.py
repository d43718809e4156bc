"""Step optimizers that need full tensors (LAMB, Shampoo, ...) where the plan shards tensors (ZeRO, tp) or spreads them over stages (pp).

Each tensor has an owner among the ranks that share it:

    live parameters                      owners                           live parameters
    (shards, stages)                     (plain full nn.Parameters)       (shards, stages)

    gradients and values  ──gather──>    the job's optimizer steps  ──scatter──>  new values

Optimizers that read one tensor at a time have their tensors distributed over the ranks, balanced by size; those that read several at once, or
draw random numbers, step all of them on one rank. State stays with the owner, in full. Values are gathered every step: forward may have written
to them (max_norm, weight clamping), or a checkpoint was loaded.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.engine.group_settings import is_plain_json, read_group_settings
from echelon.engine.parallel.block_exchange import Routes, TensorBlock, exchange_blocks
from echelon.engine.parallel.shard_layout import local_regions
from echelon.engine.process_groups import Communicator
from echelon.job import Job
from echelon.plan.whole_tensor_rules import gathered_axes, needs_single_owner
from echelon.profiler.optimizer_class import OptimizerClass, classify

if TYPE_CHECKING:
    from echelon.engine.build_model import RankModel

#: Bytes of full tensors per exchange, which bounds the memory of messages (a larger tensor goes alone).
_MAX_ROUND_BYTES = 256 * 2**20


class FullTensorOptimizer:
    """Steps one of the job's optimizers on full tensors."""

    def __init__(self, optimizer_class: OptimizerClass, rank_model: RankModel) -> None:
        """Every rank must call it."""
        shapes, reads, draws = rank_model.full_shapes, optimizer_class.reads, optimizer_class.draws
        #: The axes over which tensors are gathered; along the others ranks make the same steps.
        self.gathered_axes = gathered_axes(rank_model.plan, reads, draws)
        self._ranks = ranks = _sharing_ranks(rank_model, self.gathered_axes)
        self._tp_shards = rank_model.tp_shards
        step_axes = rank_model.axes.keys() - {*self.gathered_axes, "pp"}
        #: Whether this rank is the first of those that make the same steps.
        self.is_first_replica = not any(rank_model.axes[axis].rank for axis in step_axes)
        named, names = rank_model.model.named_parameters(), optimizer_class.parameters
        trained = {name: parameter for name, parameter in named if parameter.requires_grad and name in names}
        self._live_parameters = {name: parameter for name, parameter in trained.items() if not parameter.is_meta}
        self._dtypes = {name: parameter.dtype for name, parameter in trained.items()}
        rank_blocks = ranks.all_gather_object({name: self._local_blocks(name) for name in self._live_parameters})
        sizes = {name: math.prod(shapes[name]) * dtype.itemsize for name, dtype in self._dtypes.items()}
        sizes = {name: size for name, size in sizes.items() if any(blocks.get(name) for blocks in rank_blocks)}
        owners = assign_owners(sizes, 1 if needs_single_owner(reads, draws) else ranks.size)
        #: By exchange, the blocks that owners gather and those that they scatter.
        self._rounds = [_plan_round(names, rank_blocks, owners, shapes) for names in _split_into_rounds(sizes)]
        #: The tensors that this rank steps.
        self.owned_names = frozenset(name for name, owner in owners.items() if owner == ranks.rank)
        #: The optimizer's parameters: full tensors that this rank owns, and meta tensors for the others.
        self.parameters: dict[str, nn.Parameter] = {}
        for name, dtype in self._dtypes.items():
            device = ranks.device if name in self.owned_names else "meta"
            self.parameters[name] = nn.Parameter(torch.zeros(shapes[name], dtype=dtype, device=device))
        self._gather_values()

    def _local_blocks(self, name: str) -> list[TensorBlock]:
        regions = local_regions(self._live_parameters[name], self._tp_shards.get(name))
        return [TensorBlock(name, region.offsets, tuple(region.values.shape)) for region in regions]

    # Before and after the optimizer is constructed

    def broadcast_values(self) -> None:
        """Give every rank all values, for an `optimizer=` that reads them. Every rank of the group must call it."""
        for name, parameter in self.parameters.items():
            owned_value = parameter.detach().cpu() if name in self.owned_names else None
            values = [value for value in self._ranks.all_gather_object(owned_value) if value is not None]
            if name not in self.owned_names and values:
                self.parameters[name] = nn.Parameter(values[0].to(self._ranks.device))

    def free_unowned(self, optimizer: Optimizer) -> None:
        """Free values and state of tensors that other ranks own."""
        for name, parameter in self.parameters.items():
            if name not in self.owned_names:
                optimizer.state.pop(parameter, None)
                if not parameter.is_meta:
                    parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)

    # The step

    def step(self, optimizer: Optimizer) -> None:
        """Step `optimizer` on what this rank owns. Every rank must call it."""
        self._gather_values()
        self._gather_gradients()
        if self.owned_names:
            with self._only_owned_parameters(optimizer):
                optimizer.step()
            for name in self.owned_names:
                self.parameters[name].grad = None
        else:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch's schedules warn that no step came first
        self._scatter_values()

    @contextlib.contextmanager
    def _only_owned_parameters(self, optimizer: Optimizer) -> Iterator[None]:
        """Reduce the optimizer's groups to what this rank owns."""
        owned_ids, groups = {id(self.parameters[name]) for name in self.owned_names}, optimizer.param_groups
        saved_lists: list[dict[str, Any]] = [
            {key: group[key] for key in ("params", "param_names") if key in group} for group in groups
        ]
        for group, lists in zip(groups, saved_lists, strict=True):
            is_owned = [id(parameter) in owned_ids for parameter in lists["params"]]
            group.update({key: list(compress(values, is_owned)) for key, values in lists.items()})
        try:
            yield
        finally:
            for group, lists in zip(optimizer.param_groups, saved_lists, strict=False):
                group.update(lists)

    @torch.no_grad()
    def _gather_values(self) -> None:
        """Assemble the values of what this rank owns."""
        for to_owner, _ in self._rounds:
            for block, value in exchange_blocks(to_owner, self._ranks, self._live_block, self._dtypes):
                self.parameters[block.name].data[block.slices] = value

    @torch.no_grad()
    def _gather_gradients(self) -> None:
        """Assemble the gradients of what this rank owns; a parameter that no rank has used has none."""
        grads = {name: p.grad for name, p in self._live_parameters.items() if p.grad is not None}
        use_counts = torch.tensor([float(name in grads) for name in self.parameters], device=self._ranks.device)
        used_names = set(compress(self.parameters, self._ranks.all_reduce(use_counts).tolist()))
        for name in used_names & self.owned_names:
            self.parameters[name].grad = torch.zeros_like(self.parameters[name])

        def read(block: TensorBlock) -> Tensor:
            if block.name in grads:
                return self._block_values(grads[block.name], block)
            return torch.zeros(block.shape, dtype=self._dtypes[block.name], device=self._ranks.device)

        for to_owner, _ in self._rounds:
            for block, values in exchange_blocks(to_owner, self._ranks, read, self._dtypes):
                if (grad := self.parameters[block.name].grad) is not None:
                    grad[block.slices] = values

    @torch.no_grad()
    def _scatter_values(self) -> None:
        """Write the owners' values to every live parameter."""
        for _, to_holders in self._rounds:
            for block, value in exchange_blocks(to_holders, self._ranks, self._owned_block, self._dtypes):
                self._live_block(block).copy_(value)

    def _owned_block(self, block: TensorBlock) -> Tensor:
        return self.parameters[block.name].detach()[block.slices]

    def _live_block(self, block: TensorBlock) -> Tensor:
        return self._block_values(self._live_parameters[block.name], block)

    def _block_values(self, value: Tensor, block: TensorBlock) -> Tensor:
        value = value if value.layout == torch.strided else value.to_dense()
        regions = local_regions(value, self._tp_shards.get(block.name))
        return next(region.values for region in regions if region.offsets == block.offsets)

    # Between steps

    def sync_settings(self, optimizer: Optimizer) -> None:
        """Copy the first owner's group settings to every rank: a step may change them (counters, rate estimates). Every rank must call it."""
        groups = optimizer.param_groups
        settings = [{k: v for k, v in read_group_settings(group).items() if is_plain_json(v)} for group in groups]
        settings = self._ranks.broadcast_object(settings)
        for group, first_settings in zip(groups, settings if self._ranks.rank else (), strict=False):
            for key, value in first_settings.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value

    @property
    def owned_bytes(self) -> int:
        """Bytes of the full tensors that this rank owns."""
        return sum(self.parameters[name].nbytes for name in self.owned_names)


def _sharing_ranks(rank_model: RankModel, axis_names: Sequence[str]) -> Communicator:
    """The ranks that share tensors along these axes. Every rank must call it."""
    parallel_axes = [axis for axis in axis_names if rank_model.axes[axis].size > 1]
    if len(parallel_axes) == 1:
        return rank_model.axes[parallel_axes[0]]
    coordinate = rank_model.plan.mesh.coordinate
    communicator = rank_model.ranks.split_by(
        lambda rank: tuple(index for axis, index in coordinate(rank).items() if axis not in axis_names)
    )
    assert communicator is not None
    return communicator


def assign_owners(bytes_by_name: Mapping[str, int], rank_count: int) -> dict[str, int]:
    """Tensor -> owning rank: the largest tensor first, each to the rank that owns least."""
    bytes_per_rank = [0] * rank_count
    owners = {}
    for name in sorted(bytes_by_name, key=lambda name: -bytes_by_name[name]):
        owners[name] = bytes_per_rank.index(min(bytes_per_rank))
        bytes_per_rank[owners[name]] += max(bytes_by_name[name], 1)
    return owners


def _split_into_rounds(bytes_by_name: Mapping[str, int]) -> Iterator[list[str]]:
    names: list[str] = []
    remaining_bytes = _MAX_ROUND_BYTES
    for name, size in bytes_by_name.items():
        if names and size > remaining_bytes:
            yield names
            names, remaining_bytes = [], _MAX_ROUND_BYTES
        names.append(name)
        remaining_bytes -= size
    if names:
        yield names


_BlocksByName = Mapping[str, Sequence[TensorBlock]]


def _plan_round(
    names: Sequence[str], rank_blocks: Sequence[_BlocksByName], owners: Mapping[str, int], shapes: Mapping[str, Any]
) -> tuple[Routes, Routes]:
    """Each block goes to the owner from one rank (from itself, where it has it), and back to all that hold it."""
    to_owner: dict[tuple[int, int], list[TensorBlock]] = {}
    to_holders: dict[tuple[int, int], list[TensorBlock]] = {}
    for name in names:
        owner, covered = owners[name], set[TensorBlock]()
        for holder in sorted(range(len(rank_blocks)), key=lambda rank: rank != owner):
            for block in rank_blocks[holder].get(name, ()):
                to_holders.setdefault((owner, holder), []).append(block)
                if block not in covered:
                    covered.add(block)
                    to_owner.setdefault((holder, owner), []).append(block)
        covered_elements = sum(block.numel for block in covered)
        assert covered_elements == math.prod(shapes[name]), f"{name}: held {covered_elements} of {shapes[name]}"
    return to_owner, to_holders


def make_full_tensor_optimizers(job: Job, rank_model: RankModel) -> dict[int, FullTensorOptimizer]:
    """By index among the job's optimizers, those that step on full tensors under this plan. Every rank must call it."""
    plan, ranks = rank_model.plan, rank_model.ranks
    if not (plan.is_sharded or plan.mesh.tp > 1 or plan.mesh.pp > 1):
        return {}
    optimizer_classes: Sequence[OptimizerClass] = ()
    with ranks.raise_on_all_ranks():
        if not ranks.rank:  # on one rank: trials that draw random numbers could differ
            trained = {name: p for name, p in rank_model.model.named_parameters() if p.requires_grad}
            shapes = {name: rank_model.full_shapes.get(name, p.shape) for name, p in trained.items()}
            full = {name: torch.empty(shapes[name], dtype=p.dtype, device="meta") for name, p in trained.items()}
            optimizer_classes = classify(job, full)
    return {
        index: FullTensorOptimizer(optimizer_class, rank_model)
        for index, optimizer_class in enumerate(ranks.broadcast_object(optimizer_classes))
        if gathered_axes(plan, optimizer_class.reads, optimizer_class.draws)
    }
