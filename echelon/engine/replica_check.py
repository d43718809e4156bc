"""Compare what ranks must hold alike: parameters, buffers, optimizer state, settings and random states along every replicated axis.

Each tensor's bits are summed on its device, so that a comparison sends a few numbers. Only where those differ are tensors named and
compared by value. Differences of rounding size (sums on a GPU depend on the order of its threads) are repaired with the first replica's values; any
other ends the run.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from echelon.engine.checkpoint.param_group_state import settings
from echelon.engine.data_setup import own_generators
from echelon.engine.parallel.shard_layout import local
from echelon.engine.process_groups import Group
from echelon.engine.run_state import optimizer_tensors, whole_of
from echelon.errors import DivergenceError

if TYPE_CHECKING:
    from echelon.engine.run import Run

#: Differences up to so many units in the last place of a tensor's largest value are rounding.
_ROUNDING = 64
#: A comparison adds up words of so many bits and their squares: n words are equal where n times the sum of squares is the square of the sum.
_WORD, _WORDS = 20, 3
#: A sum of bits is taken by so many parts, so that values that changed places are seen.
_PARTS = 61


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a compared thing is called in an error, and why replicas of it usually differ."""

    name: str
    cause: str


_EARLY = _Kind(
    "parameter",
    "forward writes to it or makes it from this rank's samples: an initialization by the first batch, a layer made in forward, a Python flag",
)
_PARAMETER = _Kind(
    "parameter", "the optimizer draws random numbers of its own or depends on the rank, or forward writes to it"
)
_BUFFER = _Kind("buffer", "forward changes it by a rule that has no mean over samples, or on some ranks only")
_STATE = _Kind("optimizer state", "the optimizer draws random numbers of its own, or depends on the rank")
_SETTING = _Kind("optimizer setting", "it depends on the rank")
_GENERATOR = _Kind("generator of the model", "forward draws different numbers of random numbers on different ranks")
_RANDOM = _Kind("random state", "code draws different numbers of random numbers on different ranks")


@dataclass(frozen=True, slots=True)
class _Thing:
    """One thing that replicas hold alike: a tensor, or a plain value that is compared by its text."""

    kind: _Kind
    value: Any
    #: Axes along which ranks own different ones: see `whole_optimizer`.
    apart: tuple[str, ...] = ()


