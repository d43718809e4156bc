"""Any data set whose samples are Python values: a torch Dataset, a list, lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.data.error_text import shape_of
from echelon.data.packed import sample_schema
from echelon.data.packed.manifest import ITEMS, Column, names
from echelon.data.packed.packing_source import Origin, stamp
from echelon.data.sample_digest import digest
from echelon.data.source import Samples, open_source, opened
from echelon.errors import DataError

#: Samples that are looked at to learn the columns: the first ones, and as many spread over the rest.
_LOOKS = 16
#: Bytes of a text that are searched for ends of lines at once.
_PIECE = 2**24


class Values(Origin):
    """Samples as the first epoch of a training would see them: a random augmentation is drawn once, from the seed."""

    def __init__(self, data: Any, provenance: Mapping[str, str], *, seed: int = 0) -> None:
        self._source = Samples(numbered(data), seed=seed)
        self.samples = len(self._source)
        looked = sorted(
            {*range(min(_LOOKS, self.samples)), *np.linspace(0, self.samples - 1, _LOOKS, dtype=int).tolist()}
        )
        first = self._source.sample(0)
        self.sample, self._alike = sample_schema.structure_of(first), shape_of(first)
        if not names(self.sample):
            raise DataError(f"sample 0 is {self._alike}: it holds nothing that could be packed")
        seen = [self._leaves(number) for number in looked]
        self.columns = tuple(
            _column(name, values, looked)
            for name, values in zip(_names(self.sample), zip(*seen, strict=True), strict=True)
        )
        rows = [self._arrays(values, number) for values, number in zip(seen, looked, strict=True)]
        self.provenance = {**provenance, "content": digest(rows)}
        sizes = [sum(array.nbytes for array in row) for row in rows]
        self.row_bytes = max(1.0, sum(sizes) / len(sizes))

    def read(self, start: int, stop: int) -> Sequence[Any]:
        rows = [self._arrays(self._leaves(number), number) for number in range(start, stop)]
        return [
            list(values) if column.ragged else np.stack(values)
            for column, values in zip(self.columns, zip(*rows, strict=True), strict=True)
        ]

    def _arrays(self, values: Sequence[Any], number: int) -> list[np.ndarray]:
        return [_array(value, column, number) for value, column in zip(values, self.columns, strict=True)]

    def _leaves(self, number: int) -> list[Any]:
        sample = self._source.sample(number)
        try:
            return sample_schema.leaves(sample, self.sample)
        except ValueError:
            raise DataError(
                f"sample {number} is {shape_of(sample)}, sample 0 has another structure ({self._alike}): the samples of a packed data set "
                "are alike"
            ) from None


def numbered(data: Any) -> Any:
    """`data` as a job would read it: a path as the packed data set there; what a job refuses is refused here, in the same words."""
    data = opened(data)
    open_source(data)
    return data


class Lines(Sequence[Any]):
    """A file of JSON, one value per line, by number. Empty lines are none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        pieces = range(0, len(self._bytes), _PIECE)  # to compare takes a byte for each byte that is compared
        found = [np.flatnonzero(self._bytes[at : at + _PIECE] == ord("\n")) + at for at in pieces]
        ends = np.concatenate([np.empty(0, np.int64), *found])
        if len(self._bytes) and (not len(ends) or ends[-1] != len(self._bytes) - 1):
            ends = np.append(ends, len(self._bytes))
        starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
        full = [
            bool(self._bytes[a:b].tobytes().strip()) if b - a < 8 else True for a, b in zip(starts, ends, strict=True)
        ]
        self._starts, self._ends = starts[full], ends[full]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: Any) -> Any:
        text = self._bytes[self._starts[number] : self._ends[number]].tobytes()
        try:
            return json.loads(text)
        except ValueError as error:
            raise DataError(f"{self._path}: its value {number} is no JSON: {error}") from None


def json_lines(path: Path) -> Values:
    """A .jsonl file."""
    return Values(Lines(path), {"source": str(path), "kind": "JSON lines", "stamp": stamp([path])})


def _names(structure: Any) -> list[str]:
    found = names(structure)
    if len(set(found)) < len(found):
        raise DataError(f"two parts of a sample would have the same name among {', '.join(found)}: rename a key")
    return found


