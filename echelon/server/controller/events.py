"""What happens to the controller: frames, lost connections, time. Each event takes the state and the time, and returns actions."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import asdict
from typing import Any

from echelon.errors import EchelonError
from echelon.server.controller import checkpoints, declarations, lost_shards, members, rebalance
from echelon.server.controller.state import ControllerState, Refusal, Session
from echelon.server.protocol import wire
from echelon.server.protocol.actions import Action
from echelon.server.replica.state import MALFORMED_ERRORS

#: A connection that ended may be opened again; a process that was killed does not come back.
SERVER_RECONNECT_GRACE, WORKER_RECONNECT_GRACE = 0.2, 1.0
WORKER_LEASE = 2.0
TICK_GAP_LIMIT = 0.3  # after a longer gap between its ticks the controller does not count the silence of others


def on_frame(controller: ControllerState, now: float, peer: Hashable, frame: wire.Frame) -> list[Action]:
    """A frame from a server, a worker or an administrator."""
    session = controller.sessions.get(peer)
    if session is not None:
        session.last_heard = now
    kind_name = wire.KIND_NAMES.get(frame.kind, frame.kind)
    try:
        if frame.kind in HANDLERS:
            HANDLERS[frame.kind](controller, now, peer, frame)
        elif session is None:
            raise wire.WireError(f"{kind_name} before JOIN")
        elif frame.kind in MEMBER_HANDLERS:
            MEMBER_HANDLERS[frame.kind](controller, now, session, frame)
        else:
            raise wire.WireError(f"unexpected {kind_name}")
    except EchelonError as error:
        name = error.error if isinstance(error, Refusal) else type(error).__name__
        controller.refuse(peer, frame.request_id, name, str(error))
    except MALFORMED_ERRORS as error:
        controller.log("garbage", why=f"{kind_name}: {type(error).__name__}: {error}")
        controller.close(peer)
    return controller.take_actions()


def _on_watch(controller: ControllerState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    if controller.map.version > int(frame.meta["after"]):
        controller.send(peer, wire.MAP, frame.request_id, controller.map_answer())
    else:
        controller.watchers.append((peer, frame.request_id))


def _on_status(controller: ControllerState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    controller.send(peer, wire.STATUS_REPLY, frame.request_id, make_report(controller))


def _on_heartbeat(controller: ControllerState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    """From a server's loop, over its session; or from its thread, which names the server."""
    meta, session = frame.meta, controller.sessions.get(peer)
    if session is None:  # without a name: of a worker that has just left
        server = controller.sessions.get(controller.find_peer("server", str(meta.get("server", ""))))
        if server is not None and server.incarnation == meta["incarnation"]:
            server.last_heard = now
    elif session.role == "server":
        controller.send(peer, wire.HEARTBEAT, 0, {})
        if meta.get("cut"):
            members.on_unreachable_replicas(controller, now, session.name, [str(server) for server in meta["cut"]])
        if "report" in meta:
            controller.reports[session.name] = meta["report"]
        if int(meta["version"]) < controller.map.version:
            controller.send_map_update(peer)
        _on_map_installed(controller, now, session, frame)


def _on_map_installed(controller: ControllerState, now: float, session: Session, frame: wire.Frame) -> None:
    session.map_version = max(session.map_version, int(frame.meta["version"]))
    controller.send_due_answers()


def _on_done(controller: ControllerState, now: float, session: Session, frame: wire.Frame) -> None:
    """A server's answer to DECLARE or EXPIRE."""
    number = int(frame.meta["of"])
    if number in controller.declarations:
        declarations.on_declaration_answer(controller, now, session.name, number, frame.meta.get("error"))
    else:
        checkpoints.on_expired(controller, session, number)


#: From any connection.
HANDLERS: dict[int, Callable[[ControllerState, float, Hashable, wire.Frame], None]] = {
    wire.JOIN: members.on_join,
    wire.WATCH: _on_watch,
    wire.DECLARE: declarations.on_declare,
    wire.STATUS: _on_status,
    wire.DRAIN: rebalance.on_drain,
    wire.CHECKPOINT: checkpoints.on_checkpoint,
    wire.EXPIRE: checkpoints.on_expire,
    wire.HEARTBEAT: _on_heartbeat,
}
#: From members only.
MEMBER_HANDLERS: dict[int, Callable[[ControllerState, float, Session, wire.Frame], None]] = {
    wire.MAP_INSTALLED: _on_map_installed,
    wire.CAUGHT_UP: rebalance.on_caught_up,
    wire.DRAINED: rebalance.on_drained,
    wire.LEAVE: members.on_leave,
    wire.RESTORE_FAILED: lost_shards.on_restore_failed,
    wire.CHECKPOINT_WRITTEN: checkpoints.on_checkpoint_written,
    wire.DONE: _on_done,
}


