"""Tables exported from servers, for people and for serving: Arrow or safetensors, in any dtype, with a reader that maps the file.

Rows lie in the order of their ids' hashes, which is the order of shards: while writing, one shard is in memory at a time, and a reader
finds ids by bisection. Columns (Arrow) or tensors (safetensors): `id`, `row`, and `scale` for i2 and i1. Files are written atomically.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.errors import CheckpointError, DocumentError
from echelon.files import atomic_writer
from echelon.server.protocol.hashing import mix64, shard_of
from echelon.server.protocol.specs import DTYPE_BYTES, StoreError, Table, spec_from_plain, spec_to_plain
from echelon.server.protocol.wire_dtypes import dequantize, quantize
from echelon.server.store import shard_checkpoint
from echelon.server.store.lazy_updates import bring_rows_up_to_date, history_from_runs, make_initial_rows
from echelon.server.store.row_layout import extract_weights, initial_values
from echelon.server.store.safetensors_file import DAMAGE_ERRORS, SafetensorsFile, encode_header

RowBatch = tuple[np.ndarray, list[np.ndarray]]  # ids, rows, and the scales of integers
Batches = Iterable[RowBatch]
Rows = tuple[np.ndarray, np.ndarray]  # ids and rows
Metadata = dict[str, str]
RateRuns = tuple[np.ndarray, np.ndarray]  # learning rates, run-length encoded: up to which update, and the rate


def export_from_checkpoint(folder: Path, name: str, path: Path, wire_dtype: str = "f4") -> int:
    """Write a table of a servers' checkpoint; how many rows. Needs no server."""
    manifest = shard_checkpoint.read_manifest(folder)
    spec = _find_table_spec(folder, manifest, name)
    count, histories = _scan_shards(folder, manifest, name)
    batches = _read_checkpoint_batches(folder, manifest, spec, wire_dtype)
    write_table(Path(path), spec, batches, wire_dtype, count, histories)
    return count


def iterate_complete_rows(folder: Path, name: str, count: int, dtype: str = "f4") -> Iterator[Rows]:
    """(ids, rows) of a checkpoint's table, which is to become a tensor of `count` rows; CheckpointError, at the end, if some are missing."""
    row_count, manifest = 0, shard_checkpoint.read_manifest(folder)
    spec = _find_table_spec(folder, manifest, name)
    for ids, (rows,) in _read_checkpoint_batches(folder, manifest, spec, dtype):
        row_count += len(ids)
        yield ids, rows
    if row_count != count:
        raise CheckpointError(
            f"{folder}: {name} has {row_count:,} of {count:,} rows, the others were never trained and have no values here; "
            "`echelon server export` writes the rows that there are"
        )


def write_table(
    path: Path, spec: Table, batches: Batches, wire: str, count: int, histories: Sequence[RateRuns] = ()
) -> None:
    """Write `count` rows in batches of distinct ids, in the order of their hashes.

    `histories`: of a lazy table, the updates of each shard, from which the rows follow that nobody pushed to.
    """
    if path.suffix not in _FORMATS:
        raise StoreError(f"{path}: unknown format; use a name that ends in {' or '.join(_FORMATS)}")
    if wire not in DTYPE_BYTES:
        raise StoreError(f"wire: {wire!r} is not a dtype of rows; use one of {', '.join(DTYPE_BYTES)}")
    metadata = {"format": "echelon.table.1", "wire": wire, "rows": str(count), "spec": json.dumps(spec_to_plain(spec))}
    if any(len(ends) for ends, _ in histories):
        runs = [json.dumps([ends.tolist(), rates.tolist()]) for ends, rates in histories]
        distinct_runs = list(dict.fromkeys(runs))
        metadata["courses"] = json.dumps([distinct_runs, [distinct_runs.index(shard_runs) for shard_runs in runs]])
    write_rows, _ = _FORMATS[path.suffix]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_writer(path) as file:
            write_rows(file, metadata, _check_batches(batches, count, path), wire, (count, spec.dim))
    except OSError as error:
        raise StoreError(f"{path}: the table cannot be written ({error}); give another path") from error


