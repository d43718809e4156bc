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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.engine.checkpoint.param_group_state import is_plain, settings
from echelon.engine.parallel.shard_layout import Piece, regions
from echelon.engine.process_groups import Group, Ranks
from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.plan.whole_tensor_rules import gathered_axes, one_owner
from echelon.profiler.optimizer_class import OptimizerClass, classify

#: Bytes of whole tensors that one exchange carries at most (a larger tensor goes by itself): it bounds what messages need on top.
_ROUND = 256 * 2**20
#: Each tensor in a message begins at a multiple of this, so that any dtype can be read there.
_ALIGN = 16


@dataclass(frozen=True, slots=True)
class _Block:
    """A stretch of a tensor that a rank holds: where it begins in the whole, its shape."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def place(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class _Round:
    """What one exchange carries: by (holder, owner), the blocks that the owner needs from the holder, and those that it hands out."""

    collected: Mapping[tuple[int, int], Sequence[_Block]]
    handed: Mapping[tuple[int, int], Sequence[_Block]]


def sharing_group(ranks: Ranks, axes: Mapping[str, Group], plan: Plan, names: Sequence[str]) -> Group:
    """The ranks that hold the parts of the same tensors along these axes. Every rank must call it."""
    large = [axis for axis in names if axes[axis].size > 1]
    if len(large) == 1:
        return axes[large[0]]
    found = ranks.group_by(
        lambda rank: tuple(at for axis, at in plan.mesh.coordinate(rank).items() if axis not in names)
    )
    assert found is not None
    return found


class WholeOptimizer:
    """Steps one of the job's optimizers on whole tensors."""

    def __init__(
        self,
        kind: OptimizerClass,
        plan: Plan,
        ranks: Ranks,
        axes: Mapping[str, Group],
        model: nn.Module,
        pieces: Mapping[str, Piece],
        shapes: Mapping[str, Sequence[int]],
    ) -> None:
        """`shapes`: of the whole model's parameters. Every rank must call it."""
        #: Over which its tensors are put together; along the others ranks step alike.
        self.axes = gathered_axes(plan, kind.reads, kind.draws)
        self._group = sharing_group(ranks, axes, plan, self.axes)
        self._device = ranks.device
        #: Of the ranks that step alike, whether this is the first.
        self.first = not any(group.rank for axis, group in axes.items() if axis not in (*self.axes, "pp"))
        self._pieces = pieces
        trained = {n: v for n, v in model.named_parameters() if v.requires_grad and n in kind.parameters}
        self._live = {name: value for name, value in trained.items() if not value.is_meta}
        blocks = self._group.gather([self._blocks(name) for name in self._live])
        held: list[dict[str, list[_Block]]] = [{} for _ in blocks]
        for mine, theirs in zip(held, blocks, strict=True):
            for block in (one for each in theirs for one in each):
                mine.setdefault(block.name, []).append(block)
        sizes = {
            name: math.prod(shapes[name]) * value.element_size()
            for name, value in trained.items()
            if any(name in each for each in held)
        }
        owners = dict.fromkeys(sizes, 0) if one_owner(kind.reads, kind.draws) else deal(sizes, self._group.size)
        self._rounds = [_round(names, held, owners, shapes) for names in _in_rounds(sizes)]
        #: The tensors that this rank steps.
        self.owned = frozenset(name for name, owner in owners.items() if owner == self._group.rank)
        #: What stands for the model's parameters in the optimizer: whole tensors that this rank owns, and the others without memory.
        self.parameters = {
            name: nn.Parameter(
                torch.zeros(
                    tuple(shapes[name]), dtype=value.dtype, device=self._device if name in self.owned else "meta"
                )
            )
            for name, value in trained.items()
        }
        self._collect(gradients=False)

    def _blocks(self, name: str) -> list[_Block]:
        value = self._live[name]
        return [_Block(name, each.start, tuple(each.values.shape)) for each in regions(value, self._pieces.get(name))]

    # Before the optimizer is made, and after

    def fill(self) -> None:
        """Give every rank all values, for an `optimizer=` that looks at them. Every rank of the group must call it."""
        for name, value in self.parameters.items():
            here = value.detach() if name in self.owned else None
            found = [each for each in self._group.gather(None if here is None else here.cpu()) if each is not None]
            if name not in self.owned and found:
                self.parameters[name] = nn.Parameter(found[0].to(self._device))

    def adopt(self, optimizer: Optimizer) -> None:
        """Keep nothing for tensors that other ranks own."""
        for name, value in self.parameters.items():
            if name not in self.owned:
                optimizer.state.pop(value, None)
                if not value.is_meta:
                    value.data = value.data.new_zeros(()).expand(value.shape)

    # The step

    def step(self, optimizer: Optimizer) -> None:
        """Step `optimizer` on what this rank owns. Every rank must call it."""
        self._collect(gradients=True)
        if self.owned:
            with self._alone(optimizer):
                optimizer.step()
            for name in self.owned:
                self.parameters[name].grad = None
        else:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedules warn where no step came before theirs
        self._hand_out()

    @contextlib.contextmanager
    def _alone(self, optimizer: Optimizer) -> Iterator[None]:
        """Its groups with what this rank owns only."""
        mine = {id(self.parameters[name]) for name in self.owned}
        before: list[dict[str, list[Any]]] = [
            {key: group[key] for key in ("params", "param_names") if key in group} for group in optimizer.param_groups
        ]
        for group, lists in zip(optimizer.param_groups, before, strict=True):
            chosen = [at for at, value in enumerate(lists["params"]) if id(value) in mine]
            if len(chosen) < len(lists["params"]):
                group.update({key: [values[at] for at in chosen] for key, values in lists.items()})
        try:
            yield
        finally:
            for group, lists in zip(optimizer.param_groups, before, strict=False):
                group.update(lists)

    @torch.no_grad()
    def _collect(self, *, gradients: bool) -> None:
        """Put together the values of what this rank owns, and the gradients."""
        for each in self._rounds:
            sent, wanted = {}, {}
            for (holder, owner), blocks in each.collected.items():
                if holder == self._group.rank:
                    sent[owner] = self._of_live(blocks, gradients=gradients)
                if owner == self._group.rank:
                    wanted[holder] = self._expected(blocks, 1 + gradients, flags=gradients)
            for holder, tensors in self._exchange(sent, wanted).items():
                blocks = each.collected[holder, self._group.rank]
                for block, value in zip(blocks, tensors, strict=False):
                    self.parameters[block.name].data[block.place] = value
                if gradients:
                    reached = tensors[-1].tolist()
                    for block, value, flag in zip(blocks, tensors[len(blocks) :], reached, strict=False):
                        if flag:
                            self._gradient(block.name)[block.place] = value

    def _gradient(self, name: str) -> Tensor:
        value = self.parameters[name]
        if value.grad is None:
            value.grad = torch.zeros_like(value)
        return value.grad

    def _of_live(self, blocks: Sequence[_Block], *, gradients: bool) -> list[Tensor]:
        """What this rank has of these: values, then gradients, then which of them exist."""
        values = [self._held(self._live[block.name], block) for block in blocks]
        if not gradients:
            return values
        found = [self._live[block.name].grad for block in blocks]
        grads = [
            value.new_zeros(value.shape) if grad is None else self._held(grad, block)
            for block, grad, value in zip(blocks, found, values, strict=True)
        ]
        flags = torch.tensor([grad is not None for grad in found], dtype=torch.uint8, device=self._device)
        return [*values, *grads, flags]

    def _held(self, value: Tensor, block: _Block) -> Tensor:
        if value.layout != torch.strided:
            value = value.to_dense()
        return next(each.values for each in regions(value, self._pieces.get(block.name)) if each.start == block.start)

    @torch.no_grad()
    def _hand_out(self) -> None:
        """Write the owners' values to every live parameter."""
        for each in self._rounds:
            sent, wanted = {}, {}
            for (holder, owner), blocks in each.handed.items():
                if owner == self._group.rank:
                    sent[holder] = [self.parameters[block.name].detach()[block.place] for block in blocks]
                if holder == self._group.rank:
                    wanted[owner] = self._expected(blocks, 1, flags=False)
            for owner, tensors in self._exchange(sent, wanted).items():
                for block, value in zip(each.handed[self._group.rank, owner], tensors, strict=True):
                    self._held(self._live[block.name], block).copy_(value)

    def _expected(
        self, blocks: Sequence[_Block], times: int, *, flags: bool
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        found = [(block.shape, self.parameters[block.name].dtype) for block in blocks] * times
        return found + ([((len(blocks),), torch.uint8)] if flags else [])

    def _exchange(
        self, sent: Mapping[int, Sequence[Tensor]], wanted: Mapping[int, Sequence[tuple[tuple[int, ...], torch.dtype]]]
    ) -> dict[int, list[Tensor]]:
        """What other ranks of the group sent to this one."""
        way = torch.device("cpu") if self._group.staged else self._device
        outgoing = [_packed(sent.get(rank, ()), way) for rank in range(self._group.size)]
        lengths = [sum(_room(*each) for each in wanted.get(rank, ())) for rank in range(self._group.size)]
        incoming = torch.empty(sum(lengths), dtype=torch.uint8, device=way)
        dist.all_to_all_single(
            incoming, torch.cat(outgoing), lengths, [len(each) for each in outgoing], group=self._group.group
        )
        parts = incoming.to(self._device).split(lengths)
        return {rank: list(_unpacked(parts[rank], heads)) for rank, heads in wanted.items()}

    # Between steps

    def agree(self, optimizer: Optimizer) -> None:
        """Give every rank the settings that the first owner's groups have: a step may change them (counters, estimates of a rate). Every
        rank must call it."""
        mine = [
            {key: value for key, value in settings(group).items() if is_plain(value)}
            for group in optimizer.param_groups
        ]
        theirs = self._group.gather(None if self._group.rank else mine)[0]
        for group, found in zip(optimizer.param_groups, theirs if self._group.rank else (), strict=False):
            for key, value in found.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value

    @property
    def bytes(self) -> int:
        """Of the whole copies that this rank keeps."""
        return sum(self.parameters[name].numel() * self.parameters[name].element_size() for name in self.owned)


def deal(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Tensor -> the rank that owns it: the largest first, each to the rank that has least."""
    load = [0] * ranks
    owners = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = load.index(min(load))
        load[owners[name]] += max(sizes[name], 1)
    return owners


def _in_rounds(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    names: list[str] = []
    room = _ROUND
    for name, size in sizes.items():
        if names and size > room:
            yield names
            names, room = [], _ROUND
        names.append(name)
        room -= size
    if names:
        yield names


def _round(
    names: Sequence[str],
    held: Sequence[Mapping[str, Sequence[_Block]]],
    owners: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
) -> _Round:
    """Who sends what: each stretch comes from one rank, its owner where that has it, and goes to all that hold it."""
    collected: dict[tuple[int, int], list[_Block]] = {}
    handed: dict[tuple[int, int], list[_Block]] = {}
    for name in names:
        owner, seen = owners[name], set[_Block]()
        for holder in (owner, *(rank for rank in range(len(held)) if rank != owner)):
            for block in held[holder].get(name, ()):
                handed.setdefault((holder, owner), []).append(block)
                if block not in seen:
                    seen.add(block)
                    collected.setdefault((holder, owner), []).append(block)
        assert sum(math.prod(block.shape) for block in seen) == math.prod(shapes[name]), f"{name} is not held once"
    return _Round(collected, handed)


def _room(shape: Sequence[int], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN


def _packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Their bytes, one after another."""
    found = torch.zeros(sum(_room(each.shape, each.dtype) for each in tensors), dtype=torch.uint8, device=device)
    at = 0
    for each in tensors:
        size = each.numel() * each.element_size()
        found[at : at + size] = each.detach().contiguous().reshape(-1).view(torch.uint8)
        at += _room(each.shape, each.dtype)
    return found


def _unpacked(message: Tensor, heads: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Iterator[Tensor]:
    at = 0
    for shape, dtype in heads:
        yield message[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        at += _room(shape, dtype)


def whole_optimizers(
    job: Job,
    plan: Plan,
    ranks: Ranks,
    axes: Mapping[str, Group],
    *,
    model: nn.Module,
    pieces: Mapping[str, Piece],
    shapes: Mapping[str, Sequence[int]],
) -> dict[int, WholeOptimizer]:
    """By place among the job's optimizers, those that step on whole tensors under this plan. Every rank must call it."""
    if not (plan.sharded or plan.mesh.tp > 1 or plan.mesh.pp > 1):
        return {}
    kinds: Sequence[OptimizerClass] = ()
    with ranks.together():
        if not ranks.rank:  # one rank tries: a result by chance could differ
            trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
            kinds = classify(
                job,
                {
                    name: torch.empty(tuple(shapes.get(name, value.shape)), dtype=value.dtype, device="meta")
                    for name, value in trained.items()
                },
            )
    return {
        place: WholeOptimizer(kind, plan, ranks, axes, model, pieces, shapes)
        for place, kind in enumerate(ranks.gather(kinds)[0])
        if gathered_axes(plan, kind.reads, kind.draws)
    }
