"""Tables out of servers, for people and for serving: Arrow or safetensors, in any kind of number, and a reader that gives rows back.

Rows lie in the order of their ids' hashes, which is the shards' own order: one shard is held at a time while writing, and a
reader finds ids by bisection in a mapped file. Columns (Arrow) or tensors (safetensors): `id`, `row`, and `scale` for i2 and i1.
A file is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.errors import CheckpointError, DocumentError
from echelon.server.atomic_file import fsync_folder
from echelon.server.protocol.hashing import mix64
from echelon.server.protocol.specs import DTYPE_BYTES, StoreError, Table, spec_from_plain, spec_to_plain

#: Ids, then what `narrow` gives: rows, and scales for integers.
RowBatch = tuple[np.ndarray, list[np.ndarray]]
#: Up to which update a learning rate was in force, and the rate.
RateRuns = tuple[np.ndarray, np.ndarray]
_SAFETENSORS_DTYPES = {"f8": "F64", "f4": "F32", "f2": "F16", "i2": "I16", "i1": "I8"}
_SUFFIXES = (".arrow", ".safetensors")


def export_from_checkpoint(folder: Path, name: str, path: Path, wire_dtype: str = "f4") -> int:
    """Write a table of a servers' checkpoint; how many rows. Needs no server."""
    from echelon.server.store import shard_checkpoint

    manifest = shard_checkpoint.read_manifest(folder)
    spec = _find_table_spec(folder, manifest, name)
    count = sum(_count_rows(folder, manifest, shard, name) for shard in range(manifest["shards"]))
    histories = _read_histories(folder, manifest, spec) if spec.rule.every else []
    return write_table(
        path,
        spec,
        _read_checkpoint_batches(folder, manifest, spec, wire_dtype),
        wire_dtype=wire_dtype,
        count=count,
        histories=histories,
    )


def iterate_rows(source: Path, name: str | None = None, dtype: str = "f4") -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, rows) of a table, batch by batch, from a checkpoint's folder or an exported file."""
    from echelon.server.protocol.wire_dtypes import dequantize

    source = Path(source)
    if not source.is_dir():
        table = ExportedTable(source)
        for ids, arrays in table.chunks:
            yield np.array(ids), dequantize([np.array(array) for array in arrays], dtype)
        return
    from echelon.server.store import shard_checkpoint

    manifest = shard_checkpoint.read_manifest(source)
    spec = _find_table_spec(source, manifest, name)
    for ids, arrays in _read_checkpoint_batches(source, manifest, spec, "f8" if dtype == "f8" else "f4"):
        yield ids, arrays[0]


