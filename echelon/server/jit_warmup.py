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
from echelon.server.kernels.jit_cache import cache_folder, hash_sources, watch_compilation
from echelon.server.protocol.grouped_ids import group_by_route
from echelon.server.protocol.specs import RULE_KINDS, Dense, Rule, Table
from echelon.server.protocol.wire_dtypes import dequantize, quantize
from echelon.server.store.store import ParameterStore

#: Told the share that is done, at each sign of life of whoever compiles.
Progress = Callable[[float], None]
#: Beginnings and ends of functions' compilations, as counted once.
_COMPILE_EVENTS = 170
_LOCK_POLL_INTERVAL = 0.1


def warm_up(progress: Progress = lambda share: None) -> None:
    """Run every loop once: those of fp32 if they were compiled before, else those of float64 too, so that they are from now on."""
    with _warmup_lock(cache_folder(kernels.find_rows), progress) as report_progress:
        if report_progress is None:
            _run_store_kernels("f4")
            return
        event_numbers = count(1)
        with watch_compilation(lambda: report_progress(min(next(event_numbers) / _COMPILE_EVENTS, 0.99))):
            for step in (
                partial(_run_store_kernels, "f4"),
                partial(_run_store_kernels, "f8"),
                partial(_run_lazy_kernels, "f4"),
                partial(_run_lazy_kernels, "f8"),
                warm_up_client,
            ):
                step()


@lru_cache
def warm_up_table(dtype: str, updates_every_row: bool) -> None:
    """The loops of a declared table, before a push of it is under way and the clocks count: loaded, mostly."""
    (_run_lazy_kernels if updates_every_row else _run_store_kernels)(dtype)


@lru_cache
def warm_up_client() -> None:
    """A worker's own loops, before it joins and is missed when it is silent."""
    grouped_ids = group_by_route(np.arange(2), np.zeros(2, np.uint16), 1)
    for dtype in ("f4", "f8"):
        grouped_ids.expand(grouped_ids.sum_gradients(np.ones((2, 2), dtype)))
        for wire_dtype in ("i2", "i1"):
            dequantize(quantize(np.ones((2, 2), dtype), wire_dtype), dtype)


def _run_store_kernels(dtype: str) -> None:
    store = ParameterStore(num_shards=2, memory=1 << 24)
    ids, lsn, numpy_dtype = np.arange(4), np.ones(2, np.int64), np.dtype(dtype)
    for kind in RULE_KINDS:
        rule = Rule(kind=kind)  # type: ignore[arg-type]
        store.declare(Table(name=kind, dim=2, rule=rule, dtype=dtype, stored=dtype))  # type: ignore[arg-type]
        store.apply(kind, ids, np.ones((4, 2), numpy_dtype), lr=None, lsn=lsn)
        store.read(kind, ids, dtype)
        if kind != "rowwise_adagrad":
            store.declare(Dense(name=f"dense {kind}", size=2, rule=rule, dtype=dtype))  # type: ignore[arg-type]
            store.apply(f"dense {kind}", np.zeros(1, np.int64), [np.ones(2, numpy_dtype)], lr=None, lsn=lsn)
    store.assign(kind, ids, np.ones((4, 2), numpy_dtype), lsn=lsn)
    for shard in range(2):
        store.install(shard, store.snapshot(shard))
        store.digest(shard)
    store.close()


def _run_lazy_kernels(dtype: str) -> None:
    """The loops of tables all of whose rows move."""
    store = ParameterStore(num_shards=1, memory=1 << 24)
    for kind in ("sgd", "momentum", "adagrad", "adam"):
        store.declare(Table(name=kind, dim=2, rule=Rule(kind=kind, every=True), dtype=dtype, stored=dtype))  # type: ignore[arg-type]
        for _ in range(2):
            store.apply(kind, np.arange(2), np.ones((2, 2), dtype), lsn=np.ones(1, np.int64))
            store.advance_lazy_table(kind, np.zeros(1, np.int64))
        store.read(kind, np.arange(4), dtype)
    store.close()


def _cache_key() -> str:
    """What compiled code depends on."""
    sources = hash_sources(Path(kernels.__file__).parent) + Path(__file__).read_text()
    machine = f"{numba.__version__} {sys.implementation.cache_tag} {llvmlite.binding.get_host_cpu_name()}"
    return hashlib.sha256((sources + machine).encode()).hexdigest()[:16]


@contextmanager
def _warmup_lock(folder: Path | None, progress: Progress) -> Iterator[Progress | None]:
    """One process at a time while nothing is compiled yet: several at once would each compile all of it.

    None where it is compiled by now; else whom to tell of progress, of which those who wait hear as well.
    """
    import fcntl

    if folder is None:  # nothing is kept: each process compiles what it uses
        yield None
        return
    done_marker = folder / f"echelon-warm-{_cache_key()}"
    if done_marker.exists():
        yield None
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(done_marker.with_suffix(".lock"), "a+")  # noqa: SIM115 (closed below)
    except OSError:
        yield None
        return

    def report_progress(share: float) -> None:
        lock.truncate(0)
        lock.write(f"{share:.3f}")
        lock.flush()
        progress(share)

    with lock:
        last_text = ""
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                lock.seek(0)
                share_text = lock.read()
                if share_text != last_text:
                    last_text = share_text
                    with suppress(ValueError):  # read between its being emptied and written
                        progress(float(share_text))
                time.sleep(_LOCK_POLL_INTERVAL)
        if done_marker.exists():
            yield None
            return
        yield report_progress
        with suppress(OSError):
            done_marker.touch()
