"""Save and restore what code holds: attributes, containers, tensors and generators that are reached from some roots.

Large tensors are not copied; torch's version counter shows whether they were changed in place.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import random
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from echelon.trials.iterator_replay import ReplayableIterator, is_plain_iterator
from echelon.trials.reachable import (
    BYTE_BUFFER_TYPES,
    GENERATOR_TYPES,
    PLAIN_TYPES,
    find_reachable,
    find_slot,
    find_unfollowed,
    get_builtin_base,
    get_slots,
    is_container,
    is_user_defined,
)

#: Longer containers are not copied, nor are tensors with more bytes.
MAX_ITEMS, MAX_TENSOR_BYTES = 100_000, 2**26
#: A larger text file whose lines are iterated is not read (up to three times, about a second) to find its position.
_MAX_ITERATED_FILE_BYTES = 2**28


class SavedContents:
    """Copies of what tensors, arrays, containers, iterators and generators contain. Generators count only `with_generators`."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._copies = [(value, copy_content(value)) for value in values]

    def _select(self, with_generators: bool) -> list[tuple[Any, Any]]:
        return [pair for pair in self._copies if with_generators or not isinstance(pair[0], GENERATOR_TYPES)]

    def restore(self, *, with_generators: bool) -> None:
        for value, saved in self._select(with_generators):
            if not _is_same_content(get_content(value), saved):
                set_content(value, saved)

    def has_changed(self, *, with_generators: bool) -> bool:
        pairs = [(get_content(value), saved) for value, saved in self._select(with_generators)]
        return not all(_is_same_content(*pair) or is_equal(*pair) for pair in pairs)


class Snapshot:
    """What is reached from `roots`, as it is now; `excluded_ids`: objects that are left alone."""

    def __init__(
        self, roots: Mapping[str, Any], *, excluded_ids: Collection[int] = (), max_tensor_bytes: int = MAX_TENSOR_BYTES
    ) -> None:
        reached = find_reachable_replayable(roots, excluded_ids=excluded_ids)
        values, tensors = reached.values(), [item for item in reached.items() if isinstance(item[1], Tensor)]
        self.unfollowed_values = list({id(value): value for value in find_unfollowed(values)}.values())
        #: Open files that are read, each with its position.
        self.file_positions = list_file_positions(self.unfollowed_values)
        self._saved_slots = [(v, {label: slot.value for label, slot in get_slots(v).items()}) for v in values]
        self._large_tensors = [(n, t, t._version) for n, t in tensors if not _is_copied_size(t, max_tensor_bytes)]
        mutable = filter(has_mutable_content, values)
        self._contents = SavedContents(value for value in mutable if _is_copied_size(value, max_tensor_bytes))

    def restore(self, *, with_generators: bool = True) -> None:
        """Restore everything but large tensors, with the positions in files that are read; may be called again."""
        restore_file_positions(self.file_positions)
        for value, saved in self._saved_slots:
            current = get_slots(value)
            for label in current.keys() - saved.keys():
                current[label].delete()
            for label, saved_value in saved.items():
                slot = find_slot(value, label)
                if label not in current and isinstance(value, Dataset) and label[1:] in vars(value):
                    continue  # a file that was opened since stays open
                if slot is not None and (label not in current or current[label].value is not saved_value):
                    slot.assign(saved_value)
        self._contents.restore(with_generators=with_generators)

    def list_unrestored(self) -> list[str]:
        """Large tensors that were changed in place since."""
        return [name for name, value, version in self._large_tensors if value._version != version]

    def has_changed(self, *, with_generators: bool = True) -> bool:
        """Whether anything has another value now. An equal number or tensor in its place is no change."""
        for value, saved in self._saved_slots:
            now = get_slots(value)
            if now.keys() != saved.keys() or not all(is_equal(now[label].value, item) for label, item in saved.items()):
                return True
        return bool(self.list_unrestored()) or self._contents.has_changed(with_generators=with_generators)


def find_reachable_replayable(roots: Mapping[str, Any], *, excluded_ids: Collection[int] = ()) -> dict[str, Any]:
    """What is reached from `roots`, with a `ReplayableIterator` in place of each iterator that could not be put back otherwise."""
    reached_objects = find_reachable(roots, excluded_ids=excluded_ids)
    replays: dict[int, tuple[Any, ReplayableIterator]] = {}

    def make_replayable(value: Any) -> Any:
        if not is_plain_iterator(value) or is_user_defined(type(value)):
            return value
        return replays.setdefault(id(value), (value, ReplayableIterator(value)))[1]

    for value in reached_objects.values():
        for slot in get_slots(value).values():
            item = slot.value
            if make_replayable(item) is not item:
                slot.assign(make_replayable(item))
        if isinstance(value, list | dict) and len(value) <= MAX_ITEMS:
            for key, item in list_pairs(get_content(value)):
                if make_replayable(item) is not item:
                    get_builtin_base(value).__setitem__(value, key, make_replayable(item))
    return find_reachable(roots, excluded_ids=excluded_ids) if replays else reached_objects


def has_mutable_content(value: Any) -> bool:
    """Whether it changes in place by other means than its attributes."""
    return isinstance(value, (Tensor, np.ndarray, ReplayableIterator, *BYTE_BUFFER_TYPES, *GENERATOR_TYPES)) or (
        is_container(value) and not isinstance(value, tuple)
    )


