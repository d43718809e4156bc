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
from echelon.trials.reachable import GENERATOR_TYPES, PLAIN_TYPES, is_container, is_user_defined, is_user_object
from echelon.trials.snapshot import (
    MAX_ITEMS,
    Snapshot,
    copy_content,
    get_content,
    get_file_position,
    has_mutable_content,
    is_same_content,
    set_content,
)

#: Bytes of tensors and arrays that are copied; torch counts the changes of further tensors.
_MAX_COPIED_BYTES = 2**26
#: Bytes of a tensor among globals, closures and attributes of classes that is copied.
_MAX_SETTING_BYTES = 2**22
#: Items of longer containers are not followed: they are samples.
_MAX_FOLLOWED_ITEMS = 10_000


class DatasetState:
    """What a data set keeps, as it is now."""

    def __init__(self, data: Any) -> None:
        reachable = _find_reachable_state(data)
        self._saved_attributes = [
            (value, dict(vars(value))) for value in reachable if hasattr(value, "__dict__") and not _is_code(value)
        ]
        self._saved_contents: list[tuple[Any, Any]] = []
        self._tensor_versions: list[tuple[Tensor, int]] = []
        bytes_left = _MAX_COPIED_BYTES
        for value in reachable:
            if not has_mutable_content(value) or (is_container(value) and len(value) > MAX_ITEMS):
                continue
            size = value.nbytes if isinstance(value, Tensor | np.ndarray) else 0
            if size <= bytes_left:
                bytes_left -= size
                self._saved_contents.append((value, copy_content(value)))
            elif isinstance(value, Tensor):
                self._tensor_versions.append((value, value._version))
        # What its functions, classes and objects hold: closures, globals, attributes of classes, iterators.
        roots = {
            f"part {index}": value
            for index, value in enumerate(reachable)
            if _is_code(value) or _holds_iterators(value)
        }
        saved_ids = {id(value) for value, _ in (*self._saved_contents, *self._tensor_versions)}
        self._code_state = Snapshot(roots, excluded_ids=saved_ids, max_tensor_bytes=_MAX_SETTING_BYTES)
        files = [(value, index) for value in reachable if (index := get_file_position(value)) is not None]
        self._file_positions = [*files, *self._code_state.file_positions]
        caches = _find_lru_caches(reachable, self._code_state)
        self._cache_infos = [(value, value.cache_info()) for value in caches]
        self._cached_function_state = Snapshot(
            {f"cached {index}": value.__wrapped__ for index, value in enumerate(caches)},
            max_tensor_bytes=_MAX_SETTING_BYTES,
        )

    def restore(self, *, with_generators: bool = True) -> None:
        """Have it keep again what it kept; its random generators too, and where it is in files. Files that it closed meanwhile are opened again.
        A `functools.lru_cache` is emptied where it was empty; of others nobody but Python knows what they hold."""
        reopened = {id(file): _reopen_file(file, position) for file, position in self._file_positions if file.closed}
        for file, position in self._file_positions:
            if not file.closed and get_file_position(file) != position:
                file.seek(position)
        with warnings.catch_warnings(
            action="ignore", category=ResourceWarning
        ):  # Python closes files that were opened meanwhile
            for value, attributes in self._saved_attributes:
                current = vars(value)
                for name in [
                    name for name, attribute in current.items() if _is_restored(attribute) and name not in attributes
                ]:
                    del current[name]
                for name, attribute in attributes.items():
                    saved_value = reopened.get(id(attribute), attribute)
                    if _is_restored(current.get(name)) and (saved_value is not None or attribute is None):
                        current[name] = saved_value
        for value, saved_content in self._saved_contents:
            if (with_generators or not isinstance(value, GENERATOR_TYPES)) and not is_same_content(
                get_content(value), saved_content
            ):
                set_content(value, saved_content)
        self._code_state.restore(with_generators=with_generators)
        self._cached_function_state.restore(with_generators=with_generators)
        for function, saved_value in self._cache_infos:
            if not saved_value.currsize and function.cache_info().currsize:
                function.cache_clear()

    def has_changed(self, *, with_generators: bool = False, with_positions: bool = False) -> bool:
        """Whether readings changed it; its random generators, and where it is in files and what caches have missed, count where asked for."""
        if self.has_unrestorable_changes():
            return True
        if with_positions and (
            any(get_file_position(file) != saved_position for file, saved_position in self._file_positions)
            or any(function.cache_info().misses != saved_info.misses for function, saved_info in self._cache_infos)
        ):
            return True
        for value, saved in self._saved_attributes:
            current = vars(value)
            if any(_is_state(entry) and not _is_equal(entry, saved.get(name)) for name, entry in current.items()):
                return True
        contents = [
            entry for entry in self._saved_contents if with_generators or not isinstance(entry[0], GENERATOR_TYPES)
        ]
        snapshots = (self._code_state, self._cached_function_state)
        return any(entry.has_changed(with_generators=with_generators) for entry in snapshots) or not all(
            is_same_content(get_content(value), saved) for value, saved in contents
        )

    def has_unrestorable_changes(self) -> bool:
        """Whether readings changed what is too large to be put back."""
        return any(value._version != version for value, version in self._tensor_versions)


