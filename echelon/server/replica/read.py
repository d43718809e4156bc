"""Head: requests that change nothing. Each is answered, refused, or kept until it can be answered."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from echelon.errors import EchelonError, ServerError
from echelon.server.protocol import wire
from echelon.server.protocol.shard_sets import ShardSet, all_set, any_set
from echelon.server.replica import clocks
from echelon.server.replica.dedup import INFINITE_CLOCK, NOT_COUNTED
from echelon.server.replica.replica_link import Arrays
from echelon.server.replica.state import MALFORMED_ERRORS, ReplicaState

#: A sole replica stops answering after this silence of the controller, well below the grace before its shards are rolled back.
CONTROLLER_SILENCE_LIMIT = 1.0


def on_read(replica: ReplicaState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    """PULL, CHANGED, CLOCK, DIGEST."""
    shard_set = replica.parse_shard_set(frame)
    if not try_read(replica, now, peer, frame, shard_set):
        replica.waiting_reads.append((peer, frame, shard_set))


def retry_waiting_reads(replica: ReplicaState, now: float) -> None:
    """Answer the waiting reads that no longer have to wait."""
    if waiting := replica.waiting_reads:
        replica.waiting_reads = [request for request in waiting if not try_read(replica, now, *request)]


def may_be_superseded(replica: ReplicaState, now: float, shard_set: ShardSet) -> bool:
    """Whether shards that have no other replica may have moved to another server.

    When a sole replica is lost, the controller rolls its shards back to a checkpoint; nothing may be acknowledged after that.
    """
    is_silent = replica.target_replicas > 1 and now - replica.controller_heard_at > CONTROLLER_SILENCE_LIMIT
    return is_silent and any_set(replica.is_sole_replica[shard_set.index])


def holds_lease(replica: ReplicaState, now: float, shard_set: ShardSet) -> bool:
    """Whether every required replica answered within the lease, so that no other head exists."""
    if any(now - link.lease_start >= replica.lease and link.must_ack(shard_set) for link in replica.links.values()):
        return False
    return now >= replica.all_reads_allowed_from or not (replica.reads_allowed_from[shard_set.index] > now).any()


def try_read(replica: ReplicaState, now: float, peer: Hashable, frame: wire.Frame, shard_set: ShardSet) -> bool:
    """Answer a read; False if it has to wait."""
    if not all_set(replica.is_head[shard_set.index]):
        if frame.kind == wire.DIGEST and all_set(replica.map.replica_mask(replica.name)[shard_set.index]):
            _send_digests(replica, peer, frame)
        elif frame.meta["version"] > replica.map.version:
            return False
        else:
            replica.send_stale(peer, frame.request_id)
        return True
    is_unloaded = replica.shards_to_load and any_set(replica.is_unloaded[shard_set.index])
    if is_unloaded or not holds_lease(replica, now, shard_set) or may_be_superseded(replica, now, shard_set):
        return False
    try:
        if frame.kind == wire.PULL:
            step, bound = frame.meta["step"], frame.meta["bound"]
            # Every worker has to be within the bound of this step, and the steps before it committed.
            if bound is not None and (
                any_set(clocks.min_clock(replica)[shard_set.index] < step - bound)
                or replica.shards.has_pending(shard_set, before_step=step)
            ):
                return False
            _send_rows(replica, peer, frame)
        elif frame.kind == wire.CHANGED:
            _send_changed_rows(replica, peer, frame, shard_set)
        elif frame.kind == wire.CLOCK:
            return _send_clocks(replica, peer, frame, shard_set)
        else:
            _send_digests(replica, peer, frame)
    except EchelonError as error:
        replica.refuse(peer, frame, type(error).__name__, str(error))
    except MALFORMED_ERRORS as error:
        replica.reject_malformed(peer, frame, error)
    return True


def _send_rows(replica: ReplicaState, peer: Hashable, frame: wire.Frame) -> None:
    store, counts = replica.shards.store, []
    arrays: list[np.ndarray | wire.ChunkedArray] = []
    for op, ids in zip(frame.meta["ops"], frame.arrays[1:], strict=True):
        if "table" in op:
            op_arrays: Arrays = store.read(op["table"], ids, op["wire"])
        else:
            blocks = store.read_blocks(op["dense"], ids)
            op_arrays = [wire.ChunkedArray(blocks)] if blocks else []
        replica.counters["rows"] += len(ids)
        arrays += op_arrays
        counts.append(len(op_arrays))
    if sum(array.nbytes for array in arrays) > wire.MAX_FRAME_BYTES - wire.MAX_META_BYTES:
        raise ServerError(f"the answer exceeds {wire.MAX_FRAME_BYTES >> 20} MiB; read fewer rows at once")
    replica.counters["pulls"] += 1
    replica.send_to_peer(peer, wire.ROWS, frame.request_id, {"counts": counts}, arrays)


def _send_changed_rows(replica: ReplicaState, peer: Hashable, frame: wire.Frame, shard_set: ShardSet) -> None:
    meta, (shards, since_lsns, *_) = frame.meta, frame.arrays
    if since_lsns.shape != shards.shape or since_lsns.dtype != np.int64:
        raise wire.WireError("CHANGED: expected one log number per shard")
    store = replica.shards.store
    ids, until_lsns = store.changed_ids_until(meta["table"], shard_set.shards, since_lsns, meta["limit"])
    arrays = [ids, *store.read(meta["table"], ids, meta["wire"]), until_lsns]
    replica.send_to_peer(peer, wire.ROWS, frame.request_id, {"counts": [1, len(arrays) - 2, 1]}, arrays)


def _send_clocks(replica: ReplicaState, peer: Hashable, frame: wire.Frame, shard_set: ShardSet) -> bool:
    dedup, index = replica.shards.dedup, shard_set.index
    slot = dedup.slots.get((frame.meta["worker"], frame.meta["incarnation"]))
    if slot is None or ((dedup.clocks[slot] == NOT_COUNTED) & ~dedup.is_rolled_back)[index].any():
        return False
    lowest = clocks.min_clock(replica)[index]
    lowest = lowest[lowest != INFINITE_CLOCK]
    furthest = max(int(dedup.max_clock(shard_set.shards).max()), 0)
    # After a rollback no worker counts before its first push: the job continues at the furthest clock.
    slowest = int(lowest.min()) if len(lowest) else furthest
    fastest = max((int(dedup.clocks[live_slot][index].max()) for live_slot in replica.live_slots), default=0)
    # "furthest" includes workers that left; "pending": gradients wait for the end of a step.
    meta = {"min": slowest, "max": max(fastest, slowest), "furthest": furthest}
    meta["pending"] = replica.shards.has_pending(shard_set)
    replica.send_to_peer(peer, wire.CLOCK_REPLY, frame.request_id, meta)
    return True


def _send_digests(replica: ReplicaState, peer: Hashable, frame: wire.Frame) -> None:
    shards, meta = frame.arrays[0], {"version": replica.map.version}
    digests = np.stack([np.frombuffer(replica.shards.digest(int(shard)), np.uint8) for shard in shards])
    replica.send_to_peer(peer, wire.DIGEST_REPLY, frame.request_id, meta, [digests, replica.shards.lsn[shards]])
