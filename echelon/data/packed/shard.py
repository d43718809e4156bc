"""Writes a shard: an Arrow IPC file with one record batch, so that each column is contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from echelon.data.packed.manifest import Column, Shard
from echelon.data.packed.shard_file import ShardFile, offsets_checksum
from echelon.errors import DataError
from echelon.files import atomic_writer

#: Dtypes stored as integers of their size: NumPy lacks bfloat16, and Arrow packs eight booleans into a byte.
_STORAGE_DTYPES = {"bfloat16": "uint16", "bool": "uint8"}


def storage_dtype(column: Column) -> np.dtype[Any]:
    return np.dtype(_STORAGE_DTYPES.get(column.dtype, column.dtype))


class ShardWriter:
    """Collects the rows of a shard column by column, and writes it."""

    def __init__(self, columns: Sequence[Column], samples: int) -> None:
        self._columns, self._samples, self._row_count = tuple(columns), samples, 0
        self._fixed_columns = [
            None if column.ragged else np.empty((samples, *column.shape), storage_dtype(column)) for column in columns
        ]
        self._ragged_columns: list[list[np.ndarray]] = [[] for _ in columns]
        self._lengths = [np.zeros(samples + 1 if column.ragged else 0, np.int64) for column in columns]

    def add_rows(self, values: Sequence[Any], count: int) -> None:
        """Add `count` rows: for each column an array, or a list of arrays where the column is ragged."""
        start, stop = self._row_count, self._row_count + count
        for index, column in enumerate(self._columns):
            fixed_rows = self._fixed_columns[index]
            if fixed_rows is not None:
                fixed_rows[start:stop] = values[index]
                continue
            rows = [np.ascontiguousarray(row, storage_dtype(column)) for row in values[index]]
            self._lengths[index][start + 1 : stop + 1] = [len(row) for row in rows]
            self._ragged_columns[index] += rows
        self._row_count = stop

    def write(self, path: Path, block: int) -> Shard:
        """Write the file, which appears under its name once every byte is on disk. `block`: rows per checksum."""
        import pyarrow as pa

        assert self._row_count == self._samples
        arrays = {column.name: self._to_arrow(index) for index, column in enumerate(self._columns)}
        schema = pa.schema([pa.field(name, array.type, nullable=False) for name, array in arrays.items()])
        batch = pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema)
        try:
            with atomic_writer(path) as file:
                with pa.ipc.new_file(pa.PythonFile(file, "w"), batch.schema) as writer:
                    writer.write_batch(batch)
                file.flush()
                return _describe_shard(Path(file.name), path.name, self._columns, self._samples, block)
        except OSError as error:
            remedy = "once there is space, run the same command again, which continues where this one stopped"
            raise DataError(f"{path} cannot be written: {error.strerror or error}; {remedy}") from None

    def _to_arrow(self, index: int) -> Any:
        import pyarrow as pa

        column, fixed_rows = self._columns[index], self._fixed_columns[index]
        arrow_type = pa.from_numpy_dtype(storage_dtype(column))
        if fixed_rows is not None:
            values = pa.Array.from_buffers(arrow_type, fixed_rows.size, [None, pa.py_buffer(fixed_rows)])
            if not column.shape:
                return values
            rows = pa.FixedSizeListArray.from_arrays(values, fixed_rows[0].size)
            return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(arrow_type, column.shape), rows)
        offsets = pa.py_buffer(np.cumsum(self._lengths[index]))
        ragged_rows = self._ragged_columns[index]
        flat = np.concatenate(ragged_rows).reshape(-1) if ragged_rows else np.empty(0, storage_dtype(column))
        if column.kind != "array":
            arrow_type = pa.large_string() if column.kind == "text" else pa.large_binary()
            return pa.Array.from_buffers(arrow_type, self._samples, [None, offsets, pa.py_buffer(flat)])
        values = pa.Array.from_buffers(arrow_type, flat.size, [None, pa.py_buffer(flat)])
        if column.shape:
            values = pa.FixedSizeListArray.from_arrays(values, int(np.prod(column.shape)))
        starts = pa.Array.from_buffers(pa.int64(), self._samples + 1, [None, offsets])
        return pa.LargeListArray.from_arrays(starts, values)


def _describe_shard(path: Path, name: str, columns: Sequence[Column], samples: int, block: int) -> Shard:
    """Find where Arrow has put the columns, and compute the checksums of the file."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as mapped:
        file_buffer = mapped.read_buffer()
        batch = pa.ipc.open_file(file_buffer).get_batch(0)
        column_buffers = []
        for column, array in zip(columns, batch.columns, strict=True):
            buffers = array.buffers()
            values = buffers[-1]
            values_bytes = 0 if values is None else values.size
            values_start = values.address - file_buffer.address if values_bytes else 0
            offsets_start = buffers[1].address - file_buffer.address if column.ragged else 0
            column_buffers.append((offsets_start, values_start, values_bytes) if column.ragged else (values_start,))
        shard = Shard(
            file=name, samples=samples, bytes=file_buffer.size, buffers=tuple(column_buffers), checksums=(), frame=0, offsets=0,
        )  # fmt: skip
        file = ShardFile(path=path, shard=shard, columns=columns, block=block)
        content = np.frombuffer(file_buffer, np.uint8)
        contents = [content] * len(columns)
        block_checksums = [file.block_checksum(contents, index) for index in range(-(-samples // block))]
        frame = file.frame_checksum(content)
        offsets = offsets_checksum(content[start:stop] for start, stop in file.offset_spans())
        del content, contents, array, batch, buffers, values, file_buffer  # the mapping can be closed
    checksums = tuple(checksum for checksum in block_checksums if checksum is not None)
    if len(checksums) < len(block_checksums):
        raise DataError(f"{name} was written incorrectly: its offsets point outside of it")
    return replace(shard, checksums=checksums, frame=frame, offsets=offsets)
