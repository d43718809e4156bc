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

from echelon.engine.process_groups import Group

#: Where a buffer is: its module's buffers, and its name among them.
Place = tuple[dict[str, Tensor | None], str]
#: Copies are kept of buffers up to this size in bytes.
_SMALL = 2**20
_version: Callable[[Tensor], int] = attrgetter("_version")


class Still:
    """Buffers as they were when they were looked at.

    Every step asks whether that still `holds`, of hundreds of constant tables perhaps: the lists are laid out for that.
    """

    def __init__(self, places: dict[str, Place], seen: Mapping[str, tuple[Tensor | None, int]] | None = None) -> None:
        """`seen`: tensor and version of each, where they were looked at before."""
        self.places = places
        self._seen = {name: _look(place) if seen is None else seen[name] for name, place in places.items()}
        self._owners = [owner for owner, _ in places.values()]
        self._keys = [key for _, key in places.values()]
        self._tensors = [tensor for tensor, _ in self._seen.values()]
        self._present = [tensor for tensor in self._tensors if tensor is not None]
        self._versions = [version for tensor, version in self._seen.values() if tensor is not None]

    def holds(self) -> bool:
        """Whether each place holds the same tensor, unwritten."""
        same = all(map(is_, map(dict.get, self._owners, self._keys), self._tensors))
        return same and list(map(_version, self._present)) == self._versions

    def changed(self) -> list[str]:
        """The places that do not."""
        found = {name: (_look(place), self._seen[name]) for name, place in self.places.items()}
        return [name for name, (now, seen) in found.items() if now[0] is not seen[0] or now[1] != seen[1]]

    def without(self, names: Collection[str]) -> Still:
        """The others, as they were when they were looked at."""
        return Still({name: place for name, place in self.places.items() if name not in names}, self._seen)


def _look(place: Place) -> tuple[Tensor | None, int]:
    owner, key = place
    tensor = owner.get(key)
    return tensor, 0 if tensor is None else tensor._version


