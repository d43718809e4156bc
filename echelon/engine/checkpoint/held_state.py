"""What objects keep besides what `state_dict()` returns: attributes of objects, functions and classes, closures, mutable defaults, globals.

At the start everything that is reached gets a name (reach.py). A checkpoint holds what changed since: of an object the attributes that have other
values now, of a container its items, of a tensor, an array or a generator its content. A value that had a name at the start is stored as that
name, so that two attributes that shared an object share it again; any other value is stored itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from echelon.engine.checkpoint.json_values import Put, Take, Unstorable, decode, encode
from echelon.engine.checkpoint.tensor_storage import name_of_dtype, raw
from echelon.trials.iterator_replay import Replay
from echelon.trials.reachable import BUFFERS, GENERATORS, PLAIN, Slot, is_container, is_object, slot_at, slots_of
from echelon.trials.snapshot import ITEMS, LARGE, content_of, has_content, pairs_of, position, reached, refill

#: Larger arrays are not written into the manifest.
_BYTES = 2**24
#: Begins the reason for a tensor of which each rank has a part.
SHARDED = "a tensor that is sharded"
#: The label of what a container, a tensor, an array or a generator holds.
_CONTENT = ""

#: {"object": name}, {"value": encoded} or {"items": [[key, reference], ...]}.
Reference = dict[str, Any]
Changes = dict[str, dict[str, Reference]]


class HeldState:
    """Saves and restores what is reached from some roots."""

    #: Tensors with more bytes are not saved.
    largest: float = math.inf

    def __init__(self, roots: Mapping[str, Any], *, without: Collection[int], registered: Collection[int] = ()) -> None:
        """`without`: ids of objects that others save. `registered`: ids of modules whose `state_dict()` others save."""
        self._without, self._registered = without, registered
        #: By name; held here, so that their ids stay theirs.
        self._nodes = reached(roots, without=without)
        self._names = {id(value): name for name, value in self._nodes.items()}
        self._first = {name: self._digests(value) for name, value in self._nodes.items()}

    def ids(self) -> set[int]:
        """Those of the objects that it saves."""
        return set(self._names)

    def places(self) -> tuple[set[int], set[tuple[int, str]]]:
        """The ids of its objects, and where they keep values (id of the holder, key)."""
        slots = [slot for value in self._nodes.values() for slot in slots_of(value).values()]
        return self.ids(), {(id(slot.holder), slot.key) for slot in slots}

    def changed(self) -> list[str]:
        """The names of the objects that differ from the start."""
        return [name for name, value in self._nodes.items() if self._digests(value) != self._first[name]]

    def changed_places(self) -> list[str]:
        """The names of what in them does."""
        found = [
            (name, label, digest)
            for name in self.changed()
            for label, digest in self._digests(self._nodes[name]).items()
        ]
        return [name + label for name, label, digest in found if digest != self._first[name].get(label)]

    def shared(self, ids: Collection[int], places: Collection[tuple[int, str]]) -> dict[str, bytes]:
        """Digests by name: of the objects with one of these ids, and of the values in these places (id of the holder, key)."""
        found: dict[str, bytes] = {}
        for name, value in self._nodes.items():
            if id(value) in ids and has_content(value):
                found[name] = self._digest(value, content=True)
            for label, slot in slots_of(value).items():
                if (id(slot.holder), slot.key) in places:
                    found[name + label] = self._digest(slot.value, content=False)
        return found

    def changes(self, put: Put, only: Collection[str] | None = None) -> tuple[Changes, list[str]]:
        """What changed since the start (of those in `only`), with what `put` makes of each tensor; and why, for each change that cannot be
        stored."""
        found: Changes = defaultdict(dict)
        lost: list[str] = []
        for name, value in self._nodes.items() if only is None else [(name, self._nodes[name]) for name in only]:
            for label, digest in self._digests(value).items():
                if digest == self._first[name].get(label):
                    continue
                try:
                    found[name][label] = self._reference(
                        name + label, _held(value, label), _dense(put), content=not label
                    )
                except _OthersState:
                    continue
                except Exception as error:  # torch's own for sparse and other special tensors
                    lost.append(f"{name}{label}: {error.why if isinstance(error, Unstorable) else error}")
        return {name: labels for name, labels in found.items() if labels}, lost

    def restore(self, changes: Mapping[str, Mapping[str, Reference]], take: Take) -> list[str]:
        """Give back what `changes` returned; the names of what has no place here."""
        missing = [f"{name}{label}" for name, labels in changes.items() for label in labels if name not in self._nodes]
        for name, labels in changes.items():
            for label, reference in labels.items() if name in self._nodes else ():
                value, slot = self._nodes[name], slot_at(self._nodes[name], label)
                if label and slot is not None:
                    slot.put(self._found(reference, take))
                elif label or not refill(value, self._found(reference, take)):
                    missing.append(f"{name}{label}")
        return missing

    def _digests(self, value: Any) -> dict[str, bytes]:
        """A digest of the state, by label."""
        labels = [*([_CONTENT] if has_content(value) else []), *self._slots(value)]
        return {label: self._digest(_held(value, label), content=not label) for label in labels}

    def _slots(self, value: Any) -> dict[str, Slot]:
        found = slots_of(value)
        if id(value) not in self._registered:
            return found
        saved = {*value._parameters, *value._modules, *(value._buffers.keys() - value._non_persistent_buffers_set)}
        return {label: slot for label, slot in found.items() if label[1:] not in saved}

    def _digest(self, value: Any, *, content: bool) -> bytes:
        if isinstance(value, PLAIN):
            return f"{type(value).__name__} {value!r}".encode()
        if content and isinstance(value, Tensor):
            return digest_of(value)
        try:
            reference = self._reference("", value, lambda _, tensor: digest_of(tensor).hex(), content=content)
        except Exception:  # it cannot be stored: at least another object, or another length, is noticed
            return f"{len(value) if is_container(value) else _shown(value)}".encode()
        return hashlib.blake2b(json.dumps(reference, sort_keys=True).encode()).digest()

    def _reference(self, path: str, value: Any, put: Put, *, content: bool = False) -> Reference:
        if not content and (name := self._names.get(id(value))) is not None:
            return {"object": name}
        if self._is_others(value):
            raise _OthersState(path, "others save it")
        if not _is_state(value):
            raise Unstorable(path, f"{_kind(value)}, which a checkpoint does not hold")
        if isinstance(value, Replay) and not value.is_stored:
            raise Unstorable(path, f"an iterator ({type(value._source).__qualname__}) of which items were drawn")
        if is_container(value) and any(self._is_others(each) for _, each in pairs_of(content_of(value))):
            raise _OthersState(path, "it refers to what others save")
        if is_container(value) and len(value) > ITEMS:
            raise Unstorable(path, f"a {type(value).__name__} of {len(value):,} items, which is too long")
        if isinstance(value, np.ndarray) and value.nbytes > _BYTES:
            raise Unstorable(path, f"an array of {value.nbytes / 2**20:.0f} MiB, which is too large; use a tensor")
        if isinstance(value, Tensor) and value.layout is torch.strided and value.nbytes > self.largest:
            raise Unstorable(path, f"a tensor of {value.nbytes / 2**20:.0f} MiB, which is too large; use a buffer")
        if not content:
            return {"value": encode(value, path, put)}
        items = value.count if isinstance(value, Replay) else content_of(value)
        if isinstance(items, list | dict) and any(id(each) in self._names for _, each in pairs_of(items)):
            pairs = [(key, each, f"{path}[{key!r}]") for key, each in pairs_of(items)]
            return {"items": [[encode(key, at, put), self._reference(at, each, put)] for key, each, at in pairs]}
        return {"value": encode(items, path, put)}

    def _is_others(self, value: Any) -> bool:
        """Whether it is saved elsewhere: sharded tensors are parameters and buffers."""
        return id(value) in self._without or isinstance(value, DTensor)

    def _found(self, reference: Reference, take: Take) -> Any:
        if "object" in reference:
            return self._nodes[reference["object"]]
        if "items" in reference:
            return {decode(key, take): self._found(each, take) for key, each in reference["items"]}
        return decode(reference["value"], take)


class _OthersState(Unstorable):
    """What others save, or a container of that."""


def _dense(put: Put) -> Put:
    """`put`, but for tensors that a checkpoint does not hold."""

    def checked(path: str, value: Tensor) -> Any:
        name_of_dtype(value.dtype)
        if value.layout is not torch.strided or isinstance(value, DTensor) or value.is_meta:
            raise Unstorable(path, f"{SHARDED}, on the meta device, or of layout {value.layout}")
        return put(path, value)

    return checked


def _is_state(value: Any) -> bool:
    if isinstance(value, FunctionType | MethodType | ModuleType | type):
        return False
    known = (*PLAIN, Tensor, np.ndarray, Replay, *BUFFERS, *GENERATORS)
    return isinstance(value, known) or is_container(value) or is_object(value)


def _kind(value: Any) -> str:
    if isinstance(value, FunctionType | MethodType | ModuleType | type):
        return f"{getattr(value, '__qualname__', value.__name__)}, which is code"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _shown(value: Any) -> str:
    """Shows when a value that cannot be stored is another one: its text if Python defines it (a Fraction, a Path), else its address. Reading on in a
    file makes it another one; writing to it does not."""
    if (place := position(value)) is not None:
        return f"{value!r} at {place}"
    if type(value).__module__.partition(".")[0] in sys.stdlib_module_names and not isinstance(value, FunctionType):
        return repr(value)[:1000]
    return str(id(value))


def _held(value: Any, label: str) -> Any:
    return slots_of(value)[label].value if label else value


def digest_of(value: Tensor, *, whole: bool = False) -> bytes:
    """A digest of a tensor's numbers; for a special one and, but `whole`, for a large one, of torch's version counter."""
    if isinstance(value, DTensor) or value.is_meta or value.layout is not torch.strided:
        return f"{id(value)} {value._version}".encode()
    if value.nbytes > LARGE and not whole:
        return f"{id(value)} {value._version}".encode()
    try:
        return (
            hashlib.blake2b(raw(value.detach()), person=b"state").digest()
            + f"{value.dtype} {tuple(value.shape)}".encode()
        )
    except Exception:  # a subclass with a layout of its own
        return f"{id(value)} {value._version}".encode()
