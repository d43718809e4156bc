"""A folder on a remote store (anything that fsspec reads). A read that stalls ends with a message."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from echelon.data.packed import manifest as documents
from echelon.data.packed.manifest import Manifest
from echelon.errors import DataError, LostError

#: Bytes that are asked for at once: few enough that a slow link brings them within the time limit, many for one request.
_PIECE = 2**22

_T = TypeVar("_T")


def is_url(folder: Any) -> bool:
    """Whether it is an address of a store, as s3://bucket/folder."""
    return isinstance(folder, str) and "://" in folder


def shown(text: object) -> str:
    """A folder, or a message that names one, without the name and the password that an address may hold."""
    return re.sub(r"://[^/\s]*@", "://***@", str(text))


class Store:
    """A folder on a remote store. `timeout`: seconds without a byte, also while connecting, after which a read is given up."""

    def __init__(self, url: str, timeout: float) -> None:
        try:
            from fsspec.core import url_to_fs
        except ModuleNotFoundError:
            raise DataError(f"{shown(url)}: remote data needs fsspec: pip install 'echelon[remote]'") from None
        self.url, self._timeout = url.rstrip("/"), timeout
        self.shown = shown(self.url)
        self._connect = url_to_fs

    def manifest(self) -> Manifest:
        """What the folder holds."""
        return documents.read(
            self._guarded(documents.NAME, lambda told: b"".join(self._pieces(documents.NAME, told))),
            f"{self.shown}/{documents.NAME}",
        )

    def copy(self, name: str, path: Path) -> None:
        """A file of the folder into `path`, over the bytes that were reserved there; a longer one is not read to its end."""
        # Opened here and now: a read that is given up and comes to life later must find no other file under this name.
        target = path.open("r+b", buffering=0)
        room = os.fstat(target.fileno()).st_size

        def put(piece: memoryview) -> None:
            try:
                while piece:
                    piece = piece[target.write(piece) :]
            except OSError as error:
                raise DataError(f"{path} cannot be written: {error.strerror}; give cache= another disk") from None

        def get(told: Callable[[int], None]) -> None:
            with target:
                for piece in self._pieces(name, told):
                    put(memoryview(piece))
                    if target.tell() > room:
                        break
                target.truncate()

        self._guarded(name, get)

    def parts(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Some spans of a file of the folder, from and to."""

        def get(told: Callable[[int], None]) -> list[bytes]:
            return [b"".join(self._pieces(name, told, start, stop)) for start, stop in spans]

        return self._guarded(name, get)

    def _pieces(
        self, name: str, told: Callable[[int], None], start: int = 0, stop: int | None = None
    ) -> Iterator[bytes]:
        """The content of a file, as it comes. fsspec remembers the connection, and makes a new one in a forked process."""
        system, folder = self._connect(self.url)
        # Without a buffer of fsspec's own, which would be filled with up to 50 MB before the first byte shows here.
        with system.open(f"{folder}/{name}", "rb", block_size=_PIECE, cache_type="none") as source:
            if start:
                source.seek(start)
            while piece := source.read(_PIECE if stop is None else min(_PIECE, stop - start)):
                start += len(piece)
                told(len(piece))
                yield piece

    def _guarded(self, name: str, get: Callable[[Callable[[int], None]], _T]) -> _T:
        """`get` in a thread of its own: one that never comes back is left behind."""
        where = f"{self.shown}/{name}"
        moved, done = threading.Event(), threading.Event()
        answer: list[Any] = []
        count = 0

        def told(size: int) -> None:
            nonlocal count
            count += size
            moved.set()

        def run() -> None:
            try:
                answer.append((get(told), None))
            except BaseException as error:
                answer.append((None, error))
            done.set()
            moved.set()

        threading.Thread(target=run, daemon=True, name="echelon-remote").start()
        while not done.is_set():
            moved.clear()
            if not done.is_set() and not moved.wait(self._timeout):
                raise DataError(
                    f"{where}: no byte came for {self._timeout:g} s (after {count:,}); try again, or give timeout= more"
                )
        value, error = answer[0]
        if isinstance(error, DataError):
            raise error
        if error is not None:
            # fsspec tells of a server that does not answer as of a file that is not there, and keeps the reason behind it.
            reason = error.__cause__ if isinstance(error.__cause__, OSError) else error
            kind = LostError if isinstance(reason, FileNotFoundError) else DataError
            raise kind(f"{where} cannot be read: {type(reason).__name__}: {shown(reason)}") from None
        found: _T = value
        return found