class Replicas:
    """What a rank shares with others, by axis."""

    def __init__(self, run: Run, warn: Callable[[str], None]) -> None:
        self._run, self._warn = run, warn
        self._warned = False
        self._ties = [
            (holders, {id(value) for value in tied}) for holders, tied in run.assembly.tied if holders.size > 1
        ]
        self._generators = own_generators(run.model)

    @property
    def several(self) -> bool:
        """Whether there is anything to compare."""
        return self._run.world.size > 1 and not self._run.plan.free

    @torch.no_grad()
    def compare(self, step: int, *, updated: bool = True, settled: bool = False) -> None:
        """Raise where replicas differ after `step` steps. Every rank must call it.

        `updated`: after the optimizer's step, not before. `settled`: nothing is under way, and other code may have drawn random numbers.
        """
        run = self._run
        things = dict(self._things(updated=updated, settled=settled))
        sums = _checksums(things)
        whole = {name: thing for name, thing in things.items() if not isinstance(thing.value, DTensor)}
        alike = {name: thing for name, thing in whole.items() if not self._own(thing) and "dp" not in thing.apart}
        self._over(run.data, alike, sums, step)
        uncut = {
            name: thing for name, thing in things.items() if not self._cut(name, thing) and "tp" not in thing.apart
        }
        self._over(run.axes["tp"], uncut, sums, step)
        for holders, tied in self._ties:
            shared = {
                name: thing
                for name, thing in things.items()
                if thing.kind in (_EARLY, _PARAMETER) and id(thing.value) in tied
            }
            self._over(holders, shared, sums, step)

    # What there is

    def _things(self, *, updated: bool, settled: bool) -> Iterator[tuple[str, _Thing]]:
        run = self._run
        served = run.hub.trained if run.hub is not None else frozenset()
        kind = _PARAMETER if updated else _EARLY
        for name, value in run.model.named_parameters():
            if not value.is_meta and name not in served:
                yield name, _Thing(kind, value)
        for name, value in run.loss_parameters.items():
            yield name, _Thing(kind, value)
        # Ranks of an accelerator agree on a buffer that changes for the first time one step later.
        for name, buffer in run.model.named_buffers() if settled or run.device.type == "cpu" else ():
            if not buffer.is_meta and (
                buffer.is_floating_point() or buffer.dtype in (torch.int16, torch.int32, torch.int64)
            ):
                yield name, _Thing(_BUFFER, buffer)
        if not updated:
            return
        for name, moment in optimizer_tensors(run).items():
            owner = whole_of(run, name)
            yield f"optimizer {name}", _Thing(_STATE, moment, owner.axes if owner is not None else ())
        for place, optimizer in enumerate(run.optimizers):
            apart = run.whole[place].axes if place in run.whole else ()
            for number, group in enumerate(optimizer.param_groups):
                for key, value in settings(group).items():
                    if isinstance(value, bool | int | float | str | tuple):
                        yield f"optimizer {place} group {number} {key}", _Thing(_SETTING, value, apart)
        if settled:
            return
        if run.plan.zero == 0 and not run.pieces and run.assembly.pipeline is None and run.hub is None:
            yield "torch", _Thing(_RANDOM, torch.get_rng_state())
            yield "python", _Thing(_RANDOM, random.getstate())
            yield "numpy", _Thing(_RANDOM, numpy.random.get_state()[1].tobytes())  # type: ignore[index]
        for number, generator in enumerate(self._generators):
            yield f"generator {number}", _Thing(_GENERATOR, generator.get_state())

    def _cut(self, name: str, thing: _Thing) -> bool:
        """Whether the tensor axis gives each rank another part of it."""
        owner = name.split("/")[1] if thing.kind is _STATE and "/" in name else name
        return owner in self._run.pieces

    def _own(self, thing: _Thing) -> bool:
        """Whether data ranks have their own by intention: the model's generators, seeded for each."""
        return thing.kind is _GENERATOR and self._run.seeds_generators

    # How it is compared

    def _over(self, group: Group, things: Mapping[str, _Thing], sums: Mapping[str, int], step: int) -> None:
        if group.size == 1:
            return
        if not _agree(group, {name: sums[name] for name in things}):
            self._explain(group, things, sums, step)

    def _explain(self, group: Group, things: Mapping[str, _Thing], sums: Mapping[str, int], step: int) -> None:
        """Name what differs; raise unless it is all rounding."""
        mine = {name: (sums[name], _shape(thing.value)) for name, thing in things.items()}
        everyone = group.gather((self._run.world.rank, mine))
        names = list(dict.fromkeys(name for _, each in everyone for name in each))
        first_rank = everyone[0][0]
        for name in names:
            found = [each.get(name) for _, each in everyone]
            if len(set(found)) == 1:
                continue
            kind = things[name].kind if name in things else _EARLY
            shapes = {each and each[1] for each in found}
            if kind is _BUFFER and len(shapes) > 1:
                continue  # a cache, as large as this rank's batch
            other = next(place for place, each in enumerate(found) if each != found[0])
            rank = everyone[other][0]
            where = f"{kind.name} {name} on rank {rank} is not rank {first_rank}'s after step {step}"
            if None in found:
                missing = everyone[found.index(None)][0]
                raise _error(
                    f"{kind.name} {name} exists on some ranks and not on rank {missing} after step {step}: {_EARLY.cause}",
                    rank,
                    name,
                    _EARLY,
                )
            value = things[name].value
            if not isinstance(value, Tensor) or len(shapes) > 1:
                raise _error(f"{where}: {kind.cause}", rank, name, kind)
            if kind in (_RANDOM, _GENERATOR):
                raise _error(f"{where}: {kind.cause}", rank, name, kind)
            difference = self._difference(group, local(value.detach()))
            worst = max(range(len(difference)), key=difference.__getitem__)
            if difference[worst] == 0:
                continue  # zeros of unlike sign, or put right
            rank = everyone[worst][0]
            raise _error(
                f"{kind.name} {name} on rank {rank} differs from rank {first_rank}'s by {difference[worst]:.1e} of its largest value after step "
                f"{step}: {kind.cause}", rank, name, kind,
            )  # fmt: skip

    def _difference(self, group: Group, value: Tensor) -> list[float]:
        """How far each rank's tensor is from the first's, relative to its largest value; what is rounding is put right and 0."""
        reference = value.clone(memory_format=torch.contiguous_format)
        real = torch.view_as_real(reference) if reference.is_complex() else reference
        everyone = group.group or dist.group.WORLD
        assert everyone is not None
        dist.broadcast(real, dist.get_global_rank(everyone, 0), group=group.group)
        if not value.is_floating_point():
            return group.gather(float((reference != value).any()))
        largest = reference.abs().max().clamp(min=torch.finfo(value.dtype).tiny)
        unequal = (reference != value) & ~(reference.isnan() & value.isnan())
        relative = float(((reference - value).abs().where(unequal, 0.0).max() / largest).nan_to_num(1.0))
        found: list[float] = group.gather(relative)
        # On the host every replica computes the same bits: there only parts that the tensor axis computes apart may round apart.
        exact = value.device.type == "cpu" and group is self._run.data
        if exact or max(found) > _ROUNDING * torch.finfo(value.dtype).eps:
            return found
        value.copy_(reference)
        if not self._warned and max(found):
            self._warned = True
            self._warn(
                f"replicas drifted apart by rounding ({max(found):.0e} of the largest value): every rank took the first one's values, as it will again"
            )
        return [0.0] * len(found)


