"""The compiled loops, ready before anybody counts on answers: compiled by the first process that needs them, loaded by all others."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import count
from pathlib import Path

import llvmlite.binding  # type: ignore[import-untyped]
import numba
import numpy as np

from echelon.server import kernels
from echelon.server.client.combine import group
from echelon.server.kernels.jit_cache import kept_in, stamp_of, watching
from echelon.server.protocol.specs import RULES, Dense, Rule, Table
from echelon.server.store.narrow_numbers import narrow, widen
from echelon.server.store.store import Store

#: Told the share that is done, at each sign of life of whoever compiles.
Progress = Callable[[float], None]
#: Beginnings and ends of functions' compilations, as counted once.
_EVENTS = 170
_LOOK = 0.1


def warm(progress: Progress = lambda share: None) -> None:
    """Run every loop once: those of fp32 if they were compiled before, else those of float64 too, so that they are from now on."""
    with _alone(kept_in(kernels.find), progress) as told:
        if told is None:
            _run("f4")
            return
        signs = count(1)
        with watching(lambda: told(min(next(signs) / _EVENTS, 0.99))):
            for step in (partial(_run, "f4"), partial(_run, "f8"), partial(_move, "f4"), partial(_move, "f8"), work):
                step()


@lru_cache
def ready(number: str, every: bool) -> None:
    """The loops of a declared table, before a push of it is under way and the clocks count: loaded, mostly."""
    (_move if every else _run)(number)


@lru_cache
def work() -> None:
    """A worker's own loops, before it joins and is missed when it is silent."""
    grouped = group(np.arange(2), np.zeros(2, np.uint16), 1)
    for number in ("f4", "f8"):
        grouped.expand(grouped.sum(np.ones((2, 2), number)))
        for wire in ("i2", "i1"):
            widen(narrow(np.ones((2, 2), number), wire), number)


def _run(number: str) -> None:
    store = Store(shards=2, memory=1 << 24)
    ids, lsn, kind = np.arange(4), np.ones(2, np.int64), np.dtype(number)
    for each in RULES:
        rule = Rule(kind=each)  # type: ignore[arg-type]
        store.declare(Table(name=each, dim=2, rule=rule, dtype=number, stored=number))  # type: ignore[arg-type]
        store.apply(each, ids, np.ones((4, 2), kind), lr=None, lsn=lsn)
        store.read(each, ids, number)
        if each != "rowwise_adagrad":
            store.declare(Dense(name=f"dense {each}", size=2, rule=rule, dtype=number))  # type: ignore[arg-type]
            store.apply(f"dense {each}", np.zeros(1, np.int64), [np.ones(2, kind)], lr=None, lsn=lsn)
    store.assign(each, ids, np.ones((4, 2), kind), lsn=lsn)
    for shard in range(2):
        store.install(shard, store.snapshot(shard))
        store.digest(shard)
    store.close()


def _move(number: str) -> None:
    """The loops of tables all of whose rows move."""
    store = Store(shards=1, memory=1 << 24)
    for kind in ("sgd", "momentum", "adagrad", "adam"):
        store.declare(Table(name=kind, dim=2, rule=Rule(kind=kind, every=True), dtype=number, stored=number))  # type: ignore[arg-type]
        for _ in range(2):
            store.apply(kind, np.arange(2), np.ones((2, 2), number), lsn=np.ones(1, np.int64))
            store.advance(kind, np.zeros(1, np.int64))
        store.read(kind, np.arange(4), number)
    store.close()


def _made() -> str:
    """What compiled code depends on."""
    sources = stamp_of(Path(kernels.__file__).parent) + Path(__file__).read_text()
    machine = f"{numba.__version__} {sys.implementation.cache_tag} {llvmlite.binding.get_host_cpu_name()}"
    return hashlib.sha256((sources + machine).encode()).hexdigest()[:16]


@contextmanager
def _alone(folder: Path | None, progress: Progress) -> Iterator[Progress | None]:
    """One process at a time while nothing is compiled yet: several at once would each compile all of it.

    None where it is compiled by now; else whom to tell of progress, of which those who wait hear as well.
    """
    import fcntl

    if folder is None:  # nothing is kept: each process compiles what it uses
        yield None
        return
    mark = folder / f"echelon-warm-{_made()}"
    if mark.exists():
        yield None
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(mark.with_suffix(".lock"), "a+")  # noqa: SIM115 (closed below)
    except OSError:
        yield None
        return

    def told(share: float) -> None:
        lock.truncate(0)
        lock.write(f"{share:.3f}")
        lock.flush()
        progress(share)

    with lock:
        before = ""
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                lock.seek(0)
                said = lock.read()
                if said != before:
                    before = said
                    with suppress(ValueError):  # read between its being emptied and written
                        progress(float(said))
                time.sleep(_LOOK)
        if mark.exists():
            yield None
            return
        yield told
        with suppress(OSError):
            mark.touch()
