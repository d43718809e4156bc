"""What code holds at one moment, put back later: attributes, containers, tensors and generators that are reached from some roots.

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
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from echelon.trials.iterator_replay import Replay, is_plain_iterator
from echelon.trials.reachable import (
    BUFFERS,
    GENERATORS,
    PLAIN,
    base_of,
    is_container,
    is_user,
    leaves,
    reachable,
    slot_at,
    slots_of,
)

#: Longer containers are not copied, nor are tensors with more bytes.
ITEMS, LARGE = 100_000, 2**26
#: Bytes of a text file that is read up to three times, about a second, to see where somebody who iterates over its lines is.
_ITERATED = 2**28


class Snapshot:
    """What is reached from `roots`, as it is now; `without`: ids of objects that are left alone."""

    def __init__(self, roots: Mapping[str, Any], *, without: Collection[int] = (), largest: int = LARGE) -> None:
        nodes = list(reached(roots, without=without).items())
        self.unfollowed = list({id(each): each for each in leaves(value for _, value in nodes)}.values())
        #: Open files that are read, each with where it is in them.
        self.positions = [(each, place) for each in self.unfollowed if (place := position(each)) is not None]
        self._owners = [(value, {label: slot.value for label, slot in slots_of(value).items()}) for _, value in nodes]
        self._large = [
            (name, value, value._version)
            for name, value in nodes
            if isinstance(value, Tensor) and not _is_small(value, largest)
        ]
        self._small = [(value, copied(value)) for _, value in nodes if has_content(value) and _is_small(value, largest)]

    def put_back(self, *, generators: bool = True) -> None:
        """Have everything hold again what it held, but large tensors, and generators where not asked for, and be where it was in files that it reads;
        may be called again."""
        for file, place in self.positions:
            if not file.closed and position(file) != place:
                file.seek(place)
        for value, held in self._owners:
            now = slots_of(value)
            for label in now.keys() - held.keys():
                now[label].clear()
            for label, each in held.items():
                slot = slot_at(value, label)
                if label not in now and isinstance(value, Dataset) and label[1:] in vars(value):
                    continue  # a file that was opened meanwhile stays open
                if slot is not None and (label not in now or now[label].value is not each):
                    slot.put(each)
        for value, content in self._contents(generators):
            if not is_same_content(content_of(value), content):
                refill(value, content)

    def _contents(self, generators: bool) -> list[tuple[Any, Any]]:
        return [each for each in self._small if generators or not isinstance(each[0], GENERATORS)]

    def unrestored(self) -> list[str]:
        """Large tensors that were changed in place since."""
        return [name for name, value, version in self._large if value._version != version]

    def changed(self, *, generators: bool = True) -> bool:
        """Whether anything has another value now; generators where asked for. An equal number or tensor in its place is no change."""
        for value, held in self._owners:
            now = slots_of(value)
            if now.keys() != held.keys() or not all(_is_equal(now[label].value, each) for label, each in held.items()):
                return True
        pairs = [(content_of(value), content) for value, content in self._contents(generators)]
        return bool(self.unrestored()) or not all(_is_equal(*each) or is_same_content(*each) for each in pairs)


def reached(roots: Mapping[str, Any], *, without: Collection[int] = ()) -> dict[str, Any]:
    """What is reached from `roots`, with a `Replay` in place of each iterator that could not be put back otherwise."""
    found = reachable(roots, without=without)
    replays: dict[int, tuple[Any, Replay]] = {}

    def replaced(value: Any) -> Any:
        if not is_plain_iterator(value) or is_user(type(value)):
            return value
        return replays.setdefault(id(value), (value, Replay(value)))[1]

    for value in found.values():
        for slot in slots_of(value).values():
            held = slot.value
            if replaced(held) is not held:
                slot.put(replaced(held))
        if isinstance(value, list | dict) and len(value) <= ITEMS:
            for key, held in pairs_of(content_of(value)):
                if replaced(held) is not held:
                    base_of(value).__setitem__(value, key, replaced(held))
    return reachable(roots, without=without) if replays else found


def has_content(value: Any) -> bool:
    """Whether it changes in place otherwise than by its attributes."""
    return isinstance(value, (Tensor, np.ndarray, Replay, *BUFFERS, *GENERATORS)) or (
        is_container(value) and not isinstance(value, tuple)
    )


def _is_small(value: Any, largest: int) -> bool:
    if isinstance(value, Tensor):
        return (
            type(value) in (Tensor, nn.Parameter, nn.Buffer)
            and value.layout is torch.strided
            and not value.is_meta
            and value.nbytes <= largest
        )
    return len(value) <= ITEMS if is_container(value) else True


def position(value: Any) -> int | None:
    """Where it is in a file that is only read; None for anything else."""
    with contextlib.suppress(OSError, ValueError):  # a pipe; closed
        if isinstance(value, io.IOBase) and value.seekable() and not value.writable():
            try:
                return value.tell()
            except OSError:
                return _position_among_lines(value) if isinstance(value, io.TextIOWrapper) else None
    return None


def _position_among_lines(file: io.TextIOWrapper) -> int | None:
    """Where it is in a text file whose lines are iterated: `tell` does not work until it has been put somewhere again. None for large files."""
    if os.fstat(file.fileno()).st_size > _ITERATED:
        return None
    left = _characters(file)
    file.seek(0)
    passed = _characters(file) - left
    file.seek(0)
    file.read(passed)
    return file.tell()


def _characters(file: io.TextIOWrapper) -> int:
    """How many are left in the file, which it reads."""
    return sum(map(len, iter(partial(file.read, 2**20), "")))


def content_of(value: Any) -> Any:
    """What `refill` takes, of types that a checkpoint holds."""
    if isinstance(value, random.SystemRandom):
        return None  # the system's entropy has no state
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, BUFFERS):
        return bytes(value)
    if isinstance(value, dict):
        return dict(base_of(value).items(value))
    if isinstance(value, set):
        return set(value)
    return list(base_of(value).__iter__(value)) if isinstance(value, list | deque) else value


def copied(value: Any) -> Any:
    """Its content, which later changes leave as it is."""
    if isinstance(value, Tensor | torch.Generator):
        return value.detach().clone() if isinstance(value, Tensor) else value.clone_state()
    if isinstance(value, Replay):
        return copy.copy(value)
    return value.copy() if isinstance(value, np.ndarray) else content_of(value)


def refill(value: Any, content: Any) -> bool:
    """Have it hold `content` again; whether it can."""
    if isinstance(value, Tensor) and value.is_meta:  # another stage holds it
        return True
    if isinstance(value, Tensor | np.ndarray):
        if getattr(content, "shape", None) != value.shape:
            return False
        with torch.no_grad(), contextlib.suppress(RuntimeError, ValueError):  # expanded, or read-only
            value[...] = content
            return True
        return False
    if isinstance(value, Replay):
        return value.refill(content)
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
        base = base_of(value)
        items = list(content.values()) if isinstance(content, dict) and isinstance(value, list | deque) else content
        base.clear(value)
        (base.extend if isinstance(value, list | deque) else base.update)(value, items)
    else:
        return False
    return True


def is_same_content(one: Any, other: Any) -> bool:
    """Whether two contents are: the same objects in containers, the same bits in tensors and generators."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)  # one with NaN counts as changed, which costs a copy
    if isinstance(one, np.ndarray):
        return one.tobytes() == other.tobytes()
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if isinstance(one, Replay):
        return one.count == other.count
    if isinstance(one, list | dict):
        keys = list(one) == list(other) if isinstance(one, dict) else len(one) == len(other)
        return keys and all(mine is each for (_, mine), (_, each) in zip(pairs_of(one), pairs_of(other), strict=True))
    return repr(one) == repr(other)  # arrays within a generator's state have no single truth


def pairs_of(content: Any) -> list[tuple[Any, Any]]:
    """The items of a dict, or those of a list by place."""
    return list(content.items() if isinstance(content, dict) else enumerate(content))


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal; two objects of the user's never are."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, PLAIN):
        return bool(one == other or one != one)
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, list | dict):
        mine, theirs = pairs_of(one), pairs_of(other)
        return len(mine) == len(theirs) and all(
            a == b and _is_equal(first, second) for (a, first), (b, second) in zip(mine, theirs, strict=True)
        )
    return False
