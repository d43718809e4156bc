"""What happens to a replica: frames, connections, maps, time. Each event takes the state and the time, and returns actions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from echelon.errors import DocumentError
from echelon.server.protocol import wire
from echelon.server.protocol.actions import Action
from echelon.server.protocol.shard_map import ShardMap
from echelon.server.replica import backup, catch_up, clocks, map_change, push, read
from echelon.server.replica.dedup import INFINITE_CLOCK
from echelon.server.replica.state import MALFORMED_ERRORS, ReplicaState

Handler = Callable[[ReplicaState, float, Hashable, wire.Frame], None]


def on_frame(replica: ReplicaState, now: float, peer: Hashable, frame: wire.Frame) -> list[Action]:
    """A frame over a connection that was accepted: from a worker, or from a server as head."""
    _handle(replica, now, peer, frame)
    return replica.take_actions()


def _handle(replica: ReplicaState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    try:
        if peer in replica.frames_awaiting_map and frame.kind not in (wire.MAP_UPDATE, wire.MAP_REQUEST):
            replica.frames_awaiting_map[peer].append(frame)
        elif frame.kind in HANDLERS:
            HANDLERS[frame.kind](replica, now, peer, frame)
        else:
            raise wire.WireError("unexpected")
    except (wire.WireError, DocumentError, *MALFORMED_ERRORS) as error:
        replica.reject_malformed(peer, frame, error)


def _on_map_update(replica: ReplicaState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    _install_map(replica, now, ShardMap.from_document(frame.meta["map"]), frame.meta["specs"])


def _on_map_request(replica: ReplicaState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    replica.send_to_peer(peer, wire.MAP_UPDATE, 0, replica.map_update())


HANDLERS: dict[int, Handler] = {
    # From workers.
    wire.PUSH: push.on_push,
    wire.PULL: read.on_read,
    wire.CHANGED: read.on_read,
    wire.CLOCK: read.on_read,
    wire.DIGEST: read.on_read,
    # From servers that are heads of shards here.
    wire.HELLO: backup.on_hello,
    wire.LOG_ENTRY: backup.on_head_frame,
    wire.SNAPSHOT: backup.on_head_frame,
    wire.LOG_STATE: backup.on_head_frame,
    wire.HEARTBEAT: backup.on_head_frame,
    wire.MAP_UPDATE: _on_map_update,
    wire.MAP_REQUEST: _on_map_request,
}


def on_peer_lost(replica: ReplicaState, now: float, peer: Hashable) -> list[Action]:
    """An accepted connection is gone."""
    replica.waiting_pushes = [request for request in replica.waiting_pushes if request[0] != peer]
    replica.waiting_reads = [request for request in replica.waiting_reads if request[0] != peer]
    replica.head_of_peer.pop(peer, None)
    replica.frames_awaiting_map.pop(peer, None)
    return replica.take_actions()


def on_link_frame(replica: ReplicaState, now: float, server: str, frame: wire.Frame) -> list[Action]:
    """A frame over our own connection to another server."""
    if server in replica.links and frame.kind == wire.MAP_UPDATE:
        _on_map_update(replica, now, server, frame)
    elif server in replica.links:
        catch_up.on_link_frame(replica, now, replica.links[server], frame)
    return replica.take_actions()


def on_link_up(replica: ReplicaState, now: float, server: str) -> list[Action]:
    """Our connection to another server is open."""
    if server in replica.links:
        link = replica.links[server]
        meta = {"head": replica.name, "incarnation": replica.incarnation, "member": link.incarnation}
        replica.send_to_replica(server, wire.HELLO, meta | {"link": link.link_id, "v": replica.map.version})
    return replica.take_actions()


def on_link_lost(replica: ReplicaState, now: float, server: str) -> list[Action]:
    """Our connection to another server is gone."""
    if server in replica.links:
        replica.links[server].on_disconnect(now)
    return replica.take_actions()


def on_map(replica: ReplicaState, now: float, new_map: ShardMap, specs: Sequence[dict[str, Any]]) -> list[Action]:
    """A map from the controller."""
    _install_map(replica, now, new_map, specs)
    return replica.take_actions()


def on_controller_frame(replica: ReplicaState, now: float, frame: wire.Frame) -> list[Action]:
    """A frame of the controller, other than a map."""
    if frame.kind == wire.HANDOVER:
        shards = np.array([shard for shard in frame.meta["shards"] if replica.is_head[shard]], np.int64)
        catch_up.begin_handover(replica, now, shards)
    elif frame.kind == wire.EXPIRE:
        clocks.expire_rows(replica, now, frame)
    return replica.take_actions()


def on_controller_connected(replica: ReplicaState, now: float) -> list[Action]:
    """Connected to the controller (again): repeat what it may have missed."""
    replica.send_to_controller(wire.MAP_INSTALLED, {"version": replica.map.version})
    for link in replica.links.values():
        is_caught_up = link.is_required & ~link.has_refused
        is_caught_up[[shard for shard, _ in link.catching_up]] = False
        for shard in np.flatnonzero(is_caught_up).tolist():
            catch_up.report_caught_up(replica, link, shard)
    return replica.take_actions()


def on_tick(replica: ReplicaState, now: float) -> list[Action]:
    """Time passes; call this about every 50 ms."""
    for link in replica.links.values():
        if link.is_up and now - link.last_heartbeat >= replica.lease / 3:
            link.last_heartbeat = now
            number = link.unanswered_heartbeats[-1][0] + 1 if link.unanswered_heartbeats else 1
            link.unanswered_heartbeats.append((number, now))
            replica.send_to_replica(link.server, wire.HEARTBEAT, {"n": number, "v": replica.map.version})
        catch_up.start_transfer(replica, now, link)
    map_change.reset_absent_learners(replica, now)
    catch_up.end_handovers(replica, now)
    if now - replica.log_state_requested_at > 0.5:
        # Again: replicas do not answer for shards that they are still loading.
        replica.log_state_requested_at = now
        for link in replica.links.values():
            link.log_state_requested[:] = False
            catch_up.request_log_state(replica, link)
        clocks.forget_workers(replica, now)
    push.retry_waiting(replica, now)
    expiries, replica.waiting_expiries = replica.waiting_expiries, []
    for frame in expiries:
        clocks.expire_rows(replica, now, frame)
    return replica.take_actions()


def load_next_shard(replica: ReplicaState, now: float) -> list[Action]:
    map_change.load_next_shard(replica, now)
    return replica.take_actions()


def unreachable_replicas(replica: ReplicaState, now: float) -> list[str]:
    """Replicas whose acknowledgement is required, and that have been unreachable for a second."""
    links = replica.links.items()
    return [server for server, link in links if now - link.down_since > 1.0 and link.is_needed()]


def make_report(replica: ReplicaState) -> dict[str, Any]:
    """What `echelon server status` shows: rows and memory, progress, lag of the other replicas, waiting requests."""
    stats, lag = replica.shards.store.stats(), {}
    min_clocks = clocks.min_clock(replica)[replica.is_head]
    min_clocks = min_clocks[min_clocks != INFINITE_CLOCK]
    max_clock = int(replica.shards.dedup.clocks[replica.live_slots].max(initial=0))
    for server, link in replica.links.items():
        unsynced = ((link.is_backup | link.is_required) & ~link.is_synced).sum()
        entries, shards = link.last_number - link.last_acked, int(unsynced) + len(link.snapshot_queue)
        lag[server] = {"entries": entries, "shards": shards, "up": link.is_up}
    tables = stats["tables"].items()
    return {
        "rows": int(stats["rows"].sum()),
        "bytes": int(stats["bytes"]),
        "memory": int(stats["memory"]),
        "tables": {name: {key: int(table[key]) for key in ("rows", "bytes")} for name, table in tables},
        "lsn": int(replica.shards.lsn.max()),
        "clock": [int(min_clocks.min()) if len(min_clocks) else 0, max_clock],
        "lag": lag,
        "waiting": {"pushes": len(replica.waiting_pushes), "pulls": len(replica.waiting_reads)},
    }


def _install_map(replica: ReplicaState, now: float, new_map: ShardMap, specs: Sequence[dict[str, Any]]) -> None:
    """Adopt a newer map, then handle the frames that waited for it."""
    if not map_change.adopt_map(replica, now, new_map, specs):
        return
    awaiting_map, replica.frames_awaiting_map = replica.frames_awaiting_map, {}
    for peer, frames in awaiting_map.items():
        for frame in frames:
            _handle(replica, now, peer, frame)
    push.resume_waiting(replica, now)
