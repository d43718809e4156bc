"""Backup or learner: takes entries and snapshots, in order, from the head that the map names, and refuses those of any other server."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from echelon.errors import EchelonError
from echelon.server.protocol import wire
from echelon.server.protocol.actions import LogEvent
from echelon.server.protocol.shard_sets import ShardSet, all_set, any_set
from echelon.server.replica.shard_state import ReplicaDiverged
from echelon.server.replica.state import ReplicaState

_MAX_CACHED_ACCEPTANCES = 4096


def on_hello(replica: ReplicaState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    """HELLO: a head opens its link; the answer is the last message that arrived over it."""
    meta = frame.meta
    if meta["member"] != replica.incarnation:
        message = f"{replica.name} is incarnation {replica.incarnation}"
        replica.send_to_peer(peer, wire.REFUSED, 0, {"error": "Superseded", "message": message})
        return
    head_id = (str(meta["head"]), int(meta["incarnation"]))
    # One connection per head: what an older one still delivers is ignored.
    for other, (head, _) in list(replica.head_of_peer.items()):
        if head == head_id[0]:
            del replica.head_of_peer[other]
            replica.frames_awaiting_map.pop(other, None)
    replica.head_of_peer[peer] = head_id
    link_id = int(meta["link"])
    if replica.last_received.get(head_id, (0, 0))[0] != link_id:
        replica.last_received[head_id] = (link_id, 0)
        replica.refused_shards.pop(head_id, None)
    answer: dict[str, Any] = {"last": replica.last_received[head_id][1], "v": replica.map.version}
    replica.send_to_peer(peer, wire.HELLO_REPLY, 0, with_refused_shards(replica, head_id, answer))


def on_head_frame(replica: ReplicaState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    """LOG_ENTRY, SNAPSHOT, LOG_STATE, HEARTBEAT: from a head. Of a newer map than ours they wait for that map."""
    head_id = replica.head_of_peer.get(peer)
    if head_id is None:
        raise wire.WireError(f"{wire.KIND_NAMES[frame.kind]} over a connection without HELLO")
    meta, kind, (head, _) = frame.meta, frame.kind, head_id
    if meta["v"] > replica.map.version:
        replica.frames_awaiting_map[peer] = [frame]
        replica.send_to_peer(peer, wire.MAP_REQUEST, 0, {"version": replica.map.version})
        return
    replica.last_answered[head] = now
    if kind == wire.HEARTBEAT:
        replica.send_to_peer(peer, wire.HEARTBEAT, 0, {"n": meta["n"], "v": replica.map.version})
    elif kind == wire.LOG_STATE:
        shards = frame.arrays[0]
        shards = shards[accepts(replica, head, meta["v"], replica.shard_sets.get(shards))]
        if head_id in replica.refused_shards:
            replica.refused_shards[head_id] -= set(shards.tolist())
        state = [shards, replica.shards.entry_version[shards], replica.shards.lsn[shards]]
        replica.send_to_peer(peer, wire.LOG_STATE_REPLY, 0, {"v": replica.map.version, "of": meta["of"]}, state)
    else:
        link_id, last_number = replica.last_received[head_id]
        if meta["n"] == last_number + 1:
            last_number += 1
            replica.last_received[head_id] = (link_id, last_number)
            refused = (_take_entry if kind == wire.LOG_ENTRY else _take_snapshot_part)(replica, head, frame)
            if len(refused):
                replica.refused_shards.setdefault(head_id, set()).update(refused.tolist())
        elif meta["n"] > last_number:
            raise wire.WireError(f"message {meta['n']} of {head} after {last_number}")
        answer = with_refused_shards(replica, head_id, {"n": last_number, "v": replica.map.version})
        replica.send_to_peer(peer, wire.REPLICA_ACK, 0, answer)


def with_refused_shards(replica: ReplicaState, head_id: tuple[str, int], answer: dict[str, Any]) -> dict[str, Any]:
    """Add the refused shards, until the head asks for their state: an answer that names them may be lost."""
    if replica.refused_shards.get(head_id):
        answer["refused"] = sorted(replica.refused_shards[head_id])
    return answer


def accepts(replica: ReplicaState, head: str, version: int, shard_set: ShardSet) -> np.ndarray:
    """Per shard, whether an entry that this head sent under this map version is taken."""
    key = (head, version, shard_set)
    cached = replica.acceptance_cache.get(key)
    if cached is None:
        shard_map = replica.map
        is_accepted = shard_map.head_mask(head) & (np.array(shard_map.epochs) <= version) & ~replica.is_unloaded
        is_accepted &= shard_map.replica_mask(replica.name) & (head != replica.name)
        if len(replica.acceptance_cache) >= _MAX_CACHED_ACCEPTANCES:
            replica.acceptance_cache.clear()
        cached = replica.acceptance_cache[key] = is_accepted[shard_set.index]
    return cached


def _take_entry(replica: ReplicaState, head: str, outer: wire.Frame) -> np.ndarray:
    """Apply an entry; the shards for which it is refused."""
    frame = wire.parse(outer.arrays[0])
    only_shards, version = outer.meta.get("only"), outer.meta["v"]
    shard_set = replica.shard_sets.get(frame.arrays[0] if only_shards is None else np.array(only_shards, np.uint16))
    is_accepted = accepts(replica, head, version, shard_set)
    all_accepted = all_set(is_accepted)
    if all_accepted or any_set(is_accepted):
        accepted = shard_set if all_accepted else shard_set.subset(is_accepted)
        replica.counters["entries"] += 1
        replica.min_clock_cache = None
        if frame.kind == wire.PUSH:
            _apply_push(replica, outer.meta, frame, accepted)
        else:
            replica.shards.apply_entry(frame, accepted, version=version)
    return shard_set.wire_shards[:0] if all_accepted else shard_set.wire_shards[~is_accepted]


def _apply_push(replica: ReplicaState, meta: dict[str, Any], frame: wire.Frame, shard_set: ShardSet) -> None:
    is_next, has_gap = replica.shards.check_sequence(frame, shard_set)
    if has_gap or (is_next is not None and not all_set(is_next)):
        push = f"push {frame.meta['seq']} of worker {frame.meta['worker']}"
        raise ReplicaDiverged(f"{push} is out of order on {shard_set.wire_shards}")
    try:
        # The head enforces the memory limit; its replicas take what it took.
        with replica.shards.store.without_memory_limit():
            replica.shards.apply_push(frame, shard_set, version=meta["v"], is_noop=bool(meta.get("void")))
    except EchelonError as error:
        raise ReplicaDiverged(f"{replica.name} cannot take what the head took: {error}") from error


def _take_snapshot_part(replica: ReplicaState, head: str, frame: wire.Frame) -> np.ndarray:
    """Collect a part of a snapshot, and install the snapshot when it is complete; the shard if it is refused."""
    meta, shard = frame.meta, int(frame.meta["shard"])
    shard_array = np.array([shard], np.uint16)
    parts = replica.incoming_snapshots.pop(shard, [])
    if meta["part"] == 0:
        parts = []
    if not accepts(replica, head, meta["v"], replica.shard_sets.get(shard_array)).all() or len(parts) != meta["part"]:
        return shard_array
    parts.append((meta["meta"], frame.arrays))
    if len(parts) < meta["parts"]:
        replica.incoming_snapshots[shard] = parts
        return shard_array[:0]
    try:
        replica.shards.install(shard, parts)
    except EchelonError as error:
        # No room: the shard has to do without this replica; other shards are not affected.
        replica.shards.drop(shard)
        replica.actions.append(LogEvent("refused", {"shard": shard, "why": str(error)}))
        return shard_array
    replica.min_clock_cache = None
    return shard_array[:0]
