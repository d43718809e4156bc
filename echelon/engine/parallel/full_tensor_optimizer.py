"""Step optimizers that need full tensors (LAMB, Shampoo, ...) where the plan shards tensors (ZeRO, tp) or spreads them over stages (pp).

Each tensor has an owner among the ranks that share it:

    live parameters                      owners                           live parameters
    (shards, stages)                     (plain full nn.Parameters)       (shards, stages)

    gradients and values  ──gather──>    the job's optimizer steps  ──scatter──>  new values

Optimizers that read one tensor at a time have their tensors distributed over the ranks, balanced by size; those that read several at once, or
draw random numbers, step all of them on one rank. State stays with the owner, in full. Values are gathered too, although owners have them from
the step before: forward may have written to them (max_norm, weight clamping), or a checkpoint was loaded.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.engine.group_settings import is_plain_json, read_group_settings
from echelon.engine.parallel.block_exchange import Header, Routes, TensorBlock, exchange_blocks
from echelon.engine.parallel.shard_layout import local_regions
from echelon.engine.process_groups import Communicator, WorldCommunicator
from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.plan.whole_tensor_rules import gathered_axes, needs_single_owner
from echelon.profiler.optimizer_class import OptimizerClass, classify

if TYPE_CHECKING:
    from echelon.engine.build_model import RankModel

#: Bytes of full tensors per exchange, which bounds the memory of messages (a larger tensor goes alone).
_MAX_ROUND_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class _ExchangeRound:
    """The blocks of one exchange: what owners gather, and what they scatter."""

    to_owner: Routes
    to_holders: Routes


class FullTensorOptimizer:
    """Steps one of the job's optimizers on full tensors."""

    def __init__(
        self,
        optimizer_class: OptimizerClass,
        plan: Plan,
        ranks: WorldCommunicator,
        axes: Mapping[str, Communicator],
        rank_model: RankModel,
    ) -> None:
        """Every rank must call it."""
        shapes = rank_model.full_shapes
        #: The axes over which tensors are gathered; along the others ranks make the same steps.
        self.gathered_axes = gathered_axes(plan, optimizer_class.reads, optimizer_class.draws)
        self._communicator = _make_sharing_communicator(ranks, axes, plan, self.gathered_axes)
        self._device, self._tp_shards = ranks.device, rank_model.tp_shards
        #: Whether this rank is the first of those that make the same steps.
        self.is_first_replica = not any(
            communicator.rank for axis, communicator in axes.items() if axis not in (*self.gathered_axes, "pp")
        )
        trained = {
            name: parameter
            for name, parameter in rank_model.model.named_parameters()
            if parameter.requires_grad and name in optimizer_class.parameters
        }
        self._live_parameters = {name: parameter for name, parameter in trained.items() if not parameter.is_meta}
        rank_blocks = self._communicator.all_gather_object(
            {name: self._local_blocks(name) for name in self._live_parameters}
        )
        bytes_by_name = {
            name: math.prod(shapes[name]) * parameter.element_size()
            for name, parameter in trained.items()
            if any(blocks.get(name) for blocks in rank_blocks)
        }
        owners = (
            dict.fromkeys(bytes_by_name, 0)
            if needs_single_owner(optimizer_class.reads, optimizer_class.draws)
            else assign_owners(bytes_by_name, self._communicator.size)
        )
        self._rounds = [_plan_round(names, rank_blocks, owners, shapes) for names in _split_into_rounds(bytes_by_name)]
        #: The tensors that this rank steps.
        self.owned_names = frozenset(name for name, owner in owners.items() if owner == self._communicator.rank)
        #: The optimizer's parameters: full tensors that this rank owns, and meta tensors for the others.
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in trained.items():
            device = self._device if name in self.owned_names else "meta"
            self.parameters[name] = nn.Parameter(torch.zeros(shapes[name], dtype=parameter.dtype, device=device))
        self._gather_from_holders(with_gradients=False)

    def _local_blocks(self, name: str) -> list[TensorBlock]:
        regions = local_regions(self._live_parameters[name], self._tp_shards.get(name))
        return [TensorBlock(name, region.offsets, tuple(region.values.shape)) for region in regions]

    # Before and after the optimizer is constructed

    def broadcast_values(self) -> None:
        """Give every rank all values, for an `optimizer=` that reads them. Every rank of the group must call it."""
        for name, parameter in self.parameters.items():
            owned_value = parameter.detach().cpu() if name in self.owned_names else None
            rank_values = self._communicator.all_gather_object(owned_value)
            owner_value = next((value for value in rank_values if value is not None), None)
            if name not in self.owned_names and owner_value is not None:
                self.parameters[name] = nn.Parameter(owner_value.to(self._device))

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
        self._gather_from_holders(with_gradients=True)
        if self.owned_names:
            with self._only_owned_parameters(optimizer):
                optimizer.step()
            for name in self.owned_names:
                self.parameters[name].grad = None
        else:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch's schedules warn that no step came first
        self._scatter_to_holders()

    @contextlib.contextmanager
    def _only_owned_parameters(self, optimizer: Optimizer) -> Iterator[None]:
        """Reduce the optimizer's groups to what this rank owns."""
        owned_ids = {id(self.parameters[name]) for name in self.owned_names}
        saved_lists: list[dict[str, list[Any]]] = [
            {key: group[key] for key in ("params", "param_names") if key in group} for group in optimizer.param_groups
        ]
        for group, lists in zip(optimizer.param_groups, saved_lists, strict=True):
            owned = [position for position, parameter in enumerate(lists["params"]) if id(parameter) in owned_ids]
            if len(owned) < len(lists["params"]):
                group.update({key: [values[position] for position in owned] for key, values in lists.items()})
        try:
            yield
        finally:
            for group, lists in zip(optimizer.param_groups, saved_lists, strict=False):
                group.update(lists)

    @torch.no_grad()
    def _gather_from_holders(self, *, with_gradients: bool) -> None:
        """Assemble the values, and gradients, of what this rank owns."""

        def read(blocks: Sequence[TensorBlock]) -> list[Tensor]:
            values = [self._block_values(self._live_parameters[block.name], block) for block in blocks]
            if not with_gradients:
                return values
            live_grads = [self._live_parameters[block.name].grad for block in blocks]
            grads = [
                torch.zeros_like(value) if grad is None else self._block_values(grad, block)
                for block, grad, value in zip(blocks, live_grads, values, strict=True)
            ]
            flags = torch.tensor([grad is not None for grad in live_grads], dtype=torch.uint8, device=self._device)
            return [*values, *grads, flags]

        def headers(blocks: Sequence[TensorBlock]) -> list[Header]:
            block_headers = self._block_headers(blocks)
            return [*block_headers, *block_headers, ((len(blocks),), torch.uint8)] if with_gradients else block_headers

        for exchange_round in self._rounds:
            for blocks, tensors in self._exchange(exchange_round.to_owner, read, headers):
                for block, value in zip(blocks, tensors, strict=False):
                    self.parameters[block.name].data[block.slices] = value
                if with_gradients:
                    for block, grad, has_grad in zip(
                        blocks, tensors[len(blocks) :], tensors[-1].tolist(), strict=False
                    ):
                        parameter = self.parameters[block.name]
                        if has_grad:
                            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                            parameter.grad[block.slices] = grad

    @torch.no_grad()
    def _scatter_to_holders(self) -> None:
        """Write the owners' values to every live parameter."""

        def read(blocks: Sequence[TensorBlock]) -> list[Tensor]:
            return [self.parameters[block.name].detach()[block.slices] for block in blocks]

        for exchange_round in self._rounds:
            for blocks, tensors in self._exchange(exchange_round.to_holders, read, self._block_headers):
                for block, value in zip(blocks, tensors, strict=True):
                    self._block_values(self._live_parameters[block.name], block).copy_(value)

    def _exchange(
        self, routes: Routes, read: Any, headers: Any
    ) -> Iterator[tuple[Sequence[TensorBlock], list[Tensor]]]:
        return exchange_blocks(routes, self._communicator, self._device, read=read, headers=headers)

    def _block_values(self, value: Tensor, block: TensorBlock) -> Tensor:
        if value.layout != torch.strided:
            value = value.to_dense()
        regions = local_regions(value, self._tp_shards.get(block.name))
        return next(region.values for region in regions if region.offsets == block.offsets)

    def _block_headers(self, blocks: Sequence[TensorBlock]) -> list[Header]:
        return [(block.shape, self.parameters[block.name].dtype) for block in blocks]

    # Between steps

    def sync_settings(self, optimizer: Optimizer) -> None:
        """Copy the first owner's group settings to every rank: a step may change them (counters, rate estimates). Every rank must call it."""
        local_settings = [
            {key: value for key, value in read_group_settings(group).items() if is_plain_json(value)}
            for group in optimizer.param_groups
        ]
        first_settings = self._communicator.broadcast_object(local_settings)
        for group, settings in zip(
            optimizer.param_groups, first_settings if self._communicator.rank else (), strict=False
        ):
            for key, value in settings.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value

    @property
    def owned_bytes(self) -> int:
        """Bytes of the full tensors that this rank owns."""
        return sum(self.parameters[name].numel() * self.parameters[name].element_size() for name in self.owned_names)


