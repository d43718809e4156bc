"""Data sets whose samples are Python values: a torch Dataset, a list, lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.data.error_text import describe_shape
from echelon.data.open_data import open_if_packed, open_source
from echelon.data.packed import sample_schema
from echelon.data.packed.manifest import ITEM_BYTES, Column, list_column_names
from echelon.data.packed.packing_source import PackingSource, digest_file_stats
from echelon.data.sample_digest import digest
from echelon.data.source import SampleSource
from echelon.errors import DataError

#: Samples that are read to infer the columns: the first ones, and as many spread over the rest.
_INSPECTED_SAMPLES = 16


class SamplePackingSource(PackingSource):
    """Samples as the first epoch of a training reads them: random augmentation is drawn once, from the seed."""

    def __init__(self, data: Any, provenance: Mapping[str, str], *, seed: int = 0) -> None:
        self._source = SampleSource(open_dataset(data), seed=seed)
        self.samples = len(self._source)
        spread_indices = np.linspace(0, self.samples - 1, _INSPECTED_SAMPLES, dtype=int).tolist()
        inspected_indices = sorted({*range(min(_INSPECTED_SAMPLES, self.samples)), *spread_indices})
        first_sample = self._source.read_sample(0)
        self.sample, self._first_shape = sample_schema.infer_structure(first_sample), describe_shape(first_sample)
        names = list_column_names(self.sample)
        if not names:
            raise DataError(f"sample 0 is {self._first_shape}: it holds nothing to pack")
        if len(set(names)) < len(names):
            raise DataError(f"two parts of a sample would have the same name among {', '.join(names)}: rename a key")
        inspected_leaves = [self._read_leaves(index) for index in inspected_indices]
        columns = zip(names, zip(*inspected_leaves, strict=True), strict=True)
        self.columns = tuple(_infer_column(name, values, inspected_indices) for name, values in columns)
        rows = [self._row_arrays(*pair) for pair in zip(inspected_leaves, inspected_indices, strict=True)]
        self.provenance = {**provenance, "content": digest(rows)}
        sizes = [sum(array.nbytes for array in row) for row in rows]
        self.row_bytes = max(1.0, sum(sizes) / len(sizes))

    def read(self, start: int, stop: int) -> Sequence[Any]:
        rows = [self._row_arrays(self._read_leaves(index), index) for index in range(start, stop)]
        columns = zip(self.columns, zip(*rows, strict=True), strict=True)
        return [list(values) if column.ragged else np.stack(values) for column, values in columns]

    def _row_arrays(self, values: Sequence[Any], index: int) -> list[np.ndarray]:
        return [_to_column_array(value, column, index) for value, column in zip(values, self.columns, strict=True)]

    def _read_leaves(self, index: int) -> list[Any]:
        sample = self._source.read_sample(index)
        try:
            return sample_schema.flatten_sample(sample, self.sample)
        except ValueError:
            shapes = f"sample {index} is {describe_shape(sample)}, sample 0 is {self._first_shape}"
            raise DataError(f"{shapes}: all samples of a packed data set must have the same structure") from None


def open_dataset(data: Any) -> Any:
    """Open `data` as a job would: a path as the packed data set there. Refuses what a job refuses, with the same message."""
    data = open_if_packed(data)
    open_source(data)
    return data


class JsonLines(Sequence[Any]):
    """The values in a file of JSON lines, by number; empty lines are skipped.

    Not read with pyarrow: it accepts objects only, turns text that looks like a time into one, and has no access by index."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            sizes = np.fromiter((-len(line) if line.isspace() else len(line) for line in file), np.int64)
        self._bytes = np.memmap(path, np.uint8, "r") if len(sizes) else np.empty(0, np.uint8)
        ends = np.cumsum(np.abs(sizes))
        self._spans = np.stack([ends - np.abs(sizes), ends], axis=1)[sizes > 0]

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: Any) -> Any:
        start, stop = self._spans[index]
        try:
            return json.loads(self._bytes[start:stop].tobytes())
        except ValueError as error:
            raise DataError(f"{self._path}: value {index} is not valid JSON: {error}") from None


def open_json_lines(path: Path) -> SamplePackingSource:
    provenance = {"source": str(path), "kind": "JSON lines", "stamp": digest_file_stats([path])}
    return SamplePackingSource(JsonLines(path), provenance)


