"""Digests samples, to compare them between processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor


def digest(sample: Any) -> str:
    """Digest a sample: equal for equal samples. Values that are neither numbers nor text count by their type only, because their repr may
    hold an address."""
    hasher = hashlib.blake2b(digest_size=16)
    _hash_value(sample, hasher.update)
    return hasher.hexdigest()


def _hash_value(value: Any, write: Callable[[bytes], None]) -> None:
    write(f"{type(value).__name__} ".encode())
    if isinstance(value, Tensor):
        write(f"{value.dtype} {tuple(value.shape)} ".encode())
        if value.layout is torch.strided and not value.is_quantized and not value.is_meta:
            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            write(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        write(f"{value.dtype} {value.shape} ".encode())
        write(value.tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            write(f"{key!r} ".encode())
            _hash_value(value[key], write)
    elif isinstance(value, Set):  # its order differs between processes
        for part_digest in sorted(map(digest, value)):
            write(part_digest.encode())
    elif isinstance(value, list | tuple | np.ndarray):
        write(f"{len(value)} ".encode())
        for part in value:
            _hash_value(part, write)
    elif value is None or isinstance(value, str | bytes | int | float | complex | np.generic):
        write(f"{value!r} ".encode())
