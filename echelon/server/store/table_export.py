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
from echelon.server.atomic_file import sync_folder
from echelon.server.protocol.hashing import mix64
from echelon.server.protocol.specs import SIZES, StoreError, Table, spec_from_plain, spec_to_plain

#: Ids, then what `narrow` gives: rows, and scales for integers.
Batch = tuple[np.ndarray, list[np.ndarray]]
#: Up to which update a learning rate was in force, and the rate.
Runs = tuple[np.ndarray, np.ndarray]
_SAFE = {"f8": "F64", "f4": "F32", "f2": "F16", "i2": "I16", "i1": "I8"}
_FORMATS = (".arrow", ".safetensors")


def from_checkpoint(folder: Path, name: str, path: Path, wire: str = "f4") -> int:
    """Write a table of a servers' checkpoint; how many rows. Needs no server."""
    from echelon.server.store import shard_checkpoint

    manifest = shard_checkpoint.read_manifest(folder)
    spec = _spec(folder, manifest, name)
    count = sum(_count(folder, manifest, shard, name) for shard in range(manifest["shards"]))
    courses = _courses(folder, manifest, spec) if spec.rule.every else []
    return save(path, spec, _checkpointed(folder, manifest, spec, wire), wire=wire, count=count, courses=courses)


def rows(source: Path, name: str | None = None, dtype: str = "f4") -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, rows) of a table, batch by batch, from a checkpoint's folder or an exported file."""
    from echelon.server.store.narrow_numbers import widen

    source = Path(source)
    if not source.is_dir():
        served = Served(source)
        for ids, arrays in served.chunks:
            yield np.array(ids), widen([np.array(array) for array in arrays], dtype)
        return
    from echelon.server.store import shard_checkpoint

    manifest = shard_checkpoint.read_manifest(source)
    spec = _spec(source, manifest, name)
    for ids, arrays in _checkpointed(source, manifest, spec, "f8" if dtype == "f8" else "f4"):
        yield ids, arrays[0]


