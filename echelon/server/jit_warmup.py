"""Have the kernels ready before others wait for answers: the first process compiles them, all others load them."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import count
from pathlib import Path

import llvmlite.binding  # type: ignore[import-untyped]
import numba
import numpy as np

from echelon.errors import FileLockError
from echelon.files import acquire_lock
from echelon.server import kernels
from echelon.server.kernels.jit_cache import cache_folder, hash_sources, watch_compilation
from echelon.server.protocol.grouped_ids import group_by_route
from echelon.server.protocol.specs import RULE_KINDS, Dense, Rule, Table
from echelon.server.protocol.wire_dtypes import dequantize, quantize
from echelon.server.store.store import ParameterStore

#: Called with the share that is compiled, as compilation advances.
Progress = Callable[[float], None]
#: Starts and ends of compilations, as counted once.
_COMPILE_EVENTS = 170


def warm_up(progress: Progress = lambda share: None) -> None:
    """Run every kernel once: those of fp32 if all are compiled, else those of float64 too, so that they are from now on."""
    with _warmup_lock(cache_folder(kernels.find_rows), progress) as report_progress:
        if report_progress is None:
            _run_store_kernels("f4")
            return
        event_numbers = count(1)
        with watch_compilation(lambda: report_progress(min(next(event_numbers) / _COMPILE_EVENTS, 0.99))):
            for dtype in ("f4", "f8"):
                _run_store_kernels(dtype)
                _run_lazy_kernels(dtype)
            warm_up_client()


@lru_cache
def warm_up_table(dtype: str, updates_every_row: bool) -> None:
    """Load the kernels of a declared table before it is pushed to and the clocks count."""
    (_run_lazy_kernels if updates_every_row else _run_store_kernels)(dtype)


@lru_cache
def warm_up_client() -> None:
    """Load a worker's kernels before it joins and has to send heartbeats."""
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
    """Run the kernels of tables whose pushes update every row."""
    store = ParameterStore(num_shards=1, memory=1 << 24)
    for kind in ("sgd", "momentum", "adagrad", "adam"):
        store.declare(Table(name=kind, dim=2, rule=Rule(kind=kind, every=True), dtype=dtype, stored=dtype))  # type: ignore[arg-type]
        for _ in range(2):
            store.apply(kind, np.arange(2), np.ones((2, 2), dtype), lsn=np.ones(1, np.int64))
            store.advance_lazy_table(kind, np.zeros(1, np.int64))
        store.read(kind, np.arange(4), dtype)
    store.close()


def _cache_key() -> str:
    """A hash of what compiled code depends on."""
    sources = hash_sources(Path(kernels.__file__).parent) + Path(__file__).read_text()
    machine = f"{numba.__version__} {sys.implementation.cache_tag} {llvmlite.binding.get_host_cpu_name()}"
    return hashlib.sha256((sources + machine).encode()).hexdigest()[:16]


@contextmanager
def _warmup_lock(folder: Path | None, progress: Progress) -> Iterator[Progress | None]:
    """Let one process compile at a time: several at once would each compile everything.

    Yields None if all is compiled; else where to report progress, which processes that wait for the lock report as well.
    """
    done_marker = None if folder is None else folder / f"echelon-warm-{_cache_key()}"
    if done_marker is None or done_marker.exists():  # without a folder each process compiles what it uses
        yield None
        return
    progress_file, last_text = done_marker.with_suffix(".progress"), ""

    def relay_progress() -> str:
        nonlocal last_text
        with suppress(OSError, ValueError):  # ValueError: read while it is being written
            if (text := progress_file.read_text()) != last_text:
                progress(float(text))
                last_text = text
        return last_text

    def report_progress(share: float) -> None:
        progress_file.write_text(f"{share:.3f}")
        progress(share)

    try:
        done_marker.parent.mkdir(parents=True, exist_ok=True)
        lock = acquire_lock(done_marker.with_suffix(".lock"), timeout=math.inf, heartbeat=relay_progress)
    except (OSError, FileLockError):
        yield None
        return
    with lock:
        if done_marker.exists():
            yield None
            return
        yield report_progress
        with suppress(OSError):
            done_marker.touch()
