"""Writes one shard: an Arrow IPC file with one record batch, so that each column lies in one piece."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from echelon.data.packed import block_layout
from echelon.data.packed.manifest import Column, Shard, settle
from echelon.errors import DataError

#: Stored as integers of their size: NumPy lacks bfloat16, and Arrow packs eight booleans into a byte.
STORED = {"bfloat16": "uint16", "bool": "uint8"}


def stored(column: Column) -> np.dtype[Any]:
    """The NumPy dtype in which a column lies in the file."""
    return np.dtype(STORED.get(column.dtype, column.dtype))


class Draft:
    """The rows of a shard to be, column by column."""

    def __init__(self, columns: Sequence[Column], samples: int) -> None:
        self._columns, self._samples, self._filled = tuple(columns), samples, 0
        self._fixed = [None if c.ragged else np.empty((samples, *c.shape), stored(c)) for c in columns]
        self._ragged: list[list[np.ndarray]] = [[] for _ in columns]
        self._lengths = [np.zeros(samples + 1 if c.ragged else 0, np.int64) for c in columns]

    def add(self, values: Sequence[Any], count: int) -> None:
        """`count` more rows: for each column one array of them, or a list of arrays where they are ragged."""
        start, stop = self._filled, self._filled + count
        for place, column in enumerate(self._columns):
            fixed = self._fixed[place]
            if fixed is not None:
                fixed[start:stop] = values[place]
                continue
            rows = [np.ascontiguousarray(row, stored(column)) for row in values[place]]
            self._lengths[place][start + 1 : stop + 1] = [len(row) for row in rows]
            self._ragged[place] += rows
        self._filled = stop

    def write(self, folder: Path, name: str, block: int) -> Shard:
        """The file, under its name once every byte is on the disk."""
        import pyarrow as pa

        assert self._filled == self._samples
        temporary = folder / f".{name}.{os.getpid()}"
        arrays = [self._array(place, pa) for place in range(len(self._columns))]
        fields = [pa.field(c.name, a.type, nullable=False) for c, a in zip(self._columns, arrays, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
        try:
            with temporary.open("wb") as file:
                with pa.ipc.new_file(pa.PythonFile(file, "w"), batch.schema) as writer:
                    writer.write_batch(batch)
                file.flush()
                os.fsync(file.fileno())
            shard = _described(temporary, name, self._columns, self._samples, block)
            settle(temporary, folder / name)
        except OSError as error:
            raise DataError(
                f"{folder / name} cannot be written: {error.strerror or error}; once there is room, run the same command again, which goes "
                "on where this one stopped"
            ) from None
        finally:
            temporary.unlink(missing_ok=True)
        return shard

    def _array(self, place: int, pa: Any) -> Any:
        column, fixed = self._columns[place], self._fixed[place]
        kind = pa.from_numpy_dtype(stored(column))
        if fixed is not None:
            values = pa.Array.from_buffers(kind, fixed.size, [None, pa.py_buffer(fixed)])
            if not column.shape:
                return values
            rows = pa.FixedSizeListArray.from_arrays(values, fixed[0].size)
            return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(kind, column.shape), rows)
        offsets = pa.py_buffer(np.cumsum(self._lengths[place]))
        rows_ = self._ragged[place]
        flat = np.concatenate(rows_).reshape(-1) if rows_ else np.empty(0, stored(column))
        if column.kind != "array":
            kind = pa.large_string() if column.kind == "text" else pa.large_binary()
            return pa.Array.from_buffers(kind, self._samples, [None, offsets, pa.py_buffer(flat)])
        values = pa.Array.from_buffers(kind, flat.size, [None, pa.py_buffer(flat)])
        if column.shape:
            values = pa.FixedSizeListArray.from_arrays(values, int(np.prod(column.shape)))
        starts = pa.Array.from_buffers(pa.int64(), self._samples + 1, [None, offsets])
        return pa.LargeListArray.from_arrays(starts, values)


def _described(path: Path, name: str, columns: Sequence[Column], samples: int, block: int) -> Shard:
    """Where Arrow has put the columns, and the checksums of what now stands in the file."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as mapped:
        whole = mapped.read_buffer()
        batch = pa.ipc.open_file(whole).get_batch(0)
        places = []
        for column, array in zip(columns, batch.columns, strict=True):
            found = array.buffers()
            data = found[-1]
            first = data.address - whole.address if data is not None and data.size else 0
            size = 0 if data is None else data.size
            places.append((found[1].address - whole.address, first, size) if column.ragged else (first,))
        shard = Shard(
            file=name, samples=samples, bytes=whole.size, buffers=tuple(places), checksums=(), frame=0, offsets=0,
        )  # fmt: skip
        file = np.frombuffer(whole, np.uint8)
        sums = [
            block_layout.checksum([file] * len(columns), columns, shard, start, min(start + block, samples))
            for start in range(0, samples, block)
        ]
        rest, offsets = block_layout.frame(file, columns, shard), block_layout.offsets(file, columns, shard)
        del file, array, batch, found, data, whole
    checked = tuple(each for each in sums if each is not None)
    if len(checked) < len(sums):
        raise DataError(f"{name} was not written as it was meant to be: its offsets point outside of it")
    return replace(shard, checksums=checked, frame=rest, offsets=offsets)
