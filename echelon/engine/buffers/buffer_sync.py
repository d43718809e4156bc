"""Buffers that a model changes by a rule nobody declared: an average of its own, a codebook, a counter.

Where a step changes one, all ranks take the mean over ranks, so that they stay one model. A constant table must not travel
every step: only those travel that were seen to change, and every rank looks at every step whether there is another one. It
tells the others in the same message. On a CPU they agree at once. The host of an accelerator must not wait: it hears of it
one step later, as of the loss, or when the run is saved, so that a checkpoint holds what all ranks hold.

Whole numbers have no mean. Those that change travel too, to be compared: where ranks differ each keeps its own, and it is said.
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
    """Buffers as they were when they were looked at.

    Every step asks whether that still `is_unchanged`, of hundreds of constant tables perhaps: the lists are laid out for that.
    """

    def __init__(
        self, slots: dict[str, TensorSlot], recorded: Mapping[str, tuple[Tensor | None, int]] | None = None
    ) -> None:
        """`recorded`: tensor and version of each, where they were looked at before."""
        self.slots = slots
        self._recorded = {
            name: _tensor_and_version(slot) if recorded is None else recorded[name] for name, slot in slots.items()
        }
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
        versions = {name: (_tensor_and_version(slot), self._recorded[name]) for name, slot in self.slots.items()}
        return [
            name
            for name, (current, recorded) in versions.items()
            if current[0] is not recorded[0] or current[1] != recorded[1]
        ]

    def without(self, names: Collection[str]) -> BufferVersions:
        """The others, as they were when they were looked at."""
        return BufferVersions({name: slot for name, slot in self.slots.items() if name not in names}, self._recorded)


def _tensor_and_version(slot: TensorSlot) -> tuple[Tensor | None, int]:
    owner, key = slot
    tensor = owner.get(key)
    return tensor, 0 if tensor is None else tensor._version


class BufferTracker:
    """The buffers of a model but those of batch norms. In the message they are one flag and the changing ones."""

    def __init__(
        self,
        model: nn.Module,
        ranks: Communicator,
        *,
        deferred: bool,
        track_frozen: bool = False,
        warn: Callable[[str], None],
    ) -> None:
        """`deferred`: the host may not wait for what the ranks add up. `track_frozen`: parameters that are not trained count as well."""
        self._ranks, self._deferred, self._warn = ranks, deferred, warn
        #: By place, not by tensor: `self.average = ...` puts another tensor there.
        self.slots: dict[str, TensorSlot] = {
            name: slot
            for name, module, slot in named_slots(model)
            if not isinstance(module, _BatchNorm) and _may_hold_numbers(slot)
        }
        #: Parameters that are not trained, which may be large.
        self._frozen_slots: dict[str, TensorSlot] = {}
        if track_frozen:
            for name, _, slot in named_slots(model, "_parameters"):
                parameter = slot[0][slot[1]]
                if parameter is not None and not parameter.requires_grad and has_numbers(parameter):
                    self._frozen_slots[name] = slot
            self.slots |= self._frozen_slots
        #: Those that travel, with the shape that all ranks agreed on.
        self._synced_shapes: dict[str, tuple[int, ...]] = {}
        self._synced_numels: list[int] = []
        #: Those that did not change yet; None: to be looked at when the next step begins.
        self._constants: BufferVersions | None = None
        #: Contents before the first step; None: the ranks have agreed before.
        self._initial_checksums: dict[str, Tensor] | None = {}
        #: What changed here and is not agreed on yet, and what of it changed for the first time.
        self._pending_changes: set[str] = set()
        self._first_changes: set[str] = set()
        #: Whole numbers: whether they differ from other ranks', as far as the host has not looked; and those that do.
        self._integer_mismatches: dict[str, Tensor] = {}
        self._rank_local: set[str] = set()
        self._unchanged_flag, self._changed_flag = (
            torch.full((1,), flag, dtype=torch.float64, device=ranks.device) for flag in (0, 1)
        )
        self._local_values = self._unchanged_flag[:0]
        #: The sum of the flags, where the host may not wait for it.
        self.resync_flag: Tensor | None = None
        self.size = 1
        #: What forward changed for the first time, until rules have been looked for, and what of it was other than the ranks' mean.
        self.newly_changed: set[str] = set()
        self.differed_from_mean: set[str] = set()
        #: What small ones held that did not change yet: writing the same into one is no change.
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
        """Go on as a run that has seen these change: a resumed one then sends the same messages as the unbroken one."""
        self._constants, self._initial_checksums = None, {} if mutable_buffers is None else None
        self._pending_changes.clear()
        self._set_synced_shapes({name: tuple(shape) for name, shape in (mutable_buffers or {}).items()})

    def stop_tracking(self, names: Collection[str]) -> None:
        """Do not look at these any more: their rule is known."""
        self.slots = {name: slot for name, slot in self.slots.items() if name not in names}
        self._integer_mismatches = {
            name: mismatch for name, mismatch in self._integer_mismatches.items() if name in self.slots
        }
        for tracked_names in (self._pending_changes, self._first_changes, self._rank_local):
            tracked_names.intersection_update(self.slots)
        self._set_synced_shapes({name: shape for name, shape in self._synced_shapes.items() if name not in names})
        self._constants = None

    def begin_step(self) -> None:
        if self._constants is not None and not self._constants.is_unchanged():
            self._record_versions(
                self._constants.changed_names()
            )  # not forward but a hook or a callback changed it, once for all parts of the batch
        if self._constants is None:
            self._constants = BufferVersions(
                {name: slot for name, slot in self.slots.items() if name not in self._synced_shapes}
            )
            self._small_copies = {}
            self._record_versions(self._constants.slots)
            if self._initial_checksums is not None:
                tensors = {name: self._tensor(name) for name in self._constants.slots if name not in self._frozen_slots}
                self._initial_checksums = {
                    name: _checksum(tensor) for name, tensor in tensors.items() if _is_checksummable(tensor)
                }

    def _record_versions(self, names: Iterable[str]) -> None:
        assert self._constants is not None
        self._constants = BufferVersions(self._constants.slots)
        for name in names:
            tensor = self._tensor(name)
            if tensor is not None and tensor.nbytes <= _COPY_LIMIT_BYTES and name not in self._frozen_slots:
                self._small_copies[name] = tensor.detach().clone()

    def _holds_same_values(self, name: str) -> bool:
        """Whether it holds what it held."""
        copy, tensor = self._small_copies.get(name), self._tensor(name)
        return copy is not None and tensor is not None and torch.equal(copy, tensor)

    def pack(self) -> Tensor:
        has_changes = self._find_changes()
        if self._initial_checksums is not None or self._ranks.size == 1:
            # What changes from the start travels from the start, on an accelerator too.
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
                # While there is news each keeps its own: it may be the shape that is new. `resync` brings them together.
                self._write_means(torch.where(flag > 0, self._local_values, sums[1:]))
        elif flag.item() > 0:
            self.resync()
        elif self._synced_shapes:
            self._write_means(sums[1:])

    def resync(self) -> None:
        """Agree with the other ranks on which buffers change, and take their means now."""
        self._agree_on_changes()
        if self._synced_shapes:
            values = torch.cat([self._flat_values(name) for name in self._synced_shapes])
            self._write_means(self._ranks.all_reduce(values * self.sample_fraction))

    def _find_changes(self) -> bool:
        """Whether there is a change of which the others were not told."""
        assert self._constants is not None
        changed = [] if self._constants.is_unchanged() else self._constants.changed_names()
        if changed:
            changed = [name for name in changed if not self._holds_same_values(name)]
            self._constants = BufferVersions(self._constants.slots)
        if self._initial_checksums:
            # `buffer.data` can be changed without a new version. That is looked for once: it reads every buffer.
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
        """Any rank's yes counts. Where ranks have unlike shapes it is a cache of each rank's own: it stays that."""
        assert self._constants is not None
        rank_changes = self._ranks.all_gather_object((self._pending_changes, self._rank_local, self._first_changes))
        names, rank_local, first_changes = (
            set[str]().union(*rank_values) for rank_values in zip(*rank_changes, strict=True)
        )
        self.newly_changed |= first_changes - self._synced_shapes.keys()
        for name in sorted(rank_local & self._synced_shapes.keys()):
            self._warn(
                f"the buffer {name} holds whole numbers that are others on each data rank: every rank keeps its own, where one device has "
                "one; make it floating, so that the ranks take its mean, or add it up over the ranks in forward"
            )
        self._rank_local = rank_local
        self._pending_changes.clear()
        self._first_changes.clear()
        shapes = self._ranks.all_gather_object({name: self._syncable_shape(name) for name in names})
        synced_shapes = dict(self._synced_shapes)
        self._constants = self._constants.without(names)
        for name in names:
            synced_shapes.pop(name, None)
            rank_values = {rank_shapes[name] for rank_shapes in shapes}
            if len(rank_values) == 1 and None not in rank_values and name not in rank_local:
                synced_shapes[name] = rank_values.pop()
        self._set_synced_shapes(synced_shapes)

    def _set_synced_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._synced_shapes = {name: shapes[name] for name in self.slots if name in shapes}
        self._synced_numels = [_numel(shape) for shape in self._synced_shapes.values()]
        self.size = 1 + sum(self._synced_numels)

    def _tensor(self, name: str) -> Tensor | None:
        owner, key = self.slots[name]
        return owner.get(key)

    def _syncable_shape(self, name: str) -> tuple[int, ...] | None:
        """None: there is nothing that could be averaged or compared."""
        tensor = self._tensor(name)
        return tuple(tensor.shape) if tensor is not None and has_numbers(tensor) else None

    def _flat_values(self, name: str) -> Tensor:
        tensor, shape = self._tensor(name), self._synced_shapes[name]
        if tensor is None or not _has_shape(tensor, shape):
            return self._unchanged_flag.new_zeros(
                _numel(shape)
            )  # of the agreed length; nobody uses it, as this is news
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
                # Of ranks that differ one is further than this from the mean.
                self._integer_mismatches[name] = (
                    mean_values.view_as(tensor) - tensor.to(mean_values)
                ).abs().max() > 0.25


def _may_hold_numbers(slot: TensorSlot) -> bool:
    tensor = slot[0][slot[1]]
    return tensor is None or has_numbers(tensor)


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
    """Two numbers that tell whether a tensor changed, without a second one of its size."""
    assert tensor is not None
    return torch.stack([tensor.sum(dtype=torch.float64), torch.linalg.vector_norm(tensor, dtype=torch.float64)])


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
