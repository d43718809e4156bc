"""Tables: CSV, Parquet, Arrow and ORC files, read with pyarrow. Samples are dicts of their columns."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from echelon.data.packed.manifest import ITEM_BYTES, Column
from echelon.data.packed.packing_source import PackingSource, digest_file_stats
from echelon.errors import DataError

#: Bytes of CSV that are read at once.
_CSV_BLOCK_BYTES = 2**24
#: Rows that are read to learn how large a row is.
_SIZED_ROWS = 256
_DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
TABLE_FORMATS = {
    ".csv": "CSV", ".tsv": "CSV", ".parquet": "Parquet", ".arrow": "Arrow", ".feather": "Arrow", ".orc": "ORC"
}  # fmt: skip
#: pyarrow's names of the formats that its data sets read in place.
_ARROW_FORMATS = {"Parquet": "parquet", "Arrow": "ipc", "ORC": "orc"}


class TablePackingSource(PackingSource):
    """One or more files with the same columns, concatenated.

    A process holds one row group of Parquet, or one ORC or compressed Arrow file; Arrow is mapped. CSV is first converted to an Arrow
    file without a name in `temp_folder`.
    """

    has_random_access = False

    def __init__(self, paths: Sequence[Path], temp_folder: Path) -> None:
        self._paths, self._temp_folder = list(paths), temp_folder
        self._format = TABLE_FORMATS[paths[0].suffix.lower()]
        source = ", ".join(map(str, paths))
        self.provenance = {"source": source, "kind": self._format, "stamp": digest_file_stats(paths)}

    @property
    def identity(self) -> str:
        # Columns and rows follow from the files, and those of CSV are not known before all of it is read.
        return self._digest_identity()

    def prepare(self) -> None:
        self._fragments: list[Any] = []
        #: The fragment that was read last: rows are asked for a few at a time.
        self._last_read: tuple[int, Any] = -1, None
        schema, row_counts = None, []
        for path in self._paths:
            file_schema, fragments = self._open_file(path)
            if schema is not None and not file_schema.equals(schema):
                here, there = (", ".join(f"{field.name}: {field.type}" for field in s) for s in (file_schema, schema))
                raise DataError(f"{path} has other columns than {self._paths[0]}: {here}, not {there}")
            schema = file_schema
            self._fragments += [fragment for fragment, _ in fragments]
            row_counts += [rows for _, rows in fragments]
        assert schema is not None
        self._starts = np.cumsum([0, *row_counts])
        self.samples = int(self._starts[-1])
        if not self.samples:
            raise DataError(f"{self._paths[0]} has no rows: there is nothing to pack")
        self.columns = tuple(map(_make_column, schema))
        self.sample = {"dict": {column.name: column.name for column in self.columns}}
        self.row_bytes = self._measure_row_bytes()

    def _open_file(self, path: Path) -> tuple[Any, list[tuple[Any, int]]]:
        import pyarrow as pa

        try:
            dataset = self._open_dataset(path)
            names = dataset.schema.names
            duplicate = next((name for name in names if names.count(name) > 1), None)
            if duplicate is not None:
                raise DataError(f"{path} has two columns {duplicate!r}: rename one")
            return dataset.schema.remove_metadata(), list(_split_fragments(dataset))
        except (pa.ArrowException, OSError, ValueError) as error:
            if getattr(error, "errno", None) in _DISK_FULL_ERRNOS:
                problem = f"{self._temp_folder} has no space for the copy of {path} that is packed"
                raise DataError(f"{problem}: free some, or pack into a folder on another disk") from None
            raise DataError(f"{path} cannot be read as {self._format}: {error}") from None

    def _open_dataset(self, path: Path) -> Any:
        import pyarrow as pa
        from pyarrow import dataset, fs

        if self._format == "CSV":
            return dataset.dataset(_read_csv(path, self._temp_folder))
        try:
            local_files = fs.LocalFileSystem(use_mmap=True)
            return dataset.dataset(str(path), format=_ARROW_FORMATS[self._format], filesystem=local_files)
        except pa.ArrowInvalid:
            if self._format != "Arrow":
                raise
            return dataset.dataset(pa.ipc.open_stream(pa.memory_map(str(path))).read_all())  # as HF data sets write it

    def _measure_row_bytes(self) -> float:
        """Measure the first rows as they are packed: a file may hold them compressed."""
        rows = min(_SIZED_ROWS, self.samples)
        columns = self.read(0, rows)
        arrays = [array for column in columns for array in (column if isinstance(column, list) else [column])]
        return max(1.0, sum(array.nbytes for array in arrays) / rows)

    def read(self, start: int, stop: int) -> Sequence[Any]:
        import pyarrow as pa

        first, last = np.searchsorted(self._starts, (start, stop - 1), "right") - 1
        tables = []
        for position in range(first, last + 1):
            if self._last_read[0] != position:
                self._last_read = position, self._fragments[position].to_table(use_threads=False)
            fragment_start, fragment_stop = self._starts[position : position + 2].tolist()
            first_row = max(start, fragment_start)
            tables.append(self._last_read[1].slice(first_row - fragment_start, min(stop, fragment_stop) - first_row))
        table = pa.concat_tables(tables)
        return [_column_rows(table.column(column.name), column, start) for column in self.columns]


def _split_fragments(dataset: Any) -> Iterator[tuple[Any, int]]:
    for fragment in dataset.get_fragments():
        if hasattr(fragment, "split_by_row_group"):
            yield from ((part, part.row_groups[0].num_rows) for part in fragment.split_by_row_group())
        else:
            yield fragment, fragment.count_rows()


def _read_csv(path: Path, temp_folder: Path) -> Any:
    """Convert CSV to a mapped Arrow file without a name, which needs no memory and vanishes with the last process that reads it.

    The first 16 MB decide the column types. If later rows do not fit them (1, then 1.5), the whole file is read into memory, which finds
    types that fit all.
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


