"""Batches and outputs as trees of tensors: the one place that decides which objects are containers.

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

#: The template of an object that is rebuilt from its type and attributes.
_ATTRIBUTE_CONTAINER = object()
_PACKED_SEQUENCE_FIELDS = ("data", "batch_sizes", "sorted_indices", "unsorted_indices")
_IsLeaf = Callable[[Any], bool]


class TreeSpec:
    """A tree without its leaves. Two are equal if their containers have the same types and keys."""

    __slots__ = ("_context", "_template", "_type", "children")

    def __init__(self, container_type: Any, context: Any, children: tuple[TreeSpec, ...], template: Any = None) -> None:
        self._type, self._context, self.children, self._template = container_type, context, children, template

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, TreeSpec):
            return self is other
        return (self._type, self._context, self.children) == (other._type, other._context, other.children)

    def __hash__(self) -> int:
        return hash((self._type, self.children))

    def unflatten(self, leaves: Iterator[Any]) -> Any:
        if self._type is None:
            return next(leaves)
        parts = [child.unflatten(leaves) for child in self.children]
        return _rebuild_container(self._type, self._context, parts, self._template)


_LEAF = TreeSpec(None, None, ())


def tree_flatten(value: Any, is_leaf: _IsLeaf | None = None) -> tuple[list[Any], TreeSpec]:
    """The leaves of `value`, in order, and its structure. `is_leaf`: containers to leave as they are."""
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves, (), is_leaf)


def tree_unflatten(leaves: Iterable[Any], structure: TreeSpec) -> Any:
    """The inverse of `tree_flatten`."""
    return structure.unflatten(iter(leaves))


def tree_leaves(value: Any) -> list[Any]:
    """The leaves of `value`, in order."""
    return tree_flatten(value)[0]


def tree_map(change: Callable[..., Any], value: Any, *others: Any, is_leaf: _IsLeaf | None = None) -> Any:
    """`value` with `change` applied to every leaf, together with the same leaves of `others`; ValueError if their structures differ."""
    leaves, structures = zip(*(tree_flatten(tree, is_leaf) for tree in (value, *others)), strict=True)
    if any(structure != structures[0] for structure in structures):
        raise ValueError("trees of different structures")
    return tree_unflatten(map(change, *leaves), structures[0])


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with `change` applied to every tensor in it."""
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)


def copy_tensors(value: Any) -> Any:
    """`value` with copies of its tensors: a forward may change its inputs in place."""
    return map_tensors(Tensor.clone, value)


def tree_tensors(value: Any) -> list[Tensor]:
    """The tensors in `value`, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def tensor_versions(value: Any) -> list[int]:
    """How often each tensor in `value` was written to."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tree_tensors(value)]


def to_device(value: Any, device: torch.device, change: Callable[[Tensor], Tensor] | None = None) -> Any:
    """`value` on `device`. `change` moves one tensor (default: `.to(device)`); other leaves move if they have a method `to`."""

    def move_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device) if change is None else change(leaf)
        return leaf.to(device) if hasattr(leaf, "to") and not isinstance(leaf, type) else leaf

    return tree_map(move_leaf, value)


def _flatten(value: Any, leaves: list[Any], ancestors: tuple[int, ...], is_leaf: _IsLeaf | None) -> TreeSpec:
    container = None if isinstance(value, Tensor) or id(value) in ancestors else _open_container(value)
    if container is None or (is_leaf is not None and is_leaf(value)):
        leaves.append(value)
        return _LEAF
    container_type, context, parts, template = container
    path = (*ancestors, id(value))
    return TreeSpec(container_type, context, tuple(_flatten(part, leaves, path, is_leaf) for part in parts), template)


def _open_container(value: Any) -> tuple[Any, Any, Iterable[Any], Any] | None:
    """(type, keys, parts, template: what is left without the parts) of a container; None for a leaf."""
    kind = type(value)
    if kind is PackedSequence:  # its batch sizes stay on the host, whatever happens to the rest
        rest = value._replace(data=None, sorted_indices=None, unsorted_indices=None)
        return kind, _PACKED_SEQUENCE_FIELDS, (value.data, value.sorted_indices, value.unsorted_indices), rest
    if kind is torch.Size:
        return None
    node = SUPPORTED_NODES.get(kind)
    if node is not None:
        parts, context = node.flatten_fn(value)
        return kind, context, parts, None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind, value._fields, tuple(value), None
    if isinstance(value, dict):
        keys = tuple(value)
        mirrors_itself = instance_dict(value) is value
        template = None if mirrors_itself else _fill_dict(copy.copy(value), keys, [None] * len(keys))
        return kind, keys, value.values(), template
    if isinstance(value, list | tuple):
        return kind, len(value), value, None
    names = _container_attributes(value)
    if names:
        return kind, names, [getattr(value, name) for name in names], _ATTRIBUTE_CONTAINER
    return (kind, tuple(value), value.values(), None) if isinstance(value, Mapping) else None


def _container_attributes(value: Any) -> tuple[str, ...]:
    """The attributes that are a container's parts; none for a leaf or for any other container."""
    if isinstance(value, type | Module | Enum):
        return ()
    has_tensors = any(isinstance(item, Tensor) for item in instance_dict(value).values())
    return _stored_names(value) if has_tensors or dataclasses.is_dataclass(value) or isinstance(value, Mapping) else ()


def instance_dict(value: Any) -> dict[str, Any]:
    """An object's own attributes; empty where it has slots only."""
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else {}


def _stored_names(value: Any) -> tuple[str, ...]:
    """The names of an object's attributes, also in slots."""
    slots: list[str] = []
    for base in type(value).__mro__:
        base_slots = base.__dict__.get("__slots__", ())
        slots += [base_slots] if isinstance(base_slots, str) else base_slots
    filled = [name for name in slots if name not in ("__dict__", "__weakref__") and hasattr(value, name)]
    return tuple(dict.fromkeys([*filled, *instance_dict(value)]))


def _new_instance(container_type: Any) -> Any:
    """An object without attributes. No constructor runs: it may need other arguments."""
    try:
        return object.__new__(container_type)
    except TypeError:
        return container_type.__new__(container_type)


def _fill_dict(new: Any, keys: tuple[Any, ...], parts: list[Any]) -> Any:
    """`new`, a dict with attributes, with other values; attributes that mirror its items change too."""
    attributes = instance_dict(new)
    for key, part in zip(keys, parts, strict=True):
        dict.__setitem__(new, key, part)
        if key in attributes:
            attributes[key] = part
    return new


def _rebuild_container(container_type: Any, context: Any, parts: list[Any], template: Any) -> Any:
    if container_type is PackedSequence:
        data, sorted_indices, unsorted_indices = parts
        return template._replace(data=data, sorted_indices=sorted_indices, unsorted_indices=unsorted_indices)
    node = SUPPORTED_NODES.get(container_type)
    if node is not None:
        return node.unflatten_fn(parts, context)
    if template is not None:
        if isinstance(template, dict):
            return _fill_dict(copy.copy(template), context, parts)
        new = _new_instance(container_type)
        for name, part in zip(context, parts, strict=True):
            object.__setattr__(new, name, part)
        return new
    if issubclass(container_type, tuple) and hasattr(container_type, "_fields"):
        return container_type._make(parts)
    if issubclass(container_type, Mapping):
        return _construct_container(container_type, dict(zip(context, parts, strict=True)))
    return _construct_container(container_type, parts)


def _construct_container(container_type: Any, parts: Any) -> Any:
    """A container of the same type; a plain one if its constructor takes something else."""
    try:
        return container_type(parts)
    except TypeError:
        return parts
