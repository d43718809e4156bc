"""Servers and workers that join, leave, die and come back; and what happens to a dead server's shards, at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from echelon.server.controller import checkpoints, lost_shards, rebalance
from echelon.server.controller.shard_placement import without
from echelon.server.controller.state import Chain, ControllerState, Refusal, Session
from echelon.server.protocol import wire
from echelon.server.protocol.shard_map import ServerEntry

REBALANCE_DELAY = 0.3  # how long membership settles before shards move for it
AVOID_PAIR_TIME = 10.0  # how long a head and a replica that cannot reach each other are not paired again


def on_join(controller: ControllerState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    """JOIN: a member, new or with its incarnation."""
    meta = frame.meta
    role, name, incarnation = meta["role"], meta.get("id"), meta.get("incarnation")
    if role not in ("server", "worker") or not isinstance(name, str | None) or not isinstance(incarnation, int | None):
        raise wire.WireError(f"JOIN of {role!r} {name!r} {incarnation!r}")
    if role == "worker":
        _join_worker(controller, now, peer, frame)
    elif incarnation is None:
        _add_server(controller, now, peer, frame)
    else:
        _rejoin_server(controller, now, peer, frame)


def _open_session(controller: ControllerState, session: Session) -> None:
    old_peer = controller.find_peer(session.role, session.name)
    if old_peer is not None:
        del controller.sessions[old_peer]
        controller.close(old_peer)
    controller.sessions[session.peer] = session
    controller.disconnect_deadlines.pop((session.role, session.name), None)


def _server_entry(meta: dict[str, Any], incarnation: int) -> ServerEntry:
    return ServerEntry(address=str(meta["address"]), host=str(meta["host"]), incarnation=incarnation)


def _rejoin_server(controller: ControllerState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    name, incarnation = frame.meta.get("id", ""), frame.meta["incarnation"]
    if name not in controller.map.servers and controller.dead_servers.get(name) == incarnation:
        lost_shards.readmit_server(controller, name, _server_entry(frame.meta, incarnation))
        controller.rebalance_after = now + REBALANCE_DELAY
    if (name, incarnation) not in controller.live_servers():
        raise Refusal("Out", f"{name}, incarnation {incarnation}, is not in the map any more; join as a new server")
    _open_session(controller, Session(peer, "server", name, incarnation, now))
    controller.send(peer, wire.MAP, frame.request_id, controller.map_answer(id=name, incarnation=incarnation))


def _add_server(controller: ControllerState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    name = frame.meta.get("id", "")
    if name in controller.map.servers:
        if controller.find_peer("server", name) is not None:
            raise Refusal("Taken", f"another server is called {name}; choose another name")
        remove_dead(controller, now, [("server", name)])
    controller.last_incarnation += 1
    incarnation = controller.last_incarnation
    name = name or f"s{incarnation}"
    controller.dead_servers.pop(name, None)
    _open_session(controller, Session(peer, "server", name, incarnation, now))
    controller.rebalance_after = now + REBALANCE_DELAY
    controller.publish_map(servers={**controller.map.servers, name: _server_entry(frame.meta, incarnation)})
    lost_shards.place_unassigned_shards(controller)
    controller.send(peer, wire.MAP, frame.request_id, controller.map_answer(id=name, incarnation=incarnation))


def _join_worker(controller: ControllerState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    name, incarnation = frame.meta.get("id"), frame.meta.get("incarnation")
    if incarnation is None:
        controller.last_incarnation += 1
        incarnation = controller.last_incarnation
        name = name or f"w{incarnation}"
    elif name is None or not 0 < incarnation < 1 << 62:
        raise wire.WireError(f"JOIN of worker {name!r}, incarnation {incarnation}; expected a name and one above 0")
    known_incarnation = controller.map.workers.get(name, 0)
    if incarnation > controller.last_incarnation:
        counted = f"this controller has counted only {controller.last_incarnation}, so it started over"
        raise Refusal("Superseded", f"worker {name}, incarnation {incarnation}: {counted}; restart the worker")
    if (superseded := controller.map.why_superseded(name, incarnation)) is not None:
        raise Refusal("Superseded", superseded)
    _open_session(controller, Session(peer, "worker", name, incarnation, now))
    controller.departed_at.pop(incarnation, None)
    if known_incarnation < incarnation:
        if known_incarnation:
            controller.departed_at[known_incarnation] = now
        controller.publish_map(workers={**controller.map.workers, name: incarnation})
    controller.answer_once_installed((peer, frame.request_id), wire.MAP, {"id": name, "incarnation": incarnation})


def on_leave(controller: ControllerState, now: float, session: Session, frame: wire.Frame) -> None:
    """LEAVE: a worker ends; a server is drained first."""
    if session.role == "server":
        rebalance.begin_drain(controller, (session.peer, frame.request_id), session.name)
        return
    del controller.sessions[session.peer]
    if session.name in controller.map.workers:
        controller.departed_at[controller.map.workers[session.name]] = now
        controller.publish_map(workers=without(controller.map.workers, {session.name}))
    controller.send(session.peer, wire.DONE, frame.request_id, {})


def remove_dead(controller: ControllerState, now: float, dead: Sequence[tuple[str, str]]) -> None:
    for key in dead:
        controller.disconnect_deadlines.pop(key, None)
    shard_map = controller.map
    servers = {name for role, name in dead if role == "server" and name in shard_map.servers}
    workers = {name for role, name in dead if role == "worker" and name in shard_map.workers}
    if not servers and not workers:
        return
    chains, learners, lost = _chains_without(controller, servers)
    newly_lost = sorted(set(lost) - set(shard_map.lost_shards))
    for name in servers:
        if any(name in lost[shard] for shard in newly_lost):
            controller.dead_servers[name] = shard_map.servers[name].incarnation
        controller.reports.pop(name, None)
        controller.handovers.pop(name, None)
    controller.leaving -= servers
    if servers:
        controller.rebalance_after = now + REBALANCE_DELAY
        controller.log("died", servers=sorted(servers), lost=newly_lost)
    if workers:
        controller.departed_at |= {shard_map.workers[name]: now for name in workers}
        controller.log("left", workers=sorted(workers))
    remaining = {"servers": without(shard_map.servers, servers), "workers": without(shard_map.workers, workers)}
    controller.publish_map(**remaining, chains=chains, learners=learners, lost_shards=lost)
    if newly_lost:
        controller.lost_since = now
        checkpoints.abort_for_lost_shards(controller, newly_lost)
    controller.send_due_answers()


def _chains_without(controller: ControllerState, dead: set[str]) -> tuple[list[Chain], list[Chain], dict[int, Chain]]:
    """Chains and learners without dead servers, and the shards that are lost by then."""
    shard_map = controller.map
    chains, learners, lost = list(shard_map.chains), list(shard_map.learners), dict(shard_map.lost_shards)
    for shard, chain in enumerate(chains):
        if not dead & {*chain, *learners[shard]}:
            continue
        chains[shard] = tuple(name for name in chain if name not in dead)
        learners[shard] = tuple(name for name in learners[shard] if name not in dead)
        if chain and not chains[shard]:
            # A learner of the last replica that caught up lacks nothing that was acknowledged.
            connected = (name for name in learners[shard] if controller.find_peer("server", name) is not None)
            successor = next((name for name in connected if (shard, name) in controller.caught_up), None)
            if successor is not None:
                chains[shard] = (successor,)
                learners[shard] = tuple(name for name in learners[shard] if name != successor)
            else:
                lost[shard], learners[shard] = chain, ()
    return chains, learners, lost


def on_unreachable_replicas(controller: ControllerState, now: float, head: str, servers: Sequence[str]) -> None:
    """A head cannot reach replicas that we can: its chains continue without them, and the pair is avoided for a while."""
    chains, learners = list(controller.map.chains), list(controller.map.learners)
    for server in servers:
        if controller.find_peer("server", server) is None:
            continue  # it will be declared dead
        controller.avoided_until[head, server] = now + AVOID_PAIR_TIME
        for shard, chain in enumerate(chains):
            if chain[:1] == (head,):
                chains[shard] = tuple(name for name in chain if name != server)
                learners[shard] = tuple(name for name in learners[shard] if name != server)
    if controller.publish_chains(chains, learners):
        controller.log("cut off", head=head, **{"from": list(servers)})
