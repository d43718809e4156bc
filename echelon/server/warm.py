"""The compiled loops, ready before anybody counts on answers: compiled by the first process that needs them, loaded by all others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from echelon.server import kernels, replay
from echelon.server.kinds import RULES, Dense, Rule, Table
from echelon.server.store import Store


def warm() -> None:
    """Run every loop once: those of fp32 if they were compiled before, else those of float64 too, so that they are from now on."""
    with _alone(Path(kernels.__file__), Path(replay.__file__)) as first:
        for number in ("f4", "f8") if first else ("f4",):
            _run(number)
            if first:  # else they are loaded when such a table is declared, which few are
                _move(number)


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
    for shard in range(2):
        store.install(shard, store.snapshot(shard))
        store.digest(shard)
    store.close()


def _move(number: str) -> None:
    """The loops of tables all of whose rows move."""
    store = Store(shards=1, memory=1 << 24)
    store.declare(Table(name="every", dim=2, rule=Rule(kind="adam", every=True), dtype=number, stored=number))  # type: ignore[arg-type]
    for _ in range(2):
        store.apply("every", np.arange(2), np.ones((2, 2), number), lsn=np.ones(1, np.int64))
        store.advance("every", np.zeros(1, np.int64))
    store.read("every", np.arange(4), number)
    store.close()


@contextmanager
def _alone(*sources: Path) -> Iterator[bool]:
    """One process at a time while nothing is compiled yet: several at once would each compile all of it. Whether this is the first."""
    import fcntl

    made = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    mark = sources[0].parent / "__pycache__" / f"echelon-warm-{made}"
    if mark.exists():
        yield False
        return
    try:
        mark.parent.mkdir(exist_ok=True)
        lock = open(mark.with_suffix(".lock"), "w")  # noqa: SIM115 (closed below)
    except OSError:  # a package that cannot be written to: numba has its cache elsewhere, or none
        yield False
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not mark.exists()
        with suppress(OSError):
            mark.touch()
