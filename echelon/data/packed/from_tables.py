"""Tables: CSV, Parquet and Arrow files. Samples are dicts of their columns."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from echelon.data.packed.manifest import ITEM_BYTES, Column
from echelon.data.packed.packing_source import PackingSource, digest_file_stats
from echelon.errors import DataError

#: Bytes of CSV that are read at once.
_CSV_BLOCK_BYTES = 2**24
#: Rows that are looked at to learn their size.
_SIZED_ROWS = 256
_DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
TABLE_FORMATS = {".csv": "CSV", ".tsv": "CSV", ".parquet": "Parquet", ".arrow": "Arrow", ".feather": "Arrow"}


class TablePackingSource(PackingSource):
    """One or more files with the same columns, one behind the other. Parquet is read by row groups; Arrow is mapped, where it is not
    compressed; CSV becomes an Arrow file without a name in the folder `near`, which is mapped."""

    has_random_access = False

    def __init__(self, paths: Sequence[Path], temp_folder: Path) -> None:
        self._paths, self._temp_folder = list(paths), temp_folder
        self.provenance = {
            "source": ", ".join(map(str, paths)), "kind": TABLE_FORMATS[paths[0].suffix.lower()], "stamp": digest_file_stats(paths)
        }  # fmt: skip

    @property
    def identity(self) -> str:
        # Columns and rows follow from the files, and of CSV are not known before all of it is read.
        return self._digest_identity()

    def prepare(self) -> None:
        import pyarrow as pa

        paths = self._paths
        self._parts: list[tuple[Path, int, int]] = []  # path, row group (or 0), rows
        self._tables: dict[Path, Any] = {}
        #: The row group that was read last: rows are asked for a few at a time.
        self._last_row_group: tuple[int, Any] = -1, None
        schema = None
        for path in paths:
            try:
                file_schema, part_rows = self._open_file(path)
            except (pa.ArrowException, OSError, ValueError) as error:
                if getattr(error, "errno", None) in _DISK_FULL_ERRNOS:
                    raise DataError(
                        f"{self._temp_folder} has no room for the copy of {path} that is packed: free some, or pack into a folder on another disk"
                    ) from None
                raise DataError(f"{path} cannot be read as {TABLE_FORMATS[path.suffix.lower()]}: {error}") from None
            if schema is not None and not file_schema.equals(schema):
                raise DataError(
                    f"{path} has other columns than {paths[0]}: {_describe_schema(file_schema)}, not {_describe_schema(schema)}"
                )
            schema = file_schema
            duplicate = next((name for name in file_schema.names if file_schema.names.count(name) > 1), None)
            if duplicate is not None:
                raise DataError(f"{path} has two columns {duplicate!r}: rename one")
            self._parts += [(path, group, rows) for group, rows in enumerate(part_rows)]
        assert schema is not None
        self._ends = np.cumsum([rows for _, _, rows in self._parts])
        self.samples = int(self._ends[-1]) if len(self._ends) else 0
        if not self.samples:
            raise DataError(f"{paths[0]} has no rows: there is nothing to pack")
        self.columns = tuple(_make_column(field, pa) for field in schema)
        self.sample = {"dict": {column.name: column.name for column in self.columns}}
        self.row_bytes = self._measure_row_bytes()

    def _open_file(self, path: Path) -> tuple[Any, list[int]]:
        """The schema, and the rows of each part."""
        import pyarrow as pa

        table_format = TABLE_FORMATS[path.suffix.lower()]
        if table_format == "Parquet":
            import pyarrow.parquet as pq

            file = pq.ParquetFile(path, memory_map=True)
            return file.schema_arrow.remove_metadata(), [
                file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)
            ]
        if table_format == "CSV":
            table = _read_csv(path, self._temp_folder)
        else:
            mapped_file = pa.memory_map(str(path))
            try:
                table = pa.ipc.open_file(mapped_file).read_all()
            except pa.ArrowInvalid:  # HF data sets and others write the stream form
                table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        self._tables[path] = table
        return table.schema.remove_metadata(), [table.num_rows]

    def _measure_row_bytes(self) -> float:
        """Of the first rows as they are packed: a file may hold them compressed."""
        rows = min(_SIZED_ROWS, self.samples)
        sizes = [
            array.nbytes
            for column in self.read(0, rows)
            for array in (column if isinstance(column, list) else [column])
        ]
        return max(1.0, sum(sizes) / rows)

    def _slice_part(self, part: int, start: int, stop: int) -> Any:
        path, row_group, _ = self._parts[part]
        if path in self._tables:
            return self._tables[path].slice(start, stop - start)
        if self._last_row_group[0] != part:
            import pyarrow.parquet as pq

            self._last_row_group = (
                part,
                pq.ParquetFile(path, memory_map=True).read_row_group(row_group, use_threads=False),
            )
        return self._last_row_group[1].slice(start, stop - start)

    def read(self, start: int, stop: int) -> Sequence[Any]:
        import pyarrow as pa

        tables, row = [], start
        while row < stop:
            part = int(np.searchsorted(self._ends, row, "right"))
            part_start = int(self._ends[part]) - self._parts[part][2]
            end = min(stop, int(self._ends[part]))
            tables.append(self._slice_part(part, row - part_start, end - part_start))
            row = end
        table = pa.concat_tables(tables) if len(tables) > 1 else tables[0]
        return [_column_rows(table.column(column.name), column, start, pa) for column in self.columns]


def _read_csv(path: Path, temp_folder: Path) -> Any:
    """The table, in a file without a name that is mapped: it needs no memory and is gone with the last process that reads it.

    Kinds of columns follow from the first 16 MB. Where the rest does not fit them (1 and later 1.5), all is read into memory at once, which
    finds kinds that fit all.
    """
    import pyarrow as pa
    from pyarrow import csv

    parse_options = csv.ParseOptions(delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
    read_options = csv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK_BYTES)
    temp_folder.mkdir(parents=True, exist_ok=True)
    try:
        with (
            tempfile.TemporaryFile(dir=temp_folder) as arrow_file,
            csv.open_csv(path, parse_options=parse_options, read_options=read_options) as reader,
        ):
            with pa.ipc.new_file(pa.PythonFile(arrow_file, "w"), reader.schema) as writer:
                for batch in reader:
                    writer.write_batch(batch)
            arrow_file.flush()
            return pa.ipc.open_file(pa.memory_map(f"/proc/self/fd/{arrow_file.fileno()}")).read_all()
    except pa.ArrowInvalid:
        return csv.read_csv(path, parse_options=parse_options, read_options=csv.ReadOptions(use_threads=False))


def _describe_schema(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _make_column(field: Any, pa: Any) -> Column:
    name, arrow_type, types = field.name, field.type, pa.types
    if isinstance(arrow_type, pa.ExtensionType) and arrow_type.extension_name == "arrow.fixed_shape_tensor":
        return Column(name=name, dtype=_dtype_name(arrow_type.value_type, name, pa), shape=tuple(arrow_type.shape))
    if types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    if types.is_string(arrow_type) or types.is_large_string(arrow_type):
        return Column(name=name, dtype="uint8", ragged=True, kind="text")
    if types.is_binary(arrow_type) or types.is_large_binary(arrow_type):
        return Column(name=name, dtype="uint8", ragged=True, kind="bytes")
    if types.is_struct(arrow_type) and {
        arrow_type.field(position).name for position in range(arrow_type.num_fields)
    } == {"bytes", "path"}:
        return Column(name=name, dtype="uint8", ragged=True, kind="image")  # as HF data sets keep pictures
    if types.is_fixed_size_list(arrow_type):
        return Column(name=name, dtype=_dtype_name(arrow_type.value_type, name, pa), shape=(arrow_type.list_size,))
    if types.is_list(arrow_type) or types.is_large_list(arrow_type):
        return Column(name=name, dtype=_dtype_name(arrow_type.value_type, name, pa), ragged=True)
    return Column(name=name, dtype=_dtype_name(arrow_type, name, pa))


def _dtype_name(arrow_type: Any, name: str, pa: Any) -> str:
    if pa.types.is_temporal(arrow_type) or pa.types.is_decimal(arrow_type):
        raise DataError(f"column {name!r} is {arrow_type}: make it a number or text first")
    try:
        dtype = "bool" if pa.types.is_boolean(arrow_type) else np.dtype(arrow_type.to_pandas_dtype()).name
    except (NotImplementedError, TypeError):
        dtype = ""
    if dtype not in ITEM_BYTES:
        raise DataError(
            f"column {name!r} is {arrow_type}: numbers, lists of numbers, text, bytes and pictures can be packed"
        )
    return dtype


def _column_rows(chunked: Any, column: Column, start: int, pa: Any) -> Any:
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
        large_list = array.cast(pa.large_list(array.type.value_type))
        offsets, values = large_list.offsets.to_numpy(), _to_numpy(large_list.values, column, start)
        return [values[begin:end] for begin, end in pairwise(offsets.tolist())]
    flat = array.flatten() if pa.types.is_fixed_size_list(array.type) else array
    return _to_numpy(flat, column, start).reshape(len(array), *column.shape)


def _to_numpy(array: Any, column: Column, start: int) -> np.ndarray:
    if array.null_count:
        raise DataError(
            f"column {column.name!r} has an empty place inside a row from {start} on: fill it before packing"
        )
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values.astype(np.uint8) if values.dtype == bool else values
