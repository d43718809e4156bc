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

from echelon.errors import UnprovedPlan
from echelon.launchers.rank_ipc import leave_word
from echelon.plan.plan import Plan
from echelon.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

#: Ranks deadlock if none of them used this share of a core during a window (seconds).
IDLE, WINDOW = 0.05, 5.0
#: How many times the limit ranks that still compute may take.
MOST = 4.0
_TICK = 0.5
#: The reason, in the ranks' store.
_ENDED = "ended"
#: Seconds that the main thread gets to leave, once its connections are closed.
_GRACE = 10.0


@contextlib.contextmanager
def bounded(world: World, store: Store | None, plan: Plan, limit: float, most: float = MOST) -> Iterator[None]:
    """Disconnect all ranks and raise UnprovedPlan if the code inside deadlocks and `limit` seconds have passed, or after `most` times that.
    `store`: the ranks' own; None where there is one rank, which waits for no other."""
    if store is None:
        yield
        return
    done = threading.Event()
    watchdog = _Watchdog(world, store, plan, limit, most, done)
    thread = threading.Thread(target=watchdog.run, daemon=True, name="echelon-watchdog")
    thread.start()
    try:
        yield
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # rank 0, which may host the store, has exited
            if store.check([_ENDED]):
                raise UnprovedPlan(store.get(_ENDED).decode()) from error
        raise
    finally:
        done.set()
        thread.join()


class _Watchdog:
    """Of one rank. All publish the CPU time they have used; rank 0's decides."""

    def __init__(
        self, world: World, store: Store, plan: Plan, limit: float, most: float, done: threading.Event
    ) -> None:
        self._world, self._store, self._plan, self._limit, self._done = world, store, plan, limit, done
        self._begin, self._main = time.monotonic(), threading.get_ident()
        self._last = most * limit
        #: By time, what each rank has used.
        self._used: deque[tuple[float, list[float]]] = deque()

    def run(self) -> None:
        """Until the proof is done, or a rank's watchdog has ended it."""
        try:
            if not self._done.wait(max(self._limit - WINDOW, 0.0)):
                self._watch()
        except RuntimeError:  # rank 0, which may host the store, has exited
            pass

    def _watch(self) -> None:
        while not self._done.wait(_TICK):
            self._store.set(f"used/{self._world.rank}", f"{time.process_time()} {self._where()}")
            if self._world.main and (reason := self._reason()):
                self._store.set(_ENDED, reason)
            if self._store.check([_ENDED]):
                self._end(self._store.get(_ENDED).decode())
                return

    def _reason(self) -> str:
        """Why the proof ends now; empty: it does not."""
        names = [f"used/{rank}" for rank in range(self._world.size)]
        if not self._store.check(names):
            return ""
        told = [self._store.get(name).decode().partition(" ") for name in names]
        now, used = time.monotonic(), [float(each[0]) for each in told]
        self._used.append((now, used))
        while now - self._used[0][0] > WINDOW + _TICK:
            self._used.popleft()
        then, before = self._used[0]
        seconds = now - self._begin
        if seconds < self._limit:
            return ""
        unproved = f'"{self._plan}" was not verified in {seconds:.0f} s'
        busy = any(new - old > IDLE * (now - then) for new, old in zip(used, before, strict=True))
        if now - then < WINDOW - _TICK or busy:
            return (
                f"{unproved}: it takes too long on this machine; --no-verify trains it unproved"
                if seconds > self._last
                else ""
            )
        places = [f"rank {rank} at {where}" for rank, (_, _, where) in enumerate(told) if where]
        where = f" ({', '.join(places)})" if places else ""
        return (
            f"{unproved}: its ranks wait for each other{where}; under tp and pp not every rank runs all of the model and the loss, so "
            "collectives of torch.distributed that they call themselves deadlock; use a plan with dp alone, or leave such calls to echelon"
        )

    def _where(self) -> str:
        """The line of the user's that waits in torch; empty where none does."""
        frame = sys._current_frames().get(self._main)
        ours, python = Path(__file__).resolve().parent.parent, Path(sysconfig.get_paths()["stdlib"]).resolve()
        for each in reversed(traceback.extract_stack(frame)):
            path = Path(each.filename)
            if each.name == "__torch_function__":  # of a mode, which is called in between
                continue
            if "site-packages" in path.parts or path.is_relative_to(python) or not path.is_file():
                continue
            return "" if path.resolve().is_relative_to(ours) else f"{each.filename}, line {each.lineno}"
        return ""

    def _end(self, reason: str) -> None:
        """Wake the main thread by closing its connections; one that waits for something else ends with its process."""
        from echelon.engine.process_groups import disconnect

        disconnect()
        if self._done.wait(_GRACE):
            return
        error = UnprovedPlan(reason)
        if not leave_word(error, self._world.rank):
            print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(error.exit_code)
