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
from echelon.data.packed.block_layout import block_rows
from echelon.data.packed.file_locks import holders, locked, taken, unlock
from echelon.data.packed.locked_tasks import Task, share
from echelon.data.packed.manifest import Manifest, Shard, write_whole
from echelon.data.packed.packing_source import Origin, Progress
from echelon.data.packed.shard import Draft
from echelon.errors import DataError

#: Bytes of a shard, about. A process that packs holds one in memory.
SHARD = 2**27
#: Rows that are read from the source at once.
_CHUNK = 256
#: Seconds that another packing, whose processes may be ending just now, gets to leave the folder.
_LEAVING = 5.0
#: What a packing leaves, and what it needs only until its manifest is there.
_FILES = re.compile(r"shard-[0-9]{5,9}\.arrow")
_HELPERS = re.compile(r"shard-[0-9]{5,9}\.json|\.shard-[0-9]{5,9}\..*")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packing:
    """What is to be packed, where, and how it is cut."""

    origin: Origin
    folder: Path
    shards: int
    block: int

    @property
    def intent(self) -> dict[str, Any]:
        """What tells it from any other packing."""
        kind = self.origin.provenance.get("kind", "")
        cut = {"shards": self.shards, "block": self.block, "version": documents.VERSION}
        return {"identity": self.origin.identity, "kind": kind, **cut}

    def begin(self) -> None:
        """Say that it has begun, and what it packs."""
        said = {**self.intent, "from": dict(self.origin.provenance)}
        write_whole(self.folder / "packing.json", json.dumps(said).encode())

    def bounds(self, number: int) -> tuple[int, int]:
        """The rows of a shard, from and to."""
        samples = self.origin.samples
        return number * samples // self.shards, (number + 1) * samples // self.shards

    def note(self, number: int) -> Shard | None:
        """What a finished shard holds; None: it is not finished, or not of this packing."""
        try:
            said = json.loads((self.folder / f"{_name(number)}.json").read_bytes())
            if said["intent"] != self.intent:
                return None
            shard = documents.shard_of(said["shard"], self.origin.columns, self.block)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return None if _wrong_size(self.folder, shard) else shard

    def write_note(self, number: int, shard: Shard) -> None:
        """Say that a shard is finished."""
        said = {"intent": self.intent, "shard": asdict(shard)}
        write_whole(self.folder / f"{_name(number)}.json", json.dumps(said).encode())


