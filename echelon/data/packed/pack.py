"""Packs a source into shards with several processes, and continues where a packing that died stopped.

The order of writes leaves nothing wrong after a kill at any time: a shard appears under its name once it is on disk; then a note says
what it holds and which packing it belongs to; when all notes are there, the manifest is written, last. A shard without a note is made
again, by processes that need not know of each other (locked_tasks.py). Every packing process holds a shared lock of the folder, so that
nobody clears it for another source meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from echelon.data.packed import manifest as documents
from echelon.data.packed.file_locks import lock_file
from echelon.data.packed.locked_tasks import Task, run_tasks
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
#: Seconds that another packing, whose processes may be ending just now, gets to leave the folder.
_LEAVE_TIMEOUT = 5.0
#: Files that are needed only until the manifest is written.
_WORK_FILE_NAME = re.compile(r"shard-[0-9]{5,9}\.json|\.shard-[0-9]{5,9}\..*")
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
    def start_document(self) -> dict[str, Any]:
        """What a packing that has begun says of itself."""
        return {**self.intent, "from": dict(self.source.provenance)}

    def matches(self, document: Mapping[str, Any]) -> bool:
        """Whether `document` describes this packing."""
        return {key: document.get(key) for key in self.intent} == self.intent

    def write_start_document(self) -> None:
        """Record that the packing has begun."""
        atomic_write(self.folder / "packing.json", json.dumps(self.start_document))

    def row_range(self, shard_index: int) -> tuple[int, int]:
        """The first row of a shard and the end."""
        samples = self.source.samples
        return shard_index * samples // self.shards, (shard_index + 1) * samples // self.shards

    def read_note(self, shard_index: int) -> Shard | None:
        """Read what a finished shard holds; None: it is not finished, or belongs to another packing."""
        try:
            document = json.loads((self.folder / f"{_shard_name(shard_index)}.json").read_bytes())
            if document["intent"] != self.intent:
                return None
            shard = documents.parse_shard(document["shard"], self.source.columns, self.block)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return None if _has_wrong_size(self.folder, shard) else shard

    def write_note(self, shard_index: int, shard: Shard) -> None:
        """Record that a shard is finished."""
        document = {"intent": self.intent, "shard": asdict(shard)}
        atomic_write(self.folder / f"{_shard_name(shard_index)}.json", json.dumps(document))


def pack(
    source: PackingSource, folder: Path, *, shards: int | None = None, processes: int = 1, overwrite: bool | str = False,
    progress: ProgressCallback = lambda done, total: None,
) -> Manifest:  # fmt: skip
    """Write `source` to `folder`. If it is there already, writes only what is missing: what an unfinished packing left, and shards that
    are gone or cut off.

    `shards`: number of files (None: by size, a power of two). `overwrite`: replace another data set that is there, or, given a text,
    one of this kind only. `progress(rows done, rows in all)` is called now and then.
    """
    finished = _find_finished(folder, source, shards)
    if finished is not None:
        return finished
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file, and a packed data set is a folder: give another name")
    source.prepare()
    if shards is not None and not 1 <= shards <= source.samples:
        raise DataError(f"shards={shards}: {source.samples:,} samples can be cut into 1 to {source.samples:,} files")
    shard_count = shards or _find_shard_count(folder, source) or choose_shard_count(source)
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


def _find_finished(folder: Path, source: PackingSource, shards: int | None) -> Manifest | None:
    """The data set in the folder if it is this one and complete."""
    manifest = None if (folder / "packing.json").exists() else _load_manifest(folder, ignore_damage=True)
    if manifest is None or manifest.provenance.get("identity") != source.identity:
        return None
    is_complete = not any(_has_wrong_size(folder, shard) for shard in manifest.shards)
    return manifest if is_complete and shards in (None, len(manifest.shards)) else None


def _find_shard_count(folder: Path, source: PackingSource) -> int | None:
    """Into how many shards a packing in the folder, finished or begun, has cut this very source."""
    document = _read_start_document(folder)
    if document is None:
        manifest = _load_manifest(folder, ignore_damage=True)
        document = {} if manifest is None else _start_document_of(manifest)
    shard_count = document.get("shards")
    is_valid = document.get("identity") == source.identity and type(shard_count) is int and shard_count > 0
    return shard_count if is_valid else None


def _prepare_folder(spec: _PackingSpec, overwrite: bool | str, busy_lock: int) -> Manifest | None:
    """Return the data set if it is complete; else make the folder ready to begin or continue."""
    folder = spec.folder
    existing = _load_manifest(folder, ignore_damage=overwrite is True)
    present = _read_start_document(folder) if existing is None else _start_document_of(existing)
    if present is not None and not spec.matches(present):
        kind = str(present.get("kind"))
        differences = _describe_differences(present, spec)
        if overwrite not in (True, kind):
            what = "a part of another packing" if existing is None else "another packed data set"
            raise DataError(f"{folder} holds {what}: {differences}; {_REPLACE_HINT}")
        if overwrite is not True:  # nobody asked for hours of work to be done again
            warnings.warn(f"{folder} is packed again: {differences}", stacklevel=2)
        _clear_folder(folder, busy_lock, kind)
    elif existing is not None:
        missing = [index for index, shard in enumerate(existing.shards) if _has_wrong_size(folder, shard)]
        if not missing:
            _remove_work_files(folder)
            return existing
        for index, shard in enumerate(existing.shards):
            if index not in missing:
                spec.write_note(index, shard)
        spec.write_start_document()
        (folder / documents.FILE_NAME).unlink()
    elif overwrite is True and (present is None or (folder / documents.FILE_NAME).exists()):
        _clear_folder(folder, busy_lock, "")
    elif present is None and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise DataError(f"{folder} is not empty and not a packed data set: {_REPLACE_HINT}")
    for path in [*folder.glob(".manifest.json.*"), *folder.glob(".packing.json.*")]:
        path.unlink()  # left by a process that was killed
    if not (folder / "packing.json").exists():
        spec.write_start_document()
    return None


def _load_manifest(folder: Path, *, ignore_damage: bool) -> Manifest | None:
    try:
        return documents.load_manifest(folder) if (folder / documents.FILE_NAME).exists() else None
    except DataError:
        if ignore_damage:
            return None
        raise


def _read_start_document(folder: Path) -> dict[str, Any] | None:
    """Read what an unfinished packing says of itself; {} if that is damaged."""
    try:
        document = json.loads((folder / "packing.json").read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _start_document_of(manifest: Manifest) -> dict[str, Any]:
    """What the packing of a finished data set said of itself when it began."""
    provenance = {key: text for key, text in manifest.provenance.items() if key not in ("identity", "echelon")}
    layout = {"shards": len(manifest.shards), "block": manifest.block, "version": documents.VERSION}
    identity, kind = manifest.provenance.get("identity"), provenance.get("kind", "")
    return {"identity": identity, "kind": kind, **layout, "from": provenance}


def _describe_differences(present: Mapping[str, Any], spec: _PackingSpec) -> str:
    """Describe what is there and what would be packed now, where they differ."""
    there, here = (
        {key: side.get(key) for key in ("shards", "block", "version")}
        | (side["from"] if isinstance(side.get("from"), dict) else {})
        for side in (present, spec.start_document)
    )
    changes = [
        f"{key} {_truncate(there.get(key))} there, {_truncate(here.get(key))} here"
        for key in {**here, **there}
        if key not in spec.source.remarks and there.get(key) != here.get(key)
    ]
    identities = f"identity {present.get('identity')} there, {spec.source.identity} here"
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
                f"{folder}: {describe_holders(folder / '.packing.lock')} packs something else there: wait until it is done, end it, or choose "
                "another folder. Ranks of one job must give the same data and function: is something in them different on each?"
            )
        time.sleep(0.05)
    atomic_write(folder / "packing.json", json.dumps({"kind": kind}))
    (folder / documents.FILE_NAME).unlink(missing_ok=True)
    _delete_matching(folder, SHARD_FILE_NAME)
    _remove_work_files(folder)


def _remove_work_files(folder: Path) -> None:
    """Delete what is needed only until the manifest is written; last the file that says that there is something to delete."""
    _delete_matching(folder, _WORK_FILE_NAME)
    (folder / "packing.json").unlink(missing_ok=True)


def _delete_matching(folder: Path, pattern: re.Pattern[str]) -> None:
    for path in folder.iterdir():
        if pattern.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _has_wrong_size(folder: Path, shard: Shard) -> bool:
    path = folder / shard.file
    return not path.is_file() or path.stat().st_size != shard.bytes


def _shard_name(shard_index: int) -> str:
    return f"shard-{shard_index:05d}"


def _write_missing_shards(spec: _PackingSpec, processes: int, progress: ProgressCallback) -> None:
    missing = [shard_index for shard_index in range(spec.shards) if spec.read_note(shard_index) is None]
    total_rows = spec.source.samples
    done_rows = total_rows - sum(stop - start for start, stop in map(spec.row_range, missing))
    progress(done_rows, total_rows)
    for new_rows in run_tasks([_make_shard_task(spec, shard_index) for shard_index in missing], processes):
        done_rows += new_rows
        progress(min(done_rows, total_rows), total_rows)


def _make_shard_task(spec: _PackingSpec, shard_index: int) -> Task:
    manifest = spec.folder / documents.FILE_NAME  # notes vanish when it is written: then everything is done
    return Task(
        target=spec.folder / f"{_shard_name(shard_index)}.arrow",
        is_done=lambda: spec.read_note(shard_index) is not None or manifest.exists(),
        run=lambda: _write_shard(spec, shard_index),
    )


def _write_shard(spec: _PackingSpec, shard_index: int) -> Iterator[int]:
    """Write one shard; yields the number of rows after each read."""
    for path in spec.folder.glob(f".{_shard_name(shard_index)}.[aj]*"):
        path.unlink()  # left by a process that was killed
    start, stop = spec.row_range(shard_index)
    writer = ShardWriter(spec.source.columns, stop - start)
    for chunk_start in range(start, stop, _ROWS_PER_READ):
        chunk_stop = min(chunk_start + _ROWS_PER_READ, stop)
        writer.add_rows(spec.source.read(chunk_start, chunk_stop), chunk_stop - chunk_start)
        yield chunk_stop - chunk_start
    spec.write_note(shard_index, writer.write(spec.folder, f"{_shard_name(shard_index)}.arrow", spec.block))


def _write_manifest(spec: _PackingSpec) -> Manifest:
    """Write the manifest once all shards are there, unless another process has."""
    source, folder = spec.source, spec.folder
    if (folder / documents.FILE_NAME).exists():
        existing = documents.load_manifest(folder)
        if existing.provenance.get("identity") != source.identity:
            raise DataError(f"{folder} was packed from another source meanwhile; choose another folder")
        return existing
    notes = [spec.read_note(shard_index) for shard_index in range(spec.shards)]
    version = installed_versions(["echelon"])["echelon"]
    manifest = Manifest(
        columns=source.columns, sample=source.sample, block=spec.block, shards=tuple(note for note in notes if note),
        provenance={**source.provenance, **source.remarks, "identity": source.identity, "echelon": version},
    )  # fmt: skip
    if manifest.samples != source.samples:
        raise DataError(f"{folder}: files were deleted while they were packed; run the same command again")
    manifest.save(folder)
    _remove_work_files(folder)
    return manifest
