"""How the server's loops are compiled: by numba, when first called, and kept for all checkouts of one user.

numba itself keeps what it compiled beside the file, so that every fresh clone would compile for a minute.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import caching, event


class _Shared(caching.UserWideCacheLocator):
    """The user's cache folder, by what the file says and not by where it lies."""

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)
        self._stamp = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        self._cache_path = str(Path(self._cache_path).with_name(f"echelon_{Path(file).stem}_{self._stamp[:16]}"))

    def get_source_stamp(self) -> str:
        """Whether what is kept is of this source."""
        return self._stamp


class _Kept(caching.CompileResultCacheImpl):
    """First where the user says (NUMBA_CACHE_DIR), then shared, then where numba would."""

    _locator_classes = [  # noqa: RUF012 (numba's own name and kind)
        caching.UserProvidedCacheLocator,
        _Shared,
        *(each for each in caching.CacheImpl._locator_classes if each is not caching.UserProvidedCacheLocator),
    ]


class _Cache(caching.FunctionCache):
    _impl_class = _Kept


def compiling(**options: Any) -> Callable[[Any], Any]:
    """A decorator: compiled when first called, kept where that is possible."""

    def decorate(function: Any) -> Any:
        made = njit(nogil=True, error_model="numpy", **options)(function)
        with suppress(RuntimeError):  # no folder that can be written to: compiled anew by each process
            made._cache = _Cache(function)
        return made

    return decorate


def kept_in(function: Any) -> Path | None:
    """The folder in which a compiled function is kept."""
    path = getattr(function._cache, "cache_path", None)
    return None if path is None else Path(path)


@contextmanager
def watching(each: Callable[[], None]) -> Iterator[None]:
    """`each` is called whenever this thread begins or has done one function's compilation."""
    here = threading.get_ident()

    class Watch(event.Listener):
        def on_start(self, event: Any) -> None:
            if threading.get_ident() == here:
                each()

        on_end = on_start

    with event.install_listener("numba:compile", Watch()):
        yield
