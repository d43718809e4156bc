"""Packs a source into shards with several processes, and resumes an interrupted packing.

The order of writes makes a kill safe at any time: a shard appears under its name once it is on disk; then a note records what it holds
and which packing it belongs to; once all notes exist, the manifest is written. Shards without a note are written again, by processes
that need not know of each other (locked_tasks.py). Every packing process holds a shared lock on the folder, so that it is not cleared
for another source.
"""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from echelon.data.packed import manifest as documents
from echelon.data.packed.locked_tasks import Task, lock_file, run_tasks
from echelon.data.packed.manifest import SHARD_FILE_NAME, Manifest, Shard
from echelon.data.packed.packing_source import PackingSource, ProgressCallback
from echelon.data.packed.shard import ShardWriter
from echelon.data.packed.shard_file import rows_per_block
from echelon.errors import DataError
from echelon.files import atomic_write, describe_holders, release_lock, try_lock
from echelon.plan.document_cache import installed_versions

#: Approximate bytes of a shard. A process that packs holds one in memory.
SHARD_BYTES = 2**27
#: Rows that are read from the source at once.
_ROWS_PER_READ = 256
#: Seconds to wait for the processes of another packing in the folder to end.
_LEAVE_TIMEOUT = 5.0
#: Files that are needed only until the manifest is written.
_WORK_FILE_NAME = re.compile(r"shard-[0-9]{5,9}\.json|\.shard-[0-9]{5,9}\..*")
#: What a packing that has begun records of itself.
_RECORD_NAME = "packing.json"
_REPLACE_HINT = "choose another folder; `echelon pack --overwrite` replaces what is there"


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackingSpec:
    """What is packed where, and into how many shards."""

    source: PackingSource
    folder: Path
    shards: int
    block: int

    @property
    def intent(self) -> dict[str, Any]:
        """What distinguishes it from any other packing."""
        kind = self.source.provenance.get("kind", "")
        layout = {"shards": self.shards, "block": self.block, "version": documents.VERSION}
        return {"identity": self.source.identity, "kind": kind, **layout}

    @property
    def record(self) -> dict[str, Any]:
        """What a packing that has begun records of itself."""
        return {**self.intent, "from": dict(self.source.provenance)}

    def row_range(self, shard_index: int) -> tuple[int, int]:
        samples = self.source.samples
        return shard_index * samples // self.shards, (shard_index + 1) * samples // self.shards

    def path(self, shard_index: int, suffix: str) -> Path:
        return self.folder / f"shard-{shard_index:05d}{suffix}"

    def read_note(self, shard_index: int) -> Shard | None:
        """Read what a finished shard holds; None: it is not finished, or belongs to another packing."""
        try:
            document = json.loads(self.path(shard_index, ".json").read_bytes())
            if document["intent"] != self.intent:
                return None
            shard = documents.parse_shard(document["shard"], self.source.columns, self.block)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return None if _is_missing(self.folder, shard) else shard

    def write_note(self, shard_index: int, shard: Shard) -> None:
        document = {"intent": self.intent, "shard": asdict(shard)}
        atomic_write(self.path(shard_index, ".json"), json.dumps(document))


