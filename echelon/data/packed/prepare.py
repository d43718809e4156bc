"""Preprocessing that is done once, stored, used again, and done anew when its function or its data change."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from echelon.data.describe import kind_of
from echelon.data.digest import digest
from echelon.data.packed.from_samples import Values
from echelon.data.packed.pack import pack
from echelon.data.packed.reader import Packed
from echelon.data.source import Samples


def prepared(
    data: Any,
    folder: str | Path,
    transform: Callable[[Any], Any] | None = None,
    *,
    shards: int = 16,
    processes: int = 1,
) -> Packed:
    """`data` with `transform` applied to each sample, packed in `folder`.

    Call it where a job makes its data: ranks that call it together share the work, each sample is made by one of them, and a later
    run with the same function and the same data finds it done. Functions that `transform` calls are not looked into.
    """
    known = Samples(data)
    some = sorted({*np.linspace(0, len(known) - 1, 8, dtype=int).tolist()})
    told = {
        "source": kind_of(data),
        "kind": "prepared",
        "content": " ".join(digest(known.sample(number)) for number in some),
        "transform": "none" if transform is None else fingerprint(transform),
    }
    origin = Values(_Mapped(data, transform), told)
    pack(origin, Path(folder), shards=min(shards, origin.samples), processes=processes, overwrite=True)
    return Packed(folder)


class _Mapped:
    def __init__(self, data: Any, transform: Callable[[Any], Any] | None) -> None:
        self._data, self._transform = data, transform

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: int) -> Any:
        sample = self._data[number]
        return sample if self._transform is None else self._transform(sample)


def fingerprint(function: Any) -> str:
    """A short text that changes with what a function does: its code, its defaults, and the values that it has taken with it."""
    found = hashlib.blake2b(digest_size=16)
    _feed(function, found.update, set())
    return found.hexdigest()


def _feed(value: Any, write: Callable[[bytes], None], seen: set[int]) -> None:
    if id(value) in seen:
        return
    if isinstance(value, types.CodeType):
        write(value.co_code)
        for part in (*value.co_consts, *value.co_names):
            _feed(part, write, seen)
        return
    if isinstance(value, partial):
        seen.add(id(value))
        for part in (value.func, value.args, sorted(value.keywords.items())):
            _feed(part, write, seen)
        return
    if isinstance(value, types.FunctionType):
        seen.add(id(value))
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        for part in (value.__code__, value.__defaults__, sorted((value.__kwdefaults__ or {}).items()), cells):
            _feed(part, write, seen)
        return
    if isinstance(value, types.MethodType):
        _feed(value.__func__, write, seen)
        _feed(value.__self__, write, seen)
        return
    if isinstance(value, list | tuple | frozenset):
        write(f"{type(value).__name__} {len(value)} ".encode())
        for part in sorted(value, key=repr) if isinstance(value, frozenset) else value:
            _feed(part, write, seen)
        return
    plain = getattr(value, "__dict__", None)
    if plain is None or isinstance(value, type | types.ModuleType) or hasattr(value, "dtype"):
        write(digest(value).encode())
        return
    seen.add(id(value))
    write(f"{type(value).__qualname__} ".encode())
    call = getattr(type(value), "__call__", None)  # noqa: B004 (its code, not whether it has one)
    for part in (call, sorted(plain.items(), key=lambda item: item[0])):
        _feed(part, write, seen)
