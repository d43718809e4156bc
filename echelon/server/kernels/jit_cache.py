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
def stamp_of(folder: Path) -> str:
    """What all files of a folder say: a function is compiled together with those that it calls, which lie in others."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))).hexdigest()


class _Stamped:
    """Of one of numba's places: what is kept there is good while no file beside the function's has changed."""

    _py_file: str

    def get_source_stamp(self) -> str:
        """Whether what is kept is of this source."""
        return stamp_of(Path(self._py_file).parent)


class _Shared(_Stamped, caching.UserWideCacheLocator):
    """The user's cache folder, by what the files say and not by where they lie."""

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)
        self._cache_path = str(Path(self._cache_path).with_name(f"echelon_{self.get_source_stamp()[:16]}"))


class _Kept(caching.CompileResultCacheImpl):
    """First where the user says (NUMBA_CACHE_DIR), then shared, then where numba would."""

    _locator_classes: list[Any] = [  # noqa: RUF012 (numba's own name and kind)
        type("_Given", (_Stamped, caching.UserProvidedCacheLocator), {}),
        _Shared,
        *(
            type(f"_{each.__name__}", (_Stamped, each), {})
            for each in caching.CacheImpl._locator_classes
            if each is not caching.UserProvidedCacheLocator
        ),
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