def iterate_complete_rows(
    folder: Path, name: str, count: int, dtype: str = "f4"
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, rows) of a table of a checkpoint that is to become a tensor of so many rows; refused, at the end, where some are not there."""
    row_count = 0
    for ids, values in iterate_rows(folder, name, dtype):
        row_count += len(ids)
        yield ids, values
    if row_count != count:
        raise CheckpointError(
            f"{folder}: {name} has {row_count:,} of {count:,} rows, the others were never trained and begin as their ids say: such a table "
            "is no tensor of a file; `echelon server export` writes the rows that there are"
        )


def write_table(
    path: Path,
    spec: Table,
    batches: Iterable[RowBatch],
    *,
    wire_dtype: str,
    count: int,
    histories: Sequence[RateRuns] = (),
) -> int:
    """Write batches of distinct ids, each and all of them in the order of their hashes; `count`: rows in sum; `histories`: of tables all of
    whose rows move, the updates that each shard has had, from which rows follow that nobody pushed to."""
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise StoreError(f"{path}: cannot tell the format; give a name that ends in {' or '.join(_SUFFIXES)}")
    if wire_dtype not in DTYPE_BYTES:
        raise StoreError(f"wire: {wire_dtype!r} is no kind of number; use one of {', '.join(DTYPE_BYTES)}")
    metadata = {
        "format": "echelon.table.1",
        "wire": wire_dtype,
        "rows": str(count),
        "spec": json.dumps(spec_to_plain(spec)),
    }
    if any(len(ends) for ends, _ in histories):
        runs = [json.dumps([ends.tolist(), rates.tolist()]) for ends, rates in histories]
        distinct_runs = list(dict.fromkeys(runs))
        metadata["courses"] = json.dumps([distinct_runs, [distinct_runs.index(history_runs) for history_runs in runs]])
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_format = _write_arrow if path.suffix == ".arrow" else _write_safetensors
        with open(partial, "w+b") as file:
            write_format(file, spec, _check_batches(batches, count, path), wire_dtype, count, metadata)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        fsync_folder(path.parent)
    except OSError as error:
        raise StoreError(f"{path}: the table cannot be written ({error}); give another path") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return count


class ExportedTable:
    """An exported table, mapped: rows by id without reading it whole."""

    def __init__(self, path: Path) -> None:
        path = Path(path)
        try:
            metadata, self.chunks = (_open_arrow if path.suffix == ".arrow" else _open_safetensors)(path)
            self.spec = spec_from_plain(json.loads(metadata["spec"]), str(path))
            self.wire_dtype = metadata["wire"]
            distinct_runs, self._history_of_shard = json.loads(metadata.get("courses", "[[], []]"))
            self._histories = [tuple(map(np.array, json.loads(history_runs))) for history_runs in distinct_runs]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DocumentError(f"{path}: cannot be read as an exported table ({error}); export it again") from error
        self.row_count = sum(len(ids) for ids, _ in self.chunks)
        self._first_hashes = mix64(np.array([ids[0] for ids, _ in self.chunks], np.int64))

    def __len__(self) -> int:
        return self.row_count

    def has_rows(self, ids: np.ndarray) -> np.ndarray:
        """Whether each id has a row."""
        return self._find_positions(np.asarray(ids, np.int64))[1] >= 0

    def read_rows(self, ids: np.ndarray, dtype: str = "f4") -> np.ndarray:
        """The row of each id; of one that has none, the value that training started it with, and that its rule has made of it."""
        from echelon.server.protocol.wire_dtypes import dequantize

        assert isinstance(self.spec, Table)
        ids = np.asarray(ids, np.int64).reshape(-1)
        chunks, positions = self._find_positions(ids)
        rows = np.empty((len(ids), self.spec.dim), dtype)
        for chunk in np.unique(chunks[positions >= 0]):
            selected = np.flatnonzero((chunks == chunk) & (positions >= 0))
            rows[selected] = dequantize(
                [np.asarray(array[positions[selected]]) for array in self.chunks[chunk][1]], dtype
            )
        absent_ids = np.flatnonzero(positions < 0)
        if len(absent_ids):
            rows[absent_ids] = self._initial_rows(ids[absent_ids])
        return rows

    def _initial_rows(self, ids: np.ndarray) -> np.ndarray:
        assert isinstance(self.spec, Table)
        if not self._histories:
            return _make_initial_rows(self.spec, ids)
        from echelon.server.protocol.hashing import shard_of
        from echelon.server.store.lazy_updates import history_from_runs, make_initial_rows

        history_numbers = np.array(self._history_of_shard)[shard_of(ids, len(self._history_of_shard))]
        rows = np.empty((len(ids), self.spec.dim), self.spec.dtype)
        for history_number in np.unique(history_numbers).tolist():
            ends, rates = self._histories[history_number]
            history = history_from_runs(self.spec, ends.astype(np.int64), rates.astype(np.float64))
            rows[history_numbers == history_number] = make_initial_rows(
                self.spec, ids[history_numbers == history_number], history
            )
        return rows

    def _find_positions(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The chunk of each id and where it lies in it, -1 where it is not."""
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


def _make_initial_rows(spec: Table, ids: np.ndarray) -> np.ndarray:
    from echelon.server import kernels
    from echelon.server.store.sparse_table import derive_seed, encode_init

    kind, init_params = encode_init(spec.init)
    rows = np.empty((len(ids), spec.dim))
    for row, row_id in zip(rows, ids.tolist(), strict=True):
        kernels.init_row(kind, init_params[0], init_params[1], derive_seed(spec.name, spec.init), row_id, row)
    return rows