def every_row(folder: Path, name: str, count: int, dtype: str = "f4") -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, rows) of a table of a checkpoint that is to become a tensor of so many rows; refused, at the end, where some are not there."""
    seen = 0
    for ids, values in rows(folder, name, dtype):
        seen += len(ids)
        yield ids, values
    if seen != count:
        raise CheckpointError(
            f"{folder}: {name} has {seen:,} of {count:,} rows, the others were never trained and begin as their ids say: such a table "
            "is no tensor of a file; `echelon server export` writes the rows that there are"
        )


def save(
    path: Path, spec: Table, batches: Iterable[Batch], *, wire: str, count: int, courses: Sequence[Runs] = ()
) -> int:
    """Write batches of distinct ids, each and all of them in the order of their hashes; `count`: rows in sum; `courses`: of tables all of
    whose rows move, the updates that each shard has had, from which rows follow that nobody pushed to."""
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise StoreError(f"{path}: cannot tell the format; give a name that ends in {' or '.join(_FORMATS)}")
    if wire not in SIZES:
        raise StoreError(f"wire: {wire!r} is no kind of number; use one of {', '.join(SIZES)}")
    facts = {"format": "echelon.table.1", "wire": wire, "rows": str(count), "spec": json.dumps(spec_to_plain(spec))}
    if any(len(ends) for ends, _ in courses):
        runs = [json.dumps([ends.tolist(), rates.tolist()]) for ends, rates in courses]
        different = list(dict.fromkeys(runs))
        facts["courses"] = json.dumps([different, [different.index(each) for each in runs]])
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write = _write_arrow if path.suffix == ".arrow" else _write_safetensors
        with open(partial, "w+b") as file:
            write(file, spec, _checked(batches, count, path), wire, count, facts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        raise StoreError(f"{path}: the table cannot be written ({error}); give another path") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return count


class Served:
    """An exported table, mapped: rows by id without reading it whole."""

    def __init__(self, path: Path) -> None:
        path = Path(path)
        try:
            facts, self.chunks = (_open_arrow if path.suffix == ".arrow" else _open_safetensors)(path)
            self.spec = spec_from_plain(json.loads(facts["spec"]), str(path))
            self.wire = facts["wire"]
            different, self._course_of = json.loads(facts.get("courses", "[[], []]"))
            self._courses = [tuple(map(np.array, json.loads(each))) for each in different]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DocumentError(f"{path}: cannot be read as an exported table ({error}); export it again") from error
        self.count = sum(len(ids) for ids, _ in self.chunks)
        self._firsts = mix64(np.array([ids[0] for ids, _ in self.chunks], np.int64))

    def __len__(self) -> int:
        return self.count

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Whether each id has a row."""
        return self._places(np.asarray(ids, np.int64))[1] >= 0

    def rows(self, ids: np.ndarray, dtype: str = "f4") -> np.ndarray:
        """The row of each id; of one that has none, the value that training started it with, and that its rule has made of it."""
        from echelon.server.store.narrow_numbers import widen

        assert isinstance(self.spec, Table)
        ids = np.asarray(ids, np.int64).reshape(-1)
        chunks, places = self._places(ids)
        out = np.empty((len(ids), self.spec.dim), dtype)
        for chunk in np.unique(chunks[places >= 0]):
            mine = np.flatnonzero((chunks == chunk) & (places >= 0))
            out[mine] = widen([np.asarray(array[places[mine]]) for array in self.chunks[chunk][1]], dtype)
        absent = np.flatnonzero(places < 0)
        if len(absent):
            out[absent] = self._first(ids[absent])
        return out

    def _first(self, ids: np.ndarray) -> np.ndarray:
        assert isinstance(self.spec, Table)
        if not self._courses:
            return _initial(self.spec, ids)
        from echelon.server.protocol.hashing import shard_of
        from echelon.server.store.lazy_updates import course_of, first_rows

        numbers = np.array(self._course_of)[shard_of(ids, len(self._course_of))]
        out = np.empty((len(ids), self.spec.dim), self.spec.dtype)
        for number in np.unique(numbers).tolist():
            ends, rates = self._courses[number]
            course = course_of(self.spec, ends.astype(np.int64), rates.astype(np.float64))
            out[numbers == number] = first_rows(self.spec, ids[numbers == number], course)
        return out

    def _places(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The chunk of each id and where it lies in it, -1 where it is not."""
        hashes = mix64(ids)
        chunks = np.searchsorted(self._firsts, hashes, side="right") - 1
        places = np.full(len(ids), -1, np.int64)
        for chunk in np.unique(chunks[chunks >= 0]):
            mine = np.flatnonzero(chunks == chunk)
            known, wanted = self.chunks[chunk][0], hashes[mine]
            low, high = np.zeros(len(mine), np.int64), np.full(len(mine), len(known) - 1)
            while (low < high).any():
                middle = (low + high) >> 1
                below = mix64(known[middle]) < wanted
                low, high = np.where(below, middle + 1, low), np.where(below, high, middle)
            places[mine] = np.where(known[low] == ids[mine], low, -1)
        return chunks, places


def _initial(spec: Table, ids: np.ndarray) -> np.ndarray:
    from echelon.server import kernels
    from echelon.server.store.sparse_table import init_of, seed_of

    kind, scalars = init_of(spec.init)
    out = np.empty((len(ids), spec.dim))
    for row, number in zip(out, ids.tolist(), strict=True):
        kernels.initial(kind, scalars[0], scalars[1], seed_of(spec.name, spec.init), number, row)
    return out


def _checked(batches: Iterable[Batch], count: int, path: Path) -> Iterator[Batch]:
    """Batches that are not empty, if they are in order and as many as was said."""
    last, seen = -1, 0
    for ids, arrays in batches:
        if not len(ids):
            continue
        hashes = mix64(ids)
        if int(hashes[0]) <= last or (hashes[1:] <= hashes[:-1]).any():
            raise StoreError(
                f"{path}: ids twice, or not in the order of their hashes; give shards in order, each id once"
            )
        last, seen = int(hashes[-1]), seen + len(ids)
        yield ids, arrays
    if seen != count:
        raise StoreError(f"{path}: {seen} rows came where {count} were said; was the table written to meanwhile?")


# Checkpoints


def _spec(folder: Path, manifest: dict[str, Any], name: str | None) -> Table:
    specs = [spec_from_plain(spec, str(folder)) for spec in manifest["specs"]]
    tables = {spec.name: spec for spec in specs if isinstance(spec, Table)}
    if name is None and len(tables) == 1:
        return next(iter(tables.values()))
    if name not in tables:
        raise StoreError(f"{folder}: no table {name!r} in it; it has {', '.join(sorted(tables)) or 'none'}")
    return tables[name]


def _checkpointed(folder: Path, manifest: dict[str, Any], spec: Table, wire: str) -> Iterator[Batch]:
    from echelon.server.store import shard_checkpoint
    from echelon.server.store.lazy_updates import brought, course_of
    from echelon.server.store.narrow_numbers import narrow, widen
    from echelon.server.store.sparse_table import weights_of

    for shard in range(manifest["shards"]):
        mine = [
            (meta["kind"], arrays)
            for meta, arrays in shard_checkpoint.load(folder, shard)
            if meta.get("name") == spec.name
        ]
        raw = [arrays[0] for kind, arrays in mine if kind == "rows"]
        if not raw:
            continue
        together = np.concatenate(raw)
        del raw
        for ends, rates in (arrays for kind, arrays in mine if kind == "course"):
            together = brought(spec, together, course_of(spec, ends, rates))
        del mine
        together = together[np.argsort(mix64(np.ascontiguousarray(together[:, 0])))]
        stored = weights_of(spec, together)
        ids = np.ascontiguousarray(together[:, 0])
        yield ids, stored if spec.stored == wire else narrow(widen(stored, spec.dtype), wire)


def _courses(folder: Path, manifest: dict[str, Any], spec: Table) -> list[Runs]:
    """The updates that each shard of a checkpoint has had, without reading its rows."""
    found = [(np.empty(0, np.int64), np.empty(0))] * int(manifest["shards"])
    for shard in range(manifest["shards"]):
        with _headed(folder, manifest, shard) as (file, start, parts):
            for meta, (ends, rates) in ((meta, places) for meta, places in parts if meta.get("kind") == "course"):
                if meta["name"] == spec.name:
                    found[shard] = (_read(file, start, ends, np.int64), _read(file, start, rates, np.float64))
    return found


def _read(file: Any, start: int, entry: dict[str, Any], dtype: Any) -> np.ndarray:
    first, last = entry["data_offsets"]
    file.seek(start + first)
    return np.frombuffer(file.read(last - first), dtype).reshape(entry["shape"])


def _count(folder: Path, manifest: dict[str, Any], shard: int, name: str) -> int:
    """Rows of a table in one shard's file, by its head alone."""
    with _headed(folder, manifest, shard) as (_, _, parts):
        mine = (places for meta, places in parts if meta.get("kind") == "rows" and meta["name"] == name)
        return sum(places[0]["shape"][0] for places in mine)


@contextlib.contextmanager
def _headed(folder: Path, manifest: dict[str, Any], shard: int) -> Iterator[tuple[Any, int, list[Any]]]:
    """A shard's file, where its data begins, and its parts: what each is, and where its arrays lie."""
    from echelon.server.store import shard_checkpoint

    path = shard_checkpoint.file_of(folder, manifest, shard)
    try:
        head, start = _safetensors_head(path)
        metas = json.loads(head["__metadata__"]["parts"])
        parts = [
            (meta, [head[f"{place:06d}.{number:03d}"] for number in range(count)])
            for place, (meta, count) in enumerate(metas)
        ]
        with open(path, "rb") as file:
            yield file, start, parts
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: {type(error).__name__}: {error}; it is damaged, take an older checkpoint"
        ) from None


