"""Packs a source into shards, by several processes, and goes on where a packing that died has stopped.

Order of events, so that a kill at any time leaves nothing wrong: a shard is written under another name, made safe on the disk
and renamed; a note beside it says what it holds; when all notes are there the manifest is written, last. What has no note is
made again. Processes need not know of each other: whoever holds a shard's lock makes it, and locks go with their process.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from echelon.data.packed import manifest as documents
from echelon.data.packed.blocks import block_rows
from echelon.data.packed.family import born_to
from echelon.data.packed.manifest import Manifest, Shard, write_whole
from echelon.data.packed.origin import Origin
from echelon.data.packed.shard import Draft
from echelon.errors import DataError

#: Bytes of a shard, about. A process that packs holds one in memory.
SHARD = 2**27
#: Rows that are read from the source at once.
_CHUNK = 256

Progress = Callable[[int, int], None]


def pack(
    origin: Origin, folder: Path, *, shards: int | None = None, processes: int = 1, overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> Manifest:  # fmt: skip
    """Write `origin` to `folder`. Done already, from the same source: nothing is written; begun already: the rest is.

    `shards`: how many files (None: by size, a power of two). `progress(rows done, rows in all)` is called now and then.
    """
    if shards is not None and not 1 <= shards <= origin.samples:
        raise DataError(f"shards={shards}: {origin.samples:,} samples can be cut into 1 to {origin.samples:,} files")
    count = shards or _count(origin)
    block = block_rows(origin.row_bytes)
    intent = {"identity": origin.identity, "shards": count, "block": block, "version": documents.VERSION}
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / ".lock"):
        done = _settled(folder, intent, overwrite)
    if done is not None:
        return done
    bounds = [part * origin.samples // count for part in range(count + 1)]
    missing = [number for number in range(count) if _note(folder, number) is None]
    finished = origin.samples - sum(bounds[number + 1] - bounds[number] for number in missing)
    progress(finished, origin.samples)
    if processes > 1 and len(missing) > 1:
        rows = _together(origin, folder, bounds, block, min(processes, len(missing)))
    else:
        rows = _shards(origin, folder, bounds, block, 0)
    for more in rows:
        finished += more
        progress(min(finished, origin.samples), origin.samples)
    with _locked(folder / ".lock"):
        return _finished(origin, folder, count, block)


def _finished(origin: Origin, folder: Path, count: int, block: int) -> Manifest:
    """The manifest, once all shards are there; another process may have written it."""
    if (folder / documents.NAME).exists():
        return documents.load(folder)
    notes = [_note(folder, number) for number in range(count)]
    made = Manifest(
        columns=origin.columns, sample=origin.sample, block=block, shards=tuple(note for note in notes if note),
        provenance={**origin.provenance, "identity": origin.identity, "echelon": _version()},
    )  # fmt: skip
    if made.samples != origin.samples:
        raise DataError(f"{folder}: files were taken away while they were packed; run the same command again")
    made.save(folder)
    _tidy(folder)
    return made


def _count(origin: Origin) -> int:
    """Files by size: a power of two, which most numbers of ranks divide."""
    wanted = -(-int(origin.samples * origin.row_bytes) // SHARD)
    return min(1 << max(0, wanted - 1).bit_length(), origin.samples)


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Whether the lock is ours, which it is at last where we `wait`. It goes with the process, however that ends."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)


def _settled(folder: Path, intent: dict[str, Any], overwrite: bool) -> Manifest | None:
    """The finished data set if it is the wanted one; else the folder is made ready to begin or go on."""
    finished, begun = folder / documents.NAME, folder / "packing.json"
    found = _found(folder, overwrite)
    if found is not None:
        same = found.provenance.get("identity") == intent["identity"] and len(found.shards) == intent["shards"]
        if same and not any(_wrong_size(folder, shard) for shard in found.shards):
            _tidy(folder)
            return found
        if not same and not overwrite:
            raise DataError(
                f"{folder} holds another packed data set ({found.provenance.get('source')}): --overwrite replaces it"
            )
    if begun.exists():
        try:
            before = json.loads(begun.read_bytes())
        except ValueError:
            before = None
        if before != intent and not overwrite:
            raise DataError(
                f"{folder} holds a part of another packing (another source, or it has changed since): --overwrite begins anew"
            )
        if before != intent:
            _clear(folder)
    elif overwrite or finished.exists():
        _clear(folder)
    elif any(path.name != ".lock" and not path.name.startswith(".packing.json.") for path in folder.iterdir()):
        raise DataError(f"{folder} is not empty and not a packed data set: choose another folder, or --overwrite")
    for path in [*folder.glob(".manifest.json.*"), *folder.glob(".packing.json.*")]:
        path.unlink()  # what a process that was killed left half written
    if not begun.exists():
        write_whole(begun, json.dumps(intent).encode())
    return None


def _found(folder: Path, overwrite: bool) -> Manifest | None:
    """The data set that the folder holds, if it holds a whole one; a damaged one is nothing where it is to be replaced."""
    try:
        return documents.load(folder) if (folder / documents.NAME).exists() else None
    except DataError:
        if overwrite:
            return None
        raise


def _tidy(folder: Path) -> None:
    """Take away what is needed only until the manifest is there."""
    for pattern in ("shard-*.json", "packing.json", ".shard-*"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def _wrong_size(folder: Path, shard: Shard) -> bool:
    path = folder / shard.file
    return not path.is_file() or path.stat().st_size != shard.bytes


def _clear(folder: Path) -> None:
    """Take away a packed data set, and nothing else; the manifest first, so that what is left never looks whole."""
    (folder / documents.NAME).unlink(missing_ok=True)
    _tidy(folder)
    for path in folder.glob("shard-*.arrow"):
        path.unlink()


def _name(number: int) -> str:
    return f"shard-{number:05d}"


def _note(folder: Path, number: int) -> Shard | None:
    """What a finished shard holds; None: it is not finished."""
    try:
        values = json.loads((folder / f"{_name(number)}.json").read_bytes())
        shard = Shard(
            **{**values, "buffers": tuple(map(tuple, values["buffers"])), "checksums": tuple(values["checksums"])}
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if _wrong_size(folder, shard) else shard


def _shards(origin: Origin, folder: Path, bounds: Sequence[int], block: int, turn: int) -> Iterator[int]:
    """Make what is missing and nobody else makes, until all is there; gives numbers of rows. `turn`: where to begin."""
    count = len(bounds) - 1
    missing = [(number + turn) % count for number in range(count)]
    while missing:
        left = []
        for number in missing:
            with _locked(folder / f".{_name(number)}.lock", wait=False) as ours:
                if not ours:
                    left.append(number)
                # The notes go when the manifest is there: then all is done.
                elif _note(folder, number) is None and not (folder / documents.NAME).exists():
                    yield from _shard(origin, folder, number, bounds, block)
        if len(left) == len(missing):
            time.sleep(0.05)
        missing = left


def _shard(origin: Origin, folder: Path, number: int, bounds: Sequence[int], block: int) -> Iterator[int]:
    """Write one shard; gives the number of rows after each piece of it."""
    for path in folder.glob(f".{_name(number)}.[aj]*"):
        path.unlink()  # what a process that was killed left half written
    start, stop = bounds[number], bounds[number + 1]
    draft = Draft(origin.columns, stop - start)
    for first in range(start, stop, _CHUNK):
        last = min(first + _CHUNK, stop)
        draft.add(origin.read(first, last), last - first)
        yield last - first
    shard = draft.write(folder, f"{_name(number)}.arrow", block)
    write_whole(folder / f"{_name(number)}.json", json.dumps(asdict(shard)).encode())


def _together(origin: Origin, folder: Path, bounds: Sequence[int], block: int, processes: int) -> Iterator[int]:
    """The shards by several processes; gives numbers of rows."""
    context = multiprocessing.get_context("fork")  # the source need not be told to them: they are born with it
    workers: dict[Any, Any] = {}
    try:
        for turn in range(processes):
            receive, send = context.Pipe(duplex=False)
            first = turn * (len(bounds) - 1) // processes
            given = origin, folder, bounds, block, first, send, os.getpid()
            workers[receive] = context.Process(target=_work, args=given, daemon=True)
            workers[receive].start()
            send.close()
        talking = dict(workers)
        while talking:
            for pipe in wait(list(talking)):
                try:
                    message = cast("Connection[Any, Any]", pipe).recv()
                except EOFError:
                    worker = talking.pop(pipe)
                    worker.join()
                    if worker.exitcode:
                        raise DataError(
                            f"a packing process died (exit code {worker.exitcode}); run the same command again, which goes on where "
                            "this one stopped, with --processes 1 if it is for want of memory"
                        ) from None
                    continue
                if isinstance(message, str):
                    raise DataError(message)
                yield message
    finally:
        for worker in workers.values():
            worker.kill()
            worker.join()


def _work(origin: Origin, folder: Path, bounds: Sequence[int], block: int, turn: int, told: Any, parent: int) -> None:
    born_to(parent)
    try:
        for rows in _shards(origin, folder, bounds, block, turn):
            told.send(rows)
    except Exception as error:
        told.send(str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("echelon")
    except PackageNotFoundError:
        return "from a checkout"