def _column(name: str, values: Sequence[Any], numbers: Sequence[int]) -> Column:
    """The column that these values of a few samples belong to."""
    first = values[0]
    if isinstance(first, str):
        return Column(name=name, dtype="uint8", ragged=True, kind="text")
    if isinstance(first, bytes):
        return Column(name=name, dtype="uint8", ragged=True, kind="bytes")
    known = []
    for value, number in zip(values, numbers, strict=True):
        if isinstance(value, str | bytes):
            raise DataError(
                f"{name!r} of sample {number} is a {type(value).__name__}, and a {type(first).__name__} in sample {numbers[0]}: make them alike"
            )
        known.append(_plain(value, name, number))
    listed = isinstance(first, list)
    full = [pair for pair in known if pair[0].size] if listed else known  # a list of nothing does not say of what it is
    dtypes = {dtype for _, dtype in full or known}
    # 1 and 1.5, as Python and JSON write numbers: where some are not whole, all are floats.
    mixed = dtypes == {"int64", "float64"} and all(isinstance(value, int | float | list) for value in values)
    dtype = "float64" if mixed else (full or known)[0][1]
    if len(dtypes) > 1 and not mixed:
        raise DataError(f"{name!r} has {' and '.join(sorted(dtypes))} in different samples: make it one of them")
    if dtype not in ITEMS:
        raise DataError(f"{name!r} is {dtype}, a kind that cannot be packed: make it {', '.join(ITEMS)}")
    shapes = {array.shape for array, _ in known}
    inner = {shape[1:] for shape in shapes}
    if listed or (len(shapes) > 1 and len(inner) == 1 and () not in shapes):
        return Column(name=name, dtype=dtype, shape=() if listed else inner.pop(), ragged=True)
    if len(shapes) > 1:
        other = next(place for place, (array, _) in enumerate(known) if array.shape != known[0][0].shape)
        raise DataError(
            f"{name!r} has shape {list(known[0][0].shape)} in sample {numbers[0]} and {list(known[other][0].shape)} in sample "
            f"{numbers[other]}: only the first dimension may differ; resize or pad in the data set"
        )
    shape = shapes.pop()
    if 0 in shape:
        raise DataError(f"{name!r} has shape {list(shape)}: it holds nothing")
    return Column(name=name, dtype=dtype, shape=shape)


def _plain(value: Any, name: str, number: int) -> tuple[np.ndarray, str]:
    """A value as an array, and the name of its dtype. `name`, `number`: of the column and the sample, for messages."""
    if isinstance(value, Tensor):
        try:
            value = value.detach().cpu().contiguous()
            if value.dtype is torch.bfloat16:
                return value.view(torch.uint16).numpy(), "bfloat16"
            array = value.numpy()
        except (TypeError, RuntimeError):
            kind = f"{value.dtype}, {value.layout}".replace("torch.", "")
            raise DataError(
                f"{name!r} of sample {number} is a tensor ({kind}) that is no plain array of numbers: make it one, as with "
                ".to_dense(), .dequantize() or .float()"
            ) from None
        return array, array.dtype.name
    if isinstance(value, bool | np.bool_):
        return np.array(value), "bool"
    if isinstance(value, int | float | list):
        parts = value if isinstance(value, list) else [value]
        if parts and all(type(part) is bool for part in parts):
            return np.array(value, bool), "bool"
        dtype = "int64" if all(isinstance(part, int) for part in parts) else "float64"
        try:
            return np.array(value, dtype), dtype
        except OverflowError:
            large = max((part for part in parts if isinstance(part, int)), key=abs)
            raise DataError(
                f"{name!r} of sample {number} has the whole number {_short(large)}, which does not fit into 64 bits: make it text, or smaller"
            ) from None
        except (TypeError, ValueError):
            pass
    if hasattr(value, "getbands") and hasattr(
        value, "tobytes"
    ):  # a picture of PIL's, laid out as torchvision's ToTensor does
        pixels = np.asarray(value)
        return (pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)).copy(), pixels.dtype.name
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return array.astype(array.dtype.newbyteorder("="), copy=False), array.dtype.newbyteorder("=").name
    raise DataError(
        f"{name!r} of sample {number} is a {type(value).__name__}: only numbers, tensors, arrays, pictures, text and bytes can be packed"
    )


def _short(number: int) -> str:
    """Python itself refuses to write down thousands of digits."""
    return str(number) if number.bit_length() < 200 else f"of {number.bit_length():,} bits"


def _array(value: Any, column: Column, number: int) -> np.ndarray:
    """The value as the column stores it, or a message that names the sample."""
    if column.kind in ("text", "bytes") and isinstance(value, str if column.kind == "text" else bytes):
        return np.frombuffer(value.encode() if isinstance(value, str) else value, np.uint8)
    if column.kind == "array" and not isinstance(value, str | bytes):
        array, dtype = _plain(value, column.name, number)
        whole = type(value) in (int, list) and (dtype == "int64" or not array.size)
        if whole and column.dtype == "float64":
            array, dtype = array.astype(np.float64), "float64"
        elif isinstance(value, list) and not array.size:
            dtype = column.dtype
        shape = array.shape[1:] if column.ragged and array.ndim else array.shape
        if dtype == column.dtype and shape == column.shape:
            return array.astype(np.uint8) if dtype == "bool" else array
    raise DataError(
        f"{column.name!r} of sample {number} is {shape_of(value)}, and {column} in the samples before: make them alike "
        "(a first dimension that differs must show in the first samples)"
    )
