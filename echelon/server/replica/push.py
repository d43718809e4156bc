"""Head: a worker's push is checked, applied, forwarded and acknowledged; or it waits, or is refused."""

from __future__ import annotations

from collections.abc import Hashable

from echelon.errors import EchelonError
from echelon.server.protocol import wire
from echelon.server.protocol.shard_sets import ShardSet, all_set, any_set
from echelon.server.protocol.specs import StoreError, check_learning_rate
from echelon.server.replica import clocks, read, replication
from echelon.server.replica.replica_link import PendingAck
from echelon.server.replica.shard_state import ReplicaDiverged, target_name
from echelon.server.replica.state import MALFORMED_ERRORS, ReplicaState


def on_push(replica: ReplicaState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    """PUSH."""
    shard_set = check_push(replica, frame)
    if not try_push(replica, now, peer, frame, shard_set):
        replica.waiting_pushes.append((peer, frame, shard_set))
    elif replica.waiting_pushes:
        retry_waiting(replica, now)


def check_push(replica: ReplicaState, frame: wire.Frame) -> ShardSet:
    """The shards of a well-formed push; WireError for any other."""
    shard_set = replica.parse_shard_set(frame)
    meta = frame.meta
    for name in ("incarnation", "seq", "step"):
        if type(meta[name]) is not int or not 0 <= meta[name] < 1 << 62:
            raise wire.WireError(f"PUSH: {name} {meta[name]!r} is not a non-negative integer")
    if type(meta["worker"]) is not str or type(meta["ops"]) is not list:
        raise wire.WireError("PUSH: expected a worker's name and a list of operations")
    if meta.get("lr"):
        try:
            for name, rate in meta["lr"].items():
                check_learning_rate(name, rate)
        except StoreError as error:
            raise wire.WireError(f"PUSH: {error}") from error
    if len(meta["ops"]) > 1 and len({target_name(op) for op in meta["ops"]}) < len(meta["ops"]):
        raise wire.WireError("PUSH: more than one operation on a table or dense parameter")
    return shard_set


def try_push(replica: ReplicaState, now: float, peer: Hashable, frame: wire.Frame, shard_set: ShardSet) -> bool:
    """Take a push, or refuse it; False if it has to wait."""
    meta = frame.meta
    if not all_set(replica.is_ready[shard_set.index]):
        if all_set(replica.is_head[shard_set.index]) or meta["version"] > replica.map.version:
            return False
        replica.send_stale(peer, frame.request_id)
        return True
    if read.may_be_superseded(replica, now, shard_set):
        return False
    if (superseded := replica.map.why_superseded(meta["worker"], meta["incarnation"])) is not None:
        replica.refuse(peer, frame, "Superseded", superseded)
        return True
    is_next, has_gap = replica.shards.check_sequence(frame, shard_set)
    if has_gap:
        return False
    answer = (wire.ACK, {"seq": meta["seq"]})
    is_new = is_next is None or any_set(is_next)
    if is_next is not None and replica.shards.was_refused(frame, shard_set):
        message = f"push {meta['seq']} was refused before, but the answer was lost; nothing of it was applied"
        answer = (wire.REFUSED, {"error": "ServerError", "message": message})
    if is_new:
        new_shards, is_noop = shard_set if is_next is None else shard_set.subset(is_next), False
        try:
            replica.shards.apply_push(frame, new_shards, version=replica.map.version, is_noop=False)
        except ReplicaDiverged:
            raise
        except EchelonError as error:
            # Counted on all replicas all the same: the worker's next push follows it.
            replica.shards.apply_push(frame, new_shards, version=replica.map.version, is_noop=True)
            is_noop, answer = True, (wire.REFUSED, {"error": type(error).__name__, "message": str(error)})
            replica.counters["refused"] += 1
        replica.counters["pushes"] += 1
        replication.forward(replica, now, frame, new_shards, is_noop=is_noop)
    replication.ack_when_replicated(replica, PendingAck(peer, frame.request_id, shard_set, answer))
    if is_new:
        # Also without a tick: on rolled-back shards a worker counts from its first push on.
        replica.min_clock_cache = None
        if meta.get("tick"):
            if replica.shards.pending_pushes:
                clocks.commit_steps(replica, now)
            read.retry_waiting_reads(replica, now)
    return True


def retry_waiting(replica: ReplicaState, now: float) -> None:
    """Try all waiting requests again, pushes in the order of each worker."""
    made_progress = bool(replica.waiting_pushes)
    while made_progress:
        waiting, replica.waiting_pushes = replica.waiting_pushes, []
        still_waiting = []
        for peer, frame, shard_set in sorted(waiting, key=lambda each: (each[1].meta["worker"], each[1].meta["seq"])):
            try:
                if not try_push(replica, now, peer, frame, shard_set):
                    still_waiting.append((peer, frame, shard_set))
            except (wire.WireError, *MALFORMED_ERRORS) as error:
                replica.reject_malformed(peer, frame, error)
        made_progress = 0 < len(still_waiting) < len(waiting)
        replica.waiting_pushes = still_waiting + replica.waiting_pushes
    read.retry_waiting_reads(replica, now)


def resume_waiting(replica: ReplicaState, now: float) -> None:
    """Count, commit and answer what a change of the map, of replicas or of loaded shards allows."""
    replica.update_ready()
    clocks.add_workers(replica, now)
    clocks.commit_steps(replica, now)
    retry_waiting(replica, now)
