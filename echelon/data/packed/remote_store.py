"""A folder on a remote store (anything that fsspec reads). A read that stalls fails."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

from echelon.data.packed.manifest import FILE_NAME, Manifest, parse_manifest
from echelon.errors import DataError, MissingDataError

#: Bytes per request: few enough for a slow link to deliver them within the time limit.
_CHUNK_BYTES = 2**22

_Report = Callable[[int], None]  # of received bytes

_T = TypeVar("_T")


def is_url(folder: Any) -> bool:
    return isinstance(folder, str) and "://" in folder


def redact_credentials(url: object) -> str:
    """Hide the user name and password in a URL, or in a message with one."""
    return re.sub(r"://[^/\s]*@", "://***@", str(url))


class RemoteStore:
    """A folder on a remote store. `timeout`: seconds without a byte, also while connecting, after which a read fails."""

    def __init__(self, url: str, timeout: float) -> None:
        try:
            from fsspec.core import url_to_fs
        except ModuleNotFoundError:
            raise DataError(f"{redact_credentials(url)} needs fsspec: pip install 'echelon[remote]'") from None
        self.url, self._timeout = url.rstrip("/"), timeout
        self.display_url = redact_credentials(self.url)
        self._connect = url_to_fs

    def read_manifest(self) -> Manifest:
        (text,) = self.read_spans(FILE_NAME, [(0, None)])
        return parse_manifest(text, f"{self.display_url}/{FILE_NAME}")

    def copy_file(self, name: str, path: Path) -> None:
        """Copy a file of the folder over the bytes allocated in `path`; a longer file is not read to its end."""
        # Opened now: a read that is abandoned, but continues later, must not write to another file of this name.
        target = path.open("r+b", buffering=0)
        reserved_bytes = os.fstat(target.fileno()).st_size

        def write_chunk(chunk: memoryview) -> None:
            try:
                while chunk:
                    chunk = chunk[target.write(chunk) :]
            except OSError as error:
                raise DataError(f"{path} cannot be written: {error.strerror}; give cache= another disk") from None

        def transfer(report: _Report) -> None:
            with target:
                for chunk in self._read_chunks(name, report):
                    write_chunk(memoryview(chunk))
                    if target.tell() > reserved_bytes:
                        break
                target.truncate()

        self._run_with_timeout(name, transfer)

    def read_spans(self, name: str, spans: Sequence[tuple[int, int | None]]) -> list[bytes]:
        """Read spans of a file of the folder, each from and to (None: to its end)."""

        def read_all(report: _Report) -> list[bytes]:
            return [b"".join(self._read_chunks(name, report, start, stop)) for start, stop in spans]

        return self._run_with_timeout(name, read_all)

    def _read_chunks(self, name: str, report: _Report, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yield the content of a file as it arrives. fsspec caches the connection, and makes a new one in a forked process."""
        filesystem, folder = self._connect(self.url)
        # Without fsspec's own buffer, which would read up to 50 MB before the first byte arrives here.
        with filesystem.open(f"{folder}/{name}", "rb", block_size=_CHUNK_BYTES, cache_type="none") as file:
            if start:
                file.seek(start)
            while chunk := file.read(_CHUNK_BYTES if stop is None else min(_CHUNK_BYTES, stop - start)):
                start += len(chunk)
                report(len(chunk))
                yield chunk

    def _run_with_timeout(self, name: str, operation: Callable[[_Report], _T]) -> _T:
        """Run `operation` in a thread, which is abandoned if it stalls."""
        location = f"{self.display_url}/{name}"
        last_progress, received_bytes = time.monotonic(), 0

        def report(size: int) -> None:
            nonlocal last_progress, received_bytes
            last_progress, received_bytes = time.monotonic(), received_bytes + size

        result = run_in_thread(lambda: operation(report))
        while not wait([result], last_progress + self._timeout - time.monotonic()).done:
            if time.monotonic() >= last_progress + self._timeout:
                problem = f"received nothing for {self._timeout:g} s (after {received_bytes:,} bytes)"
                raise DataError(f"{location}: {problem}; try again, or increase timeout=")
        error = result.exception()
        if error is None or isinstance(error, DataError):
            return result.result()
        # fsspec reports a server that does not answer as a missing file, with the reason as its cause.
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        error_type = MissingDataError if isinstance(cause, FileNotFoundError) else DataError
        raise error_type(f"{location} cannot be read: {type(cause).__name__}: {redact_credentials(cause)}") from None


def run_in_thread(work: Callable[[], _T]) -> Future[_T]:
    """Run `work` in a thread that does not keep the process alive."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="echelon-remote").start()
    return future
