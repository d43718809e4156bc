"""Head: brings replicas up to date (comparison, snapshot, entries since), and hands shards over.

HELLO -> HELLO_REPLY      the link is up; unacknowledged messages are sent again
LOG_STATE -> LOG_STATE_REPLY    (version, lsn) per shard: equal ones are synced, the others queue for a snapshot
SNAPSHOT ... LOG_ENTRY -> REPLICA_ACK    parts of one shard at a time, then its entries since
learners: CAUGHT_UP to the controller, which adds them to the chain
"""

from __future__ import annotations

import numpy as np

from echelon.server.protocol import wire
from echelon.server.protocol.actions import LINK, Close
from echelon.server.replica import push, replication
from echelon.server.replica.replica_link import Meta, ReplicaLink, SnapshotTransfer
from echelon.server.replica.shard_state import ReplicaDiverged
from echelon.server.replica.state import ReplicaState

DRAIN_TIMEOUT = 1.0  # a drained shard whose new head does not come (the controller died) is served again after this


def on_link_frame(replica: ReplicaState, now: float, link: ReplicaLink, frame: wire.Frame) -> None:
    """A replica's answer."""
    meta, kind = frame.meta, frame.kind
    if kind == wire.MAP_REQUEST:
        if meta["version"] < replica.map.version:
            replica.send_to_replica(link.server, wire.MAP_UPDATE, replica.map_update())
        return
    if kind == wire.REFUSED:
        replica.actions.append(Close(LINK, link.server))
        return
    is_current = meta["v"] <= replica.map.version
    link.peer_map_version = max(link.peer_map_version, meta["v"])
    if not is_current and replica.requested_map_version < meta["v"]:
        replica.requested_map_version = meta["v"]
        replica.send_to_replica(link.server, wire.MAP_REQUEST, {"version": replica.map.version})
    if kind in (wire.REPLICA_ACK, wire.HELLO_REPLY):
        if meta.get("refused"):
            link.has_refused[meta["refused"]] = True
        on_acked(replica, now, link, meta["n" if kind == wire.REPLICA_ACK else "last"], is_current)
    if kind == wire.HELLO_REPLY:
        # Only now: messages that resulted from the acknowledgement are numbered, and sent, after those that are sent again.
        link.is_up, link.down_since = True, float("inf")
        replica.actions += [message for _, _, message in link.unacked]
        request_log_state(replica, link)
    elif kind == wire.LOG_STATE_REPLY:
        _on_log_state_reply(replica, now, link, frame)
    elif kind == wire.HEARTBEAT:
        while link.unanswered_heartbeats and link.unanswered_heartbeats[0][0] <= meta["n"]:
            _, sent_at = link.unanswered_heartbeats.popleft()
            if is_current:
                link.lease_start = max(link.lease_start, sent_at)
        if replica.waiting_reads:
            push.retry_waiting(replica, now)
    start_transfer(replica, now, link)


def on_acked(replica: ReplicaState, now: float, link: ReplicaLink, number: int, is_current: bool) -> None:
    """The replica has everything up to this number."""
    if number > link.last_number:
        raise ReplicaDiverged(f"{link.server} has message {number} of {link.last_number}")
    link.last_acked = max(link.last_acked, number)
    while link.unacked and link.unacked[0][0] <= number:
        _, sent_at, _ = link.unacked.popleft()
        if is_current:
            link.lease_start = max(link.lease_start, sent_at)
    while link.pending_acks and link.pending_acks[0][0] <= number:
        _, ack = link.pending_acks.popleft()
        if ack.awaited_numbers.pop(link.server, None) is not None and not ack.awaited_numbers:
            replication.send_ack(replica, ack)
    if link.transfer is not None:
        _parts_acked(replica, now, link, link.transfer, number)
    for shard, last_number in [entry for entry in link.catching_up if entry[1] <= number]:
        link.catching_up.remove((shard, last_number))
        if not link.has_refused[shard]:
            report_caught_up(replica, link, shard)
    if replica.handovers:
        _report_drained(replica)


def request_log_state(replica: ReplicaState, link: ReplicaLink) -> None:
    """Ask the replica for its (version, lsn) of the shards where it is unknown."""
    is_known = link.is_forwarding | link.log_state_requested | replica.is_unloaded
    is_known[list(link.snapshot_queue)] = True
    if link.transfer is not None:
        is_known[link.transfer.shard] = True
    shards = np.flatnonzero((link.is_backup | link.is_learner) & ~is_known)
    if link.is_up and len(shards):
        link.log_state_requested[shards] = True
        meta = {"v": replica.map.version, "of": replica.map.version}
        replica.send_to_replica(link.server, wire.LOG_STATE, meta, [shards.astype(np.uint16)])