def _check_batches(batches: Iterable[RowBatch], count: int, path: Path) -> Iterator[RowBatch]:
    """Batches that are not empty, if they are in order and as many as was said."""
    last_hash, row_count = -1, 0
    for ids, arrays in batches:
        if not len(ids):
            continue
        hashes = mix64(ids)
        if int(hashes[0]) <= last_hash or (hashes[1:] <= hashes[:-1]).any():
            raise StoreError(
                f"{path}: ids twice, or not in the order of their hashes; give shards in order, each id once"
            )
        last_hash, row_count = int(hashes[-1]), row_count + len(ids)
        yield ids, arrays
    if row_count != count:
        raise StoreError(f"{path}: {row_count} rows came where {count} were said; was the table written to meanwhile?")


# Checkpoints


def _find_table_spec(folder: Path, manifest: dict[str, Any], name: str | None) -> Table:
    specs = [spec_from_plain(spec, str(folder)) for spec in manifest["specs"]]
    tables = {spec.name: spec for spec in specs if isinstance(spec, Table)}
    if name is None and len(tables) == 1:
        return next(iter(tables.values()))
    if name not in tables:
        raise StoreError(f"{folder}: no table {name!r} in it; it has {', '.join(sorted(tables)) or 'none'}")
    return tables[name]


def _read_checkpoint_batches(
    folder: Path, manifest: dict[str, Any], spec: Table, wire_dtype: str
) -> Iterator[RowBatch]:
    from echelon.server.protocol.wire_dtypes import dequantize, quantize
    from echelon.server.store import shard_checkpoint
    from echelon.server.store.lazy_updates import bring_rows_up_to_date, history_from_runs
    from echelon.server.store.sparse_table import extract_weights

    for shard in range(manifest["shards"]):
        table_parts = [
            (meta["kind"], arrays)
            for meta, arrays in shard_checkpoint.load_shard(folder, shard)
            if meta.get("name") == spec.name
        ]
        row_arrays = [arrays[0] for kind, arrays in table_parts if kind == "rows"]
        if not row_arrays:
            continue
        rows = np.concatenate(row_arrays)
        del row_arrays
        for ends, rates in (arrays for kind, arrays in table_parts if kind == "course"):
            rows = bring_rows_up_to_date(spec, rows, history_from_runs(spec, ends, rates))
        del table_parts
        rows = rows[np.argsort(mix64(np.ascontiguousarray(rows[:, 0])))]
        weights = extract_weights(spec, rows)
        ids = np.ascontiguousarray(rows[:, 0])
        yield ids, weights if spec.stored == wire_dtype else quantize(dequantize(weights, spec.dtype), wire_dtype)


def _read_histories(folder: Path, manifest: dict[str, Any], spec: Table) -> list[RateRuns]:
    """The updates that each shard of a checkpoint has had, without reading its rows."""
    histories = [(np.empty(0, np.int64), np.empty(0))] * int(manifest["shards"])
    for shard in range(manifest["shards"]):
        with _open_shard_file(folder, manifest, shard) as (file, start, parts):
            for meta, (ends, rates) in ((meta, entries) for meta, entries in parts if meta.get("kind") == "course"):
                if meta["name"] == spec.name:
                    histories[shard] = (
                        _read_array(file, start, ends, np.int64),
                        _read_array(file, start, rates, np.float64),
                    )
    return histories


def _read_array(file: Any, start: int, entry: dict[str, Any], dtype: Any) -> np.ndarray:
    first, last = entry["data_offsets"]
    file.seek(start + first)
    return np.frombuffer(file.read(last - first), dtype).reshape(entry["shape"])


def _count_rows(folder: Path, manifest: dict[str, Any], shard: int, name: str) -> int:
    """Rows of a table in one shard's file, by its head alone."""
    with _open_shard_file(folder, manifest, shard) as (_, _, parts):
        row_entries = (entries for meta, entries in parts if meta.get("kind") == "rows" and meta["name"] == name)
        return sum(entries[0]["shape"][0] for entries in row_entries)


