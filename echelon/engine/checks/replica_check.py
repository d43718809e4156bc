"""Compare replicas along every axis: parameters, buffers, optimizer state, settings and random states.

Each tensor's bits are summed on its device, so a comparison sends a few numbers; where those differ, tensors are compared by value. Differences of
rounding size (sums on a GPU depend on the order of its threads) are overwritten with the first replica's values; any other ends the run.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from echelon.engine.buffers.slots import has_numbers
from echelon.engine.data_setup import find_generators
from echelon.engine.full_state import full_tensor_optimizer_of, optimizer_tensors
from echelon.engine.group_settings import read_group_settings
from echelon.engine.parallel.shard_layout import to_local
from echelon.engine.process_groups import Communicator
from echelon.engine.run_state import RunState
from echelon.errors import DivergenceError

#: Units in the last place of a tensor's largest value up to which differences are rounding.
_ROUNDING_ULPS = 64
#: A comparison sums words of this many bits and their squares: n words are equal where n times the sum of squares is the square of the sum.
_WORD_BITS, _WORD_COUNT = 20, 3
#: Parts of a tensor whose bits are summed apart, so that values that changed places are seen.
_CHECKSUM_PARTS = 61


@dataclass(frozen=True, slots=True)
class _ReplicaKind:
    """How errors name a replicated item, and why replicas of it usually differ."""

    name: str
    cause: str


_OPTIMIZER_CAUSE = "the optimizer draws random numbers of its own or depends on the rank"
_INITIAL_PARAMETER = _ReplicaKind(
    "parameter",
    "forward writes to it or makes it from this rank's samples: an initialization by the first batch, a layer made in forward, a Python flag",
)
_PARAMETER = _ReplicaKind("parameter", f"{_OPTIMIZER_CAUSE}, or forward writes to it")
_BUFFER = _ReplicaKind("buffer", "forward changes it by a rule that has no mean over samples, or on some ranks only")
_OPTIMIZER_STATE = _ReplicaKind("optimizer state", _OPTIMIZER_CAUSE)
_OPTIMIZER_SETTING = _ReplicaKind("optimizer setting", "it depends on the rank")
_GENERATOR = _ReplicaKind("generator of the model", "forward draws more random numbers on some ranks")
_RANDOM_STATE = _ReplicaKind("random state", "code draws different numbers of random numbers on different ranks")


@dataclass(frozen=True, slots=True)
class _ReplicatedItem:
    """A tensor, or a plain value that is compared by its text."""

    kind: _ReplicaKind
    value: Any
    split_axes: Collection[str] = ()  #: along which ranks hold different parts, or their own


_Items = Mapping[str, _ReplicatedItem]


class ReplicaCheck:
    """Compares the replicas of one run."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._has_warned = False
        self._generators = find_generators(run.model)

    @torch.no_grad()
    def compare(self, step: int, *, after_update: bool = True, between_steps: bool = False) -> None:
        """Raise where replicas differ after `step` steps. Every rank must call it. `after_update`: after the optimizer's step, not before.
        `between_steps`: nothing is in flight, and other code may have drawn random numbers."""
        run = self._run
        items = dict(self._items(after_update=after_update, between_steps=between_steps))
        checksums = _checksums(items, run.device)
        for axis in ("dp", "tp"):
            replicated = {name: item for name, item in items.items() if axis not in item.split_axes}
            self._compare_over(run.axes[axis], replicated, checksums, step)
        for holders, tied in run.rank_model.tied_parameters:
            tied_ids = set(map(id, tied))
            shared = {name: item for name, item in items.items() if id(item.value) in tied_ids}
            self._compare_over(holders, shared, checksums, step)

    # What is replicated

    def _items(self, *, after_update: bool, between_steps: bool) -> Iterator[tuple[str, _ReplicatedItem]]:
        run = self._run
        kind = _PARAMETER if after_update else _INITIAL_PARAMETER
        for name, value in run.model.named_parameters():
            if not value.is_meta and name not in run.backend.server_trained:
                yield name, _ReplicatedItem(kind, value, self._split_axes(name, value))
        for name, value in run.loss_parameters.items():
            yield name, _ReplicatedItem(kind, value)
        # Ranks of an accelerator agree on a buffer that changes for the first time one step later.
        for name, buffer in run.model.named_buffers() if between_steps or run.device.type == "cpu" else ():
            if has_numbers(buffer):
                yield name, _ReplicatedItem(_BUFFER, buffer, self._split_axes(name, buffer))
        if not after_update:
            return
        for name, moment in optimizer_tensors(run).items():
            owner = full_tensor_optimizer_of(run, name)
            axes = self._split_axes(name.split("/")[1], moment).union(owner.gathered_axes if owner else ())
            yield f"optimizer {name}", _ReplicatedItem(_OPTIMIZER_STATE, moment, axes)
        for index, optimizer in enumerate(run.optimizers):
            owner = run.full_tensor_optimizers.get(index)
            owned_axes = owner.gathered_axes if owner else ()
            for group_index, group in enumerate(optimizer.param_groups):
                for key, value in read_group_settings(group).items():
                    if isinstance(value, bool | int | float | str | tuple):
                        name = f"optimizer {index} group {group_index} {key}"
                        yield name, _ReplicatedItem(_OPTIMIZER_SETTING, value, owned_axes)
        if between_steps:
            return
        if run.plan.zero == 0 and not run.tp_shards and run.rank_model.pipeline is None and not run.plan.uses_servers:
            yield "torch", _ReplicatedItem(_RANDOM_STATE, torch.get_rng_state())
            yield "python", _ReplicatedItem(_RANDOM_STATE, random.getstate())
            yield "numpy", _ReplicatedItem(_RANDOM_STATE, numpy.random.get_state()[1].tobytes())  # type: ignore[index]
        seeded_axes = ("dp",) if run.seeded_generators else ()
        for index, generator in enumerate(self._generators):
            yield f"generator {index}", _ReplicatedItem(_GENERATOR, generator.get_state(), seeded_axes)

    def _split_axes(self, parameter_name: str, value: Tensor) -> set[str]:
        is_split = {"dp": isinstance(value, DTensor), "tp": parameter_name in self._run.tp_shards}
        return {axis for axis, split in is_split.items() if split}

    # Comparison

    def _compare_over(self, communicator: Communicator, items: _Items, checksums: Mapping[str, int], step: int) -> None:
        if communicator.size > 1:
            text = "\n".join(f"{name} {checksums[name]}" for name in sorted(items)).encode()
            if not is_same_on_ranks(communicator, hash_bytes(text)):
                self._diagnose(communicator, items, checksums, step)

    def _diagnose(self, communicator: Communicator, items: _Items, checksums: Mapping[str, int], step: int) -> None:
        """Name what differs; raise unless it is all rounding."""
        tensors = {name: to_local(item.value) for name, item in items.items() if isinstance(item.value, Tensor)}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        local_checksums = {name: (checksums[name], shapes.get(name, ())) for name in items}
        gathered = communicator.all_gather_object((self._run.world.rank, local_checksums))
        ranks, rank_checksums = zip(*gathered, strict=True)
        for name in dict.fromkeys(name for checksums_of_rank in rank_checksums for name in checksums_of_rank):
            found = [checksums_of_rank.get(name) for checksums_of_rank in rank_checksums]
            if len(set(found)) == 1:
                continue
            if None in found:
                missing_rank = ranks[found.index(None)]
                raise _divergence_error(
                    f"{items[name].kind.name if name in items else 'parameter'} {name} exists on some ranks and not on rank {missing_rank} after step {step}: "
                    f"{_INITIAL_PARAMETER.cause}", _first_differing(ranks, found), name, _INITIAL_PARAMETER,
                )  # fmt: skip
            kind, value, has_one_shape = items[name].kind, items[name].value, len({shape for _, shape in found}) == 1
            if kind is _BUFFER and not has_one_shape:
                continue  # a cache, as large as this rank's batch
            rank, difference = _first_differing(ranks, found), ""
            if isinstance(value, Tensor) and has_one_shape and kind not in (_RANDOM_STATE, _GENERATOR):
                differences = self._relative_differences(communicator, to_local(value.detach()))
                largest, rank = max(zip(differences, ranks, strict=True), key=lambda pair: pair[0])
                if largest == 0:
                    continue  # zeros of unlike sign, or overwritten
                difference = f" by {largest:.1e} of its largest value"
            where = f"{kind.name} {name} on rank {rank} differs from rank {ranks[0]}'s{difference} after step {step}"
            raise _divergence_error(f"{where}: {kind.cause}", rank, name, kind)

    def _relative_differences(self, communicator: Communicator, value: Tensor) -> list[float]:
        """How far each rank's tensor is from the first's, relative to its largest value; 0 where rounding was overwritten."""
        reference = value.clone(memory_format=torch.contiguous_format)
        real_view = torch.view_as_real(reference) if reference.is_complex() else reference
        process_group = communicator.process_group or dist.group.WORLD
        assert process_group is not None
        dist.broadcast(real_view, dist.get_global_rank(process_group, 0), group=communicator.process_group)
        if not value.is_floating_point():
            return communicator.all_gather_object(float((reference != value).any()))
        largest = reference.abs().max().clamp(min=torch.finfo(value.dtype).tiny)
        unequal = (reference != value) & ~(reference.isnan() & value.isnan())
        relative = float(((reference - value).abs().where(unequal, 0.0).max() / largest).nan_to_num(1.0))
        differences: list[float] = communicator.all_gather_object(relative)
        # On the host every replica computes the same bits; only what tp computes in parts may round differently.
        is_exact = value.device.type == "cpu" and communicator is self._run.data_parallel
        if is_exact or max(differences) > _ROUNDING_ULPS * torch.finfo(value.dtype).eps:
            return differences
        value.copy_(reference)
        if not self._has_warned and max(differences):
            self._has_warned = True
            self._run.warn(
                f"replicas drifted apart by rounding ({max(differences):.0e} of the largest value): every rank took the first one's values, as it will again"
            )
        return [0.0] * len(differences)


