"""Head: workers' clocks, and the entries that no worker pushes: commits of synchronous steps, workers that join or expire, row expiry."""

from __future__ import annotations

import numpy as np

from echelon.server.protocol import wire
from echelon.server.replica import replication
from echelon.server.replica.dedup import INFINITE_CLOCK, NOT_COUNTED
from echelon.server.replica.state import ReplicaState


def min_clock(replica: ReplicaState) -> np.ndarray:
    """Per shard, the lowest clock of the workers that count."""
    if replica.min_clock_cache is None:
        replica.min_clock_cache = replica.shards.dedup.min_clock(replica.live_slots)
    return replica.min_clock_cache


def add_workers(replica: ReplicaState, now: float) -> None:
    """Count the map's workers on all ready shards, starting at the lowest clock there."""
    dedup = replica.shards.dedup
    for worker, incarnation in sorted(replica.map.workers.items()):
        slot = dedup.get_slot(worker, incarnation)
        shards = np.flatnonzero(replica.is_ready & (dedup.clocks[slot] == NOT_COUNTED) & ~dedup.is_rolled_back)
        lowest = min_clock(replica)[shards]
        start_clocks = np.where(lowest == INFINITE_CLOCK, np.maximum(dedup.max_clock(shards), 0), lowest)
        meta = {"worker": worker, "incarnation": incarnation}
        replication.append_entry(replica, now, wire.ADD_WORKER, meta, shards, start_clocks)


def commit_steps(replica: ReplicaState, now: float) -> None:
    """Append the commit of each step that all workers have ended."""
    for step in sorted(replica.shards.pending_pushes):
        is_pending = np.zeros(replica.map.num_shards, bool)
        for push in replica.shards.pending_pushes[step]:
            is_pending[push.shards] = True
        shards = np.flatnonzero(is_pending & replica.is_ready & (min_clock(replica) > step))
        replication.append_entry(replica, now, wire.COMMIT_STEP, {"step": step}, shards)


def forget_workers(replica: ReplicaState, now: float) -> None:
    """Drop the records of expired incarnations on all replicas. Every later head knows a map that expires them too."""
    dedup, shard_map = replica.shards.dedup, replica.map
    slots = dedup.expired_slots(shard_map.is_expired)
    has_records = (dedup.last_seq[slots] != 0) | (dedup.clocks[slots] != NOT_COUNTED)
    meta = {"horizon": shard_map.horizon, "kept": sorted(shard_map.retained_incarnations)}
    shards = np.flatnonzero(replica.is_ready & has_records.any(axis=0))
    replication.append_entry(replica, now, wire.FORGET_WORKERS, meta, shards)


def expire_rows(replica: ReplicaState, now: float, frame: wire.Frame) -> None:
    """Expire old rows on all shards headed here, once all of them are ready."""
    if (replica.is_head & ~replica.is_ready).any():
        replica.waiting_expiries.append(frame)
        return
    shards = np.flatnonzero(replica.is_ready)
    before_lsn = np.maximum(replica.shards.lsn[shards] - int(frame.meta["older"]) + 1, 0)
    replication.append_entry(replica, now, wire.EXPIRE, {"table": frame.meta["table"]}, shards, before_lsn)
    replica.send_to_controller(wire.DONE, {"of": frame.meta.get("of")})
