"""Packs a source into shards, by several processes, and goes on where a packing that died has stopped.

Order of events, so that a kill at any time leaves nothing wrong: a shard is written under another name, made safe on the disk
and renamed; a note beside it says what it holds and what packing it belongs to; when all notes are there the manifest is written,
last. What has no note is made again, by processes that need not know of each other (share.py). Whoever packs holds a lock of the folder
together with the others: nobody clears it for another source meanwhile.
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
from echelon.data.packed.block_layout import rows_per_block
from echelon.data.packed.file_locks import lock_file
from echelon.data.packed.locked_tasks import Task, run_tasks
from echelon.data.packed.manifest import Manifest, Shard
from echelon.data.packed.packing_source import PackingSource, ProgressCallback
from echelon.data.packed.shard import ShardWriter
from echelon.errors import DataError
from echelon.files import atomic_write, describe_holders, release_lock, try_lock

#: Bytes of a shard, about. A process that packs holds one in memory.
SHARD_BYTES = 2**27
#: Rows that are read from the source at once.
_ROWS_PER_READ = 256
#: Seconds that another packing, whose processes may be ending just now, gets to leave the folder.
_LEAVE_TIMEOUT = 5.0
#: What a packing leaves, and what it needs only until its manifest is there.
_SHARD_FILES = re.compile(r"shard-[0-9]{5,9}\.arrow")
_WORK_FILES = re.compile(r"shard-[0-9]{5,9}\.json|\.shard-[0-9]{5,9}\..*")


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackingSpec:
    """What is to be packed, where, and how it is cut."""

    source: PackingSource
    folder: Path
    shards: int
    block: int

    @property
    def intent(self) -> dict[str, Any]:
        """What tells it from any other packing."""
        kind = self.source.provenance.get("kind", "")
        layout = {"shards": self.shards, "block": self.block, "version": documents.VERSION}
        return {"identity": self.source.identity, "kind": kind, **layout}

    def write_start_document(self) -> None:
        """Say that it has begun, and what it packs."""
        document = {**self.intent, "from": dict(self.source.provenance)}
        atomic_write(self.folder / "packing.json", json.dumps(document))

    def row_range(self, shard_index: int) -> tuple[int, int]:
        """The rows of a shard, from and to."""
        samples = self.source.samples
        return shard_index * samples // self.shards, (shard_index + 1) * samples // self.shards

    def read_note(self, shard_index: int) -> Shard | None:
        """What a finished shard holds; None: it is not finished, or not of this packing."""
        try:
            document = json.loads((self.folder / f"{_shard_name(shard_index)}.json").read_bytes())
            if document["intent"] != self.intent:
                return None
            shard = documents.parse_shard(document["shard"], self.source.columns, self.block)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return None if _has_wrong_size(self.folder, shard) else shard

    def write_note(self, shard_index: int, shard: Shard) -> None:
        """Say that a shard is finished."""
        document = {"intent": self.intent, "shard": asdict(shard)}
        atomic_write(self.folder / f"{_shard_name(shard_index)}.json", json.dumps(document))


def pack(
    source: PackingSource, folder: Path, *, shards: int | None = None, processes: int = 1, overwrite: bool | str = False,
    progress: ProgressCallback = lambda done, total: None,
) -> Manifest:  # fmt: skip
    """Write `source` to `folder`. Done already, from the same source: nothing is written; begun already, or files of it are gone or cut
    off: the rest is.

    `shards`: how many files (None: by size, a power of two). `overwrite`: replace another data set that is there; a text: only one of
    this kind. `progress(rows done, rows in all)` is called now and then.
    """
    finished = _find_finished(folder, source, shards)
    if finished is not None:
        return finished
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file: a packed data set is a folder; give the name of one")
    source.prepare()
    if shards is not None and not 1 <= shards <= source.samples:
        raise DataError(f"shards={shards}: {source.samples:,} samples can be cut into 1 to {source.samples:,} files")
    shard_count = shards or _existing_shard_count(folder, source) or choose_shard_count(source)
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


def _find_finished(folder: Path, source: PackingSource, shards: int | None) -> Manifest | None:
    """The data set that is there already, if it is this one and nothing is left to do."""
    if (folder / "packing.json").exists():
        return None
    try:
        manifest = documents.load_manifest(folder)
    except DataError:
        return None
    is_same_source = manifest.provenance.get("identity") == source.identity and shards in (None, len(manifest.shards))
    return manifest if is_same_source and not any(_has_wrong_size(folder, shard) for shard in manifest.shards) else None


def _write_missing_shards(spec: _PackingSpec, processes: int, progress: ProgressCallback) -> None:
    """Every shard that is missing."""
    missing = [shard_index for shard_index in range(spec.shards) if spec.read_note(shard_index) is None]
    total_rows = spec.source.samples
    done_rows = total_rows - sum(stop - start for start, stop in map(spec.row_range, missing))
    progress(done_rows, total_rows)
    for new_rows in run_tasks([_make_shard_task(spec, shard_index) for shard_index in missing], processes):
        done_rows += new_rows
        progress(min(done_rows, total_rows), total_rows)


def _write_manifest(spec: _PackingSpec) -> Manifest:
    """The manifest, once all shards are there; another process may have written it."""
    source, folder = spec.source, spec.folder
    if (folder / documents.FILE_NAME).exists():
        existing = documents.load_manifest(folder)
        if existing.provenance.get("identity") != source.identity:
            raise DataError(f"{folder} was packed from another source meanwhile; choose another folder")
        return existing
    notes = [spec.read_note(shard_index) for shard_index in range(spec.shards)]
    manifest = Manifest(
        columns=source.columns, sample=source.sample, block=spec.block, shards=tuple(note for note in notes if note),
        provenance={**source.provenance, **source.remarks, "identity": source.identity, "echelon": _package_version()},
    )  # fmt: skip
    if manifest.samples != source.samples:
        raise DataError(f"{folder}: files were taken away while they were packed; run the same command again")
    manifest.save(folder)
    _remove_work_files(folder)
    return manifest


def _existing_shard_count(folder: Path, source: PackingSource) -> int | None:
    """Into how many files this very source was cut by a packing that is there, finished or begun: what is missing of it fits in."""
    started = _read_start_document(folder / "packing.json")
    if started is None:
        try:
            manifest = documents.load_manifest(folder)
        except DataError:
            return None
        started = {"identity": manifest.provenance.get("identity"), "shards": len(manifest.shards)}
    shard_count = started.get("shards")
    return (
        shard_count
        if started.get("identity") == source.identity and type(shard_count) is int and shard_count > 0
        else None
    )


def choose_shard_count(source: PackingSource) -> int:
    """Files by size: a power of two, which most numbers of ranks divide."""
    shard_count = -(-int(source.samples * source.row_bytes) // SHARD_BYTES)
    return min(1 << max(0, shard_count - 1).bit_length(), source.samples)


def _prepare_folder(spec: _PackingSpec, overwrite: bool | str, busy_lock: int) -> Manifest | None:
    """The finished data set if it is the wanted one; else the folder is made ready to begin or go on."""
    folder, start_path = spec.folder, spec.folder / "packing.json"
    existing = _load_existing(folder, overwrite is True)
    started = _read_start_document(start_path)
    if existing is not None and _is_same_packing(existing, spec):
        missing_shards = [
            shard_index for shard_index, shard in enumerate(existing.shards) if _has_wrong_size(folder, shard)
        ]
        if not missing_shards:
            _remove_work_files(folder)
            return existing
        _reopen_packing(spec, existing, missing_shards)
    elif existing is not None:
        if overwrite not in (True, existing.provenance.get("kind", "")):
            raise DataError(
                f"{folder} holds another packed data set: {_describe_differences(_start_document_of(existing), spec)}; {_REPLACE_HINT}"
            )
        _warn_replacing(spec, _start_document_of(existing), overwrite)
        _clear_folder(folder, busy_lock, existing.provenance.get("kind", ""))
    elif started is not None and {key: started.get(key) for key in spec.intent} != spec.intent:
        if overwrite not in (True, started.get("kind")):
            raise DataError(
                f"{folder} holds a part of another packing: {_describe_differences(started, spec)}; {_REPLACE_HINT}"
            )
        _warn_replacing(spec, started, overwrite)
        _clear_folder(folder, busy_lock, str(started.get("kind")))
    elif overwrite is True and (started is None or (folder / documents.FILE_NAME).exists()):
        _clear_folder(folder, busy_lock, "")
    elif started is None and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise DataError(f"{folder} is not empty and not a packed data set: {_REPLACE_HINT}")
    for path in [*folder.glob(".manifest.json.*"), *folder.glob(".packing.json.*")]:
        path.unlink()  # what a process that was killed left half written
    if not start_path.exists():
        spec.write_start_document()
    return None


def _warn_replacing(spec: _PackingSpec, started: Mapping[str, Any], overwrite: bool | str) -> None:
    """Say that, and why, hours of work may be done again that nobody asked to replace."""
    if overwrite is not True:
        warnings.warn(f"{spec.folder} is made anew: {_describe_differences(started, spec)}", stacklevel=2)


def _start_document_of(manifest: Manifest) -> dict[str, Any]:
    """What the packing of a finished data set said when it began."""
    provenance = {key: text for key, text in manifest.provenance.items() if key not in ("identity", "echelon")}
    layout = {"shards": len(manifest.shards), "block": manifest.block, "version": documents.VERSION}
    return {**layout, "identity": manifest.provenance.get("identity"), "from": provenance}


def _describe_differences(started: Mapping[str, Any], spec: _PackingSpec) -> str:
    """What is there and what would be packed now, where they differ."""
    now = {**spec.intent, "from": dict(spec.source.provenance)}
    started_provenance = started.get("from")
    sides = [
        {
            **{key: side.get(key) for key in ("shards", "block", "version")},
            **(provenance if isinstance(provenance, dict) else {}),
        }
        for side, provenance in ((started, started_provenance), (now, now["from"]))
    ]
    keys = [key for key in {**sides[1], **sides[0]} if key not in spec.source.remarks]
    changes = [
        f"{key} {_truncate(sides[0].get(key))} there, {_truncate(sides[1].get(key))} here"
        for key in keys
        if sides[0].get(key) != sides[1].get(key)
    ]
    return (
        "; ".join(changes)
        or f"samples or columns other than here (identity {started.get('identity')} there, {spec.source.identity} here)"
    )


def _truncate(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) < 80 else f"{text[:77]}..."


_REPLACE_HINT = "choose another folder; `echelon pack --overwrite` replaces what is there"


def _read_start_document(path: Path) -> dict[str, Any] | None:
    """What a packing that has not finished said of itself."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _load_existing(folder: Path, overwrite: bool) -> Manifest | None:
    """The data set that the folder holds, if it holds a whole one; a damaged one is nothing where it is to be replaced."""
    try:
        return documents.load_manifest(folder) if (folder / documents.FILE_NAME).exists() else None
    except DataError:
        if overwrite:
            return None
        raise