def _on_log_state_reply(replica: ReplicaState, now: float, link: ReplicaLink, frame: wire.Frame) -> None:
    if frame.meta["of"] != replica.map.version:
        return  # requested again since
    for shard, entry_version, lsn in zip(*(array.tolist() for array in frame.arrays), strict=True):
        if not link.log_state_requested[shard]:
            continue
        link.log_state_requested[shard] = link.has_refused[shard] = False
        if lsn == replica.shards.lsn[shard] and entry_version == replica.shards.entry_version[shard]:
            link.is_forwarding[shard] = True
            mark_synced(replica, now, link, shard)
        elif link.is_backup[shard]:
            link.snapshot_queue.appendleft(shard)
        else:
            link.snapshot_queue.append(shard)
    push.resume_waiting(replica, now)


def mark_synced(replica: ReplicaState, now: float, link: ReplicaLink, shard: int) -> None:
    """The replica has what we have of a shard, except for entries in flight."""
    link.is_synced[shard] = True
    if link.is_learner[shard]:
        # From here on its acknowledgement is required; once it has what was sent before, it lacks nothing.
        link.is_required[shard] = True
        link.catching_up.append((shard, link.last_number))
        if link.last_acked >= link.last_number:
            on_acked(replica, now, link, link.last_acked, False)
    else:
        blocked, replica.blocked_acks = replica.blocked_acks, []
        for ack in blocked:
            replication.send_ack(replica, ack)
        push.resume_waiting(replica, now)


def start_transfer(replica: ReplicaState, now: float, link: ReplicaLink) -> None:
    """Start the next snapshot, one at a time. A backup's does not wait for its turn: pushes wait for it."""
    if not link.is_up or not link.snapshot_queue or link.transfer is not None:
        return
    shard = link.snapshot_queue[0]
    if now >= link.next_transfer_at or link.is_backup[shard]:
        link.snapshot_queue.popleft()
        link.transfer = SnapshotTransfer(shard, replica.shards.snapshot(shard), now)
        _send_parts(replica, now, link, link.transfer)


def _send_parts(replica: ReplicaState, now: float, link: ReplicaLink, transfer: SnapshotTransfer) -> None:
    """Send the next parts of a snapshot; after the last one, the entries since."""
    parts = transfer.parts
    while transfer.parts_sent < len(parts) and len(transfer.unacked_parts) < replica.max_parts_in_flight:
        meta, arrays = parts[transfer.parts_sent]
        part_meta: Meta = {"v": replica.map.version, "shard": transfer.shard, "meta": meta}
        part_meta |= {"part": transfer.parts_sent, "parts": len(parts)}
        number = replication.send_numbered(replica, now, link, wire.SNAPSHOT, part_meta, arrays)
        transfer.unacked_parts.append(number)
        transfer.parts_sent += 1
    if transfer.parts_sent == len(parts) and transfer.last_part_number is None:
        transfer.last_part_number = transfer.unacked_parts[-1]
        link.is_forwarding[transfer.shard] = True
        for meta, arrays in transfer.deferred_entries:
            replication.send_numbered(replica, now, link, wire.LOG_ENTRY, meta, arrays)
        transfer.deferred_entries = []


def _parts_acked(replica: ReplicaState, now: float, link: ReplicaLink, transfer: SnapshotTransfer, number: int) -> None:
    while transfer.unacked_parts and transfer.unacked_parts[0] <= number:
        transfer.unacked_parts.popleft()
    _send_parts(replica, now, link, transfer)
    if transfer.last_part_number is None or transfer.last_part_number > number:
        return
    link.transfer = None
    # Pause for as long as the snapshot took: others use the link too.
    link.next_transfer_at = now + min(now - transfer.started_at, 1.0)
    if not link.has_refused[transfer.shard]:
        mark_synced(replica, now, link, transfer.shard)


def report_caught_up(replica: ReplicaState, link: ReplicaLink, shard: int) -> None:
    """Report to the controller that a learner lacks nothing that was acknowledged."""
    meta = {"shard": shard, "learner": link.server, "incarnation": link.incarnation, "version": replica.map.version}
    replica.send_to_controller(wire.CAUGHT_UP, meta)
    if replica.handovers:
        _report_drained(replica)


def begin_handover(replica: ReplicaState, now: float, shards: np.ndarray) -> None:
    """Stop taking pushes for these shards; report when everything on them is acknowledged."""
    replica.is_draining[shards] = True
    replica.update_ready()
    replica.handovers.append((now + DRAIN_TIMEOUT, shards, False))
    _report_drained(replica)


def end_handovers(replica: ReplicaState, now: float) -> None:
    """Serve shards again whose new head did not come in time."""
    for handover in [candidate for candidate in replica.handovers if candidate[0] <= now]:
        replica.handovers.remove(handover)
        replica.is_draining[handover[1]] = False
        push.resume_waiting(replica, now)


def _report_drained(replica: ReplicaState) -> None:
    for index, (deadline, shards, is_reported) in enumerate(replica.handovers):
        if is_reported or not len(shards):
            continue
        shard_set = replica.shard_sets.from_numbers(shards)
        if all(link.last_acked == link.last_number or not link.must_ack(shard_set) for link in replica.links.values()):
            replica.handovers[index] = (deadline, shards, True)
            meta = {"shards": shards.tolist(), "version": replica.map.version}
            replica.send_to_controller(wire.DRAINED, meta)
