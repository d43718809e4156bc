"""Maps several files into one range of addresses, read-only, so that one gather reaches rows of all of them.

NumPy and Python map one file at a time, at an address that they do not choose. The C library maps files side by side into a reserved
range. Nothing is read before it is accessed, and nothing counts as this process's own memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

#: Limit of the address space left free: a process has about 100 TB.
_MAX_GAP_BYTES = 2**42
#: Bytes of a huge page, on x86 and on ARM with small pages of 4 KB.
HUGE_PAGE_BYTES = 2**21
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE, _MADV_HUGEPAGE = 0, 0x10, 0x4000, 14  # Linux
_MAP_FAILED = ctypes.c_void_p(-1).value


class MappedRegion:
    """Maps `files` one after the other; `starts` are their first bytes in `bytes`."""

    def __init__(self, files: Sequence[tuple[Path, int]], gaps: Sequence[int], page_bytes: int) -> None:
        """`files`: path and size of each. `gaps`: bytes left free before each (empty: none), in whole pages. `page_bytes`: HUGE_PAGE_BYTES asks the
        kernel to read and map that much at a time, which is faster where the file system supports it."""
        self.has_gaps = any(gaps)
        self._sizes = [size for _, size in files]
        padded_sizes = [-(-size // page_bytes) * page_bytes for size in self._sizes]
        gap_bytes = np.array(gaps or [0] * len(files), np.int64)
        self.starts = np.cumsum([0, *padded_sizes[:-1]]) + np.cumsum(gap_bytes)
        self._length = max(sum(padded_sizes) + int(gap_bytes.sum()), page_bytes)
        self._reserved_bytes = self._length + page_bytes - mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._first = _mmap(None, self._reserved_bytes, _PROT_NONE, flags, -1)
        self._address = -(-self._first // page_bytes) * page_bytes
        for (path, size), start in zip(files, self.starts.tolist(), strict=True):
            if not size:
                continue
            with path.open("rb") as file:
                actual_size = os.fstat(file.fileno()).st_size
                if actual_size != size:  # reading a mapping beyond the end of its file would kill the process
                    raise OSError(f"it has {actual_size:,} bytes, not {size:,}")
                flags = mmap.MAP_SHARED | _MAP_FIXED
                address = _mmap(self._address + start, size, mmap.PROT_READ, flags, file.fileno())
                if page_bytes == HUGE_PAGE_BYTES:
                    _libc().madvise(address, size, _MADV_HUGEPAGE)  # if refused, pages stay small

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self._length,), "data": (self._address, True)}

    @property
    def bytes(self) -> np.ndarray:
        """The whole range; the region lives as long as this array or a view of it."""
        return np.asarray(self)

    def file_bytes(self, index: int) -> np.ndarray:
        start = int(self.starts[index])
        return self.bytes[start : start + self._sizes[index]]

    def __del__(self) -> None:
        address = getattr(self, "_first", None)
        if address is not None:
            _libc().munmap(address, self._reserved_bytes)


def find_aligned_gaps(sizes: Sequence[int], offsets: Sequence[int], row_size: int, page_size: int) -> list[int] | None:
    """Find gaps before files of `sizes` that put their `offsets` whole multiples of `row_size` apart; None where none do, because files
    are mapped in whole pages, or only vast ones."""
    common_divisor = gcd(page_size, row_size)
    inverse = pow(page_size // common_divisor, -1, row_size // common_divisor)
    gaps, position = [], 0
    for size, offset in zip(sizes, offsets, strict=True):
        shortfall = offsets[0] - position - offset
        if shortfall % common_divisor:
            return None
        gaps.append(shortfall // common_divisor * inverse % (row_size // common_divisor) * page_size)
        position += gaps[-1] + -(-size // page_size) * page_size
    return gaps if sum(gaps) < _MAX_GAP_BYTES else None


def _mmap(address: int | None, length: int, protection: int, flags: int, file: int) -> int:
    mapped = _libc().mmap(address, length, protection, flags, file, 0)
    if mapped == _MAP_FAILED or mapped is None:
        code = ctypes.get_errno()
        raise OSError(code, f"{length:,} bytes cannot be mapped: {os.strerror(code)}")
    return int(mapped)


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    address, length, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = [address, length, number, number, number, ctypes.c_long]
    library.munmap.argtypes = [address, length]
    library.madvise.argtypes = [address, length, number]
    return library
