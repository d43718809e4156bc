"""Gathers the rows of one column from the mapped files of a packed data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.data.column_gather import gather_in_memory
from echelon.data.packed.from_images import decode_image
from echelon.data.packed.manifest import Column
from echelon.data.packed.shard import storage_dtype
from echelon.errors import DataError


class RowGather(ABC):
    """Gathers rows of one column. `file_indices`: the file of each row; None: there is only one file."""

    def __init__(self, column: Column) -> None:
        self._column, self._storage_dtype = column, storage_dtype(column)
        self._dtype: torch.dtype = getattr(torch, column.dtype)

    @abstractmethod
    def take(self, ids: np.ndarray, file_indices: np.ndarray | None, pin: bool) -> Any:
        """Gather rows: one tensor, or a list where rows differ in length."""

    def take_padded(self, ids: np.ndarray, file_indices: np.ndarray | None, value: float, pin: bool) -> Any:
        """Gather rows; numbers that differ in length become one tensor, padded with `value`."""
        return self.take(ids, file_indices, pin)


class ContiguousGather(RowGather):
    """Rows of equal size in one array over all files: `rows[id + shifts[file]]`, with no shift in the first file."""

    def __init__(self, column: Column, rows: np.ndarray, shifts: np.ndarray) -> None:
        super().__init__(column)
        self._rows, self._shifts = rows, shifts

    def take(self, ids: np.ndarray, file_indices: np.ndarray | None, pin: bool) -> Tensor:
        rows = ids if file_indices is None else ids + self._shifts[file_indices]
        return gather_in_memory(self._rows, self._dtype, rows, pin)


class AddressGather(RowGather):
    """Rows of equal size without a common stride, by their addresses."""

    def __init__(self, column: Column, content: np.ndarray, bases: np.ndarray) -> None:
        super().__init__(column)
        self._bases, self._windows = bases, _byte_windows(content, column.item_bytes)

    def take(self, ids: np.ndarray, file_indices: np.ndarray | None, pin: bool) -> Tensor:
        addresses = ids * self._column.item_bytes + self._bases[0 if file_indices is None else file_indices]
        rows = self._windows[addresses].view(self._storage_dtype).reshape(len(ids), *self._column.shape)
        tensor = torch.from_numpy(rows).view(self._dtype)
        return tensor.pin_memory() if pin else tensor


class RaggedGather(RowGather):
    """Rows of any length. `offsets`, `values`: where those of row 0 would start if all rows were in each file."""

    def __init__(self, column: Column, content: np.ndarray, offsets: np.ndarray, values: np.ndarray) -> None:
        super().__init__(column)
        self._content, self._offsets, self._values = content, offsets, values
        self._offset_pairs = _byte_windows(content, 16)

    def _byte_spans(self, ids: np.ndarray, file_indices: np.ndarray | None) -> np.ndarray:
        file_selector = 0 if file_indices is None else file_indices
        pairs = self._offset_pairs[ids * 8 + self._offsets[file_selector]].view(np.int64).reshape(-1, 2)
        if self._column.item_bytes > 1:
            pairs = pairs * self._column.item_bytes
        return pairs + np.asarray(self._values[file_selector]).reshape(-1, 1)

    def take_padded(self, ids: np.ndarray, file_indices: np.ndarray | None, value: float, pin: bool) -> Any:
        if self._column.kind != "array":
            return self.take(ids, file_indices, pin)
        spans = self._byte_spans(ids, file_indices)
        longest = int((spans[:, 1] - spans[:, 0]).max()) // self._column.item_bytes
        padded = torch.full((len(ids), longest, *self._column.shape), value, dtype=self._dtype, pin_memory=pin)
        if longest:
            # Each row's bytes are copied once, to their place in the batch.
            content, padded_bytes = self._content, padded.view(len(ids), -1).view(torch.uint8).numpy()
            for row, (start, stop) in zip(padded_bytes, spans.tolist(), strict=True):
                row[: stop - start] = content[start:stop]
        return padded

    def take(self, ids: np.ndarray, file_indices: np.ndarray | None, pin: bool) -> list[Any]:
        content = self._content
        rows = [content[start:stop] for start, stop in self._byte_spans(ids, file_indices).tolist()]
        kind = self._column.kind
        if kind == "text":
            return [_decode_text(row, sample_id) for row, sample_id in zip(rows, ids, strict=True)]
        if kind == "bytes":
            return [row.tobytes() for row in rows]
        if kind == "image":
            pictures = zip(rows, ids, strict=True)
            return [torch.from_numpy(decode_image(row.tobytes(), f"sample {sample_id}")) for row, sample_id in pictures]
        shape = (-1, *self._column.shape)
        tensors = [torch.from_numpy(row.copy().view(self._storage_dtype).reshape(shape)) for row in rows]
        return tensors if self._storage_dtype.name == self._column.dtype else [row.view(self._dtype) for row in tensors]


def _decode_text(row: np.ndarray, sample_id: int) -> str:
    try:
        return row.tobytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"sample {sample_id} has text that is not UTF-8: {error}") from None


def _byte_windows(content: np.ndarray, size: int) -> np.ndarray:
    """The `size` bytes from each byte on, as one overlapping array that takes no memory: an index is an address."""
    return np.ndarray(len(content) - size + 1, f"V{size}", content.data, strides=1)