def _is_same_packing(manifest: Manifest, spec: _PackingSpec) -> bool:
    """Whether a data set is what this packing would make."""
    layout = len(manifest.shards), manifest.block
    return manifest.provenance.get("identity") == spec.source.identity and layout == (spec.shards, spec.block)


def _reopen_packing(spec: _PackingSpec, manifest: Manifest, missing_shards: list[int]) -> None:
    """Make a finished packing one that is begun, in which `missing_shards` shards are missing."""
    for shard_index, shard in enumerate(manifest.shards):
        if shard_index not in missing_shards:
            spec.write_note(shard_index, shard)
    spec.write_start_document()
    (spec.folder / documents.FILE_NAME).unlink()


def _has_wrong_size(folder: Path, shard: Shard) -> bool:
    path = folder / shard.file
    return not path.is_file() or path.stat().st_size != shard.bytes


def _clear_folder(folder: Path, busy_lock: int, kind: str) -> None:
    """Take away a packed data set of this kind, and nothing else; the manifest first, so that what is left never looks whole. A kill
    meanwhile leaves what looks like a packing of that kind that has only begun."""
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
    _delete_matching(folder, _SHARD_FILES)
    _remove_work_files(folder)


def _remove_work_files(folder: Path) -> None:
    """Take away what is needed only until the manifest is there. Last what says that there is something to take away."""
    _delete_matching(folder, _WORK_FILES)
    (folder / "packing.json").unlink(missing_ok=True)