def _make_sharing_communicator(
    ranks: WorldCommunicator, axes: Mapping[str, Communicator], plan: Plan, axis_names: Sequence[str]
) -> Communicator:
    """The ranks that share tensors along these axes. Every rank must call it."""
    parallel_axes = [axis for axis in axis_names if axes[axis].size > 1]
    if len(parallel_axes) == 1:
        return axes[parallel_axes[0]]
    communicator = ranks.split_by(
        lambda rank: tuple(position for axis, position in plan.mesh.coordinate(rank).items() if axis not in axis_names)
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


def _plan_round(
    names: Sequence[str],
    rank_blocks: Sequence[Mapping[str, Sequence[TensorBlock]]],
    owners: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
) -> _ExchangeRound:
    """Each block goes to the owner from one rank (from itself, where it has it), and back to all that hold it."""
    to_owner: dict[tuple[int, int], list[TensorBlock]] = {}
    to_holders: dict[tuple[int, int], list[TensorBlock]] = {}
    for name in names:
        owner, covered = owners[name], set[TensorBlock]()
        for holder in (owner, *(rank for rank in range(len(rank_blocks)) if rank != owner)):
            for block in rank_blocks[holder].get(name, ()):
                to_holders.setdefault((owner, holder), []).append(block)
                if block not in covered:
                    covered.add(block)
                    to_owner.setdefault((holder, owner), []).append(block)
        covered_elements = sum(math.prod(block.shape) for block in covered)
        assert covered_elements == math.prod(shapes[name]), f"{name}: held {covered_elements} of {shapes[name]}"
    return _ExchangeRound(to_owner, to_holders)


def make_full_tensor_optimizers(
    job: Job,
    plan: Plan,
    ranks: WorldCommunicator,
    axes: Mapping[str, Communicator],
    rank_model: RankModel,
) -> dict[int, FullTensorOptimizer]:
    """By index among the job's optimizers, those that step on full tensors under this plan. Every rank must call it."""
    if not (plan.is_sharded or plan.mesh.tp > 1 or plan.mesh.pp > 1):
        return {}
    optimizer_classes: Sequence[OptimizerClass] = ()
    with ranks.raise_on_all_ranks():
        if not ranks.rank:  # on one rank: trials that draw random numbers could differ
            full_parameters = {
                name: torch.empty(
                    rank_model.full_shapes.get(name, parameter.shape), dtype=parameter.dtype, device="meta"
                )
                for name, parameter in rank_model.model.named_parameters()
                if parameter.requires_grad
            }
            optimizer_classes = classify(job, full_parameters)
    return {
        index: FullTensorOptimizer(optimizer_class, plan, ranks, axes, rank_model)
        for index, optimizer_class in enumerate(ranks.broadcast_object(optimizer_classes))
        if gathered_axes(plan, optimizer_class.reads, optimizer_class.draws)
    }
