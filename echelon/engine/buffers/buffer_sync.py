"""Synchronize buffers that forward mutates by a rule nobody declared: an average of its own, a codebook, a counter.

When a step changes one, all ranks take the mean over ranks, so that they stay one model. Constant tables are not sent: only buffers
that were seen to change are, and each step every rank looks for further ones and reports them in the same message. On a CPU the ranks
agree at once. The host of an accelerator must not wait: it reads the report one step later, as the loss, or when the run is saved, so that
a checkpoint holds what all ranks hold.

Integers have no mean. Those that change are sent to be compared: where ranks differ, each keeps its own, with a warning.
"""

from __future__ import annotations

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


class BufferVersions:
    """Tensors and their versions at one moment. Every step asks `is_unchanged`, maybe of hundreds of tables: the lists are laid out for that."""

    def __init__(
        self, slots: dict[str, TensorSlot], recorded: Mapping[str, tuple[Tensor | None, int]] | None = None
    ) -> None:
        """`recorded`: an earlier record."""
        self.slots = slots
        read = _tensor_and_version
        self._recorded = {n: read(slot) if recorded is None else recorded[n] for n, slot in slots.items()}
        self._owners = [owner for owner, _ in slots.values()]
        self._keys = [key for _, key in slots.values()]
        self._tensors = [tensor for tensor, _ in self._recorded.values()]
        self._present = [tensor for tensor in self._tensors if tensor is not None]
        self._versions = [version for tensor, version in self._recorded.values() if tensor is not None]

    def is_unchanged(self) -> bool:
        """Whether each place holds the same tensor, unwritten."""
        same_tensors = all(map(is_, map(dict.get, self._owners, self._keys), self._tensors))
        return same_tensors and list(map(_version_of, self._present)) == self._versions

    def changed_names(self) -> list[str]:
        """The places that do not."""
        current = {name: _tensor_and_version(slot) for name, slot in self.slots.items()}
        recorded = self._recorded
        return [
            n for n, (tensor, version) in current.items() if tensor is not recorded[n][0] or version != recorded[n][1]
        ]

    def without(self, names: Collection[str]) -> BufferVersions:
        """The record of the others."""
        return BufferVersions({name: slot for name, slot in self.slots.items() if name not in names}, self._recorded)


def _tensor_and_version(slot: TensorSlot) -> tuple[Tensor | None, int]:
    owner, key = slot
    tensor = owner.get(key)
    return tensor, 0 if tensor is None else tensor._version


