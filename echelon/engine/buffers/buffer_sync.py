"""Synchronize buffers that forward mutates by a rule nobody declared: an average of its own, a codebook, a counter.

Every step the buffers that were seen to change are replaced by their mean over ranks, in the step's message, which also reports further changes.
On a CPU the ranks agree on these at once; the host of an accelerator reads the report one step later, or when the run is saved. Integers have
no mean: they are sent to be compared, and where ranks differ, each keeps its own, with a warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter, is_

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.engine.buffers.slots import TensorSlot, has_numbers, make_writable, named_slots
from echelon.engine.process_groups import Communicator

#: Copies are kept of buffers up to this size in bytes.
_COPY_LIMIT_BYTES = 2**20
_version_of: Callable[[Tensor], int] = attrgetter("_version")
_Version = tuple[Tensor | None, int]


class BufferVersions:
    """Tensors and their versions at one moment. Every step asks `is_unchanged`, maybe of hundreds of tables: the lists are laid out for that."""

    def __init__(self, slots: dict[str, TensorSlot], recorded: Mapping[str, _Version] | None = None) -> None:
        """`recorded`: an earlier record."""
        self.slots = slots
        self._recorded = {n: _version(slot) if recorded is None else recorded[n] for n, slot in slots.items()}
        self._owners = [slot.owner for slot in slots.values()]
        self._keys = [slot.key for slot in slots.values()]
        self._tensors = [tensor for tensor, _ in self._recorded.values()]
        self._present = [tensor for tensor in self._tensors if tensor is not None]
        self._versions = [version for tensor, version in self._recorded.values() if tensor is not None]

    def is_unchanged(self) -> bool:
        """Whether each place holds the same tensor, unwritten."""
        same_tensors = all(map(is_, map(dict.get, self._owners, self._keys), self._tensors))
        return same_tensors and list(map(_version_of, self._present)) == self._versions

    def changed_names(self) -> list[str]:
        """The places that do not."""
        changed = []
        for name, slot in self.slots.items():
            (tensor, version), (recorded, recorded_version) = _version(slot), self._recorded[name]
            if tensor is not recorded or version != recorded_version:
                changed.append(name)
        return changed

    def without(self, names: Collection[str]) -> BufferVersions:
        """The record of the others."""
        return BufferVersions({name: slot for name, slot in self.slots.items() if name not in names}, self._recorded)


def _version(slot: TensorSlot) -> _Version:
    tensor = slot.tensor
    return tensor, 0 if tensor is None else tensor._version


class BufferTracker:
    """The buffers of a model except those of batch norms. They add one flag and the changing values to the step's message."""

    def __init__(
        self, model: nn.Module, ranks: Communicator, *, deferred: bool, track_frozen: bool, warn: Callable[[str], None]
    ) -> None:
        """`deferred`: the host must not wait for sums over ranks. `track_frozen`: also track frozen parameters."""
        self._ranks, self._deferred, self._warn = ranks, deferred, warn
        #: By place, not by tensor: `self.average = ...` puts another tensor there.
        slots = {name: slot for name, module, slot in named_slots(model) if not isinstance(module, _BatchNorm)}
        self.slots = {n: slot for n, slot in slots.items() if slot.tensor is None or has_numbers(slot.tensor)}
        #: Frozen parameters, which may be large.
        self._frozen_names = set[str]()
        for name, _, slot in named_slots(model, "_parameters") if track_frozen else ():
            if has_numbers(slot.tensor) and not slot.tensor.requires_grad:
                self.slots[name] = slot
                self._frozen_names.add(name)
        #: Those that are sent, with the shape that all ranks agreed on.
        self._synced_shapes: dict[str, tuple[int, ...]] = {}
        #: Those that did not change so far; None: recorded when the next step begins.
        self._constants: BufferVersions | None = None
        #: Checksums before the first step; None: the ranks have agreed since.
        self._initial_checksums: dict[str, Tensor] | None = {}
        #: Changes on this rank that are not agreed on yet, and those of them that are first ones.
        self._pending_changes: set[str] = set()
        self._first_changes: set[str] = set()
        #: Integers: whether they differ from other ranks' (unread results), and those that do.
        self._integer_mismatches: dict[str, Tensor] = {}
        self._rank_local: set[str] = set()
        self._unchanged_flag = torch.zeros(1, dtype=torch.float64, device=ranks.device)
        self._changed_flag = self._unchanged_flag + 1
        self._local_values = self._unchanged_flag[:0]
        #: The sum of the flags, where the host must not wait for it.
        self.resync_flag: Tensor | None = None
        #: First changes since rules were last looked for, and those of them that differed from the ranks' mean.
        self.newly_changed: set[str] = set()
        self.differed_from_mean: set[str] = set()
        #: Values of small ones that did not change so far: writing equal values is no change.
        self._small_copies: dict[str, Tensor] = {}
        #: This rank's part of the step's samples.
        self.sample_fraction = 1 / ranks.size

    @property
    def size(self) -> int:
        """Numbers in the step's message."""
        return 1 + sum(map(math.prod, self._synced_shapes.values()))

    @property
    def mutable_buffers(self) -> dict[str, tuple[int, ...]] | None:
        """Names and shapes of those that steps change; None: no step was observed."""
        is_known = self._initial_checksums is None and self._ranks.size > 1
        return dict(self._synced_shapes) if is_known else None

    def clear_newly_changed(self) -> None:
        """After the rules of everything that changes have been looked for."""
        self.newly_changed.clear()
        self.differed_from_mean.clear()

    def assume_mutable(self, mutable_buffers: Mapping[str, Sequence[int]] | None) -> None:
        """Resume as a run that has seen these change: it then sends the same messages as the uninterrupted one."""
        self._constants, self._initial_checksums = None, {} if mutable_buffers is None else None
        self._pending_changes.clear()
        self._set_synced_shapes({name: tuple(shape) for name, shape in (mutable_buffers or {}).items()})

    def stop_tracking(self, names: Collection[str]) -> None:
        """Ignore these from now on: their rule is known."""
        self.slots = {name: slot for name, slot in self.slots.items() if name not in names}
        self._integer_mismatches = {n: flag for n, flag in self._integer_mismatches.items() if n in self.slots}
        for tracked_names in (self._pending_changes, self._first_changes, self._rank_local):
            tracked_names.intersection_update(self.slots)
        self._set_synced_shapes({name: shape for name, shape in self._synced_shapes.items() if name not in names})
        self._constants = None

    def begin_step(self) -> None:
        if self._constants is not None and not self._constants.is_unchanged():
            # Not forward but a hook or a callback changed it, once for all parts of the batch.
            self._record_versions(self._constants.changed_names())
        if self._constants is None:
            self._constants = BufferVersions({n: s for n, s in self.slots.items() if n not in self._synced_shapes})
            self._small_copies = {}
            self._record_versions(self._constants.slots)
            if self._initial_checksums is not None:
                tensors = {name: self._tensor(name) for name in self._constants.slots if name not in self._frozen_names}
                self._initial_checksums = {n: _checksum(t) for n, t in tensors.items() if _is_checksummable(t)}

    def _record_versions(self, names: Iterable[str]) -> None:
        assert self._constants is not None
        self._constants = BufferVersions(self._constants.slots)
        for name in names:
            tensor = self._tensor(name)
            if tensor is not None and tensor.nbytes <= _COPY_LIMIT_BYTES and name not in self._frozen_names:
                self._small_copies[name] = tensor.detach().clone()

    def _holds_same_values(self, name: str) -> bool:
        copy, tensor = self._small_copies.get(name), self._tensor(name)
        return copy is not None and tensor is not None and torch.equal(copy, tensor)

    def pack(self) -> Tensor:
        has_changes = self._find_changes()
        if self._initial_checksums is not None or self._ranks.size == 1:
            # What changes from the start is sent from the start, on an accelerator too.
            self._initial_checksums = None
            self._agree_on_changes()
            has_changes = False
        flag = self._changed_flag if has_changes else self._unchanged_flag
        if not self._synced_shapes:
            return flag
        self._local_values = torch.cat([self._flat_values(name) for name in self._synced_shapes])
        return torch.cat([flag, self._local_values * self.sample_fraction])

    def unpack(self, sums: Tensor) -> None:
        flag = sums[:1] if self._synced_shapes else sums
        if self._deferred:
            self.resync_flag = flag.view(())
            if self._synced_shapes:
                # Before the ranks have agreed each keeps its own, whose shape may be new; `resync` then reduces them.
                self._write_means(torch.where(flag > 0, self._local_values, sums[1:]))
        elif flag.item() > 0:
            self.resync()
        elif self._synced_shapes:
            self._write_means(sums[1:])

    def resync(self) -> None:
        """Agree with the other ranks on which buffers change, and take their means."""
        self._agree_on_changes()
        if self._synced_shapes:
            values = torch.cat([self._flat_values(name) for name in self._synced_shapes])
            self._write_means(self._ranks.all_reduce(values * self.sample_fraction))

    def _find_changes(self) -> bool:
        """Whether there is a change that the others do not know of."""
        assert self._constants is not None
        changed = [] if self._constants.is_unchanged() else self._constants.changed_names()
        if changed:
            changed = [name for name in changed if not self._holds_same_values(name)]
            self._constants = BufferVersions(self._constants.slots)
        if self._initial_checksums:
            # Writes to `buffer.data` leave the version as it is. Checked once, because it reads every buffer.
            initial = {n: checksum for n, checksum in self._initial_checksums.items() if n not in changed}
            changed += [n for n, before in initial.items() if not _is_close(_checksum(self._tensor(n)), before, 0)]
        if changed:
            self._constants = self._constants.without(changed)
        self._first_changes.update(changed)
        changed += [name for name, shape in self._synced_shapes.items() if not _has_shape(self._tensor(name), shape)]
        mismatched = {name for name, mismatch in self._integer_mismatches.items() if mismatch}
        self._integer_mismatches.clear()
        self._rank_local |= mismatched
        changed += mismatched
        self._pending_changes.update(changed)
        return bool(changed)

    def _agree_on_changes(self) -> None:
        """A change on any rank counts. Where shapes differ between ranks it is a cache of each rank's own, and stays so."""
        assert self._constants is not None
        rank_changes = self._ranks.all_gather_object((self._pending_changes, self._rank_local, self._first_changes))
        names, rank_local, first_changes = (set[str]().union(*values) for values in zip(*rank_changes, strict=True))
        self.newly_changed |= first_changes - self._synced_shapes.keys()
        for name in sorted(rank_local & self._synced_shapes.keys()):
            self._warn(
                f"the buffer {name} holds integers that differ between data ranks: every rank keeps its own, where one device has one; make it "
                "floating-point, so that the ranks take its mean, or sum it over the ranks in forward"
            )
        self._rank_local = rank_local
        self._pending_changes.clear()
        self._first_changes.clear()
        rank_shapes = self._ranks.all_gather_object({name: self._syncable_shape(name) for name in names})
        synced_shapes = {name: shape for name, shape in self._synced_shapes.items() if name not in names}
        self._constants = self._constants.without(names)
        for name in names - rank_local:
            shapes = {shapes_of_rank[name] for shapes_of_rank in rank_shapes}
            if len(shapes) == 1 and None not in shapes:
                synced_shapes[name] = shapes.pop()
        self._set_synced_shapes(synced_shapes)

    def _set_synced_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._synced_shapes = {name: shapes[name] for name in self.slots if name in shapes}

    def _tensor(self, name: str) -> Tensor | None:
        return self.slots[name].tensor

    def _syncable_shape(self, name: str) -> tuple[int, ...] | None:
        """None: nothing can be averaged or compared."""
        tensor = self._tensor(name)
        return tuple(tensor.shape) if has_numbers(tensor) else None

    def _flat_values(self, name: str) -> Tensor:
        tensor, shape = self._tensor(name), self._synced_shapes[name]
        if tensor is None or not _has_shape(tensor, shape):
            return self._unchanged_flag.new_zeros(math.prod(shape))  # unused: the flag reports the new shape
        return tensor.reshape(-1).to(self._unchanged_flag)  # a model may put a tensor of the host there

    def _write_means(self, means: Tensor) -> None:
        sizes = list(map(math.prod, self._synced_shapes.values()))
        for name, mean in zip(self._synced_shapes, means.split(sizes), strict=True):
            tensor = self._tensor(name)
            if tensor is None or not _has_shape(tensor, self._synced_shapes[name]):
                continue
            mean = mean.view_as(tensor)
            if tensor.is_floating_point():
                if name in self.newly_changed and not _is_close(tensor.to(mean), mean, 1e-6):
                    self.differed_from_mean.add(name)
                make_writable(self.slots[name]).copy_(mean)
            elif tensor.numel():
                # Of integers that differ one is further than this from the mean.
                self._integer_mismatches[name] = (mean - tensor.to(mean)).abs().max() > 0.25


def _has_shape(tensor: Tensor | None, shape: tuple[int, ...]) -> bool:
    return tensor is not None and tensor.shape == shape


def _is_checksummable(tensor: Tensor | None) -> bool:
    if tensor is None or tensor.layout is not torch.strided:
        return False
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def _is_close(value: Tensor, reference: Tensor, tolerance: float) -> bool:
    is_same_device = value.device == reference.device
    return is_same_device and torch.allclose(reference, value, rtol=tolerance, atol=0, equal_nan=True)


def _checksum(tensor: Tensor | None) -> Tensor:
    """Two numbers that show whether a tensor changed, without a copy of it."""
    assert tensor is not None
    return torch.stack([tensor.sum(dtype=torch.float64), torch.linalg.vector_norm(tensor, dtype=torch.float64)])
