"""Batches and outputs as trees of tensors: the one place that says which objects are containers.

Containers keep their type when they are rebuilt: dicts, lists, tuples, named tuples, whatever torch's pytree knows (HF's ModelOutput),
dataclasses (frozen and slotted ones too), other mappings (UserDict, HF's BatchEncoding) and plain objects that hold tensors as attributes
(`types.SimpleNamespace`, distributions). Anything else is a leaf: strings, numbers, arrays, modules.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import SUPPORTED_NODES

#: Of an object nothing is left but its type.
_ATTRIBUTES = object()
_PACKED = ("data", "batch_sizes", "sorted_indices", "unsorted_indices")


class Structure:
    """A tree without its leaves. Two are equal where the containers are of the same types with the same keys."""

    __slots__ = ("_context", "_hollow", "_kind", "children")

    def __init__(self, kind: Any, context: Any, children: tuple[Structure, ...], hollow: Any = None) -> None:
        self._kind, self._context, self.children = kind, context, children
        self._hollow = hollow

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and (
            self is other or (self._kind, self._context, self.children) == (other._kind, other._context, other.children)
        )

    def __hash__(self) -> int:
        return hash((self._kind, self.children))

    def build(self, leaves: Iterator[Any]) -> Any:
        """The tree, of the next leaves."""
        if self._kind is None:
            return next(leaves)
        parts = [child.build(leaves) for child in self.children]
        return _rebuilt(self._kind, self._context, parts, self._hollow)


_LEAF = Structure(None, None, ())


def tree_flatten(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of `value`, in order, and what remains of it."""
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves, ())


def tree_unflatten(leaves: Iterable[Any], structure: Structure) -> Any:
    """The inverse of `tree_flatten`."""
    return structure.build(iter(leaves))


def tree_leaves(value: Any) -> list[Any]:
    """The leaves of `value`, in order."""
    leaves: list[Any] = []
    _flatten(value, leaves, ())
    return leaves


def tree_map(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `change` applied to every leaf; `value` itself stays as it is."""
    leaves, structure = tree_flatten(value)
    return tree_unflatten(map(change, leaves), structure)


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with `change` applied to every tensor in it."""
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)


def copy_tensors(value: Any) -> Any:
    """`value` with copies of its tensors: a forward may change its inputs in place."""
    return map_tensors(Tensor.clone, value)


def tensors(value: Any) -> list[Tensor]:
    """The tensors in `value`, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def to_device(value: Any, device: torch.device, change: Callable[[Tensor], Tensor] | None = None) -> Any:
    """`value` on `device`. `change` moves one tensor (default: `.to(device)`); leaves that can be moved by themselves (`.to`) are."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device) if change is None else change(leaf)
        return leaf.to(device) if hasattr(leaf, "to") and not isinstance(leaf, type) else leaf

    return tree_map(moved, value)


def _flatten(value: Any, leaves: list[Any], above: tuple[int, ...]) -> Structure:
    found = None if isinstance(value, Tensor) or id(value) in above else _parts(value)
    if found is None:
        leaves.append(value)
        return _LEAF
    kind, context, parts, hollow = found
    within = (*above, id(value))
    return Structure(kind, context, tuple(_flatten(part, leaves, within) for part in parts), hollow)


def _parts(value: Any) -> tuple[Any, Any, Iterable[Any], Any] | None:
    """(type, keys, parts, what is left without them) of a container; None: a leaf."""
    kind = type(value)
    if kind is PackedSequence:  # its batch sizes stay on the host, whatever happens to the rest
        rest = value._replace(data=None, sorted_indices=None, unsorted_indices=None)
        return kind, _PACKED, (value.data, value.sorted_indices, value.unsorted_indices), rest
    if kind is torch.Size:
        return None
    node = SUPPORTED_NODES.get(kind)
    if node is not None:
        parts, context = node.flatten_fn(value)
        return kind, context, parts, None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind, value._fields, tuple(value), None
    if isinstance(value, dict):
        return kind, tuple(value), value.values(), None if vars_of(value) is value else _emptied(value, tuple(value))
    if isinstance(value, list | tuple):
        return kind, len(value), value, None
    names = _attributes(value)
    if names:
        return kind, names, [getattr(value, name) for name in names], _ATTRIBUTES
    if isinstance(value, Mapping):
        return kind, tuple(value), value.values(), None
    return None


def _attributes(value: Any) -> tuple[str, ...]:
    """The attributes of an object that is a container; none: it is a leaf, or holds its parts in another way."""
    if isinstance(value, type | Module | Enum):
        return ()
    names, own = _stored(value), vars_of(value)
    if dataclasses.is_dataclass(value) or isinstance(value, Mapping):
        return names
    return names if any(isinstance(each, Tensor) for each in own.values()) else ()


def vars_of(value: Any) -> dict[str, Any]:
    """An object's own attributes; none where it has no place for them."""
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else {}


def _stored(value: Any) -> tuple[str, ...]:
    """The names under which an object stores values, in slots too."""
    slots: list[str] = []
    for base in type(value).__mro__:
        own = base.__dict__.get("__slots__", ())
        slots += [own] if isinstance(own, str) else own
    filled = [name for name in slots if name not in ("__dict__", "__weakref__") and hasattr(value, name)]
    return tuple(dict.fromkeys([*filled, *vars_of(value)]))


def _bare(kind: Any) -> Any:
    """An object of a type, without attributes. No constructor runs: it may want more than its parts."""
    try:
        return object.__new__(kind)
    except TypeError:
        return kind.__new__(kind)


def _emptied(value: dict[Any, Any], keys: tuple[Any, ...]) -> Any:
    return _filled(copy.copy(value), keys, [None] * len(keys))


def _filled(new: Any, keys: tuple[Any, ...], parts: list[Any]) -> Any:
    """`new`, a dict with attributes, with other values; those that it mirrors as attributes too."""
    own = vars_of(new)
    for key, part in zip(keys, parts, strict=True):
        dict.__setitem__(new, key, part)
        if key in own:
            own[key] = part
    return new


def _rebuilt(kind: Any, context: Any, parts: list[Any], hollow: Any) -> Any:
    if kind is PackedSequence:
        data, sorted_indices, unsorted_indices = parts
        return hollow._replace(data=data, sorted_indices=sorted_indices, unsorted_indices=unsorted_indices)
    node = SUPPORTED_NODES.get(kind)
    if node is not None:
        return node.unflatten_fn(parts, context)
    if hollow is not None:
        if isinstance(hollow, dict):
            return _filled(copy.copy(hollow), context, parts)
        new = _bare(kind)
        for name, part in zip(context, parts, strict=True):
            object.__setattr__(new, name, part)
        return new
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind._make(parts)
    if issubclass(kind, Mapping):
        return _constructed(kind, dict(zip(context, parts, strict=True)))
    return _constructed(kind, parts)


def _constructed(kind: Any, parts: Any) -> Any:
    """A container of the same type; a plain one where its constructor wants something else."""
    try:
        return kind(parts)
    except TypeError:
        return parts
