"""Head: sends log entries to the other replicas, and acknowledges a push once all of them have it."""

from __future__ import annotations

import numpy as np

from echelon.server.protocol import wire
from echelon.server.protocol.actions import LINK, Send
from echelon.server.protocol.shard_sets import ShardSet, all_set, any_set
from echelon.server.replica.replica_link import Arrays, Meta, PendingAck, ReplicaLink, SnapshotTransfer
from echelon.server.replica.shard_state import covers_frame
from echelon.server.replica.state import ReplicaState


def forward(replica: ReplicaState, now: float, frame: wire.Frame, applied: ShardSet, *, is_noop: bool = False) -> None:
    """Send an entry that was applied on these shards to every replica of them."""
    for link in replica.links.values():
        meta: Meta = {"v": replica.map.version}
        if is_noop:
            meta["void"] = True
        if link.transfer is not None and link.transfer.last_part_number is None:
            defer_entry(link.transfer, frame, applied, meta)
        is_forwarding = link.is_forwarding[applied.index]
        forwards_all = all_set(is_forwarding)
        if not forwards_all and not any_set(is_forwarding):
            continue
        if not forwards_all or not covers_frame(applied, frame):
            meta["only"] = applied.wire_shards[is_forwarding].tolist()
        send_numbered(replica, now, link, wire.LOG_ENTRY, meta, [frame.raw])


def defer_entry(transfer: SnapshotTransfer, frame: wire.Frame, applied: ShardSet, meta: Meta) -> None:
    """Hold back an entry of a shard whose snapshot is still being sent."""
    if (applied.shards == transfer.shard).any():
        transfer.deferred_entries.append((meta | {"only": [transfer.shard]}, [frame.raw]))


def send_numbered(replica: ReplicaState, now: float, link: ReplicaLink, kind: int, meta: Meta, arrays: Arrays) -> int:
    """Send a message that the replica acknowledges by its number; keep it until then."""
    link.last_number += 1
    meta["n"] = link.last_number
    message = Send(LINK, link.server, kind, 0, meta, arrays)
    link.unacked.append((link.last_number, now, message))
    if link.is_up:
        replica.actions.append(message)
    return link.last_number


def ack_when_replicated(replica: ReplicaState, ack: PendingAck) -> None:
    """Answer a worker once every required replica has everything sent so far."""
    for link in replica.links.values():
        if link.last_acked < link.last_number and link.must_ack(ack.shard_set):
            ack.awaited_numbers[link.server] = link.last_number
            link.pending_acks.append((link.last_number, ack))
    if not ack.awaited_numbers:
        send_ack(replica, ack)


def send_ack(replica: ReplicaState, ack: PendingAck) -> None:
    """Answer now, or block the answer while a required replica is behind or knows a newer map."""
    version, shard_set = replica.map.version, ack.shard_set
    for link in replica.links.values():
        if link.is_behind(shard_set) or (link.peer_map_version > version and link.must_ack(shard_set)):
            replica.blocked_acks.append(ack)
            return
    kind, meta = ack.answer
    replica.send_to_peer(ack.peer, kind, ack.request_id, meta)


def append_entry(replica: ReplicaState, now: float, kind: int, meta: Meta, *arrays: np.ndarray) -> None:
    """Apply and forward an entry that the head itself creates, on the shards of the first array (if any)."""
    shards, *more = arrays
    if len(shards):
        frame = wire.parse(wire.join_buffers(wire.encode(kind, 0, meta, [shards.astype(np.uint16), *more])))
        shard_set = replica.shard_sets.get(frame.arrays[0])
        replica.shards.apply_entry(frame, shard_set, version=replica.map.version)
        replica.min_clock_cache = None
        forward(replica, now, frame, shard_set)
