"""Safetensors files in parts: written chunk by chunk, read by their header alone.

The library's own `save` holds a file in memory twice, and its `save_file` leaves files that other users cannot read.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.errors import CheckpointError

Tensors = Mapping[str, tuple[np.dtype, Sequence[int]]]  # dtype and shape by name
DAMAGE_ERRORS = (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError)  # what a damaged file raises


def encode_header(tensors: Tensors, metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """The first bytes of a file, where each tensor begins in it, and its length. Tensors follow in this order."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        if dtype.kind not in "fiu":
            raise CheckpointError(f"{name}: the format has no {dtype}")
        start, offset = offset, offset + dtype.itemsize * math.prod(shape)
        code = f"{dtype.kind.upper()}{8 * dtype.itemsize}"
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, offset]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    offsets = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in tensors}
    return len(text).to_bytes(8, "little") + text, offsets, 8 + len(text) + offset


class SafetensorsFile:
    """A file, from its bytes or mapped: `metadata`, and the tensors by name."""

    def __init__(self, source: bytes | Path) -> None:
        data: Any = source
        if isinstance(source, Path):
            with open(source, "rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(data[:8], "little")
        if not 0 < length < 100 << 20:
            raise ValueError(f"a header of {length} bytes")
        self._tensors: dict[str, Any] = json.loads(bytes(data[8 : 8 + length]))
        self.metadata: dict[str, str] = self._tensors.pop("__metadata__")
        self._data, self._start = data, 8 + length

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name]["shape"])

    def tensor(self, name: str) -> np.ndarray:
        """A tensor: a read-only view of the data."""
        code, shape = self._tensors[name]["dtype"], self.shape(name)
        dtype = np.dtype(f"{code[0].lower()}{int(code[1:]) // 8}")
        offset = self._start + self._tensors[name]["data_offsets"][0]
        return np.frombuffer(self._data, dtype, math.prod(shape), offset).reshape(shape)
