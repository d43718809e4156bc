"""Several files as one range of addresses, read-only, so that one gather reaches rows of all of them.

NumPy and Python map one file at a time, wherever it falls. The C library lays files side by side in a range that was reserved
for them; nothing is read before it is touched, and nothing counts as this process's own memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

_PROT_NONE, _FIXED, _NORESERVE = 0, 0x10, 0x4000  # Linux
_FAILED = ctypes.c_void_p(-1).value


class Region:
    """Maps `files` one behind the other; `starts` are their first bytes in `bytes`."""

    def __init__(self, files: Sequence[tuple[Path, int]]) -> None:
        """`files`: path and size of each."""
        page = mmap.PAGESIZE
        sizes = [-(-size // page) * page for _, size in files]
        self.starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self._length = max(sum(sizes), page)
        self._address = _map(None, self._length, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1)
        for (path, size), start in zip(files, self.starts.tolist(), strict=True):
            if size:
                with path.open("rb") as file:
                    found = os.fstat(file.fileno()).st_size
                    if found != size:  # a mapping beyond the end of a file would end the process when it is read
                        raise OSError(f"it has {found:,} bytes, not {size:,}")
                    _map(self._address + start, size, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, file.fileno())

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self._length,), "data": (self._address, True)}

    @property
    def bytes(self) -> np.ndarray:
        """All of it; the region lives as long as this array or a view of it does."""
        return np.asarray(self)

    def __del__(self) -> None:
        address = getattr(self, "_address", None)
        if address is not None:
            _library().munmap(ctypes.c_void_p(address), ctypes.c_size_t(self._length))


def _map(address: int | None, length: int, protection: int, flags: int, file: int) -> int:
    found = _library().mmap(address, length, protection, flags, file, 0)
    if found == _FAILED or found is None:
        code = ctypes.get_errno()
        raise OSError(code, f"{length:,} bytes cannot be mapped: {os.strerror(code)}")
    return int(found)


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library
