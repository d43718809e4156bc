"""NumPy files and the IDX files of MNIST and its relatives, as they lie on the disk."""

from __future__ import annotations

import gzip
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.data.packed.manifest import ITEMS, Column
from echelon.data.packed.packing_source import Origin, stamp
from echelon.data.packed.shard import stored
from echelon.errors import DataError

_IDX = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_PAIR = re.compile(r"(.*?)[-_.]?images?[-.].*ubyte(\.gz)?$")


class Arrays(Origin):
    """Arrays of equal length; `sample` is a tuple of a row of each, in their order, a dict, or the row itself."""

    def __init__(self, arrays: Mapping[str, np.ndarray], sample: Any, provenance: Mapping[str, str]) -> None:
        lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
        if len(set(lengths.values())) != 1 or not min(lengths.values()):
            said = ", ".join(f"{name}: {length:,}" for name, length in lengths.items()) or "no array at all"
            raise DataError(f"arrays of one data set have equally many rows, at least one; here are {said}")
        self.columns = tuple(_column(name, array) for name, array in arrays.items())
        self.samples, self.sample, self.provenance = next(iter(lengths.values())), sample, provenance
        self.row_bytes = float(sum(column.item for column in self.columns))
        self._arrays = list(arrays.values())

    def read(self, start: int, stop: int) -> Sequence[Any]:
        return [
            np.asarray(array[start:stop]).astype(stored(column), copy=False)
            for array, column in zip(self._arrays, self.columns, strict=True)
        ]


def _column(name: str, array: np.ndarray) -> Column:
    dtype = array.dtype.newbyteorder("=").name
    if dtype not in ITEMS or 0 in array.shape[1:]:
        raise DataError(
            f"array {name!r} of {array.dtype} {array.shape} cannot be packed: make it numbers, with rows that hold some"
        )
    return Column(name=name, dtype=dtype, shape=array.shape[1:])


def numpy_file(path: Path) -> Arrays:
    """A .npy file (rows), or a .npz file (named columns)."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            sample: Any = {"dict": {name: name for name in arrays}}
        else:
            arrays, sample = {"value": np.load(path, mmap_mode="r", allow_pickle=False)}, "value"
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as a NumPy file of numbers: {error}") from None
    return Arrays(arrays, sample, {"source": str(path), "kind": "NumPy", "stamp": stamp([path])})


def idx_pairs(folder: Path) -> dict[str, tuple[Path, Path]]:
    """The pairs of images and labels in a folder, by what their names begin with (`train`, `t10k`)."""
    found = {}
    for images in sorted(folder.iterdir()):
        match = _PAIR.fullmatch(images.name)
        labels = folder / images.name.replace("images", "labels").replace("idx3", "idx1")
        if match and labels != images and labels.is_file():
            found[match[1]] = images, labels
    return found


def idx_folder(folder: Path, split: str | None) -> Arrays:
    """A folder of MNIST-style files: samples are (image, label)."""
    pairs = idx_pairs(folder)
    if split is None and len(pairs) > 1:
        split = "train" if "train" in pairs else None
    chosen = split if split is not None else next(iter(pairs), "")
    if chosen not in pairs:
        raise DataError(
            f"{folder} has no split {chosen!r}; it has {', '.join(pairs) or 'no pair of IDX images and labels'}"
        )
    files = pairs[chosen]
    images, labels = map(read_idx, files)
    told = {"source": str(folder), "kind": "IDX", "split": chosen, "stamp": stamp(files)}
    return Arrays({"image": images, "label": labels.astype(np.int64)}, {"tuple": ["image", "label"]}, told)


def read_idx(path: Path) -> np.ndarray:
    """The array in an IDX file, packed with gzip or not."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise DataError(f"{path} cannot be read: {error}") from None
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _IDX or len(raw) < 4 + 4 * raw[3]:
        raise DataError(f"{path} is no IDX file: it begins with {raw[:4].hex(' ') or 'nothing'}")
    shape = tuple(np.frombuffer(raw, ">u4", raw[3], 4).tolist())
    dtype, first = np.dtype(_IDX[raw[2]]), 4 + 4 * raw[3]
    if len(raw) - first != dtype.itemsize * int(np.prod(shape, dtype=object)):
        raise DataError(
            f"{path} has {len(raw) - first:,} bytes of values, its head promises {shape} of {dtype.itemsize} bytes"
        )
    return np.frombuffer(raw, dtype, offset=first).reshape(shape)
