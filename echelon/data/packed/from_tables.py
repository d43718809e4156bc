"""Tables: CSV, Parquet and Arrow files. Samples are dicts of their columns."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from echelon.data.packed.manifest import ITEMS, Column
from echelon.data.packed.packing_source import Origin, stamp
from echelon.errors import DataError

#: Bytes of CSV that are read at once.
_BLOCK = 2**24
#: Rows that are looked at to learn their size.
_LOOKS = 256
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
ENDINGS = {".csv": "CSV", ".tsv": "CSV", ".parquet": "Parquet", ".arrow": "Arrow", ".feather": "Arrow"}


class Tables(Origin):
    """One or more files with the same columns, one behind the other. Parquet is read by row groups; Arrow is mapped, where it is not
    compressed; CSV becomes an Arrow file without a name in the folder `near`, which is mapped."""

    by_row = False

    def __init__(self, paths: Sequence[Path], near: Path) -> None:
        self._paths, self._near = list(paths), near
        self.provenance = {
            "source": ", ".join(map(str, paths)), "kind": ENDINGS[paths[0].suffix.lower()], "stamp": stamp(paths)
        }  # fmt: skip

    @property
    def identity(self) -> str:
        # Columns and rows follow from the files, and of CSV are not known before all of it is read.
        return self._identity()

    def prepare(self) -> None:
        import pyarrow as pa

        paths = self._paths
        self._parts: list[tuple[Path, int, int]] = []  # path, row group (or 0), rows
        self._tables: dict[Path, Any] = {}
        #: The row group that was read last: rows are asked for a few at a time.
        self._group: tuple[int, Any] = -1, None
        schema = None
        for path in paths:
            try:
                found, counts = self._open(path)
            except (pa.ArrowException, OSError, ValueError) as error:
                if getattr(error, "errno", None) in _NO_ROOM:
                    raise DataError(
                        f"{self._near} has no room for the copy of {path} that is packed: free some, or pack into a folder on another disk"
                    ) from None
                raise DataError(f"{path} cannot be read as {ENDINGS[path.suffix.lower()]}: {error}") from None
            if schema is not None and not found.equals(schema):
                raise DataError(f"{path} has other columns than {paths[0]}: {_words(found)}, not {_words(schema)}")
            schema = found
            twice = next((name for name in found.names if found.names.count(name) > 1), None)
            if twice is not None:
                raise DataError(f"{path} has two columns {twice!r}: rename one")
            self._parts += [(path, group, rows) for group, rows in enumerate(counts)]
        assert schema is not None
        self._ends = np.cumsum([rows for _, _, rows in self._parts])
        self.samples = int(self._ends[-1]) if len(self._ends) else 0
        if not self.samples:
            raise DataError(f"{paths[0]} has no rows: there is nothing to pack")
        self.columns = tuple(_column(field, pa) for field in schema)
        self.sample = {"dict": {column.name: column.name for column in self.columns}}
        self.row_bytes = self._row_bytes()

    def _open(self, path: Path) -> tuple[Any, list[int]]:
        """The schema, and the rows of each part."""
        import pyarrow as pa

        kind = ENDINGS[path.suffix.lower()]
        if kind == "Parquet":
            import pyarrow.parquet as pq

            file = pq.ParquetFile(path, memory_map=True)
            return file.schema_arrow.remove_metadata(), [
                file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)
            ]
        if kind == "CSV":
            table = _csv(path, self._near)
        else:
            mapped = pa.memory_map(str(path))
            try:
                table = pa.ipc.open_file(mapped).read_all()
            except pa.ArrowInvalid:  # HF data sets and others write the stream form
                table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        self._tables[path] = table
        return table.schema.remove_metadata(), [table.num_rows]

    def _row_bytes(self) -> float:
        """Of the first rows as they are packed: a file may hold them compressed."""
        rows = min(_LOOKS, self.samples)
        sizes = [
            array.nbytes
            for column in self.read(0, rows)
            for array in (column if isinstance(column, list) else [column])
        ]
        return max(1.0, sum(sizes) / rows)

    def _table(self, part: int, start: int, stop: int) -> Any:
        path, group, _ = self._parts[part]
        if path in self._tables:
            return self._tables[path].slice(start, stop - start)
        if self._group[0] != part:
            import pyarrow.parquet as pq

            self._group = part, pq.ParquetFile(path, memory_map=True).read_row_group(group, use_threads=False)
        return self._group[1].slice(start, stop - start)

    def read(self, start: int, stop: int) -> Sequence[Any]:
        import pyarrow as pa

        tables, place = [], start
        while place < stop:
            part = int(np.searchsorted(self._ends, place, "right"))
            first = int(self._ends[part]) - self._parts[part][2]
            end = min(stop, int(self._ends[part]))
            tables.append(self._table(part, place - first, end - first))
            place = end
        table = pa.concat_tables(tables) if len(tables) > 1 else tables[0]
        return [_rows(table.column(column.name), column, start, pa) for column in self.columns]


def _csv(path: Path, near: Path) -> Any:
    """The table, in a file without a name that is mapped: it needs no memory and is gone with the last process that reads it.

    Kinds of columns follow from the first 16 MB. Where the rest does not fit them (1 and later 1.5), all is read into memory at once, which
    finds kinds that fit all.
    """
    import pyarrow as pa
    from pyarrow import csv

    parse = csv.ParseOptions(delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
    how = csv.ReadOptions(use_threads=False, block_size=_BLOCK)
    near.mkdir(parents=True, exist_ok=True)
    try:
        with (
            tempfile.TemporaryFile(dir=near) as kept,
            csv.open_csv(path, parse_options=parse, read_options=how) as rows,
        ):
            with pa.ipc.new_file(pa.PythonFile(kept, "w"), rows.schema) as writer:
                for batch in rows:
                    writer.write_batch(batch)
            kept.flush()
            return pa.ipc.open_file(pa.memory_map(f"/proc/self/fd/{kept.fileno()}")).read_all()
    except pa.ArrowInvalid:
        return csv.read_csv(path, parse_options=parse, read_options=csv.ReadOptions(use_threads=False))


def _words(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _column(field: Any, pa: Any) -> Column:
    name, kind, types = field.name, field.type, pa.types
    if isinstance(kind, pa.ExtensionType) and kind.extension_name == "arrow.fixed_shape_tensor":
        return Column(name=name, dtype=_dtype(kind.value_type, name, pa), shape=tuple(kind.shape))
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind):
        return Column(name=name, dtype="uint8", ragged=True, kind="text")
    if types.is_binary(kind) or types.is_large_binary(kind):
        return Column(name=name, dtype="uint8", ragged=True, kind="bytes")
    if types.is_struct(kind) and {kind.field(place).name for place in range(kind.num_fields)} == {"bytes", "path"}:
        return Column(name=name, dtype="uint8", ragged=True, kind="image")  # as HF data sets keep pictures
    if types.is_fixed_size_list(kind):
        return Column(name=name, dtype=_dtype(kind.value_type, name, pa), shape=(kind.list_size,))
    if types.is_list(kind) or types.is_large_list(kind):
        return Column(name=name, dtype=_dtype(kind.value_type, name, pa), ragged=True)
    return Column(name=name, dtype=_dtype(kind, name, pa))


def _dtype(kind: Any, name: str, pa: Any) -> str:
    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        raise DataError(f"column {name!r} is {kind}: make it a number or text first")
    try:
        dtype = "bool" if pa.types.is_boolean(kind) else np.dtype(kind.to_pandas_dtype()).name
    except (NotImplementedError, TypeError):
        dtype = ""
    if dtype not in ITEMS:
        raise DataError(f"column {name!r} is {kind}: numbers, lists of numbers, text, bytes and pictures can be packed")
    return dtype


def _rows(chunked: Any, column: Column, start: int, pa: Any) -> Any:
    array = chunked.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # a column of no chunks, or of too many bytes for one
        array = pa.concat_arrays(array.chunks)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if column.kind == "image":
        array = array.field("bytes")
    if array.null_count:
        row = start + int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(
            f"column {column.name!r} has no value in row {row}: fill such rows or leave them out before packing"
        )
    if column.ragged and column.kind != "array":
        binary = array.cast(pa.large_string() if column.kind == "text" else pa.large_binary())
        return [
            np.frombuffer(value.as_buffer(), np.uint8) if value.as_buffer().size else np.empty(0, np.uint8)
            for value in binary
        ]
    if column.ragged:
        large = array.cast(pa.large_list(array.type.value_type))
        offsets, values = large.offsets.to_numpy(), _numbers(large.values, column, start)
        return [values[a:b] for a, b in pairwise(offsets.tolist())]
    flat = array.flatten() if pa.types.is_fixed_size_list(array.type) else array
    return _numbers(flat, column, start).reshape(len(array), *column.shape)


def _numbers(array: Any, column: Column, start: int) -> np.ndarray:
    if array.null_count:
        raise DataError(
            f"column {column.name!r} has an empty place inside a row from {start} on: fill it before packing"
        )
    found: np.ndarray = array.to_numpy(zero_copy_only=False)
    return found.astype(np.uint8) if found.dtype == bool else found