class Unknown:
    """The buffers of a model but those of batch norms. In the message they are one flag and the changing ones."""

    def __init__(
        self, model: nn.Module, ranks: Group, *, later: bool, frozen: bool = False, warn: Callable[[str], None]
    ) -> None:
        """`later`: the host may not wait for what the ranks add up. `frozen`: parameters that are not trained count as well."""
        self._ranks, self._later, self._warn = ranks, later, warn
        #: By place, not by tensor: `self.average = ...` puts another tensor there.
        self.slots: dict[str, Place] = {
            f"{path}.{key}" if path else key: (module._buffers, key)
            for path, module in model.named_modules()
            for key, value in module._buffers.items()
            if not isinstance(module, _BatchNorm) and (value is None or (_travels(value) and not value.is_meta))
        }
        #: Parameters that are not trained, which may be large.
        self._frozen: dict[str, Place] = {}
        if frozen:
            self._frozen = {
                f"{path}.{key}" if path else key: (module._parameters, key)
                for path, module in model.named_modules()
                for key, value in module._parameters.items()
                if value is not None and not value.requires_grad and _travels(value) and not value.is_meta
            }
            self.slots |= self._frozen
        #: Those that travel, with the shape that all ranks agreed on.
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._lengths: list[int] = []
        #: Those that did not change yet; None: to be looked at when the next step begins.
        self._still: Still | None = None
        #: Contents before the first step; None: the ranks have agreed before.
        self._contents: dict[str, Tensor] | None = {}
        #: What changed here and is not agreed on yet, and what of it changed for the first time.
        self._changed: set[str] = set()
        self._begun: set[str] = set()
        #: Whole numbers: whether they differ from other ranks', as far as the host has not looked; and those that do.
        self._apart: dict[str, Tensor] = {}
        self._own: set[str] = set()
        self._quiet, self._loud = (torch.full((1,), flag, dtype=torch.float64, device=ranks.device) for flag in (0, 1))
        self._mine = self._quiet[:0]
        #: The sum of the flags, where the host may not wait for it.
        self.news: Tensor | None = None
        self.size = 1
        #: What forward changed for the first time, until rules have been looked for, and what of it was other than the ranks' mean.
        self.surprising: set[str] = set()
        self.averaged: set[str] = set()
        #: What small ones held that did not change yet: writing the same into one is no change.
        self._copies: dict[str, Tensor] = {}
        #: This rank's part of the step's samples.
        self.weight = 1 / ranks.size

    @property
    def changing(self) -> dict[str, tuple[int, ...]] | None:
        """Names and shapes of those that change; None: no step has been looked at."""
        return None if self._contents is not None else dict(self._shapes)

    def expect(self, changing: Mapping[str, Sequence[int]] | None) -> None:
        """Go on as a run that has seen these change: a resumed one then sends the same messages as the unbroken one."""
        self._still, self._contents = None, {} if changing is None else None
        self._changed.clear()
        self._agree_on({name: tuple(shape) for name, shape in (changing or {}).items()})

    def leave(self, names: Collection[str]) -> None:
        """Do not look at these any more: their rule is known."""
        self.slots = {name: place for name, place in self.slots.items() if name not in names}
        self._apart = {name: apart for name, apart in self._apart.items() if name in self.slots}
        for found in (self._changed, self._begun, self._own):
            found.intersection_update(self.slots)
        self._agree_on({name: shape for name, shape in self._shapes.items() if name not in names})
        self._still = None

    def begin(self) -> None:
        if self._still is not None and not self._still.holds():
            self._look_again(
                self._still.changed()
            )  # not forward but a hook or a callback changed it, once for all parts of the batch
        if self._still is None:
            self._still = Still({name: place for name, place in self.slots.items() if name not in self._shapes})
            self._copies = {}
            self._look_again(self._still.places)
            if self._contents is not None:
                tensors = {name: self._tensor(name) for name in self._still.places if name not in self._frozen}
                self._contents = {name: _content(tensor) for name, tensor in tensors.items() if _summable(tensor)}

    def _look_again(self, names: Iterable[str]) -> None:
        assert self._still is not None
        self._still = Still(self._still.places)
        for name in names:
            tensor = self._tensor(name)
            if tensor is not None and tensor.nbytes <= _SMALL and name not in self._frozen:
                self._copies[name] = tensor.detach().clone()

    def _is_rewritten(self, name: str) -> bool:
        """Whether it holds what it held."""
        copy, tensor = self._copies.get(name), self._tensor(name)
        return copy is not None and tensor is not None and torch.equal(copy, tensor)

    def share(self) -> Tensor:
        news = self._find_changes()
        if self._contents is not None or self._ranks.size == 1:
            # What changes from the start travels from the start, on an accelerator too.
            self._contents = None
            self._agree()
            news = False
        flag = self._loud if news else self._quiet
        if not self._shapes:
            return flag
        self._mine = torch.cat([self._values(name) for name in self._shapes])
        return torch.cat([flag, self._mine * self.weight])

    def set(self, sums: Tensor) -> None:
        heard = sums[:1] if self._shapes else sums
        if self._later:
            self.news = heard.view(())
            if self._shapes:
                # While there is news each keeps its own: it may be the shape that is new. `settle` brings them together.
                self._put(torch.where(heard > 0, self._mine, sums[1:]))
        elif heard.item() > 0:
            self.settle()
        elif self._shapes:
            self._put(sums[1:])

    def settle(self) -> None:
        """Agree with the other ranks on which buffers change, and take their means now."""
        self._agree()
        if self._shapes:
            values = torch.cat([self._values(name) for name in self._shapes])
            self._put(self._ranks.sum(values * self.weight))

    def _find_changes(self) -> bool:
        """Whether there is a change of which the others were not told."""
        assert self._still is not None
        found = [] if self._still.holds() else self._still.changed()
        if found:
            found = [name for name in found if not self._is_rewritten(name)]
            self._still = Still(self._still.places)
        if self._contents:
            # `buffer.data` can be changed without a new version. That is looked for once: it reads every buffer.
            found += [
                name
                for name, before in self._contents.items()
                if name not in found and not _alike(before, _content(self._tensor(name)))
            ]
        if found:
            self._still = self._still.without(found)
        self._begun.update(found)
        found += [name for name, shape in self._shapes.items() if not _fits(self._tensor(name), shape)]
        unlike = {name for name, apart in self._apart.items() if apart}
        self._apart.clear()
        self._own |= unlike
        found += unlike
        self._changed.update(found)
        return bool(found)

    def _agree(self) -> None:
        """Any rank's yes counts. Where ranks have unlike shapes it is a cache of each rank's own: it stays that."""
        assert self._still is not None
        gathered = self._ranks.gather((self._changed, self._own, self._begun))
        names, own, forward = (set[str]().union(*found) for found in zip(*gathered, strict=True))
        self.surprising |= forward - self._shapes.keys()
        for name in sorted(own & self._shapes.keys()):
            self._warn(
                f"the buffer {name} holds whole numbers that are others on each data rank: every rank keeps its own, where one device has "
                "one; make it floating, so that the ranks take its mean, or add it up over the ranks in forward"
            )
        self._own = own
        self._changed.clear()
        self._begun.clear()
        shapes = self._ranks.gather({name: self._shape(name) for name in names})
        agreed = dict(self._shapes)
        self._still = self._still.without(names)
        for name in names:
            agreed.pop(name, None)
            found = {each[name] for each in shapes}
            if len(found) == 1 and None not in found and name not in own:
                agreed[name] = found.pop()
        self._agree_on(agreed)

    def _agree_on(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = {name: shapes[name] for name in self.slots if name in shapes}
        self._lengths = [_elements(shape) for shape in self._shapes.values()]
        self.size = 1 + sum(self._lengths)

    def _tensor(self, name: str) -> Tensor | None:
        owner, key = self.slots[name]
        return owner.get(key)

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """None: there is nothing that could be averaged or compared."""
        tensor = self._tensor(name)
        return tuple(tensor.shape) if tensor is not None and _travels(tensor) else None

    def _values(self, name: str) -> Tensor:
        tensor, shape = self._tensor(name), self._shapes[name]
        if tensor is None or not _fits(tensor, shape):
            return self._quiet.new_zeros(_elements(shape))  # of the agreed length; nobody uses it, as this is news
        return tensor.reshape(-1).to(self._quiet)  # a model may put a tensor of the host there

    def _put(self, means: Tensor) -> None:
        for (name, shape), part in zip(self._shapes.items(), means.split(self._lengths), strict=True):
            tensor = self._tensor(name)
            if tensor is None or not _fits(tensor, shape):
                continue
            if tensor.is_floating_point():
                mean = part.view_as(tensor)
                if name in self.surprising and not torch.allclose(
                    mean, tensor.to(mean), rtol=1e-6, atol=0, equal_nan=True
                ):
                    self.averaged.add(name)
                writable(self.slots[name]).copy_(mean)
            elif tensor.numel():
                # Of ranks that differ one is further than this from the mean.
                self._apart[name] = (part.view_as(tensor) - tensor.to(part)).abs().max() > 0.25


def writable(place: Place) -> Tensor:
    """The tensor in a place; a copy, put there, of one whose elements share memory (`expand`)."""
    slots, key = place
    value = slots[key]
    assert value is not None
    if any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True)):
        slots[key] = value = value.detach().clone(memory_format=torch.contiguous_format)
    return value


def _travels(tensor: Tensor) -> bool:
    """Numbers, not flags or bytes, which are mostly a step's own masks."""
    return tensor.is_floating_point() or tensor.dtype in (torch.int16, torch.int32, torch.int64)


def _fits(tensor: Tensor | None, shape: tuple[int, ...]) -> bool:
    return tensor is not None and tensor.shape == shape


def _summable(tensor: Tensor | None) -> bool:
    return (
        tensor is not None
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.dtype.itemsize > 1
    )


def _alike(left: Tensor, right: Tensor) -> bool:
    return left.device == right.device and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


def _content(tensor: Tensor | None) -> Tensor:
    """Two numbers that tell whether a tensor changed, without a second one of its size."""
    assert tensor is not None
    return torch.stack([tensor.sum(dtype=torch.float64), torch.linalg.vector_norm(tensor, dtype=torch.float64)])


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