def _infer_column(name: str, values: Sequence[Any], indices: Sequence[int]) -> Column:
    first = values[0]
    if isinstance(first, str | bytes):
        return Column(name=name, dtype="uint8", ragged=True, kind="text" if isinstance(first, str) else "bytes")
    arrays = []
    for value, index in zip(values, indices, strict=True):
        if isinstance(value, str | bytes):
            types = f"a {type(value).__name__}, and a {type(first).__name__} in sample {indices[0]}"
            raise DataError(f"{name!r} of sample {index} is {types}: give them one type")
        arrays.append(_to_array(value, name, index))
    is_list = isinstance(first, list)
    # An empty list does not show its dtype.
    typed = ([pair for pair in arrays if pair[0].size] if is_list else arrays) or arrays
    dtypes = {dtype for _, dtype in typed}
    # Python and JSON write 1 and 1.5: where some numbers are not integers, all are floats.
    is_mixed = dtypes == {"int64", "float64"} and all(isinstance(value, int | float | list) for value in values)
    dtype = "float64" if is_mixed else typed[0][1]
    if len(dtypes) > 1 and not is_mixed:
        raise DataError(f"{name!r} has {' and '.join(sorted(dtypes))} in different samples: make it one of them")
    if dtype not in ITEM_BYTES:
        raise DataError(f"{name!r} is {dtype}, which cannot be packed: make it {', '.join(ITEM_BYTES)}")
    shapes = {array.shape for array, _ in arrays}
    inner_shapes = {shape[1:] for shape in shapes}
    if is_list or (len(shapes) > 1 and len(inner_shapes) == 1 and () not in shapes):
        return Column(name=name, dtype=dtype, shape=() if is_list else inner_shapes.pop(), ragged=True)
    if len(shapes) > 1:
        pairs = [(list(array.shape), index) for (array, _), index in zip(arrays, indices, strict=True)]
        other_shape, index = next(pair for pair in pairs if pair[0] != pairs[0][0])
        problem = f"{name!r} has shape {pairs[0][0]} in sample {indices[0]} and {other_shape} in sample {index}"
        raise DataError(f"{problem}: only the first dimension may differ; resize or pad in the data set")
    shape = shapes.pop()
    if 0 in shape:
        raise DataError(f"{name!r} has shape {list(shape)}: it is empty")
    return Column(name=name, dtype=dtype, shape=shape)


def _to_array(value: Any, name: str, index: int) -> tuple[np.ndarray, str]:
    """Convert a value to an array, and name its dtype. `name`, `index`: the column and the sample, for messages."""
    if isinstance(value, Tensor):
        try:
            value = value.detach().cpu().contiguous()
            if value.dtype is torch.bfloat16:
                return value.view(torch.uint16).numpy(), "bfloat16"
            array = value.numpy()
        except (TypeError, RuntimeError):
            kind = f"{value.dtype}, {value.layout}".replace("torch.", "")
            problem = f"{name!r} of sample {index} is a tensor ({kind}) that is not a plain array"
            raise DataError(f"{problem}: convert it, as with .to_dense(), .dequantize() or .float()") from None
        return array, array.dtype.name
    if isinstance(value, bool | np.bool_):
        return np.array(value), "bool"
    if isinstance(value, int | float | list):
        items = value if isinstance(value, list) else [value]
        if items and all(type(item) is bool for item in items):
            return np.array(value, bool), "bool"
        dtype = "int64" if all(isinstance(item, int) for item in items) else "float64"
        try:
            return np.array(value, dtype), dtype
        except OverflowError:
            largest = max((item for item in items if isinstance(item, int)), key=abs)
            # Python refuses to format thousands of digits.
            digits = str(largest) if largest.bit_length() < 200 else f"of {largest.bit_length():,} bits"
            problem = f"has the integer {digits}, which does not fit into 64 bits"
            raise DataError(f"{name!r} of sample {index} {problem}: make it text, or smaller") from None
        except (TypeError, ValueError):
            pass
    if hasattr(value, "getbands") and hasattr(value, "tobytes"):  # a PIL image, to the layout of torchvision's ToTensor
        pixels = np.asarray(value)
        return (pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)).copy(), pixels.dtype.name
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return array.astype(array.dtype.newbyteorder("="), copy=False), array.dtype.newbyteorder("=").name
    types = "only numbers, tensors, arrays, images, text and bytes can be packed"
    raise DataError(f"{name!r} of sample {index} is a {type(value).__name__}: {types}")


def _to_column_array(value: Any, column: Column, index: int) -> np.ndarray:
    """Convert a value to what its column stores; an error names the sample."""
    if column.kind in ("text", "bytes") and isinstance(value, str if column.kind == "text" else bytes):
        return np.frombuffer(value.encode() if isinstance(value, str) else value, np.uint8)
    if column.kind == "array" and not isinstance(value, str | bytes):
        array, dtype = _to_array(value, column.name, index)
        is_integer = type(value) in (int, list) and (dtype == "int64" or not array.size)
        if is_integer and column.dtype == "float64":
            array, dtype = array.astype(np.float64), "float64"
        elif isinstance(value, list) and not array.size:
            dtype = column.dtype
        shape = array.shape[1:] if column.ragged and array.ndim else array.shape
        if dtype == column.dtype and shape == column.shape:
            return array.astype(np.uint8) if dtype == "bool" else array
    problem = f"{column.name!r} of sample {index} is {describe_shape(value)}, and {column} in earlier samples"
    hint = "where the first dimension differs, it must differ among the first samples"
    raise DataError(f"{problem}: give them one type and shape ({hint})")
