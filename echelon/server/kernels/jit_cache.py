"""Compile the kernels with numba when they are first called, and cache them for all checkouts of one user.

numba's own cache lies in the source folder, so every fresh clone would compile for a minute.
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
    """A hash of all sources in a folder: a kernel is compiled together with those that it calls in other files."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))).hexdigest()


class _SourceHashLocator:
    """Invalidates the cache when any file in the function's folder changes."""

    _py_file: str

    def get_source_stamp(self) -> str:
        return hash_sources(Path(self._py_file).parent)


class _SharedCacheLocator(_SourceHashLocator, caching.UserWideCacheLocator):
    """The user's cache folder, by content instead of path."""

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)
        self._cache_path = str(Path(self._cache_path).with_name(f"echelon_{self.get_source_stamp()[:16]}"))


class _CacheImpl(caching.CompileResultCacheImpl):
    """Try NUMBA_CACHE_DIR, then the shared folder, then numba's own choices."""

    _locator_classes: list[Any] = [  # noqa: RUF012 (numba's own name and kind)
        type("_UserProvided", (_SourceHashLocator, caching.UserProvidedCacheLocator), {}),
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
    """A decorator that compiles a function on its first call, and caches it if a folder is writable."""

    def decorate(function: Any) -> Any:
        compiled = njit(nogil=True, error_model="numpy", **options)(function)
        with suppress(RuntimeError):  # no writable folder: each process compiles
            compiled._cache = _KernelCache(function)
        return compiled

    return decorate


compiled, inlined = cached_njit(), cached_njit(forceinline=True)


def cache_folder(function: Any) -> Path | None:
    """The folder in which a compiled function is cached."""
    path = getattr(function._cache, "cache_path", None)
    return None if path is None else Path(path)


@contextmanager
def watch_compilation(callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` whenever this thread starts or finishes compiling a function."""
    thread_id = threading.get_ident()

    class CompileListener(event.Listener):
        def on_start(self, event: Any) -> None:
            if threading.get_ident() == thread_id:
                callback()

        on_end = on_start

    with event.install_listener("numba:compile", CompileListener()):
        yield
