"""What a data set keeps from one reading to the next: counters, running statistics, caches, samples that it edits in place.

Readings that are only tried leave no trace in it.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from functools import _lru_cache_wrapper, partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from echelon.trials.iterator_replay import is_plain_iterator
from echelon.trials.reachable import GENERATORS, PLAIN, is_container, is_object, is_user
from echelon.trials.snapshot import ITEMS, Snapshot, content_of, copied, has_content, is_same_content, position, refill

#: Bytes of tensors and arrays that are copied; torch counts the changes of further tensors.
_COPIED = 2**26
#: Bytes of a tensor among globals, closures and attributes of classes that is copied.
_SETTING = 2**22
#: Items of longer containers are not followed: they are samples.
_LONG = 10_000


class DataState:
    """What a data set keeps, as it is now."""

    def __init__(self, data: Any) -> None:
        found = _held(data)
        self._attributes = [
            (each, dict(vars(each))) for each in found if hasattr(each, "__dict__") and not _is_code(each)
        ]
        self._contents: list[tuple[Any, Any]] = []
        self._versions: list[tuple[Tensor, int]] = []
        left = _COPIED
        for each in found:
            if not has_content(each) or (is_container(each) and len(each) > ITEMS):
                continue
            size = each.nbytes if isinstance(each, Tensor | np.ndarray) else 0
            if size <= left:
                left -= size
                self._contents.append((each, copied(each)))
            elif isinstance(each, Tensor):
                self._versions.append((each, each._version))
        # What its functions, classes and objects hold: closures, globals, attributes of classes, iterators.
        roots = {f"part {place}": each for place, each in enumerate(found) if _is_code(each) or _holds_iterators(each)}
        known = {id(each) for each, _ in (*self._contents, *self._versions)}
        self._settings = Snapshot(roots, without=known, largest=_SETTING)
        files = [(each, place) for each in found if (place := position(each)) is not None]
        self._positions = [*files, *self._settings.positions]
        caches = _caches_of(found, self._settings)
        self._caches = [(each, each.cache_info()) for each in caches]
        self._behind_caches = Snapshot(
            {f"cached {place}": each.__wrapped__ for place, each in enumerate(caches)}, largest=_SETTING
        )

    def put_back(self, *, generators: bool = True) -> None:
        """Have it keep again what it kept; its random generators too, and where it is in files. Files that it closed meanwhile are opened again.
        A `functools.lru_cache` is emptied where it was empty; of others nobody but Python knows what they hold."""
        reopened = {id(file): _reopened(file, place) for file, place in self._positions if file.closed}
        for file, place in self._positions:
            if not file.closed and position(file) != place:
                file.seek(place)
        with warnings.catch_warnings(
            action="ignore", category=ResourceWarning
        ):  # Python closes files that were opened meanwhile
            for value, held in self._attributes:
                now = vars(value)
                for name in [name for name, each in now.items() if _is_restored(each) and name not in held]:
                    del now[name]
                for name, each in held.items():
                    before = reopened.get(id(each), each)
                    if _is_restored(now.get(name)) and (before is not None or each is None):
                        now[name] = before
        for value, content in self._contents:
            if (generators or not isinstance(value, GENERATORS)) and not is_same_content(content_of(value), content):
                refill(value, content)
        self._settings.put_back(generators=generators)
        self._behind_caches.put_back(generators=generators)
        for function, before in self._caches:
            if not before.currsize and function.cache_info().currsize:
                function.cache_clear()

    def changed(self, *, generators: bool = False, positions: bool = False) -> bool:
        """Whether readings changed it; its random generators, and where it is in files and what caches have missed, count where asked for."""
        if self.unrestorable():
            return True
        if positions and (
            any(position(file) != place for file, place in self._positions)
            or any(function.cache_info().misses != before.misses for function, before in self._caches)
        ):
            return True
        for value, held in self._attributes:
            now = vars(value)
            if any(_is_state(each) and not _is_equal(each, held.get(name)) for name, each in now.items()):
                return True
        contents = [each for each in self._contents if generators or not isinstance(each[0], GENERATORS)]
        settings = (self._settings, self._behind_caches)
        return any(each.changed(generators=generators) for each in settings) or not all(
            is_same_content(content_of(value), held) for value, held in contents
        )

    def unrestorable(self) -> bool:
        """Whether readings changed what is too large to be put back."""
        return any(value._version != version for value, version in self._versions)


@contextlib.contextmanager
def unread(*values: Any) -> Iterator[None]:
    """Readings inside leave no trace in the data sets and collate functions `values`."""
    held = [DataState(each) for each in values if runs_code(each)]
    try:
        yield
    finally:
        for each in held:
            each.put_back()


def runs_code(value: Any) -> bool:
    """Whether reading a sample of it, or calling it, runs code that may change what it keeps."""
    if type(value) is Subset:
        return runs_code(value.dataset)
    if type(value) is ConcatDataset:
        return any(map(runs_code, value.datasets))
    if type(value) in (list, tuple):  # of samples: those of one are like those of all
        return any(map(_is_followed, _held(value[:1])))
    return type(value) is not TensorDataset and (_is_followed(value) or _is_code(value))


def _is_followed(value: Any) -> bool:
    return isinstance(value, Dataset) or is_object(value)


def _held(data: Any) -> list[Any]:
    """Data sets, objects, containers, tensors, arrays, generators and code that are reached from a data set by attributes and items, each once.
    Code is not followed further."""
    found: dict[int, Any] = {}
    pending = [data]
    while pending:
        value = pending.pop()
        known = _is_followed(value) or has_content(value) or isinstance(value, tuple | io.IOBase) or _is_code(value)
        if id(value) in found or not known:
            continue
        found[id(value)] = value
        if is_container(value):
            if len(value) <= _LONG:
                pending += value.values() if isinstance(value, dict) else value
        elif _has_attributes(value):
            pending += [*vars(value).values(), type(value)]
    return list(found.values())


def _holds_iterators(value: Any) -> bool:
    return isinstance(value, Dataset) or any(map(is_plain_iterator, getattr(value, "__dict__", {}).values()))


def _caches_of(found: list[Any], settings: Snapshot) -> list[Any]:
    """Functions and methods with a `functools.lru_cache` that readings may call."""
    of_classes = [
        each for kind in found if isinstance(kind, type) for base in kind.__mro__ for each in vars(base).values()
    ]
    every = [*found, *of_classes, *settings.unfollowed]
    return list({id(each): each for each in every if isinstance(each, _lru_cache_wrapper) and is_user(each)}.values())


def _has_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") and not (has_content(value) or _is_code(value) or isinstance(value, io.IOBase))


def _reopened(file: Any, place: int) -> Any:
    """A closed file, open again at a position; None where nothing says how to open it, or it is gone."""
    with contextlib.suppress(OSError):
        again: Any = None
        if isinstance(file, io.TextIOWrapper) and isinstance(file.buffer, io.BufferedReader):
            again = Path(file.name).open(encoding=file.encoding, errors=file.errors)  # noqa: SIM115 (it stays open)
        elif isinstance(file, io.BufferedReader):
            again = Path(file.name).open("rb")  # noqa: SIM115 (it stays open)
        if again is not None:
            again.seek(place)
        return again
    return None


def _is_code(value: Any) -> bool:
    """Whether it is code of the user's, or an object that holds its attributes otherwise than in a dict: `Snapshot` follows these."""
    if isinstance(value, FunctionType | type | _lru_cache_wrapper):
        return is_user(value)
    return isinstance(value, MethodType | partial) or (is_object(value) and not hasattr(value, "__dict__"))


def _is_state(value: Any) -> bool:
    """Whether an attribute with this value is one that readings change: not a file, a connection or a library's object."""
    return isinstance(value, (*PLAIN, Tensor, np.ndarray)) or is_container(value) or is_object(value)


def _is_restored(value: Any) -> bool:
    return _is_state(value) or isinstance(value, io.IOBase)


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or is_container(one) or is_object(one):
        return False
    if isinstance(one, Tensor | np.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype and is_same_content(one, other)
    return bool(one == other or one != one)
