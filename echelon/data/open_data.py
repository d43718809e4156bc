"""Opens a job's data=: tensors, lists, Datasets, packed data, Hugging Face data sets."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from echelon.data.column_gather import make_column_gather
from echelon.data.error_text import type_name
from echelon.data.source import Collate, GatherSource, SampleSource, Source
from echelon.errors import DataError
from echelon.job import with_torch_format


def is_stream(data: Any) -> bool:
    """Whether `data` can only be read from its start (stream.py), not by index."""
    return isinstance(data, IterableDataset)


def open_source(data: Any, *, collate: Collate | None = None, seed: int = 0) -> Source:
    """Open a map-style Dataset, a list of samples, a tensor, a packed data set or its folder, or anything with `__len__` and
    `__getitem__`."""
    data = open_if_packed(data)
    if collate is None:
        data = with_torch_format(data)
    _require_dataset(data)
    try:
        samples = len(data)
    except TypeError as error:
        remedy = "give it `__len__` (it is read by index), or make it a torch IterableDataset and set the job's steps="
        raise DataError(f"{type_name(data)} has no length: {remedy}") from error
    if samples < 1:
        raise DataError(f"{type_name(data)} is empty: a training or an evaluation needs at least one sample")
    base = data
    while type(base) is Subset:
        base = base.dataset
    reader = sys.modules.get("echelon.data.packed.reader")  # without it, the data cannot be packed
    if reader is not None and isinstance(base, reader.Packed):
        source: Source = reader.open_packed_source(base, data, _subset_rows(data), collate, seed)
        return source
    gather_source = _open_tensors(base, data) if collate is None else None
    if gather_source is not None:
        return gather_source
    if not hasattr(data, "__getitem__") and not hasattr(data, "__getitems__"):
        raise DataError(f"{type_name(data)} has no `__getitem__`: samples are read by index, as data[17]")
    sample_source = SampleSource(data, collate=collate, seed=seed)
    sample_source.identity = getattr(data, "packed_identity", None)
    return sample_source


def _require_dataset(data: Any) -> None:
    """Refuse what has a length and can be indexed, but whose items are not samples."""
    if isinstance(data, DataLoader):
        raise DataError("data is a DataLoader: give its data set, data=loader.dataset; the job batches and shuffles")
    if isinstance(data, str | bytes | Path):
        remedy = "give a torch Dataset, a list of samples, or the folder of a packed data set (`echelon pack`)"
        raise DataError(f"data={data!r} is text: {remedy}")
    if is_stream(data):
        problem = "is a stream (IterableDataset), whose samples have no index"
        raise DataError(f"{type_name(data)} {problem}; give a map-style data set here")
    if isinstance(data, Mapping):
        keys = ", ".join(repr(key) for key in list(data)[:5])
        remedy = "give one of its data sets, or, if these are columns, TensorDataset(*data.values())"
        raise DataError(f"data is a {type(data).__name__} with the keys {keys}: {remedy}")
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor | np.ndarray) for part in data):
        problem = f"data is a tuple of {len(data)} {type_name(data[0])}s, which is columns, not samples"
        raise DataError(f"{problem}: give torch.utils.data.TensorDataset(*data), or list(data) if each is one sample")


def open_if_packed(data: Any) -> Any:
    """Open `data` if it is the folder or URL of a packed data set; return anything else as it is."""
    if not isinstance(data, str | Path):
        return data
    is_url = isinstance(data, str) and "://" in data
    if not is_url and not any((Path(data) / name).is_file() for name in ("manifest.json", "packing.json")):
        return data
    from echelon.data.packed.reader import Packed

    return Packed(data)


def _open_tensors(base: Any, data: Any) -> GatherSource | None:
    """Gather the columns of a tensor, an array or a TensorDataset; None where gathering is not the same as collating samples."""
    # A subclass may return anything from its __getitem__.
    is_dataset = type(base) is TensorDataset
    columns = base.tensors if is_dataset else (base,)
    column_gathers = [gather for gather in map(make_column_gather, columns) if gather is not None]
    if len(column_gathers) < len(columns):
        return None

    def gather_columns(ids: np.ndarray, pin: bool) -> list[Any]:
        return [gather(ids, pin) for gather in column_gathers]

    return GatherSource(gather_columns, list if is_dataset else itemgetter(0), len(base), _subset_rows(data))


def _subset_rows(data: Any) -> np.ndarray | None:
    if type(data) is not Subset:
        return None
    dataset: Any = data.dataset
    length, rows = len(dataset), _subset_rows(dataset)
    selected = np.asarray(data.indices, dtype=np.int64)
    invalid = selected[(selected < -length) | (selected >= length)]
    if len(invalid):
        raise DataError(f"Subset has the index {invalid[0]}, its data set {length} samples: give it this data set")
    return selected % length if rows is None else rows[selected]
