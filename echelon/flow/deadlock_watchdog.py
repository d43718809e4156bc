"""End a proof whose ranks deadlock, as after a collective in user code that only some of them reach."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.errors import UnverifiedPlanError
from echelon.launchers.rank_ipc import report_failure
from echelon.plan.plan import Plan
from echelon.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

#: Ranks deadlock if none of them used this share of a core during a window (seconds).
IDLE_CPU_SHARE, WINDOW_SECONDS = 0.05, 5.0
#: How many times the limit ranks that still compute may take.
MAX_LIMIT_FACTOR = 4.0
_POLL_SECONDS = 0.5
#: The reason, in the ranks' store.
_REASON_KEY = "ended"
#: Seconds that the main thread gets to leave, once its connections are closed.
_EXIT_GRACE_SECONDS = 10.0


@contextlib.contextmanager
def watch_for_deadlock(
    world: World, store: Store | None, plan: Plan, limit: float, limit_factor: float = MAX_LIMIT_FACTOR
) -> Iterator[None]:
    """Disconnect all ranks and raise UnverifiedPlanError if the code inside deadlocks after `limit` seconds, or takes `limit_factor` times that.
    `store`: the ranks' own; None for one rank, which cannot deadlock."""
    if store is None:
        yield
        return
    watchdog = _Watchdog(world, store, plan, limit, limit_factor)
    thread = threading.Thread(target=watchdog.run, daemon=True, name="echelon-watchdog")
    thread.start()
    try:
        yield
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # rank 0, which may host the store, has exited
            if store.check([_REASON_KEY]):
                raise UnverifiedPlanError(store.get(_REASON_KEY).decode()) from error
        raise
    finally:
        watchdog.done.set()
        thread.join()


class _Watchdog:
    """Of one rank. All publish the CPU time they have used; rank 0's decides."""

    def __init__(self, world: World, store: Store, plan: Plan, limit: float, limit_factor: float) -> None:
        self._world, self._store, self._plan, self._limit = world, store, plan, limit
        self._start_time, self._main_thread_id = time.monotonic(), threading.get_ident()
        self._hard_limit = limit_factor * limit
        self.done = threading.Event()
        #: By time, the CPU seconds of each rank.
        self._cpu_samples: deque[tuple[float, list[float]]] = deque()

    def run(self) -> None:
        """Watch until the proof is done, or a rank's watchdog has ended it."""
        with contextlib.suppress(RuntimeError):  # rank 0, which may host the store, has exited
            if self.done.wait(max(self._limit - WINDOW_SECONDS, 0.0)):
                return
            while not self.done.wait(_POLL_SECONDS):
                self._store.set(f"used/{self._world.rank}", f"{time.process_time()} {self._find_waiting_line()}")
                if self._world.is_main and (reason := self._find_reason()):
                    self._store.set(_REASON_KEY, reason)
                if self._store.check([_REASON_KEY]):
                    self._abort(self._store.get(_REASON_KEY).decode())
                    return

    def _find_reason(self) -> str:
        """Why the proof ends now; empty: it does not."""
        keys = [f"used/{rank}" for rank in range(self._world.size)]
        if not self._store.check(keys):
            return ""
        reports = [self._store.get(name).decode().partition(" ") for name in keys]
        now, cpu_seconds = time.monotonic(), [float(report[0]) for report in reports]
        self._cpu_samples.append((now, cpu_seconds))
        while now - self._cpu_samples[0][0] > WINDOW_SECONDS + _POLL_SECONDS:
            self._cpu_samples.popleft()
        then, earlier_cpu_seconds = self._cpu_samples[0]
        elapsed, window = now - self._start_time, now - then
        if elapsed < self._limit:
            return ""
        summary = f'"{self._plan}" was not verified in {elapsed:.0f} s'
        used = [new - old for new, old in zip(cpu_seconds, earlier_cpu_seconds, strict=True)]
        if window < WINDOW_SECONDS - _POLL_SECONDS or max(used) > IDLE_CPU_SHARE * window:
            is_late = elapsed > self._hard_limit
            return f"{summary}: it takes too long on this machine; --no-verify trains it unproved" if is_late else ""
        lines = [f"rank {rank} at {line}" for rank, (_, _, line) in enumerate(reports) if line]
        location = f" ({', '.join(lines)})" if lines else ""
        cause = "under tp and pp not every rank runs all of the model and the loss, so their own torch.distributed collectives deadlock"
        remedy = "use a plan with dp alone, or leave such calls to echelon"
        return f"{summary}: its ranks wait for each other{location}; {cause}; {remedy}"

    def _find_waiting_line(self) -> str:
        """The line of the user's code that waits in torch; empty if none does."""
        frame = sys._current_frames().get(self._main_thread_id)
        package_folder = Path(__file__).resolve().parent.parent
        stdlib_folder = Path(sysconfig.get_paths()["stdlib"]).resolve()
        for summary in reversed(traceback.extract_stack(frame)):
            path = Path(summary.filename)
            if summary.name == "__torch_function__":  # of a mode, which is called in between
                continue
            if "site-packages" in path.parts or path.is_relative_to(stdlib_folder) or not path.is_file():
                continue
            return "" if path.resolve().is_relative_to(package_folder) else f"{summary.filename}, line {summary.lineno}"
        return ""

    def _abort(self, reason: str) -> None:
        """Wake the main thread by closing its connections; one that waits for something else ends with its process."""
        from echelon.engine.connections import close_connections

        close_connections()
        if self.done.wait(_EXIT_GRACE_SECONDS):
            return
        error = UnverifiedPlanError(reason)
        if not report_failure(error, self._world.rank):
            print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(error.exit_code)
