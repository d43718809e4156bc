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
from echelon.server.replica.state import MALFORMED_ERRORS, ReplicaState

Handler = Callable[[ReplicaState, float, Hashable, wire.Frame], None]


def on_frame(replica: ReplicaState, now: float, peer: Hashable, frame: wire.Frame) -> list[Action]:
    """A frame over a connection that was accepted: from a worker, or from a server as head."""
    try:
        if peer in replica.frames_awaiting_map and frame.kind not in (wire.MAP_UPDATE, wire.MAP_REQUEST):
            replica.frames_awaiting_map[peer].append(frame)
        else:
            _dispatch(replica, now, peer, frame)
    except (wire.WireError, DocumentError, *MALFORMED_ERRORS) as error:
        replica.reject_malformed(peer, frame, error)
    return replica.take_actions()


def _dispatch(replica: ReplicaState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    handler = HANDLERS.get(frame.kind)
    if handler is None:
        raise wire.WireError(f"unexpected {wire.KIND_NAMES.get(frame.kind, frame.kind)}")
    handler(replica, now, peer, frame)


def _on_map_update(replica: ReplicaState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    _install_map(replica, now, ShardMap.from_document(frame.meta["map"]), frame.meta["specs"])


def _on_map_request(replica: ReplicaState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    replica.send_to_peer(peer, wire.MAP_UPDATE, 0, {"map": replica.map.to_document(), "specs": replica.specs})


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
    """An accepted connection is gone: nobody waits for its answers."""
    replica.waiting_pushes = [request for request in replica.waiting_pushes if request[0] != peer]
    replica.waiting_reads = [request for request in replica.waiting_reads if request[0] != peer]
    replica.head_of_peer.pop(peer, None)
    replica.frames_awaiting_map.pop(peer, None)
    return replica.take_actions()


def on_link_frame(replica: ReplicaState, now: float, server: str, frame: wire.Frame) -> list[Action]:
    """A frame over our own connection to another server."""
    link = replica.links.get(server)
    if link is not None and frame.kind == wire.MAP_UPDATE:
        _on_map_update(replica, now, server, frame)
    elif link is not None:
        catch_up.on_link_frame(replica, now, link, frame)
    return replica.take_actions()


def on_link_up(replica: ReplicaState, now: float, server: str) -> list[Action]:
    """Our connection to another server is open."""
    link = replica.links.get(server)
    if link is not None:
        meta = {"head": replica.name, "incarnation": replica.incarnation, "member": link.incarnation}
        meta |= {"link": link.link_id, "v": replica.map.version}
        replica.send_to_replica(server, wire.HELLO, meta)
    return replica.take_actions()


def on_link_lost(replica: ReplicaState, now: float, server: str) -> list[Action]:
    """Our connection to another server is gone."""
    if server in replica.links:
        replica.links[server].on_disconnect()
        replica.links[server].down_since = min(now, replica.links[server].down_since)
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
        catching_up = {shard for shard, _ in link.catching_up}
        for shard in np.flatnonzero(link.is_required & ~link.has_refused).tolist():
            if shard not in catching_up:
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


def unreachable_replicas(replica: ReplicaState, now: float, min_seconds: float = 1.0) -> list[str]:
    """Replicas whose acknowledgement is required, and that have been unreachable for so long."""
    return [
        server
        for server, link in replica.links.items()
        if now - link.down_since > min_seconds and (link.is_backup.any() or link.is_required.any())
    ]


def _install_map(replica: ReplicaState, now: float, new_map: ShardMap, specs: Sequence[dict[str, Any]]) -> None:
    """Adopt a newer map, then handle the frames that waited for it."""
    if not map_change.adopt_map(replica, now, new_map, specs):
        return
    awaiting_map, replica.frames_awaiting_map = replica.frames_awaiting_map, {}
    for peer, frames in awaiting_map.items():
        for frame in frames:
            if peer in replica.frames_awaiting_map:
                replica.frames_awaiting_map[peer].append(frame)
                continue
            try:
                _dispatch(replica, now, peer, frame)
            except (wire.WireError, *MALFORMED_ERRORS) as error:
                replica.reject_malformed(peer, frame, error)
    push.resume_waiting(replica, now)
