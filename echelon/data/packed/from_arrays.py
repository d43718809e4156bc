"""NumPy files, and IDX files as of MNIST."""

from __future__ import annotations

import gzip
import re
import zipfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from echelon.data.packed.manifest import ITEM_BYTES, Column
from echelon.data.packed.packing_source import PackingSource, digest_file_stats
from echelon.data.packed.shard import storage_dtype
from echelon.errors import DataError

_IDX_DTYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_IMAGES_FILE_NAME = re.compile(r"(.*?)[-_.]?images?[-.].*ubyte(\.gz)?$")


class ArrayPackingSource(PackingSource):
    """Arrays of equal length, and the structure of a sample over them."""

    def __init__(self, arrays: Mapping[str, np.ndarray], sample: Any, provenance: Mapping[str, str]) -> None:
        lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
        if len(set(lengths.values())) != 1 or not min(lengths.values()):
            lengths_text = ", ".join(f"{name}: {length:,}" for name, length in lengths.items()) or "no array at all"
            raise DataError(f"arrays of a data set must have equally many rows, at least one; found {lengths_text}")
        self.columns = tuple(_make_column(name, array) for name, array in arrays.items())
        self.samples, self.sample, self.provenance = next(iter(lengths.values())), sample, provenance
        self.row_bytes = float(sum(column.item_bytes for column in self.columns))
        self._arrays = list(arrays.values())

    def read(self, start: int, stop: int) -> Sequence[Any]:
        dtypes = map(storage_dtype, self.columns)
        pairs = zip(self._arrays, dtypes, strict=True)
        return [np.asarray(array[start:stop]).astype(dtype, copy=False) for array, dtype in pairs]


def _make_column(name: str, array: np.ndarray) -> Column:
    dtype = array.dtype.newbyteorder("=").name
    if dtype not in ITEM_BYTES or 0 in array.shape[1:]:
        raise DataError(f"array {name!r} of {array.dtype} {array.shape} cannot be packed: use non-empty number rows")
    return Column(name=name, dtype=dtype, shape=array.shape[1:])


def open_numpy_file(path: Path) -> ArrayPackingSource:
    """Open a .npy file (rows) or a .npz file (named columns)."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            sample: Any = {"dict": {name: name for name in arrays}}
        else:
            arrays, sample = {"value": np.load(path, mmap_mode="r", allow_pickle=False)}, "value"
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as a NumPy file of numbers: {error}") from None
    provenance = {"source": str(path), "kind": "NumPy", "stamp": digest_file_stats([path])}
    return ArrayPackingSource(arrays, sample, provenance)


def find_idx_pairs(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Pairs of images and labels in a folder, by the prefix of their names (`train`, `t10k`)."""
    pairs = {}
    for images in sorted(folder.iterdir()):
        match = _IMAGES_FILE_NAME.fullmatch(images.name)
        labels = folder / images.name.replace("images", "labels").replace("idx3", "idx1")
        if match and labels != images and labels.is_file():
            pairs[match[1]] = images, labels
    return pairs


def open_idx_folder(folder: Path, split: str | None) -> ArrayPackingSource:
    pairs = find_idx_pairs(folder)
    if split is None:
        split = "train" if "train" in pairs else next(iter(pairs), "")
    if split not in pairs:
        available = ", ".join(pairs) or "no pair of IDX images and labels"
        raise DataError(f"{folder} has no split {split!r}; it has {available}")
    images, labels = map(read_idx, pairs[split])
    provenance = {"source": str(folder), "kind": "IDX", "split": split, "stamp": digest_file_stats(pairs[split])}
    arrays = {"image": images, "label": labels.astype(np.int64)}
    return ArrayPackingSource(arrays, {"tuple": ["image", "label"]}, provenance)


def read_idx(path: Path) -> np.ndarray:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise DataError(f"{path} cannot be read: {error}") from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_DTYPES or len(content) < 4 + 4 * content[3]:
        raise DataError(f"{path} is not an IDX file: it begins with {content[:4].hex(' ') or 'nothing'}")
    shape = tuple(np.frombuffer(content, ">u4", content[3], 4).tolist())
    dtype, header_bytes = np.dtype(_IDX_DTYPES[content[2]]), 4 + 4 * content[3]
    value_bytes = len(content) - header_bytes
    if value_bytes != dtype.itemsize * prod(shape):
        declared = f"{shape} of {dtype.itemsize} bytes"
        raise DataError(f"{path} has {value_bytes:,} bytes of values, but its header declares {declared}")
    return np.frombuffer(content, dtype, offset=header_bytes).reshape(shape)
