"""What a data set keeps between reads: counters, running statistics, caches, samples that it edits in place.

Trial reads leave no trace in it.
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

from echelon.trials import snapshot
from echelon.trials.iterator_replay import is_plain_iterator
from echelon.trials.reachable import PLAIN_TYPES, is_container, is_user_defined, is_user_object

#: Bytes of tensors and arrays that are copied; for further tensors torch counts the changes.
_MAX_COPIED_BYTES = 2**26
#: Bytes of a tensor among globals, closures and attributes of classes that is copied.
_MAX_SETTING_BYTES = 2**22
#: Items of longer containers are not followed: they are samples.
_MAX_FOLLOWED_ITEMS = 10_000


class DatasetState:
    """What a data set keeps, as it is now."""

    def __init__(self, data: Any) -> None:
        reachable = _find_reachable_state(data)
        self._saved_attributes = [(v, dict(vars(v))) for v in reachable if hasattr(v, "__dict__") and not _is_code(v)]
        copied: list[Any] = []
        self._tensor_versions: list[tuple[Tensor, int]] = []
        bytes_left = _MAX_COPIED_BYTES
        for value in reachable:
            if not snapshot.has_mutable_content(value) or (is_container(value) and len(value) > snapshot.MAX_ITEMS):
                continue
            size = value.nbytes if isinstance(value, Tensor | np.ndarray) else 0
            if size <= bytes_left:
                bytes_left -= size
                copied.append(value)
            elif isinstance(value, Tensor):
                self._tensor_versions.append((value, value._version))
        self._contents = snapshot.SavedContents(copied)
        # What its functions, classes and objects hold: closures, globals, attributes of classes, iterators.
        holders = [v for v in reachable if any(map(is_plain_iterator, getattr(v, "__dict__", {}).values()))]
        holders += [value for value in reachable if _is_code(value) or isinstance(value, Dataset)]
        roots = {f"part {index}": value for index, value in enumerate(holders)}
        saved_ids = {id(value) for value in (*copied, *(tensor for tensor, _ in self._tensor_versions))}
        code_state = snapshot.Snapshot(roots, excluded_ids=saved_ids, max_tensor_bytes=_MAX_SETTING_BYTES)
        self._file_positions = [*snapshot.list_file_positions(reachable), *code_state.file_positions]
        classes = [base for owner in reachable if isinstance(owner, type) for base in owner.__mro__]
        attributes = [value for owner in classes for value in vars(owner).values()]
        candidates = {id(value): value for value in (*reachable, *attributes, *code_state.unfollowed_values)}.values()
        caches = [value for value in candidates if isinstance(value, _lru_cache_wrapper) and is_user_defined(value)]
        self._cache_infos = [(value, value.cache_info()) for value in caches]
        cached_functions = {f"cached {index}": value.__wrapped__ for index, value in enumerate(caches)}
        self._snapshots = (code_state, snapshot.Snapshot(cached_functions, max_tensor_bytes=_MAX_SETTING_BYTES))

    def restore(self, *, with_generators: bool = True) -> None:
        """Restore it, with its random generators if asked for and its positions in files; files that it has closed since are opened again. A
        `functools.lru_cache` is cleared if it was empty: the content of others is not accessible."""
        reopened = {id(file): _reopen_file(file, position) for file, position in self._file_positions if file.closed}
        snapshot.restore_file_positions(self._file_positions)
        # Python closes files that were opened since.
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            for value, attributes in self._saved_attributes:
                current = vars(value)
                for name in [n for n, item in current.items() if _is_restored(item) and n not in attributes]:
                    del current[name]
                for name, item in attributes.items():
                    saved = reopened.get(id(item), item)
                    if _is_restored(current.get(name)) and (saved is not None or item is None):
                        current[name] = saved
        for state in (self._contents, *self._snapshots):
            state.restore(with_generators=with_generators)
        for function, info in self._cache_infos:
            if not info.currsize and function.cache_info().currsize:
                function.cache_clear()

    def has_changed(self, *, with_generators: bool = False, with_positions: bool = False) -> bool:
        """Whether reads changed it; generators, and positions in files and misses of caches, count where asked for."""
        if self.has_unrestorable_changes():
            return True
        if with_positions and (
            any(snapshot.get_file_position(file) != position for file, position in self._file_positions)
            or any(function.cache_info().misses != info.misses for function, info in self._cache_infos)
        ):
            return True
        for value, saved in self._saved_attributes:
            current = {name: item for name, item in vars(value).items() if _is_state(item)}
            if not all(snapshot.is_equal(item, saved.get(name)) for name, item in current.items()):
                return True
        return any(state.has_changed(with_generators=with_generators) for state in (self._contents, *self._snapshots))

    def has_unrestorable_changes(self) -> bool:
        """Whether reads changed what is too large to be put back."""
        return any(value._version != version for value, version in self._tensor_versions)


@contextlib.contextmanager
def preserve_datasets(*values: Any) -> Iterator[None]:
    """Reads inside leave no trace in the data sets and collate functions `values`."""
    states = [DatasetState(value) for value in values if may_change_on_read(value)]
    try:
        yield
    finally:
        for state in states:
            state.restore()


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
    """What is reached from a data set by attributes and items: data sets, objects, containers, tensors, arrays, generators, and code, which is
    not followed further."""
    reachable: dict[int, Any] = {}
    pending = [data]
    while pending:
        value = pending.pop()
        is_code, is_mutable = _is_code(value), snapshot.has_mutable_content(value)
        is_file = isinstance(value, io.IOBase)
        is_stateful = is_code or is_mutable or is_file or isinstance(value, tuple) or _is_dataset_or_object(value)
        if id(value) in reachable or not is_stateful:
            continue
        reachable[id(value)] = value
        if is_container(value):
            if len(value) <= _MAX_FOLLOWED_ITEMS:
                pending += value.values() if isinstance(value, dict) else value
        elif hasattr(value, "__dict__") and not (is_mutable or is_code or is_file):
            pending += [*vars(value).values(), type(value)]
    return list(reachable.values())


def _reopen_file(file: Any, position: int) -> Any:
    """A closed file, open again at `position`; None where nothing says how to open it, or it is gone."""
    arguments: dict[str, Any] = {}
    if isinstance(file, io.TextIOWrapper) and isinstance(file.buffer, io.BufferedReader):
        arguments = {"encoding": file.encoding, "errors": file.errors}
    elif isinstance(file, io.BufferedReader):
        arguments = {"mode": "rb"}
    else:
        return None
    with contextlib.suppress(OSError):
        reopened = Path(file.name).open(**arguments)  # noqa: SIM115 (it stays open)
        reopened.seek(position)
        return reopened
    return None


def _is_code(value: Any) -> bool:
    """Whether it is the user's code, or an object whose attributes are in no dict: `Snapshot` follows these."""
    if isinstance(value, FunctionType | type | _lru_cache_wrapper):
        return is_user_defined(value)
    return isinstance(value, MethodType | partial) or (is_user_object(value) and not hasattr(value, "__dict__"))


def _is_state(value: Any) -> bool:
    """Whether reads may change an attribute with this value: not a file, a connection or a library's object."""
    return isinstance(value, (*PLAIN_TYPES, Tensor, np.ndarray)) or is_container(value) or is_user_object(value)


def _is_restored(value: Any) -> bool:
    return _is_state(value) or isinstance(value, io.IOBase)