def pack(
    origin: Origin, folder: Path, *, shards: int | None = None, processes: int = 1, overwrite: bool | str = False,
    progress: Progress = lambda done, total: None,
) -> Manifest:  # fmt: skip
    """Write `origin` to `folder`. Done already, from the same source: nothing is written; begun already, or files of it are gone or cut
    off: the rest is.

    `shards`: how many files (None: by size, a power of two). `overwrite`: replace another data set that is there; a text: only one of
    this kind. `progress(rows done, rows in all)` is called now and then.
    """
    done = _done(folder, origin, shards)
    if done is not None:
        return done
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file: a packed data set is a folder; give the name of one")
    origin.prepare()
    if shards is not None and not 1 <= shards <= origin.samples:
        raise DataError(f"shards={shards}: {origin.samples:,} samples can be cut into 1 to {origin.samples:,} files")
    count = shards or _cut(folder, origin) or count_of(origin)
    work = _Packing(origin=origin, folder=folder, shards=count, block=block_rows(origin.row_bytes))
    folder.mkdir(parents=True, exist_ok=True)
    busy = os.open(folder / ".packing.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with locked(folder / ".lock"):
            done = _settled(work, overwrite, busy)
            if done is not None:
                return done
            taken(busy, shared=True)
        _make(work, processes, progress)
        with locked(folder / ".lock"):
            return _finished(work)
    finally:
        unlock(busy)


def _done(folder: Path, origin: Origin, shards: int | None) -> Manifest | None:
    """The data set that is there already, if it is this one and nothing is left to do."""
    if (folder / "packing.json").exists():
        return None
    try:
        found = documents.load(folder)
    except DataError:
        return None
    wanted = found.provenance.get("identity") == origin.identity and shards in (None, len(found.shards))
    return found if wanted and not any(_wrong_size(folder, shard) for shard in found.shards) else None


def _make(work: _Packing, processes: int, progress: Progress) -> None:
    """Every shard that is missing."""
    missing = [number for number in range(work.shards) if work.note(number) is None]
    total = work.origin.samples
    finished = total - sum(stop - start for start, stop in map(work.bounds, missing))
    progress(finished, total)
    for more in share([_task(work, number) for number in missing], processes):
        finished += more
        progress(min(finished, total), total)


def _finished(work: _Packing) -> Manifest:
    """The manifest, once all shards are there; another process may have written it."""
    origin, folder = work.origin, work.folder
    if (folder / documents.NAME).exists():
        found = documents.load(folder)
        if found.provenance.get("identity") != origin.identity:
            raise DataError(f"{folder} was packed from another source meanwhile; choose another folder")
        return found
    notes = [work.note(number) for number in range(work.shards)]
    made = Manifest(
        columns=origin.columns, sample=origin.sample, block=work.block, shards=tuple(note for note in notes if note),
        provenance={**origin.provenance, **origin.remarks, "identity": origin.identity, "echelon": _version()},
    )  # fmt: skip
    if made.samples != origin.samples:
        raise DataError(f"{folder}: files were taken away while they were packed; run the same command again")
    made.save(folder)
    _tidy(folder)
    return made


def _cut(folder: Path, origin: Origin) -> int | None:
    """Into how many files this very source was cut by a packing that is there, finished or begun: what is missing of it fits in."""
    before = _begun(folder / "packing.json")
    if before is None:
        try:
            found = documents.load(folder)
        except DataError:
            return None
        before = {"identity": found.provenance.get("identity"), "shards": len(found.shards)}
    count = before.get("shards")
    return count if before.get("identity") == origin.identity and type(count) is int and count > 0 else None


def count_of(origin: Origin) -> int:
    """Files by size: a power of two, which most numbers of ranks divide."""
    wanted = -(-int(origin.samples * origin.row_bytes) // SHARD)
    return min(1 << max(0, wanted - 1).bit_length(), origin.samples)


def _settled(work: _Packing, overwrite: bool | str, busy: int) -> Manifest | None:
    """The finished data set if it is the wanted one; else the folder is made ready to begin or go on."""
    folder, begun = work.folder, work.folder / "packing.json"
    found = _found(folder, overwrite is True)
    before = _begun(begun)
    if found is not None and _same(found, work):
        bad = [number for number, shard in enumerate(found.shards) if _wrong_size(folder, shard)]
        if not bad:
            _tidy(folder)
            return found
        _reopen(work, found, bad)
    elif found is not None:
        if overwrite not in (True, found.provenance.get("kind", "")):
            raise DataError(f"{folder} holds another packed data set: {_differences(_told(found), work)}; {_REPLACE}")
        _anew(work, _told(found), overwrite)
        _clear(folder, busy, found.provenance.get("kind", ""))
    elif before is not None and {key: before.get(key) for key in work.intent} != work.intent:
        if overwrite not in (True, before.get("kind")):
            raise DataError(f"{folder} holds a part of another packing: {_differences(before, work)}; {_REPLACE}")
        _anew(work, before, overwrite)
        _clear(folder, busy, str(before.get("kind")))
    elif overwrite is True and (before is None or (folder / documents.NAME).exists()):
        _clear(folder, busy, "")
    elif before is None and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise DataError(f"{folder} is not empty and not a packed data set: {_REPLACE}")
    for path in [*folder.glob(".manifest.json.*"), *folder.glob(".packing.json.*")]:
        path.unlink()  # what a process that was killed left half written
    if not begun.exists():
        work.begin()
    return None


def _anew(work: _Packing, before: Mapping[str, Any], overwrite: bool | str) -> None:
    """Say that, and why, hours of work may be done again that nobody asked to replace."""
    if overwrite is not True:
        warnings.warn(f"{work.folder} is made anew: {_differences(before, work)}", stacklevel=2)


def _told(found: Manifest) -> dict[str, Any]:
    """What the packing of a finished data set said when it began."""
    told = {key: text for key, text in found.provenance.items() if key not in ("identity", "echelon")}
    cut = {"shards": len(found.shards), "block": found.block, "version": documents.VERSION}
    return {**cut, "identity": found.provenance.get("identity"), "from": told}


def _differences(before: Mapping[str, Any], work: _Packing) -> str:
    """What is there and what would be packed now, where they differ."""
    now = {**work.intent, "from": dict(work.origin.provenance)}
    came = before.get("from")
    sides = [
        {**{key: side.get(key) for key in ("shards", "block", "version")}, **(told if isinstance(told, dict) else {})}
        for side, told in ((before, came), (now, now["from"]))
    ]
    keys = [key for key in {**sides[1], **sides[0]} if key not in work.origin.remarks]
    found = [
        f"{key} {_brief(sides[0].get(key))} there, {_brief(sides[1].get(key))} here"
        for key in keys
        if sides[0].get(key) != sides[1].get(key)
    ]
    return (
        "; ".join(found)
        or f"samples or columns other than here (identity {before.get('identity')} there, {work.origin.identity} here)"
    )


def _brief(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) < 80 else f"{text[:77]}..."


_REPLACE = "choose another folder; `echelon pack --overwrite` replaces what is there"


def _begun(path: Path) -> dict[str, Any] | None:
    """What a packing that has not finished said of itself."""
    try:
        said = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _found(folder: Path, overwrite: bool) -> Manifest | None:
    """The data set that the folder holds, if it holds a whole one; a damaged one is nothing where it is to be replaced."""
    try:
        return documents.load(folder) if (folder / documents.NAME).exists() else None
    except DataError:
        if overwrite:
            return None
        raise


def _same(found: Manifest, work: _Packing) -> bool:
    """Whether a data set is what this packing would make."""
    cut = len(found.shards), found.block
    return found.provenance.get("identity") == work.origin.identity and cut == (work.shards, work.block)


def _reopen(work: _Packing, found: Manifest, bad: list[int]) -> None:
    """Make a finished packing one that is begun, in which `bad` shards are missing."""
    for number, shard in enumerate(found.shards):
        if number not in bad:
            work.write_note(number, shard)
    work.begin()
    (work.folder / documents.NAME).unlink()


def _wrong_size(folder: Path, shard: Shard) -> bool:
    path = folder / shard.file
    return not path.is_file() or path.stat().st_size != shard.bytes


def _clear(folder: Path, busy: int, kind: str) -> None:
    """Take away a packed data set of this kind, and nothing else; the manifest first, so that what is left never looks whole. A kill
    meanwhile leaves what looks like a packing of that kind that has only begun."""
    until = time.monotonic() + _LEAVING
    while not taken(busy):
        if time.monotonic() > until:
            raise DataError(
                f"{folder}: {holders(folder / '.packing.lock')} packs something else there: wait until it is done, end it, or choose "
                "another folder. Ranks of one job must give the same data and function: is something in them different on each?"
            )
        time.sleep(0.05)
    write_whole(folder / "packing.json", json.dumps({"kind": kind}).encode())
    (folder / documents.NAME).unlink(missing_ok=True)
    _delete(folder, _FILES)
    _tidy(folder)


def _tidy(folder: Path) -> None:
    """Take away what is needed only until the manifest is there. Last what says that there is something to take away."""
    _delete(folder, _HELPERS)
    (folder / "packing.json").unlink(missing_ok=True)


def _delete(folder: Path, names: re.Pattern[str]) -> None:
    for path in folder.iterdir():
        if names.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _name(number: int) -> str:
    return f"shard-{number:05d}"


def _task(work: _Packing, number: int) -> Task:
    """One shard. The notes go when the manifest is there: then all is done."""
    manifest = work.folder / documents.NAME
    return Task(
        makes=work.folder / f"{_name(number)}.arrow", done=lambda: work.note(number) is not None or manifest.exists(),
        make=lambda: _shard(work, number),
    )  # fmt: skip


def _shard(work: _Packing, number: int) -> Iterator[int]:
    """Write one shard; gives the number of rows after each piece of it."""
    for path in work.folder.glob(f".{_name(number)}.[aj]*"):
        path.unlink()  # what a process that was killed left half written
    start, stop = work.bounds(number)
    draft = Draft(work.origin.columns, stop - start)
    for first in range(start, stop, _CHUNK):
        last = min(first + _CHUNK, stop)
        draft.add(work.origin.read(first, last), last - first)
        yield last - first
    work.write_note(number, draft.write(work.folder, f"{_name(number)}.arrow", work.block))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("echelon")
    except PackageNotFoundError:
        return "from a checkout"