def _error(message: str, rank: int, name: str, kind: _Kind) -> DivergenceError:
    remedy = "; the last checkpoint was saved before that" if kind is not _EARLY else ""
    return DivergenceError(f"ranks came apart: {message}{remedy}", rank=rank, tensor=name, cause=kind.cause)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(local(value).shape) if isinstance(value, Tensor) else ()


def _agree(group: Group, sums: Mapping[str, int]) -> bool:
    """Whether all ranks have the same names with the same sums."""
    text = "\n".join(f"{name} {number}" for name, number in sorted(sums.items())).encode()
    return same(group, int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big"))


def same(group: Group, number: int) -> bool:
    """Whether a number of 60 bits is the same on every rank of a group."""
    words = [number >> (_WORD * place) & ((1 << _WORD) - 1) for place in range(_WORDS)]
    mine = [float(each) for word in words for each in (word, word * word)]
    found = group.sum(torch.tensor(mine, dtype=torch.float64).to(group.device)).tolist()
    return all(equal(group.size, found[place], found[place + 1]) for place in range(0, 2 * _WORDS, 2))


def equal(count: int, total: float, squares: float) -> bool:
    """Whether `count` whole numbers of 20 bits with this sum and sum of squares are all the same."""
    return count * round(squares) == round(total) ** 2


def _checksums(things: Mapping[str, _Thing]) -> dict[str, int]:
    tensors = {name: thing.value for name, thing in things.items() if isinstance(thing.value, Tensor)}
    found = dict(zip(tensors, _on_host([checksum(local(value.detach())) for value in tensors.values()]), strict=True))
    for name, thing in things.items():
        if name not in tensors:
            data = thing.value if isinstance(thing.value, bytes) else repr(thing.value).encode()
            found[name] = int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")
    return found


def _on_host(sums: list[Tensor]) -> list[int]:
    """Numbers of several devices, each device being waited for once."""
    found: dict[int, int] = {}
    for device in {each.device for each in sums}:
        places = [place for place, each in enumerate(sums) if each.device == device]
        found.update(zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True))
    return [found[place] for place in range(len(sums))]


def checksum(tensor: Tensor) -> Tensor:
    """A sum of a tensor's bits that depends on their places; a number on its device."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.reshape(-1) if tensor.is_contiguous() or not _dense(tensor) else _in_memory(tensor)
    flat = flat.view(torch.uint8) if flat.dtype is torch.bool else flat
    wide = 8 // flat.element_size()
    length = flat.numel() // (wide * _PARTS) * (wide * _PARTS)
    total = _narrow(flat[length:]).sum(dtype=torch.int64)
    if length and flat.storage_offset() % wide == 0:
        parts = flat[:length].view(torch.int64).view(_PARTS, -1).sum(1)
    elif length:
        parts = _narrow(flat[:length]).view(_PARTS, -1).sum(1, dtype=torch.int64)
    else:
        return total
    return total + (parts * torch.arange(1, 2 * _PARTS, 2, device=parts.device)).sum()


def _narrow(flat: Tensor) -> Tensor:
    """The bits as whole numbers of the same width."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(kinds[flat.element_size()])


def _dense(tensor: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _in_memory(tensor: Tensor) -> Tensor:
    """A dense tensor's numbers in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