@contextlib.contextmanager
def _open_shard_file(folder: Path, manifest: dict[str, Any], shard: int) -> Iterator[tuple[Any, int, list[Any]]]:
    """A shard's file, where its data begins, and its parts: what each is, and where its arrays lie."""
    from echelon.server.store import shard_checkpoint

    path = shard_checkpoint.shard_file(folder, manifest, shard)
    try:
        header, start = _read_safetensors_header(path)
        metas = json.loads(header["__metadata__"]["parts"])
        parts = [
            (meta, [header[f"{part_number:06d}.{array_number:03d}"] for array_number in range(count)])
            for part_number, (meta, count) in enumerate(metas)
        ]
        with open(path, "rb") as file:
            yield file, start, parts
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: {type(error).__name__}: {error}; it is damaged, take an older checkpoint"
        ) from None


# Formats


def _write_arrow(
    file: Any, spec: Table, batches: Iterator[RowBatch], wire_dtype: str, count: int, metadata: dict[str, str]
) -> None:
    import pyarrow as pa

    kind = pa.from_numpy_dtype(np.dtype(wire_dtype))
    fields = [pa.field("id", pa.int64()), pa.field("row", pa.list_(kind, spec.dim))]
    fields += [pa.field("scale", pa.float32())] if wire_dtype[0] == "i" else []
    schema = pa.schema(fields, metadata=metadata)
    with pa.ipc.new_file(file, schema) as writer:
        for ids, arrays in batches:
            flat = pa.array(arrays[0].reshape(-1), kind)
            columns = [pa.array(ids), pa.FixedSizeListArray.from_arrays(flat, spec.dim), *map(pa.array, arrays[1:])]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def _open_arrow(path: Path) -> tuple[dict[str, str], list[RowBatch]]:
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


def _write_safetensors(
    file: Any, spec: Table, batches: Iterator[RowBatch], wire_dtype: str, count: int, metadata: dict[str, str]
) -> None:
    sizes = {
        "id": count * 8,
        "row": count * spec.dim * DTYPE_BYTES[wire_dtype],
        "scale": count * 4 if wire_dtype[0] == "i" else 0,
    }
    dtypes_and_shapes = {
        "id": ("I64", [count]),
        "row": (_SAFETENSORS_DTYPES[wire_dtype], [count, spec.dim]),
        "scale": ("F32", [count]),
    }
    # Longer numbers first, so that each tensor is aligned to its own.
    order = [name for name in ("id", "scale", "row") if sizes[name] or name != "scale"]
    header: dict[str, Any] = {"__metadata__": metadata}
    offsets, offset = {}, 0
    for name in order:
        offsets[name] = offset
        header[name] = {
            "dtype": dtypes_and_shapes[name][0],
            "shape": dtypes_and_shapes[name][1],
            "data_offsets": [offset, offset + sizes[name]],
        }
        offset += sizes[name]
    header_bytes = json.dumps(header, separators=(",", ":")).encode()
    header_bytes += b" " * (-len(header_bytes) % 64)
    file.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
    file.truncate(8 + len(header_bytes) + offset)
    for ids, arrays in batches:
        for name, array in zip(("id", "row", "scale"), (ids, *arrays), strict=False):
            file.seek(8 + len(header_bytes) + offsets[name])
            file.write(np.ascontiguousarray(array).data)
            offsets[name] += array.nbytes


def _read_safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length < 100 << 20:
            raise ValueError(f"a head of {length} bytes")
        return json.loads(file.read(length)), 8 + length


def _open_safetensors(path: Path) -> tuple[dict[str, str], list[RowBatch]]:
    header, start = _read_safetensors_header(path)
    dtype_by_code = {code: kind for kind, code in _SAFETENSORS_DTYPES.items()} | {"I64": "i8"}
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    arrays = []
    for name in ("id", "row", "scale"):
        if name in header:
            entry = header[name]
            count = int(np.prod(entry["shape"], dtype=np.int64))
            view = np.frombuffer(mapping, dtype_by_code[entry["dtype"]], count, start + entry["data_offsets"][0])
            arrays.append(view.reshape(entry["shape"]))
    return header["__metadata__"], [(arrays[0], arrays[1:])] if len(arrays[0]) else []
