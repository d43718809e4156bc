"""The processes of a case, and what happens to them: frames, lost connections, ticks. The replica, controller and outbox are the real ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from echelon.server.client.outbox import Outbox, Section
from echelon.server.controller import events as controller_events
from echelon.server.controller.state import ControllerState
from echelon.server.protocol import wire
from echelon.server.protocol.actions import Action
from echelon.server.protocol.shard_map import ShardMap
from echelon.server.replica import events
from echelon.server.replica.shard_state import ShardState
from echelon.server.replica.state import ReplicaState
from tests.server.fake_store import TinyStore


@dataclass
class Server:
    """A server process: before it joined, `replica` is None."""

    name: str
    incarnation: int = 0
    replica: ReplicaState | None = None
    joined: bool = False


@dataclass
class Worker:
    """A worker process: its outbox, and how many pushes it has yet to make."""

    name: str
    left: int
    incarnation: int = 0
    outbox: Outbox[int] | None = None
    known: int = -1
    flying: dict[int, Section[int]] = field(default_factory=dict)
    requests: int = 0
    step: int = 0


def _server(call: str) -> Callable[..., list[Action]]:
    def run(server: Server, now: float, *args: Any) -> list[Action]:
        if server.replica is None:
            return []
        return list(getattr(events, call)(server.replica, now, *args))

    return run


def _framed(call: str) -> Callable[..., list[Action]]:
    def run(server: Server, now: float, peer: Any, frame: wire.Frame) -> list[Action]:
        assert server.replica is not None
        return list(getattr(events, call)(server.replica, now, peer, frame))

    return run


def _controlled(server: Server, now: float, frame: wire.Frame) -> list[Any]:
    """A frame of the controller at a server."""
    out: list[Any] = []
    if frame.kind == wire.MAP:
        server.incarnation, server.joined = frame.meta["incarnation"], True
        new = ShardMap.from_document(frame.meta["map"])
        if server.replica is None:
            shards = ShardState(TinyStore(new.num_shards), new.num_shards)
            server.replica = ReplicaState(name=server.name, incarnation=server.incarnation, shards=shards)
            server.replica.max_parts_in_flight = 1  # of a snapshot under way at once: pushes come between them
        out += events.on_map(server.replica, now, new, frame.meta["specs"])
        out += events.on_controller_connected(server.replica, now)
    elif frame.kind == wire.REFUSED:
        out.append("anew")
    elif frame.kind == wire.MAP_UPDATE:
        if server.replica is not None and server.joined:
            new = ShardMap.from_document(frame.meta["map"])
            seat = new.servers.get(server.name)
            if seat is None or seat.incarnation != server.incarnation:
                out.append("anew")
            else:
                out += events.on_map(server.replica, now, new, frame.meta["specs"])
    elif server.replica is not None:
        out += events.on_controller_frame(server.replica, now, frame)
    if "anew" in out:
        server.replica, server.incarnation, server.joined = None, 0, False
    return out


def _ticked(core: ControllerState, now: float, dead: str | None) -> list[Action]:
    """The controller's tick, when everyone who has a connection has just been heard."""
    core.last_tick = now
    for session in core.sessions.values():
        session.last_heard = now
    if dead is not None:
        core.disconnect_deadlines["server", dead] = now
    return controller_events.on_tick(core, now)


def _mapped(worker: Worker, now: float, frame: wire.Frame) -> list[Any]:
    if frame.kind != wire.MAP:
        return []
    new = ShardMap.from_document(frame.meta["map"])
    if "incarnation" in frame.meta:
        worker.incarnation = frame.meta["incarnation"]
    if worker.outbox is None:
        worker.outbox = Outbox(new)
        return [new.version]
    return [new.version, *worker.outbox.install_map(new)]


def _answered(worker: Worker, now: float, frame: wire.Frame) -> list[Any]:
    section = worker.flying.pop(frame.request_id, None)
    if frame.kind == wire.ACK and section is not None and worker.outbox is not None:
        worker.outbox.acknowledge(section)
    return []


def _lost_head(worker: Worker, now: float, head: str) -> list[Any]:
    if worker.outbox is not None:
        worker.outbox.mark_unreachable(head)
        worker.flying = {number: each for number, each in worker.flying.items() if each.head != head}
    return []


def _made(worker: Worker, now: float, value: int) -> list[Any]:
    worker.left -= 1
    assert worker.outbox is not None
    return list(worker.outbox.push(value))


def _posted(worker: Worker, now: float, section: Section[int]) -> list[Any]:
    worker.requests = max([*worker.flying, 0]) + 1
    worker.flying[worker.requests] = section
    return [worker.requests]


#: What may happen to a node: (node, time, ...) -> what it wants done; the node changes.
EVENTS: dict[str, Callable[..., list[Any]]] = {
    "frame": _framed("on_frame"),
    "answer": _framed("on_link_frame"),
    "controlled": _controlled,
    "link": _server("on_link_up"),
    "link lost": _server("on_link_lost"),
    "peer lost": _server("on_peer_lost"),
    "server tick": _server("on_tick"),
    "unjoined": lambda server, now: setattr(server, "joined", False) or [],
    "heard": lambda core, now, peer, frame: controller_events.on_frame(core, now, peer, frame),
    "lost": lambda core, now, peer: controller_events.on_peer_lost(core, now, peer),
    "tick": _ticked,
    "map": _mapped,
    "answered": _answered,
    "lose": _lost_head,
    "regain": lambda worker, now, head: [] if worker.outbox is None else worker.outbox.mark_reachable(head),
    "push": _made,
    "posted": _posted,
    "begins": lambda worker, now, left: setattr(worker, "left", left) or [],
}
