"""How the server's loops are compiled: by numba, when first called, and kept for all checkouts of one user.

numba itself keeps what it compiled beside the file, so that every fresh clone would compile for a minute.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import caching, event


@lru_cache
def hash_sources(folder: Path) -> str:
    """What all files of a folder say: a function is compiled together with those that it calls, which lie in others."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))).hexdigest()


class _SourceHashLocator:
    """Of one of numba's places: what is kept there is good while no file beside the function's has changed."""

    _py_file: str

    def get_source_stamp(self) -> str:
        """Whether what is kept is of this source."""
        return hash_sources(Path(self._py_file).parent)


class _SharedCacheLocator(_SourceHashLocator, caching.UserWideCacheLocator):
    """The user's cache folder, by what the files say and not by where they lie."""

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)
        self._cache_path = str(Path(self._cache_path).with_name(f"echelon_{self.get_source_stamp()[:16]}"))


class _CacheImpl(caching.CompileResultCacheImpl):
    """First where the user says (NUMBA_CACHE_DIR), then shared, then where numba would."""

    _locator_classes: list[Any] = [  # noqa: RUF012 (numba's own name and kind)
        type("_Given", (_SourceHashLocator, caching.UserProvidedCacheLocator), {}),
        _SharedCacheLocator,
        *(
            type(f"_{locator.__name__}", (_SourceHashLocator, locator), {})
            for locator in caching.CacheImpl._locator_classes
            if locator is not caching.UserProvidedCacheLocator
        ),
    ]


class _KernelCache(caching.FunctionCache):
    _impl_class = _CacheImpl


def cached_njit(**options: Any) -> Callable[[Any], Any]:
    """A decorator: compiled when first called, kept where that is possible."""

    def decorate(function: Any) -> Any:
        compiled = njit(nogil=True, error_model="numpy", **options)(function)
        with suppress(RuntimeError):  # no folder that can be written to: compiled anew by each process
            compiled._cache = _KernelCache(function)
        return compiled

    return decorate


def cache_folder(function: Any) -> Path | None:
    """The folder in which a compiled function is kept."""
    path = getattr(function._cache, "cache_path", None)
    return None if path is None else Path(path)


@contextmanager
def watch_compilation(callback: Callable[[], None]) -> Iterator[None]:
    """`callback` is called whenever this thread begins or has done one function's compilation."""
    thread_id = threading.get_ident()

    class CompileListener(event.Listener):
        def on_start(self, event: Any) -> None:
            if threading.get_ident() == thread_id:
                callback()

        on_end = on_start

    with event.install_listener("numba:compile", CompileListener()):
        yield