def _is_copied_size(value: Any, max_tensor_bytes: int) -> bool:
    if not isinstance(value, Tensor):
        return not is_container(value) or len(value) <= MAX_ITEMS
    is_plain = type(value) in (Tensor, nn.Parameter, nn.Buffer) and value.layout is torch.strided and not value.is_meta
    return is_plain and value.nbytes <= max_tensor_bytes


def list_file_positions(values: Iterable[Any]) -> list[tuple[Any, int]]:
    return [(value, position) for value in values if (position := get_file_position(value)) is not None]


def restore_file_positions(file_positions: Iterable[tuple[Any, int]]) -> None:
    for file, position in file_positions:
        if not file.closed and get_file_position(file) != position:
            file.seek(position)


def get_file_position(value: Any) -> int | None:
    """The position in a file that is only read; None for anything else."""
    with contextlib.suppress(OSError, ValueError):  # a pipe; closed
        if isinstance(value, io.IOBase) and value.seekable() and not value.writable():
            try:
                return value.tell()
            except OSError:
                return _find_position_among_lines(value) if isinstance(value, io.TextIOWrapper) else None
    return None


def _find_position_among_lines(file: io.TextIOWrapper) -> int | None:
    """The position in a text file whose lines are iterated, where `tell` raises until the next `seek`. None for large files."""
    if os.fstat(file.fileno()).st_size > _MAX_ITERATED_FILE_BYTES:
        return None
    remaining = _count_remaining_characters(file)
    file.seek(0)
    characters_read = _count_remaining_characters(file) - remaining
    file.seek(0)
    file.read(characters_read)
    return file.tell()


def _count_remaining_characters(file: io.TextIOWrapper) -> int:
    return sum(map(len, iter(partial(file.read, 2**20), "")))


def get_content(value: Any) -> Any:
    """What `set_content` takes, in types that a checkpoint can hold."""
    if isinstance(value, random.SystemRandom):
        return None  # the system's entropy has no state
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, BYTE_BUFFER_TYPES):
        return bytes(value)
    if isinstance(value, dict):
        return dict(get_builtin_base(value).items(value))
    if isinstance(value, set):
        return set(value)
    return list(get_builtin_base(value).__iter__(value)) if isinstance(value, list | deque) else value


def copy_content(value: Any) -> Any:
    """Its content, unaffected by later changes."""
    if isinstance(value, Tensor | torch.Generator):
        return value.detach().clone() if isinstance(value, Tensor) else value.clone_state()
    if isinstance(value, ReplayableIterator):
        return copy.copy(value)
    return value.copy() if isinstance(value, np.ndarray) else get_content(value)


def set_content(value: Any, content: Any) -> bool:
    """Put `content` back; returns whether that is possible."""
    if isinstance(value, Tensor) and value.is_meta:  # another stage holds it
        return True
    if isinstance(value, Tensor | np.ndarray):
        if getattr(content, "shape", None) != value.shape:
            return False
        with torch.no_grad(), contextlib.suppress(RuntimeError, ValueError):  # expanded, or read-only
            value[...] = content
            return True
        return False
    if isinstance(value, ReplayableIterator):
        return value.advance_to(content)
    if isinstance(value, array):
        del value[:]
        value.frombytes(content)
    elif isinstance(value, bytearray):
        value[:] = content
    elif isinstance(value, torch.Generator):
        value.set_state(content.get_state())
    elif isinstance(value, random.Random):
        if not isinstance(value, random.SystemRandom):
            value.setstate(content)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = content
    elif isinstance(value, np.random.RandomState):
        value.set_state(content)
    elif is_container(value):
        base = get_builtin_base(value)
        items = list(content.values()) if isinstance(content, dict) and isinstance(value, list | deque) else content
        base.clear(value)
        (base.extend if isinstance(value, list | deque) else base.update)(value, items)
    else:
        return False
    return True


def _is_same_content(first: Any, second: Any) -> bool:
    """Whether two contents are the same: the same objects in containers, the same bits in tensors and generators."""
    if isinstance(first, Tensor):
        return torch.equal(first, second)  # one with NaN counts as changed, which costs a copy
    if isinstance(first, np.ndarray):
        return first.tobytes() == second.tobytes()
    if isinstance(first, torch.Generator):
        return torch.equal(first.get_state(), second.get_state())
    if isinstance(first, ReplayableIterator):
        return first.num_drawn == second.num_drawn
    if isinstance(first, list | dict):
        same_keys = list(first) == list(second) if isinstance(first, dict) else len(first) == len(second)
        pairs = zip(list_pairs(first), list_pairs(second), strict=True) if same_keys else ()
        return same_keys and all(a is b for (_, a), (_, b) in pairs)
    return repr(first) == repr(second)  # arrays within a generator's state have no single truth


def list_pairs(content: Any) -> list[tuple[Any, Any]]:
    """The items of a dict, or those of a list by index."""
    return list(content.items() if isinstance(content, dict) else enumerate(content))


def is_equal(first: Any, second: Any) -> bool:
    """Whether two values are equal; two objects of the user's never are."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, PLAIN_TYPES):
        return bool(first == second or first != first)
    if isinstance(first, Tensor | np.ndarray):
        return first.shape == second.shape and first.dtype == second.dtype and _is_same_content(first, second)
    if isinstance(first, list | dict) and len(first) == len(second):
        pairs = zip(list_pairs(first), list_pairs(second), strict=True)
        return all(key == other_key and is_equal(item, other) for (key, item), (other_key, other) in pairs)
    return False