# Formats


def _write_arrow(
    file: Any, spec: Table, batches: Iterator[Batch], wire: str, count: int, facts: dict[str, str]
) -> None:
    import pyarrow as pa

    kind = pa.from_numpy_dtype(np.dtype(wire))
    fields = [pa.field("id", pa.int64()), pa.field("row", pa.list_(kind, spec.dim))]
    fields += [pa.field("scale", pa.float32())] if wire[0] == "i" else []
    schema = pa.schema(fields, metadata=facts)
    with pa.ipc.new_file(file, schema) as writer:
        for ids, arrays in batches:
            flat = pa.array(arrays[0].reshape(-1), kind)
            columns = [pa.array(ids), pa.FixedSizeListArray.from_arrays(flat, spec.dim), *map(pa.array, arrays[1:])]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def _open_arrow(path: Path) -> tuple[dict[str, str], list[Batch]]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        facts = {key.decode(): value.decode() for key, value in (reader.schema.metadata or {}).items()}
        dim = reader.schema.field("row").type.list_size
        chunks = []
        for number in range(reader.num_record_batches):
            ids, values, *scales = reader.get_batch(number).columns
            flat = values.flatten().to_numpy().reshape(-1, dim)
            chunks.append((ids.to_numpy(), [flat, *(scale.to_numpy() for scale in scales)]))
    return facts, chunks


def _write_safetensors(
    file: Any, spec: Table, batches: Iterator[Batch], wire: str, count: int, facts: dict[str, str]
) -> None:
    sizes = {"id": count * 8, "row": count * spec.dim * SIZES[wire], "scale": count * 4 if wire[0] == "i" else 0}
    kinds = {"id": ("I64", [count]), "row": (_SAFE[wire], [count, spec.dim]), "scale": ("F32", [count])}
    # Longer numbers first, so that each tensor is aligned to its own.
    order = [name for name in ("id", "scale", "row") if sizes[name] or name != "scale"]
    head: dict[str, Any] = {"__metadata__": facts}
    places, at = {}, 0
    for name in order:
        places[name] = at
        head[name] = {"dtype": kinds[name][0], "shape": kinds[name][1], "data_offsets": [at, at + sizes[name]]}
        at += sizes[name]
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + at)
    for ids, arrays in batches:
        for name, array in zip(("id", "row", "scale"), (ids, *arrays), strict=False):
            file.seek(8 + len(text) + places[name])
            file.write(np.ascontiguousarray(array).data)
            places[name] += array.nbytes


def _safetensors_head(path: Path) -> tuple[dict[str, Any], int]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length < 100 << 20:
            raise ValueError(f"a head of {length} bytes")
        return json.loads(file.read(length)), 8 + length


def _open_safetensors(path: Path) -> tuple[dict[str, str], list[Batch]]:
    head, start = _safetensors_head(path)
    kinds = {code: kind for kind, code in _SAFE.items()} | {"I64": "i8"}
    with open(path, "rb") as file:
        area = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    arrays = []
    for name in ("id", "row", "scale"):
        if name in head:
            entry = head[name]
            count = int(np.prod(entry["shape"], dtype=np.int64))
            view = np.frombuffer(area, kinds[entry["dtype"]], count, start + entry["data_offsets"][0])
            arrays.append(view.reshape(entry["shape"]))
    return head["__metadata__"], [(arrays[0], arrays[1:])] if len(arrays[0]) else []
