"""As head: who counts from which step on, and entries that nobody pushed: commits of synchronous steps, rows that expire."""

from __future__ import annotations

import numpy as np

from echelon.server.protocol import wire
from echelon.server.replica.dedup import INFINITE_CLOCK, NOT_COUNTED
from echelon.server.replica.log import ReplicationLog


class WorkerClocks(ReplicationLog):
    """Workers' clocks."""

    def min_clock(self) -> np.ndarray:
        """Per shard the least clock of the workers that are counted."""
        if self._min_clock is None:
            self._min_clock = self.state.dedup.min_clock(self._live_slots)
        return self._min_clock

    def _add_workers(self, now: float) -> None:
        """Count the map's workers on all shards that we head, from the least clock there is."""
        dedup = self.state.dedup
        for worker, incarnation in sorted(self.map.workers.items()):
            slot = dedup.get_slot(worker, incarnation)
            new_shards = np.flatnonzero(self.is_ready & (dedup.clocks[slot] == NOT_COUNTED) & ~dedup.is_rolled_back)
            if len(new_shards):
                min_clocks = self.min_clock()[new_shards]
                start_clocks = np.where(
                    min_clocks == INFINITE_CLOCK, np.maximum(dedup.max_clock(new_shards), 0), min_clocks
                )
                wire_shards = new_shards.astype(np.uint16)
                self._append_entry(
                    now, wire.ADD_WORKER, {"worker": worker, "incarnation": incarnation}, [wire_shards, start_clocks]
                )

    def _commit_steps(self, now: float) -> None:
        """Log the commit of each step that all workers have ticked."""
        for step in sorted(self.state.pending_pushes):
            is_pending = np.zeros(self.map.num_shards, bool)
            for push in self.state.pending_pushes[step]:
                is_pending[push.shards] = True
            shards = np.flatnonzero(is_pending & self.is_ready & (self.min_clock() > step))
            if len(shards):
                self._append_entry(now, wire.COMMIT_STEP, {"step": step}, [shards.astype(np.uint16)])

    def _forget_workers(self, now: float) -> None:
        """Lives of workers that the map says are over: forget them, on all replicas. Whoever is head from here on knows that map."""
        dedup, shard_map = self.state.dedup, self.map
        expired_slots = dedup.expired_slots(shard_map.is_expired)
        if not expired_slots:
            return
        has_records = (dedup.last_seq[expired_slots] != 0).any(axis=0) | (
            dedup.clocks[expired_slots] != NOT_COUNTED
        ).any(axis=0)
        shards = np.flatnonzero(self.is_ready & has_records)
        if len(shards):
            meta = {"horizon": shard_map.horizon, "kept": sorted(shard_map.retained_incarnations)}
            self._append_entry(now, wire.FORGET_WORKERS, meta, [shards.astype(np.uint16)])

    def _expire_rows(self, now: float, frame: wire.Frame) -> None:
        if (self.is_head & ~self.is_ready).any():
            self._waiting_expiries.append(frame)  # "done" is said of all that we head
            return
        shards = np.flatnonzero(self.is_ready)
        if len(shards):
            before_lsn = np.maximum(self.state.lsn[shards] - int(frame.meta["older"]) + 1, 0)
            self._append_entry(now, wire.EXPIRE, {"table": frame.meta["table"]}, [shards.astype(np.uint16), before_lsn])
        self._send_to_controller(wire.DONE, {"of": frame.meta.get("of")})