def _delete_matching(folder: Path, pattern: re.Pattern[str]) -> None:
    for path in folder.iterdir():
        if pattern.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _shard_name(shard_index: int) -> str:
    return f"shard-{shard_index:05d}"


def _make_shard_task(spec: _PackingSpec, shard_index: int) -> Task:
    """One shard. The notes go when the manifest is there: then all is done."""
    manifest = spec.folder / documents.FILE_NAME
    return Task(
        target=spec.folder / f"{_shard_name(shard_index)}.arrow", is_done=lambda: spec.read_note(shard_index) is not None or manifest.exists(),
        run=lambda: _write_shard(spec, shard_index),
    )  # fmt: skip


def _write_shard(spec: _PackingSpec, shard_index: int) -> Iterator[int]:
    """Write one shard; gives the number of rows after each piece of it."""
    for path in spec.folder.glob(f".{_shard_name(shard_index)}.[aj]*"):
        path.unlink()  # what a process that was killed left half written
    start, stop = spec.row_range(shard_index)
    writer = ShardWriter(spec.source.columns, stop - start)
    for chunk_start in range(start, stop, _ROWS_PER_READ):
        chunk_stop = min(chunk_start + _ROWS_PER_READ, stop)
        writer.add_rows(spec.source.read(chunk_start, chunk_stop), chunk_stop - chunk_start)
        yield chunk_stop - chunk_start
    spec.write_note(shard_index, writer.write(spec.folder, f"{_shard_name(shard_index)}.arrow", spec.block))


def _package_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("echelon")
    except PackageNotFoundError:
        return "from a checkout"