class ExportedTable:
    """An exported table, mapped: rows by id without reading all of it."""

    def __init__(self, path: Path) -> None:
        path = Path(path)
        _, open_file = _FORMATS.get(path.suffix, _FORMATS[".safetensors"])
        try:
            metadata, self.chunks = open_file(path)
            spec = spec_from_plain(json.loads(metadata["spec"]), str(path))
            self.wire_dtype = metadata["wire"]
            runs, history_of_shard = json.loads(metadata.get("courses", "[[], []]"))
            decoded = (json.loads(text) for text in runs)
            self._histories = [(np.array(ends, np.int64), np.array(rates, float)) for ends, rates in decoded]
            self._history_of_shard = np.array(history_of_shard)
        except DAMAGE_ERRORS as error:
            raise DocumentError(f"{path}: cannot be read as an exported table ({error}); export it again") from error
        assert isinstance(spec, Table)
        self.spec = spec
        self._first_hashes = mix64(np.array([ids[0] for ids, _ in self.chunks], np.int64))

    def __len__(self) -> int:
        return sum(len(ids) for ids, _ in self.chunks)

    def read_rows(self, ids: np.ndarray, dtype: str = "f4") -> np.ndarray:
        """The row of each id; for an id without one, its initial value, after the updates of a lazy table."""
        ids = np.asarray(ids, np.int64).reshape(-1)
        chunks, positions = self._find_positions(ids)
        rows = np.empty((len(ids), self.spec.dim), dtype)
        for chunk in np.unique(chunks[positions >= 0]):
            selected = np.flatnonzero((chunks == chunk) & (positions >= 0))
            rows[selected] = dequantize([array[positions[selected]] for array in self.chunks[chunk][1]], dtype)
        absent = positions < 0
        rows[absent] = self._initial_rows(ids[absent])
        return rows

    def _initial_rows(self, ids: np.ndarray) -> np.ndarray:
        if not self._histories:
            return initial_values(self.spec, ids, self.spec.dim, "f8")
        numbers = self._history_of_shard[shard_of(ids, len(self._history_of_shard))]
        rows = np.empty((len(ids), self.spec.dim), self.spec.dtype)
        for number in np.unique(numbers).tolist():
            history, selected = history_from_runs(self.spec, *self._histories[number]), numbers == number
            rows[selected] = make_initial_rows(self.spec, ids[selected], history)
        return rows

    def _find_positions(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The chunk of each id, and its position there or -1."""
        hashes = mix64(ids)
        chunks = np.searchsorted(self._first_hashes, hashes, side="right") - 1
        positions = np.full(len(ids), -1, np.int64)
        for chunk in np.unique(chunks[chunks >= 0]):
            selected = np.flatnonzero(chunks == chunk)
            chunk_ids, id_hashes = self.chunks[chunk][0], hashes[selected]
            low, high = np.zeros(len(selected), np.int64), np.full(len(selected), len(chunk_ids) - 1)
            while (low < high).any():
                middle = (low + high) >> 1
                is_below = mix64(chunk_ids[middle]) < id_hashes
                low, high = np.where(is_below, middle + 1, low), np.where(is_below, high, middle)
            positions[selected] = np.where(chunk_ids[low] == ids[selected], low, -1)
        return chunks, positions


def _check_batches(batches: Batches, count: int, path: Path) -> Iterator[RowBatch]:
    """The batches that are not empty; StoreError if they are not in order, or not of `count` rows."""
    last_hash, row_count = np.empty(0, np.uint64), 0
    for ids, arrays in batches:
        hashes = np.append(last_hash, mix64(ids))
        if (hashes[1:] <= hashes[:-1]).any():
            raise StoreError(f"{path}: ids are duplicated or out of order; give shards in order, each id once")
        last_hash, row_count = hashes[-1:], row_count + len(ids)
        if len(ids):
            yield ids, arrays
    if row_count != count:
        raise StoreError(f"{path}: expected {count} rows, got {row_count}; was the table written to meanwhile?")


# Checkpoints


def _find_table_spec(folder: Path, manifest: dict[str, Any], name: str) -> Table:
    specs = [spec_from_plain(spec, str(folder)) for spec in manifest["specs"]]
    tables = {spec.name: spec for spec in specs if isinstance(spec, Table)}
    if name not in tables:
        raise StoreError(f"{folder}: no table {name!r} in it; it has {', '.join(sorted(tables)) or 'none'}")
    return tables[name]


def _read_checkpoint_batches(folder: Path, manifest: dict[str, Any], spec: Table, wire: str) -> Iterator[RowBatch]:
    for shard in range(manifest["shards"]):
        parts = shard_checkpoint.load_shard(folder, shard)
        table_parts = [(meta["kind"], arrays) for meta, arrays in parts if meta.get("name") == spec.name]
        row_arrays = [arrays[0] for kind, arrays in table_parts if kind == "rows"]
        if not row_arrays:
            continue
        rows = np.concatenate(row_arrays)
        histories = [arrays for kind, arrays in table_parts if kind == "course"]
        del parts, table_parts, row_arrays
        for ends, rates in histories:
            rows = bring_rows_up_to_date(spec, rows, history_from_runs(spec, ends, rates))
        rows = rows[np.argsort(mix64(np.ascontiguousarray(rows[:, 0])))]
        weights = extract_weights(spec, rows)
        ids = np.ascontiguousarray(rows[:, 0])
        yield ids, weights if spec.stored == wire else quantize(dequantize(weights, spec.dtype), wire)


def _scan_shards(folder: Path, manifest: dict[str, Any], name: str) -> tuple[int, list[RateRuns]]:
    """How many rows a table has, and the updates of each shard if it is lazy, without reading its rows."""
    count, histories = 0, [(np.empty(0, np.int64), np.empty(0))] * int(manifest["shards"])
    for shard in range(manifest["shards"]):
        path = shard_checkpoint.shard_file(folder, manifest, shard)
        try:
            file = SafetensorsFile(path)
            for meta, names in shard_checkpoint.parse_parts(file):
                if meta.get("name") == name and meta["kind"] == "rows":
                    count += file.shape(names[0])[0]
                elif meta.get("name") == name and meta["kind"] == "course":
                    ends, rates = map(file.tensor, names)
                    histories[shard] = (ends, rates)
        except DAMAGE_ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{path}: {reason}; it is damaged, use an older checkpoint") from None
    return count, histories


# Formats


def _write_arrow(file: Any, metadata: Metadata, batches: Batches, wire: str, shape: Sequence[int]) -> None:
    import pyarrow as pa

    kind, dim = pa.from_numpy_dtype(np.dtype(wire)), shape[1]
    fields = [pa.field("id", pa.int64()), pa.field("row", pa.list_(kind, dim))]
    fields += [pa.field("scale", pa.float32())] if wire[0] == "i" else []
    schema = pa.schema(fields, metadata=metadata)
    with pa.ipc.new_file(file, schema) as writer:
        for ids, (rows, *scales) in batches:
            column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1), kind), dim)
            writer.write_batch(pa.record_batch([pa.array(ids), column, *map(pa.array, scales)], schema=schema))


def _open_arrow(path: Path) -> tuple[Metadata, list[RowBatch]]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        metadata = {key.decode(): value.decode() for key, value in (reader.schema.metadata or {}).items()}
        dim = reader.schema.field("row").type.list_size
        chunks = []
        for number in range(reader.num_record_batches):
            ids, values, *scales = reader.get_batch(number).columns
            flat = values.flatten().to_numpy().reshape(-1, dim)
            chunks.append((ids.to_numpy(), [flat, *(scale.to_numpy() for scale in scales)]))
    return metadata, chunks


def _write_safetensors(file: Any, metadata: Metadata, batches: Batches, wire: str, shape: Sequence[int]) -> None:
    # Wider dtypes first, so that each tensor is aligned to its own.
    tensors: dict[str, tuple[np.dtype, Sequence[int]]] = {"id": (np.dtype("i8"), shape[:1])}
    if wire[0] == "i" and shape[0]:
        tensors["scale"] = (np.dtype("f4"), shape[:1])
    tensors["row"] = (np.dtype(wire), shape)
    header, offsets, file_bytes = encode_header(tensors, metadata)
    file.write(header)
    file.truncate(file_bytes)
    for ids, arrays in batches:
        for name, array in zip(("id", "row", "scale"), (ids, *arrays), strict=False):
            file.seek(offsets[name])
            file.write(np.ascontiguousarray(array).data)
            offsets[name] += array.nbytes


def _open_safetensors(path: Path) -> tuple[Metadata, list[RowBatch]]:
    file = SafetensorsFile(path)
    ids, *arrays = (file.tensor(name) for name in ("id", "row", "scale") if name in file)
    return file.metadata, [(ids, arrays)] if len(ids) else []


_FORMATS: dict[str, tuple[Callable[..., None], Callable[[Path], tuple[Metadata, list[RowBatch]]]]] = {
    ".arrow": (_write_arrow, _open_arrow),
    ".safetensors": (_write_safetensors, _open_safetensors),
}
