"""As head: who counts from which step on, and entries that nobody pushed: commits of synchronous steps, rows that expire."""

from __future__ import annotations

import numpy as np

from echelon.server.protocol import wire
from echelon.server.replica.dedup import ABSENT, FAR
from echelon.server.replica.log import Entries


class Clocks(Entries):
    """Workers' clocks."""

    def floor(self) -> np.ndarray:
        """Per shard the least clock of the workers that are counted."""
        if self._floor is None:
            self._floor = self.state.windows.floor(self._live)
        return self._floor

    def _enrol(self, now: float) -> None:
        """Count the map's workers on all shards that we head, from the least clock there is."""
        windows = self.state.windows
        for worker, incarnation in sorted(self.map.workers.items()):
            slot = windows.slot(worker, incarnation)
            new = np.flatnonzero(self.ready & (windows.clock[slot] == ABSENT) & ~windows.restored)
            if len(new):
                floor = self.floor()[new]
                starts = np.where(floor == FAR, np.maximum(windows.furthest(new), 0), floor)
                cover = new.astype(np.uint16)
                self._log(now, wire.ENROL, {"worker": worker, "incarnation": incarnation}, [cover, starts])

    def _commit(self, now: float) -> None:
        """Log the commit of each step that all workers have ticked."""
        for step in sorted(self.state.pending):
            shards = np.zeros(self.map.shards, bool)
            for held in self.state.pending[step]:
                shards[held.shards] = True
            cover = np.flatnonzero(shards & self.ready & (self.floor() > step))
            if len(cover):
                self._log(now, wire.COMMIT, {"step": step}, [cover.astype(np.uint16)])

    def _forget(self, now: float) -> None:
        """Lives of workers that the map says are over: forget them, on all replicas. Whoever is head from here on knows that map."""
        windows, known = self.state.windows, self.map
        gone = windows.of(known.over)
        if not gone:
            return
        have = (windows.last[gone] != 0).any(axis=0) | (windows.clock[gone] != ABSENT).any(axis=0)
        cover = np.flatnonzero(self.ready & have)
        if len(cover):
            meta = {"horizon": known.horizon, "kept": sorted(known.kept)}
            self._log(now, wire.FORGET, meta, [cover.astype(np.uint16)])

    def _expire(self, now: float, frame: wire.Frame) -> None:
        if (self.headed & ~self.ready).any():
            self._expiring.append(frame)  # "done" is said of all that we head
            return
        cover = np.flatnonzero(self.ready)
        if len(cover):
            before = np.maximum(self.state.lsn[cover] - int(frame.meta["older"]) + 1, 0)
            self._log(now, wire.EXPIRE, {"table": frame.meta["table"]}, [cover.astype(np.uint16), before])
        self._tell(wire.DONE, {"of": frame.meta.get("of")})