def _first_differing(ranks: Sequence[int], values: Sequence[object]) -> int:
    return next(rank for rank, value in zip(ranks, values, strict=True) if value != values[0])


def _divergence_error(message: str, rank: int, name: str, kind: _ReplicaKind) -> DivergenceError:
    remedy = "; the last checkpoint was saved before that" if kind is not _INITIAL_PARAMETER else ""
    return DivergenceError(f"ranks diverged: {message}{remedy}", rank=rank, tensor=name, cause=kind.cause)


def is_same_on_ranks(communicator: Communicator, checksum: int) -> bool:
    """Whether an integer of 60 bits is the same on every rank."""
    words = [checksum >> (_WORD_BITS * index) & ((1 << _WORD_BITS) - 1) for index in range(_WORD_COUNT)]
    words_and_squares = torch.tensor([(word, word * word) for word in words], dtype=torch.float64)
    sums = communicator.all_reduce(words_and_squares.to(communicator.device)).tolist()
    return all(all_words_equal(communicator.size, *word_sums) for word_sums in sums)


def all_words_equal(count: int, total: float, squares: float) -> bool:
    """Whether `count` integers of 20 bits with this sum and sum of squares are all the same."""
    return count * round(squares) == round(total) ** 2


def hash_bytes(data: bytes) -> int:
    """An integer of 56 bits."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def _checksums(items: _Items, device: torch.device) -> dict[str, int]:
    tensors = {name: item.value for name, item in items.items() if isinstance(item.value, Tensor)}
    device_sums = [checksum(to_local(tensor.detach())).to(device) for tensor in tensors.values()]
    checksums = dict(zip(tensors, torch.stack(device_sums).tolist() if device_sums else (), strict=True))
    for name, item in items.items():
        if name not in tensors:
            checksums[name] = hash_bytes(item.value if isinstance(item.value, bytes) else repr(item.value).encode())
    return checksums


def checksum(tensor: Tensor) -> Tensor:
    """A sum of a tensor's bits that depends on their places, on its device."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    is_dense = bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
    is_permuted = is_dense and not tensor.is_contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,)) if is_permuted else tensor.reshape(-1)  # in memory order
    flat = flat.view(torch.uint8) if flat.dtype is torch.bool else flat
    values_per_word = 8 // flat.element_size()
    length = flat.numel() // (values_per_word * _CHECKSUM_PARTS) * (values_per_word * _CHECKSUM_PARTS)
    total = _as_integers(flat[length:]).sum(dtype=torch.int64)
    if length and flat.storage_offset() % values_per_word == 0:
        part_sums = flat[:length].view(torch.int64).view(_CHECKSUM_PARTS, -1).sum(1)
    elif length:
        part_sums = _as_integers(flat[:length]).view(_CHECKSUM_PARTS, -1).sum(1, dtype=torch.int64)
    else:
        return total
    return total + (part_sums * torch.arange(1, 2 * _CHECKSUM_PARTS, 2, device=part_sums.device)).sum()


def _as_integers(flat: Tensor) -> Tensor:
    """The bits as integers of the same width."""
    dtypes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(dtypes[flat.element_size()])