def _make_column(field: Any) -> Column:
    import pyarrow as pa

    name, arrow_type, types = field.name, field.type, pa.types
    if isinstance(arrow_type, pa.ExtensionType) and arrow_type.extension_name == "arrow.fixed_shape_tensor":
        return Column(name=name, dtype=_dtype_name(arrow_type.value_type, name), shape=tuple(arrow_type.shape))
    if types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    if types.is_string(arrow_type) or types.is_large_string(arrow_type):
        return Column(name=name, dtype="uint8", ragged=True, kind="text")
    if types.is_binary(arrow_type) or types.is_large_binary(arrow_type):
        return Column(name=name, dtype="uint8", ragged=True, kind="bytes")
    if types.is_struct(arrow_type) and {part.name for part in arrow_type} == {"bytes", "path"}:
        return Column(name=name, dtype="uint8", ragged=True, kind="image")  # as HF data sets store images
    if types.is_fixed_size_list(arrow_type):
        return Column(name=name, dtype=_dtype_name(arrow_type.value_type, name), shape=(arrow_type.list_size,))
    if types.is_list(arrow_type) or types.is_large_list(arrow_type):
        return Column(name=name, dtype=_dtype_name(arrow_type.value_type, name), ragged=True)
    return Column(name=name, dtype=_dtype_name(arrow_type, name))


def _dtype_name(arrow_type: Any, name: str) -> str:
    import pyarrow as pa

    if pa.types.is_temporal(arrow_type) or pa.types.is_decimal(arrow_type):
        raise DataError(f"column {name!r} is {arrow_type}: make it a number or text first")
    try:
        dtype = "bool" if pa.types.is_boolean(arrow_type) else np.dtype(arrow_type.to_pandas_dtype()).name
    except (NotImplementedError, TypeError):
        dtype = ""
    if dtype not in ITEM_BYTES:
        raise DataError(f"column {name!r} is {arrow_type}: use numbers, lists of numbers, text, bytes or images")
    return dtype


def _column_rows(chunked: Any, column: Column, start: int) -> Any:
    import pyarrow as pa

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
        raise DataError(f"column {column.name!r} has no value in row {row}: fill or delete such rows before packing")
    if not column.ragged:
        flat = array.flatten() if pa.types.is_fixed_size_list(array.type) else array
        return _to_numpy(flat, column, start).reshape(len(array), *column.shape)
    if column.kind == "array":
        large_list = array.cast(pa.large_list(array.type.value_type))
        offsets, values = large_list.offsets.to_numpy(), _to_numpy(large_list.values, column, start)
    else:
        binary = array.cast(pa.large_binary())
        _, offset_buffer, value_buffer = binary.buffers()
        offsets = np.frombuffer(offset_buffer, np.int64, len(binary) + 1, 8 * binary.offset)
        values = np.frombuffer(value_buffer or b"", np.uint8)
    return [values[begin:end] for begin, end in pairwise(offsets.tolist())]


def _to_numpy(array: Any, column: Column, start: int) -> np.ndarray:
    if array.null_count:
        raise DataError(f"column {column.name!r} has a null inside a row from {start} on: fill it before packing")
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values.astype(np.uint8) if values.dtype == bool else values