@contextlib.contextmanager
def preserve_datasets(*values: Any) -> Iterator[None]:
    """Readings inside leave no trace in the data sets and collate functions `values`."""
    states = [DatasetState(item) for item in values if may_change_on_read(item)]
    try:
        yield
    finally:
        for item in states:
            item.restore()


def may_change_on_read(value: Any) -> bool:
    """Whether reading a sample of it, or calling it, runs code that may change what it keeps."""
    if type(value) is Subset:
        return may_change_on_read(value.dataset)
    if type(value) is ConcatDataset:
        return any(map(may_change_on_read, value.datasets))
    if type(value) in (list, tuple):  # of samples: those of one are like those of all
        return any(map(_is_dataset_or_object, _find_reachable_state(value[:1])))
    return type(value) is not TensorDataset and (_is_dataset_or_object(value) or _is_code(value))


def _is_dataset_or_object(value: Any) -> bool:
    return isinstance(value, Dataset) or is_user_object(value)


def _find_reachable_state(data: Any) -> list[Any]:
    """Data sets, objects, containers, tensors, arrays, generators and code that are reached from a data set by attributes and items, each once.
    Code is not followed further."""
    reachable: dict[int, Any] = {}
    pending = [data]
    while pending:
        value = pending.pop()
        is_stateful = (
            _is_dataset_or_object(value)
            or has_mutable_content(value)
            or isinstance(value, tuple | io.IOBase)
            or _is_code(value)
        )
        if id(value) in reachable or not is_stateful:
            continue
        reachable[id(value)] = value
        if is_container(value):
            if len(value) <= _MAX_FOLLOWED_ITEMS:
                pending += value.values() if isinstance(value, dict) else value
        elif _has_attributes(value):
            pending += [*vars(value).values(), type(value)]
    return list(reachable.values())


def _holds_iterators(value: Any) -> bool:
    return isinstance(value, Dataset) or any(map(is_plain_iterator, getattr(value, "__dict__", {}).values()))


def _find_lru_caches(reachable: list[Any], code_state: Snapshot) -> list[Any]:
    """Functions and methods with a `functools.lru_cache` that readings may call."""
    attributes = [
        value
        for owner in reachable
        if isinstance(owner, type)
        for base in owner.__mro__
        for value in vars(base).values()
    ]
    candidates = [*reachable, *attributes, *code_state.unfollowed_values]
    return list(
        {
            id(value): value for value in candidates if isinstance(value, _lru_cache_wrapper) and is_user_defined(value)
        }.values()
    )


def _has_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") and not (
        has_mutable_content(value) or _is_code(value) or isinstance(value, io.IOBase)
    )


def _reopen_file(file: Any, file_offset: int) -> Any:
    """A closed file, open again at a position; None where nothing says how to open it, or it is gone."""
    with contextlib.suppress(OSError):
        reopened: Any = None
        if isinstance(file, io.TextIOWrapper) and isinstance(file.buffer, io.BufferedReader):
            reopened = Path(file.name).open(encoding=file.encoding, errors=file.errors)  # noqa: SIM115 (it stays open)
        elif isinstance(file, io.BufferedReader):
            reopened = Path(file.name).open("rb")  # noqa: SIM115 (it stays open)
        if reopened is not None:
            reopened.seek(file_offset)
        return reopened
    return None


def _is_code(value: Any) -> bool:
    """Whether it is code of the user's, or an object that holds its attributes otherwise than in a dict: `Snapshot` follows these."""
    if isinstance(value, FunctionType | type | _lru_cache_wrapper):
        return is_user_defined(value)
    return isinstance(value, MethodType | partial) or (is_user_object(value) and not hasattr(value, "__dict__"))


def _is_state(value: Any) -> bool:
    """Whether an attribute with this value is one that readings change: not a file, a connection or a library's object."""
    return isinstance(value, (*PLAIN_TYPES, Tensor, np.ndarray)) or is_container(value) or is_user_object(value)


def _is_restored(value: Any) -> bool:
    return _is_state(value) or isinstance(value, io.IOBase)


def _is_equal(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if type(first) is not type(second) or is_container(first) or is_user_object(first):
        return False
    if isinstance(first, Tensor | np.ndarray):
        return first.shape == second.shape and first.dtype == second.dtype and is_same_content(first, second)
    return bool(first == second or first != first)