class BufferTracker:
    """The buffers of a model except those of batch norms. They add one flag and the changing values to the step's message."""

    def __init__(
        self,
        model: nn.Module,
        ranks: Communicator,
        *,
        deferred: bool,
        track_frozen: bool = False,
        warn: Callable[[str], None],
    ) -> None:
        """`deferred`: the host must not wait for sums over ranks. `track_frozen`: also track frozen parameters."""
        self._ranks, self._deferred, self._warn = ranks, deferred, warn
        #: By place, not by tensor: `self.average = ...` puts another tensor there.
        self.slots: dict[str, TensorSlot] = {
            name: slot
            for name, module, slot in named_slots(model)
            if not isinstance(module, _BatchNorm) and ((tensor := slot[0][slot[1]]) is None or has_numbers(tensor))
        }
        #: Frozen parameters, which may be large.
        self._frozen_slots: dict[str, TensorSlot] = {}
        if track_frozen:
            for name, _, slot in named_slots(model, "_parameters"):
                parameter = slot[0][slot[1]]
                if parameter is not None and not parameter.requires_grad and has_numbers(parameter):
                    self._frozen_slots[name] = slot
            self.slots |= self._frozen_slots
        #: Those that are sent, with the shape that all ranks agreed on.
        self._synced_shapes: dict[str, tuple[int, ...]] = {}
        self._synced_numels: list[int] = []
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
        self.size = 1
        #: First changes since rules were last looked for, and those of them that differed from the ranks' mean.
        self.newly_changed: set[str] = set()
        self.differed_from_mean: set[str] = set()
        #: Values of small ones that did not change so far: writing equal values is no change.
        self._small_copies: dict[str, Tensor] = {}
        #: This rank's part of the step's samples.
        self.sample_fraction = 1 / ranks.size

    @property
    def mutable_buffers(self) -> dict[str, tuple[int, ...]] | None:
        """Names and shapes of those that steps change; None: no step was observed."""
        is_known = self._initial_checksums is None and self._ranks.size > 1
        return dict(self._synced_shapes) if is_known else None

    def clear_newly_changed(self) -> None:
        """The rules of everything that changes have been looked for."""
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
                tensors = {name: self._tensor(name) for name in self._constants.slots if name not in self._frozen_slots}
                self._initial_checksums = {n: _checksum(t) for n, t in tensors.items() if _is_checksummable(t)}

    def _record_versions(self, names: Iterable[str]) -> None:
        assert self._constants is not None
        self._constants = BufferVersions(self._constants.slots)
        for name in names:
            tensor = self._tensor(name)
            if tensor is not None and tensor.nbytes <= _COPY_LIMIT_BYTES and name not in self._frozen_slots:
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
            changed += [
                name
                for name, checksum in self._initial_checksums.items()
                if name not in changed and not _checksums_equal(checksum, _checksum(self._tensor(name)))
            ]
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
                f"the buffer {name} holds whole numbers that are others on each data rank: every rank keeps its own, where one device has "
                "one; make it floating, so that the ranks take its mean, or add it up over the ranks in forward"
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
        self._synced_numels = [torch.Size(shape).numel() for shape in self._synced_shapes.values()]
        self.size = 1 + sum(self._synced_numels)

    def _tensor(self, name: str) -> Tensor | None:
        owner, key = self.slots[name]
        return owner.get(key)

    def _syncable_shape(self, name: str) -> tuple[int, ...] | None:
        """None: nothing can be averaged or compared."""
        tensor = self._tensor(name)
        return tuple(tensor.shape) if tensor is not None and has_numbers(tensor) else None

    def _flat_values(self, name: str) -> Tensor:
        tensor, shape = self._tensor(name), self._synced_shapes[name]
        if tensor is None or not _has_shape(tensor, shape):
            return self._unchanged_flag.new_zeros(torch.Size(shape).numel())  # unused: the flag reports the new shape
        return tensor.reshape(-1).to(self._unchanged_flag)  # a model may put a tensor of the host there

    def _write_means(self, means: Tensor) -> None:
        for (name, shape), mean_values in zip(
            self._synced_shapes.items(), means.split(self._synced_numels), strict=True
        ):
            tensor = self._tensor(name)
            if tensor is None or not _has_shape(tensor, shape):
                continue
            if tensor.is_floating_point():
                mean = mean_values.view_as(tensor)
                if name in self.newly_changed and not torch.allclose(
                    mean, tensor.to(mean), rtol=1e-6, atol=0, equal_nan=True
                ):
                    self.differed_from_mean.add(name)
                make_writable(self.slots[name]).copy_(mean)
            elif tensor.numel():
                # Of integers that differ one is further than this from the mean.
                self._integer_mismatches[name] = (
                    mean_values.view_as(tensor) - tensor.to(mean_values)
                ).abs().max() > 0.25


def _has_shape(tensor: Tensor | None, shape: tuple[int, ...]) -> bool:
    return tensor is not None and tensor.shape == shape


def _is_checksummable(tensor: Tensor | None) -> bool:
    return (
        tensor is not None
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.dtype.itemsize > 1
    )


def _checksums_equal(left: Tensor, right: Tensor) -> bool:
    return left.device == right.device and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


def _checksum(tensor: Tensor | None) -> Tensor:
    """Two numbers that show whether a tensor changed, without a copy of it."""
    assert tensor is not None
    return torch.stack([tensor.sum(dtype=torch.float64), torch.linalg.vector_norm(tensor, dtype=torch.float64)])
