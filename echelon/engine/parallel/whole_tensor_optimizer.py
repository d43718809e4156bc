"""Steps optimizers that need whole tensors where the plan cuts tensors (ZeRO, tp) or spreads them over stages (pp).

Each tensor has an owner among the ranks that share it. A step of the optimizer is then:

    live parameters                   owners                          live parameters
    (shards, pieces, stages)          (plain whole nn.Parameters)     (shards, pieces, stages)

    gradients and values  --collect-->  the user's optimizer steps  --hand out-->  new values

Optimizers that read one tensor at a time have their tensors dealt out over the ranks that share them, balanced by size; those that read
several at once, or draw random numbers, step all of them on one rank. The state stays with the owner, whole. Values are collected too,
although owners have them from the step before: a forward may write to parameters (max_norm, weight clamping), and a checkpoint was
perhaps loaded.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.engine.checkpoint.group_settings import is_plain_json, read_group_settings
from echelon.engine.parallel.shard_layout import TPShard, local_regions
from echelon.engine.process_groups import Communicator, WorldCommunicator
from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.plan.whole_tensor_rules import gathered_axes, needs_single_owner
from echelon.profiler.optimizer_class import OptimizerClass, classify

#: Bytes of whole tensors that one exchange carries at most (a larger tensor goes by itself): it bounds what messages need on top.
_MAX_ROUND_BYTES = 256 * 2**20
#: Each tensor in a message begins at a multiple of this, so that any dtype can be read there.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class _TensorBlock:
    """A stretch of a tensor that a rank holds: where it begins in the whole, its shape."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class _ExchangeRound:
    """What one exchange carries: by (holder, owner), the blocks that the owner needs from the holder, and those that it hands out."""

    to_owner: Mapping[tuple[int, int], Sequence[_TensorBlock]]
    to_holders: Mapping[tuple[int, int], Sequence[_TensorBlock]]


def make_sharing_communicator(
    ranks: WorldCommunicator, axes: Mapping[str, Communicator], plan: Plan, axis_names: Sequence[str]
) -> Communicator:
    """The ranks that hold the parts of the same tensors along these axes. Every rank must call it."""
    parallel_axes = [axis for axis in axis_names if axes[axis].size > 1]
    if len(parallel_axes) == 1:
        return axes[parallel_axes[0]]
    communicator = ranks.split_by(
        lambda rank: tuple(position for axis, position in plan.mesh.coordinate(rank).items() if axis not in axis_names)
    )
    assert communicator is not None
    return communicator