def on_peer_lost(controller: ControllerState, now: float, peer: Hashable) -> list[Action]:
    """A connection is gone."""
    session = controller.sessions.pop(peer, None)
    controller.watchers = [watcher for watcher in controller.watchers if watcher[0] != peer]
    if session is not None:
        grace = SERVER_RECONNECT_GRACE if session.role == "server" else WORKER_RECONNECT_GRACE
        controller.disconnect_deadlines[session.role, session.name] = now + grace
    return controller.take_actions()


def on_manifest(controller: ControllerState, error: str | None) -> list[Action]:
    """A checkpoint's manifest is written and its folder has its name; or why not."""
    checkpoints.complete_checkpoint(controller, error)
    return controller.take_actions()


def on_tick(controller: ControllerState, now: float) -> list[Action]:
    """Time passes; call this about every 50 ms."""
    if now - controller.last_tick > TICK_GAP_LIMIT:
        # We were stopped, or starved of CPU: what others sent since is still to be read.
        for session in controller.sessions.values():
            session.last_heard = now
        for key, deadline in controller.disconnect_deadlines.items():
            controller.disconnect_deadlines[key] = max(deadline, now + SERVER_RECONNECT_GRACE)
    controller.last_tick = now
    for peer, session in list(controller.sessions.items()):
        lease = controller.lease if session.role == "server" else WORKER_LEASE
        if now - session.last_heard > lease:
            del controller.sessions[peer]
            controller.close(peer)
            controller.disconnect_deadlines[session.role, session.name] = now
    dead = [key for key, deadline in controller.disconnect_deadlines.items() if deadline <= now]
    members.remove_dead(controller, now, dead)
    lost_shards.roll_back_lost_shards(controller, now)
    if controller.oldest_version() >= controller.map.version:
        rebalance.rebalance(controller, now)
    checkpoints.request_shard_files(controller, now)
    declarations.request_declarations(controller, now)
    checkpoints.send_expiry_requests(controller)
    return controller.take_actions()


def make_report(controller: ControllerState) -> dict[str, Any]:
    """What STATUS answers with: shards, servers and workers, as `echelon server status` shows them."""
    shard_map, replicas = controller.map, controller.replicas
    lengths = [len(chain) for chain in shard_map.chains]
    possible = min(replicas, max(1, len(set(shard_map.servers) - controller.leaving)))
    return {
        "version": shard_map.version,
        "shards": shard_map.num_shards,
        "replicas": replicas,
        "unplaced": sum(not n and shard not in shard_map.lost_shards for shard, n in enumerate(lengths)),
        "short": sum(0 < length < replicas for length in lengths),
        # Of those, the ones that the present servers could hold.
        "owed": sum(0 < length < possible for length in lengths),
        "shards_by_replicas": {str(count): lengths.count(count) for count in sorted(set(lengths))},
        "unreadable": controller.checkpoint_error,
        "learning": sum(bool(learners) for learners in shard_map.learners),
        "lost": {str(shard): list(chain) for shard, chain in shard_map.lost_shards.items()},
        "restored": {str(shard): list(source) for shard, source in shard_map.restored_from.items()},
        "revived": sorted(shard_map.rolled_back_shards),
        "checkpoint": controller.last_checkpoint,
        "settings": controller.settings,
        "specs": controller.specs,
        "workers": {
            name: {"incarnation": incarnation, "here": controller.find_peer("worker", name) is not None}
            for name, incarnation in shard_map.workers.items()
        },
        "servers": {
            name: {
                **asdict(entry),
                "heads": shard_map.heads.count(name),
                "replicas": sum(name in chain for chain in shard_map.chains),
                "leaving": name in controller.leaving,
                "here": controller.find_peer("server", name) is not None,
                "version": controller.installed_version(name),
                **controller.reports.get(name, {}),
            }
            for name, entry in shard_map.servers.items()
        },
    }