def pack(
    source: PackingSource, folder: Path, *, shards: int | None = None, processes: int = 1, overwrite: bool | str = False,
    progress: ProgressCallback = lambda done, total: None,
) -> Manifest:  # fmt: skip
    """Write `source` to `folder`. If it is there already, write only what is missing: what an unfinished packing left, and shards that
    were deleted or truncated.

    `shards`: number of files (None: by size, a power of two). `overwrite`: replace another data set that is there, or, given a text,
    one of this kind only. `progress(rows done, rows in all)` is called now and then.
    """
    existing = None if (folder / _RECORD_NAME).exists() else _load_manifest(folder, ignore_damage=True)
    if existing is not None and existing.provenance.get("identity") == source.identity:
        is_complete = not any(_is_missing(folder, shard) for shard in existing.shards)
        if is_complete and shards in (None, len(existing.shards)):
            return existing
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file, and a packed data set is a folder: choose another name")
    source.prepare()
    if shards is not None and not 1 <= shards <= source.samples:
        raise DataError(f"shards={shards}: {source.samples:,} samples can be cut into 1 to {source.samples:,} files")
    record = _read_record(folder, _load_manifest(folder, ignore_damage=True)) or {}
    previous_shards = record["shards"] if record.get("identity") == source.identity else None
    shard_count = shards or previous_shards or choose_shard_count(source)
    spec = _PackingSpec(source=source, folder=folder, shards=shard_count, block=rows_per_block(source.row_bytes))
    folder.mkdir(parents=True, exist_ok=True)
    busy_lock = os.open(folder / ".packing.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with lock_file(folder / ".lock"):
            finished = _prepare_folder(spec, overwrite, busy_lock)
            if finished is not None:
                return finished
            try_lock(busy_lock, shared=True)
        _write_missing_shards(spec, processes, progress)
        with lock_file(folder / ".lock"):
            return _write_manifest(spec)
    finally:
        release_lock(busy_lock)


def choose_shard_count(source: PackingSource) -> int:
    """Choose the number of shards by size: a power of two, which most numbers of ranks divide."""
    shard_count = -(-int(source.samples * source.row_bytes) // SHARD_BYTES)
    return min(1 << max(0, shard_count - 1).bit_length(), source.samples)


def _prepare_folder(spec: _PackingSpec, overwrite: bool | str, busy_lock: int) -> Manifest | None:
    """Return the data set if it is complete; else make the folder ready to begin or continue."""
    folder, record_path = spec.folder, spec.folder / _RECORD_NAME
    existing = _load_manifest(folder, ignore_damage=overwrite is True)
    record = _read_record(folder, existing)
    if record is not None and any(record.get(key) != value for key, value in spec.intent.items()):
        kind, differences = str(record.get("kind")), _describe_differences(record, spec)
        if overwrite not in (True, kind):
            what = "a part of another packing" if existing is None else "another packed data set"
            raise DataError(f"{folder} holds {what}: {differences}; {_REPLACE_HINT}")
        if overwrite is not True:  # repeats hours of work that the user did not ask for
            warnings.warn(f"{folder} is packed again: {differences}", stacklevel=2)
        _clear_folder(folder, busy_lock, kind)
    elif existing is not None:
        if not any(_is_missing(folder, shard) for shard in existing.shards):
            _remove_work_files(folder)
            return existing
        for index, shard in enumerate(existing.shards):
            if not _is_missing(folder, shard):
                spec.write_note(index, shard)
        atomic_write(record_path, json.dumps(spec.record))
        (folder / documents.FILE_NAME).unlink()
    elif overwrite is True and (record is None or (folder / documents.FILE_NAME).exists()):
        _clear_folder(folder, busy_lock, "")
    elif record is None and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise DataError(f"{folder} is not empty and not a packed data set: {_REPLACE_HINT}")
    for path in [*folder.glob(".manifest.json.*"), *folder.glob(f".{_RECORD_NAME}.*")]:
        path.unlink()  # left by a process that was killed
    if not record_path.exists():
        atomic_write(record_path, json.dumps(spec.record))
    return None


def _load_manifest(folder: Path, *, ignore_damage: bool) -> Manifest | None:
    try:
        return documents.load_manifest(folder) if (folder / documents.FILE_NAME).exists() else None
    except DataError:
        if ignore_damage:
            return None
        raise


def _read_record(folder: Path, manifest: Manifest | None) -> dict[str, Any] | None:
    """What the packing in the folder recorded of itself when it began: {} if that is damaged, None if there is no packing."""
    if manifest is not None:
        provenance = {key: text for key, text in manifest.provenance.items() if key not in ("identity", "echelon")}
        layout = {"shards": len(manifest.shards), "block": manifest.block, "version": documents.VERSION}
        identity, kind = manifest.provenance.get("identity"), provenance.get("kind", "")
        return {"identity": identity, "kind": kind, **layout, "from": provenance}
    try:
        document = json.loads((folder / _RECORD_NAME).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _describe_differences(record: Mapping[str, Any], spec: _PackingSpec) -> str:
    layout = ("shards", "block", "version")
    there, here = ({key: side.get(key) for key in layout} | (side.get("from") or {}) for side in (record, spec.record))
    keys = [key for key in here | there if key not in spec.source.remarks and there.get(key) != here.get(key)]
    changes = [f"{key} {_truncate(there.get(key))} there, {_truncate(here.get(key))} here" for key in keys]
    identities = f"identity {record.get('identity')} there, {spec.source.identity} here"
    return "; ".join(changes) or f"samples or columns other than here ({identities})"


def _truncate(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def _clear_folder(folder: Path, busy_lock: int, kind: str) -> None:
    """Delete a packed data set of this kind, and nothing else; the manifest first, so that the rest never looks complete. After a kill
    the rest looks like a packing of that kind that has only begun."""
    deadline = time.monotonic() + _LEAVE_TIMEOUT
    while not try_lock(busy_lock):
        if time.monotonic() > deadline:
            raise DataError(
                f"{folder}: {describe_holders(folder / '.packing.lock')} is packing something else there: wait until it is done, end it, or "
                "choose another folder. Ranks of one job must give the same data and function: does something in them differ between ranks?"
            )
        time.sleep(0.05)
    atomic_write(folder / _RECORD_NAME, json.dumps({"kind": kind}))
    (folder / documents.FILE_NAME).unlink(missing_ok=True)
    for path in folder.iterdir():
        if SHARD_FILE_NAME.fullmatch(path.name):
            path.unlink(missing_ok=True)
    _remove_work_files(folder)


def _remove_work_files(folder: Path) -> None:
    """Delete what is needed only until the manifest is written; last the file that says that there is something to delete."""
    for path in folder.iterdir():
        if _WORK_FILE_NAME.fullmatch(path.name):
            path.unlink(missing_ok=True)
    (folder / _RECORD_NAME).unlink(missing_ok=True)


def _is_missing(folder: Path, shard: Shard) -> bool:
    path = folder / shard.file
    return not path.is_file() or path.stat().st_size != shard.bytes


def _write_missing_shards(spec: _PackingSpec, processes: int, progress: ProgressCallback) -> None:
    missing = [shard_index for shard_index in range(spec.shards) if spec.read_note(shard_index) is None]
    total_rows = spec.source.samples
    done_rows = total_rows - sum(stop - start for start, stop in map(spec.row_range, missing))
    progress(done_rows, total_rows)
    manifest = spec.folder / documents.FILE_NAME  # notes vanish when it is written: then everything is done

    def make_task(index: int) -> Task:
        target, run = spec.path(index, ".arrow"), partial(_write_shard, spec, index)
        return Task(target=target, is_done=lambda: spec.read_note(index) is not None or manifest.exists(), run=run)

    for new_rows in run_tasks(list(map(make_task, missing)), processes):
        done_rows += new_rows
        progress(min(done_rows, total_rows), total_rows)


def _write_shard(spec: _PackingSpec, shard_index: int) -> Iterator[int]:
    target = spec.path(shard_index, ".arrow")
    for path in spec.folder.glob(f".{target.stem}.[aj]*"):
        path.unlink()  # left by a process that was killed
    start, stop = spec.row_range(shard_index)
    writer = ShardWriter(spec.source.columns, stop - start)
    for chunk_start in range(start, stop, _ROWS_PER_READ):
        chunk_stop = min(chunk_start + _ROWS_PER_READ, stop)
        writer.add_rows(spec.source.read(chunk_start, chunk_stop), chunk_stop - chunk_start)
        yield chunk_stop - chunk_start
    spec.write_note(shard_index, writer.write(target, spec.block))


def _write_manifest(spec: _PackingSpec) -> Manifest:
    """Write the manifest once all shards are there, unless another process has."""
    source, folder = spec.source, spec.folder
    if (folder / documents.FILE_NAME).exists():
        existing = documents.load_manifest(folder)
        if existing.provenance.get("identity") != source.identity:
            raise DataError(f"{folder} was packed from another source in the meantime; choose another folder")
        return existing
    notes = [spec.read_note(shard_index) for shard_index in range(spec.shards)]
    version = installed_versions(["echelon"])["echelon"]
    manifest = Manifest(
        columns=source.columns, sample=source.sample, block=spec.block, shards=tuple(note for note in notes if note),
        provenance={**source.provenance, **source.remarks, "identity": source.identity, "echelon": version},
    )  # fmt: skip
    if manifest.samples != source.samples:
        raise DataError(f"{folder}: files were deleted during packing; run the same command again")
    manifest.save(folder)
    _remove_work_files(folder)
    return manifest