class FullTensorOptimizer:
    """Steps one of the job's optimizers on whole tensors."""

    def __init__(
        self,
        optimizer_class: OptimizerClass,
        plan: Plan,
        ranks: WorldCommunicator,
        axes: Mapping[str, Communicator],
        model: nn.Module,
        tp_shards: Mapping[str, TPShard],
        shapes: Mapping[str, Sequence[int]],
    ) -> None:
        """`shapes`: of the whole model's parameters. Every rank must call it."""
        #: Over which its tensors are put together; along the others ranks step alike.
        self.gathered_axes = gathered_axes(plan, optimizer_class.reads, optimizer_class.draws)
        self._communicator = make_sharing_communicator(ranks, axes, plan, self.gathered_axes)
        self._device = ranks.device
        #: Of the ranks that step alike, whether this is the first.
        self.is_first_replica = not any(
            communicator.rank for axis, communicator in axes.items() if axis not in (*self.gathered_axes, "pp")
        )
        self._tp_shards = tp_shards
        trained = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name in optimizer_class.parameters
        }
        self._live_parameters = {name: parameter for name, parameter in trained.items() if not parameter.is_meta}
        rank_blocks = self._communicator.all_gather_object([self._local_blocks(name) for name in self._live_parameters])
        held_blocks: list[dict[str, list[_TensorBlock]]] = [{} for _ in rank_blocks]
        for blocks_by_name, tensor_blocks in zip(held_blocks, rank_blocks, strict=True):
            for block in chain.from_iterable(tensor_blocks):
                blocks_by_name.setdefault(block.name, []).append(block)
        bytes_by_name = {
            name: math.prod(shapes[name]) * parameter.element_size()
            for name, parameter in trained.items()
            if any(name in each for each in held_blocks)
        }
        owners = (
            dict.fromkeys(bytes_by_name, 0)
            if needs_single_owner(optimizer_class.reads, optimizer_class.draws)
            else assign_owners(bytes_by_name, self._communicator.size)
        )
        self._rounds = [_plan_round(names, held_blocks, owners, shapes) for names in _split_into_rounds(bytes_by_name)]
        #: The tensors that this rank steps.
        self.owned_names = frozenset(name for name, owner in owners.items() if owner == self._communicator.rank)
        #: What stands for the model's parameters in the optimizer: whole tensors that this rank owns, and the others without memory.
        self.parameters = {
            name: nn.Parameter(
                torch.zeros(
                    tuple(shapes[name]),
                    dtype=parameter.dtype,
                    device=self._device if name in self.owned_names else "meta",
                )
            )
            for name, parameter in trained.items()
        }
        self._gather_from_holders(with_gradients=False)

    def _local_blocks(self, name: str) -> list[_TensorBlock]:
        parameter = self._live_parameters[name]
        return [
            _TensorBlock(name, region.offsets, tuple(region.values.shape))
            for region in local_regions(parameter, self._tp_shards.get(name))
        ]

    # Before the optimizer is made, and after

    def broadcast_values(self) -> None:
        """Give every rank all values, for an `optimizer=` that looks at them. Every rank of the group must call it."""
        for name, parameter in self.parameters.items():
            owned_value = parameter.detach() if name in self.owned_names else None
            owner_values = [
                rank_value
                for rank_value in self._communicator.all_gather_object(
                    None if owned_value is None else owned_value.cpu()
                )
                if rank_value is not None
            ]
            if name not in self.owned_names and owner_values:
                self.parameters[name] = nn.Parameter(owner_values[0].to(self._device))

    def free_unowned(self, optimizer: Optimizer) -> None:
        """Keep nothing for tensors that other ranks own."""
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
            optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedules warn where no step came before theirs
        self._scatter_to_holders()

    @contextlib.contextmanager
    def _only_owned_parameters(self, optimizer: Optimizer) -> Iterator[None]:
        """Its groups with what this rank owns only."""
        owned_ids = {id(self.parameters[name]) for name in self.owned_names}
        saved_lists: list[dict[str, list[Any]]] = [
            {key: group[key] for key in ("params", "param_names") if key in group} for group in optimizer.param_groups
        ]
        for group, lists in zip(optimizer.param_groups, saved_lists, strict=True):
            kept_positions = [
                position for position, parameter in enumerate(lists["params"]) if id(parameter) in owned_ids
            ]
            if len(kept_positions) < len(lists["params"]):
                group.update({key: [values[position] for position in kept_positions] for key, values in lists.items()})
        try:
            yield
        finally:
            for group, lists in zip(optimizer.param_groups, saved_lists, strict=False):
                group.update(lists)

    @torch.no_grad()
    def _gather_from_holders(self, *, with_gradients: bool) -> None:
        """Put together the values of what this rank owns, and the gradients."""
        for exchange_round in self._rounds:
            outgoing, expected = {}, {}
            for (holder, owner), blocks in exchange_round.to_owner.items():
                if holder == self._communicator.rank:
                    outgoing[owner] = self._live_values(blocks, with_gradients=with_gradients)
                if owner == self._communicator.rank:
                    expected[holder] = self._expected_headers(blocks, 1 + with_gradients, with_flags=with_gradients)
            for holder, tensors in self._all_to_all(outgoing, expected).items():
                blocks = exchange_round.to_owner[holder, self._communicator.rank]
                for block, value in zip(blocks, tensors, strict=False):
                    self.parameters[block.name].data[block.slices] = value
                if with_gradients:
                    gradient_flags = tensors[-1].tolist()
                    for block, value, has_gradient in zip(blocks, tensors[len(blocks) :], gradient_flags, strict=False):
                        if has_gradient:
                            self._ensure_gradient(block.name)[block.slices] = value

    def _ensure_gradient(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def _live_values(self, blocks: Sequence[_TensorBlock], *, with_gradients: bool) -> list[Tensor]:
        """What this rank has of these: values, then gradients, then which of them exist."""
        values = [self._block_values(self._live_parameters[block.name], block) for block in blocks]
        if not with_gradients:
            return values
        live_grads = [self._live_parameters[block.name].grad for block in blocks]
        grads = [
            value.new_zeros(value.shape) if grad is None else self._block_values(grad, block)
            for block, grad, value in zip(blocks, live_grads, values, strict=True)
        ]
        flags = torch.tensor([grad is not None for grad in live_grads], dtype=torch.uint8, device=self._device)
        return [*values, *grads, flags]

    def _block_values(self, value: Tensor, block: _TensorBlock) -> Tensor:
        if value.layout != torch.strided:
            value = value.to_dense()
        return next(
            region.values
            for region in local_regions(value, self._tp_shards.get(block.name))
            if region.offsets == block.offsets
        )

    @torch.no_grad()
    def _scatter_to_holders(self) -> None:
        """Write the owners' values to every live parameter."""
        for exchange_round in self._rounds:
            outgoing, expected = {}, {}
            for (holder, owner), blocks in exchange_round.to_holders.items():
                if owner == self._communicator.rank:
                    outgoing[holder] = [self.parameters[block.name].detach()[block.slices] for block in blocks]
                if holder == self._communicator.rank:
                    expected[owner] = self._expected_headers(blocks, 1, with_flags=False)
            for owner, tensors in self._all_to_all(outgoing, expected).items():
                for block, value in zip(
                    exchange_round.to_holders[self._communicator.rank, owner], tensors, strict=True
                ):
                    self._block_values(self._live_parameters[block.name], block).copy_(value)

    def _expected_headers(
        self, blocks: Sequence[_TensorBlock], copies: int, *, with_flags: bool
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        headers = [(block.shape, self.parameters[block.name].dtype) for block in blocks] * copies
        return headers + ([((len(blocks),), torch.uint8)] if with_flags else [])

    def _all_to_all(
        self,
        tensors_by_rank: Mapping[int, Sequence[Tensor]],
        headers_by_rank: Mapping[int, Sequence[tuple[tuple[int, ...], torch.dtype]]],
    ) -> dict[int, list[Tensor]]:
        """What other ranks of the group sent to this one."""
        transfer_device = torch.device("cpu") if self._communicator.via_host else self._device
        messages = [_pack(tensors_by_rank.get(rank, ()), transfer_device) for rank in range(self._communicator.size)]
        lengths = [
            sum(_padded_bytes(*item) for item in headers_by_rank.get(rank, ()))
            for rank in range(self._communicator.size)
        ]
        incoming = torch.empty(sum(lengths), dtype=torch.uint8, device=transfer_device)
        dist.all_to_all_single(
            incoming,
            torch.cat(messages),
            lengths,
            [len(item) for item in messages],
            group=self._communicator.process_group,
        )
        received = incoming.to(self._device).split(lengths)
        return {rank: list(_unpack(received[rank], headers)) for rank, headers in headers_by_rank.items()}

    # Between steps

    def sync_settings(self, optimizer: Optimizer) -> None:
        """Give every rank the settings that the first owner's groups have: a step may change them (counters, estimates of a rate). Every
        rank must call it."""
        local_settings = [
            {key: value for key, value in read_group_settings(group).items() if is_plain_json(value)}
            for group in optimizer.param_groups
        ]
        owner_settings = self._communicator.all_gather_object(None if self._communicator.rank else local_settings)[0]
        for group, group_values in zip(
            optimizer.param_groups, owner_settings if self._communicator.rank else (), strict=False
        ):
            for key, value in group_values.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value

    @property
    def owned_bytes(self) -> int:
        """Of the whole copies that this rank keeps."""
        return sum(self.parameters[name].numel() * self.parameters[name].element_size() for name in self.owned_names)


def assign_owners(bytes_by_name: Mapping[str, int], rank_count: int) -> dict[str, int]:
    """Tensor -> the rank that owns it: the largest first, each to the rank that has least."""
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
    held_blocks: Sequence[Mapping[str, Sequence[_TensorBlock]]],
    owners: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
) -> _ExchangeRound:
    """Who sends what: each stretch comes from one rank, its owner where that has it, and goes to all that hold it."""
    to_owner: dict[tuple[int, int], list[_TensorBlock]] = {}
    to_holders: dict[tuple[int, int], list[_TensorBlock]] = {}
    for name in names:
        owner, covered_blocks = owners[name], set[_TensorBlock]()
        for holder in (owner, *(rank for rank in range(len(held_blocks)) if rank != owner)):
            for block in held_blocks[holder].get(name, ()):
                to_holders.setdefault((holder, owner), []).append(block)
                if block not in covered_blocks:
                    covered_blocks.add(block)
                    to_owner.setdefault((holder, owner), []).append(block)
        assert sum(math.prod(block.shape) for block in covered_blocks) == math.prod(shapes[name]), (
            f"{name} is not held once"
        )
    return _ExchangeRound(to_owner, to_holders)


def _padded_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _pack(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Their bytes, one after another."""
    message = torch.zeros(
        sum(_padded_bytes(tensor.shape, tensor.dtype) for tensor in tensors), dtype=torch.uint8, device=device
    )
    offset = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        message[offset : offset + size] = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        offset += _padded_bytes(tensor.shape, tensor.dtype)
    return message


def _unpack(message: Tensor, headers: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Iterator[Tensor]:
    offset = 0
    for shape, dtype in headers:
        yield message[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        offset += _padded_bytes(shape, dtype)


def make_full_tensor_optimizers(
    job: Job,
    plan: Plan,
    ranks: WorldCommunicator,
    axes: Mapping[str, Communicator],
    *,
    model: nn.Module,
    tp_shards: Mapping[str, TPShard],
    shapes: Mapping[str, Sequence[int]],
) -> dict[int, FullTensorOptimizer]:
    """By place among the job's optimizers, those that step on whole tensors under this plan. Every rank must call it."""
    if not (plan.is_sharded or plan.mesh.tp > 1 or plan.mesh.pp > 1):
        return {}
    optimizer_classes: Sequence[OptimizerClass] = ()
    with ranks.raise_on_all_ranks():
        if not ranks.rank:  # one rank tries: a result by chance could differ
            trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
            optimizer_classes = classify(
                job,
                {
                    name: torch.empty(tuple(shapes.get(name, parameter.shape)), dtype=parameter.dtype, device="meta")
                    for name, parameter in trained.items()
                },
            )
    return {
        index: FullTensorOptimizer(optimizer_class, plan, ranks, axes, model, tp_shards, shapes)
        for index, optimizer_class in enumerate(ranks.all_gather_object(optimizer_classes)[0])
        if gathered_axes(plan, optimizer_class.reads, optimizer_class.draws)
    }
