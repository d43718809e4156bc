"""State that objects keep outside of `state_dict()`: attributes, closures, mutable defaults, globals.

Everything reachable at the start gets a name (trials/reachable.py). A checkpoint stores what has changed since: a value that had a name as
that name, so attributes that shared an object share it again; any other value itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Set
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from echelon.checkpoint_files.tensor_files import dtype_to_name, tensor_bytes
from echelon.engine.checkpoint.json_values import LoadTensor, StoreTensor, UnstorableValue, decode, encode
from echelon.trials import reachable, snapshot
from echelon.trials.iterator_replay import ReplayableIterator

#: Larger arrays are not written into the manifest.
_MAX_ARRAY_BYTES = 2**24
#: The reason for a tensor that is spread over ranks starts with this.
SHARDED_TENSOR_REASON = "a tensor that is sharded"
#: Attributes of torch's optimizers and schedules that lead to parameters.
_PARAMETER_ATTRIBUTES = ("optimizer", "param_groups", "state", "defaults")
_CONTENT_LABEL = ""

#: {"object": name}, {"value": encoded} or {"items": [[key, reference], ...]}.
ValueReference = dict[str, Any]
#: The name of an object, and the label of a slot or of the content in it.
SlotName = tuple[str, str]
StateChanges = dict[SlotName, ValueReference]
#: Changes, and why others cannot be stored.
CollectedChanges = tuple[StateChanges, list[str]]
_Names = Collection[str] | None


class ReachableState:
    """Saves and restores the state that is reachable from some roots."""

    #: Larger tensors are not saved.
    max_tensor_bytes: float = math.inf

    def __init__(self, roots: Mapping[str, Any], *, excluded_ids: Set[int], module_ids: Collection[int] = ()) -> None:
        """`excluded_ids`: objects saved elsewhere. `module_ids`: modules whose `state_dict()` is saved elsewhere."""
        self._excluded_ids, self._module_ids = excluded_ids, module_ids
        #: By name; referenced here, so their ids stay valid.
        self._objects = snapshot.find_reachable_replayable(roots, excluded_ids=excluded_ids)
        self._names_by_id = {id(value): name for name, value in self._objects.items()}
        self._initial_digests = {name: self._digest_slots(value) for name, value in self._objects.items()}

    def object_ids(self) -> set[int]:
        """The ids of the objects that are saved here."""
        return set(self._names_by_id)

    def ids_and_slots(self) -> tuple[set[int], set[tuple[int, str]]]:
        """The ids of the objects, and of the slots in them (id of the owner, key)."""
        slots = [slot for value in self._objects.values() for slot in reachable.get_slots(value).values()]
        return self.object_ids(), {(id(slot.owner), slot.key) for slot in slots}

    def changed_objects(self) -> list[str]:
        """The names of the objects that have changed."""
        return [n for n, value in self._objects.items() if self._digest_slots(value) != self._initial_digests[n]]

    def changed_slots(self, names: _Names = None) -> list[SlotName]:
        """The slots and contents that have changed (of the objects `names`)."""
        return [
            (name, label)
            for name in (self._objects if names is None else names)
            for label, digest in self._digest_slots(self._objects[name]).items()
            if digest != self._initial_digests[name].get(label)
        ]

    def digest_shared(self, object_ids: Collection[int], slot_keys: Collection[tuple[int, str]]) -> dict[str, bytes]:
        """Digests by name of the objects with these ids, and of the values in these slots (id of the owner, key)."""
        digests: dict[str, bytes] = {}
        for name, value in self._objects.items():
            if id(value) in object_ids and snapshot.has_mutable_content(value):
                digests[name] = self._digest_value(value, is_content=True)
            for label, slot in reachable.get_slots(value).items():
                if (id(slot.owner), slot.key) in slot_keys:
                    digests[name + label] = self._digest_value(slot.value, is_content=False)
        return digests

    def collect_changes(self, store_tensor: StoreTensor, names: _Names = None) -> CollectedChanges:
        """The changes since the start (of the objects `names`), with `store_tensor(...)` for each tensor, and why others cannot be stored."""
        changes: StateChanges = {}
        unstorable: list[str] = []
        store_dense = partial(_store_dense, store_tensor)
        for name, label in self.changed_slots(names):
            value = _slot_value(self._objects[name], label)
            try:
                changes[name, label] = self._make_reference(name + label, value, store_dense, is_content=not label)
            except _SavedElsewhere:
                continue
            except Exception as error:  # torch's, for sparse and other special tensors
                unstorable.append(f"{name}{label}: {error.reason if isinstance(error, UnstorableValue) else error}")
        return changes, unstorable

    def restore(self, changes: StateChanges, load_tensor: LoadTensor) -> list[str]:
        """Restore what `collect_changes` returned; returns the names of what this job has no slot for."""
        missing = []
        for (name, label), reference in changes.items():
            value = self._objects.get(name)
            slot = reachable.find_slot(value, label) if label else None
            if slot is not None:
                slot.assign(self._resolve_reference(reference, load_tensor))
            elif label or not snapshot.set_content(value, self._resolve_reference(reference, load_tensor)):
                missing.append(name + label)
        return missing

    def _digest_slots(self, value: Any) -> dict[str, bytes]:
        labels = [*([_CONTENT_LABEL] if snapshot.has_mutable_content(value) else []), *self._saved_slots(value)]
        return {label: self._digest_value(_slot_value(value, label), is_content=not label) for label in labels}

    def _saved_slots(self, value: Any) -> dict[str, reachable.Slot]:
        slots = reachable.get_slots(value)
        if id(value) not in self._module_ids:
            return slots
        buffers = value._buffers.keys() - value._non_persistent_buffers_set
        saved_names = {*value._parameters, *value._modules, *buffers}
        return {label: slot for label, slot in slots.items() if label[1:] not in saved_names}

    def _digest_value(self, value: Any, *, is_content: bool) -> bytes:
        if isinstance(value, reachable.PLAIN_TYPES):
            return f"{type(value).__name__} {value!r}".encode()
        if is_content and isinstance(value, Tensor):
            return digest_tensor(value)
        try:
            reference = self._make_reference("", value, lambda _, t: digest_tensor(t).hex(), is_content=is_content)
        except Exception:  # it cannot be stored: notice at least another object, or another length
            return f"{len(value) if reachable.is_container(value) else _identity_text(value)}".encode()
        return hashlib.blake2b(json.dumps(reference, sort_keys=True).encode()).digest()

    def _make_reference(self, path: str, value: Any, store: StoreTensor, *, is_content: bool = False) -> ValueReference:
        if not is_content and (name := self._names_by_id.get(id(value))) is not None:
            return {"object": name}
        if self._is_saved_elsewhere(value):
            raise _SavedElsewhere(path, "saved elsewhere")
        if not _is_storable(value):
            raise UnstorableValue(path, f"{_describe_type(value)}, which a checkpoint cannot hold")
        if isinstance(value, ReplayableIterator) and not value.is_reproducible:
            raise UnstorableValue(path, f"an iterator ({type(value._source).__qualname__}) of which items were drawn")
        contained = snapshot.list_pairs(snapshot.get_content(value)) if reachable.is_container(value) else []
        if any(self._is_saved_elsewhere(item) for _, item in contained):
            raise _SavedElsewhere(path, "contains what is saved elsewhere")
        if reachable.is_container(value) and len(value) > snapshot.MAX_ITEMS:
            raise UnstorableValue(path, f"a {type(value).__name__} of {len(value):,} items, which is too long")
        if isinstance(value, np.ndarray) and value.nbytes > _MAX_ARRAY_BYTES:
            raise UnstorableValue(path, f"an array of {value.nbytes / 2**20:.0f} MiB, which is too large; use a tensor")
        if isinstance(value, Tensor) and value.layout is torch.strided and value.nbytes > self.max_tensor_bytes:
            raise UnstorableValue(path, f"a tensor of {value.nbytes / 2**20:.0f} MiB, which is too large; use a buffer")
        if not is_content:
            return {"value": encode(value, path, store)}
        items = value.num_drawn if isinstance(value, ReplayableIterator) else snapshot.get_content(value)
        contained = snapshot.list_pairs(items) if isinstance(items, list | dict) else []
        if any(id(item) in self._names_by_id for _, item in contained):
            pairs = []
            for key, item in contained:
                item_path = f"{path}[{key!r}]"
                pairs.append([encode(key, item_path, store), self._make_reference(item_path, item, store)])
            return {"items": pairs}
        return {"value": encode(items, path, store)}

    def _is_saved_elsewhere(self, value: Any) -> bool:
        """Sharded tensors are: they are parameters and buffers."""
        return id(value) in self._excluded_ids or isinstance(value, DTensor)

    def _resolve_reference(self, reference: ValueReference, load_tensor: LoadTensor) -> Any:
        if "object" in reference:
            return self._objects[reference["object"]]
        if "items" in reference:
            return {decode(key, load_tensor): self._resolve_reference(x, load_tensor) for key, x in reference["items"]}
        return decode(reference["value"], load_tensor)


class _SavedElsewhere(UnstorableValue):
    """A value that is saved elsewhere, or a container of one."""


def nest_changes(changes: StateChanges) -> dict[str, dict[str, ValueReference]]:
    """Changes as a checkpoint stores them: name -> label -> reference."""
    nested: dict[str, dict[str, ValueReference]] = {}
    for (name, label), reference in changes.items():
        nested.setdefault(name, {})[label] = reference
    return nested


def flatten_changes(nested: Mapping[str, Mapping[str, ValueReference]]) -> StateChanges:
    """The inverse of `nest_changes`."""
    return {(name, label): ref for name, labels in nested.items() for label, ref in labels.items()}


def _store_dense(store_tensor: StoreTensor, path: str, tensor: Tensor) -> Any:
    dtype_to_name(tensor.dtype)
    if tensor.layout is not torch.strided or isinstance(tensor, DTensor) or tensor.is_meta:
        raise UnstorableValue(path, f"{SHARDED_TENSOR_REASON}, on the meta device, or of layout {tensor.layout}")
    return store_tensor(path, tensor)


def _is_storable(value: Any) -> bool:
    if isinstance(value, FunctionType | MethodType | ModuleType | type):
        return False
    types = (*reachable.PLAIN_TYPES, *reachable.BYTE_BUFFER_TYPES, *reachable.GENERATOR_TYPES, ReplayableIterator)
    is_leaf = isinstance(value, (*types, Tensor, np.ndarray))
    return is_leaf or reachable.is_container(value) or reachable.is_user_object(value)


def _describe_type(value: Any) -> str:
    if isinstance(value, FunctionType | MethodType | ModuleType | type):
        return f"{getattr(value, '__qualname__', value.__name__)}, which is code"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _identity_text(value: Any) -> str:
    """Tells values that cannot be stored apart: by position in a file, by text if Python defines their type (a Path), else by address."""
    if (file_position := snapshot.get_file_position(value)) is not None:
        return f"{value!r} at {file_position}"
    if type(value).__module__.partition(".")[0] in sys.stdlib_module_names and not isinstance(value, FunctionType):
        return repr(value)[:1000]
    return str(id(value))


def _slot_value(value: Any, label: str) -> Any:
    return reachable.get_slots(value)[label].value if label else value


def digest_tensor(tensor: Tensor, *, include_large: bool = False) -> bytes:
    """A digest of a tensor's values; of its version counter for special tensors, and for large ones unless `include_large`."""
    is_special = isinstance(tensor, DTensor) or tensor.is_meta or tensor.layout is not torch.strided
    if not is_special and (include_large or tensor.nbytes <= snapshot.MAX_TENSOR_BYTES):
        with contextlib.suppress(Exception):  # a subclass with its own layout
            digest = hashlib.blake2b(tensor_bytes(tensor.detach()), person=b"state").digest()
            return digest + f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return f"{id(tensor)} {tensor._version}".encode()


def store_digest(_: str, tensor: Tensor) -> str:
    """For `collect_changes`: a digest of each tensor in its place."""
    return digest_tensor(tensor, include_large=True).hex()


def iterate_user_objects(candidate: Any, seen_ids: set[int]) -> Iterator[Any]:
    """An object of the user's, and what torch's schedules and optimizers hold: functions, hooks, other schedules."""
    if id(candidate) in seen_ids:
        return
    seen_ids.add(id(candidate))
    if isinstance(candidate, LRScheduler | Optimizer):
        yield candidate
        for key, item in vars(candidate).items():
            if key not in _PARAMETER_ATTRIBUTES:
                yield from iterate_user_objects(item, seen_ids)
    elif isinstance(candidate, list | tuple | dict):
        for item in candidate.values() if isinstance(candidate, dict) else candidate:
            yield from iterate_user_objects(item, seen_ids)
    elif callable(candidate) or hasattr(candidate, "__dict__"):
        yield candidate
