"""A model checker for the protocol: all interleavings of a small case, over the real replica, controller and outbox.

Every message may be delivered at any time (in order per connection), and at any time the case's budget of misfortunes may be spent:
a server crashes, a live one is judged dead (stopped, or cut off from the controller), a connection is cut, the controller crashes, a
server joins, one is drained. States that were seen before are not explored again. What must hold:

- each replica holds exactly what its windows say it was given (so nothing is applied twice or half);
- every live member of a shard's chain, as the controller's disk has it, has everything that was ever acknowledged on that shard;
- once a head acknowledged, no head of an earlier epoch does (but what the new one has too);
- from every end, when the network behaves again, all pushes are acknowledged, and replicas are equal.

Time stands still but for the fair ending; leases of reads are checked by `tests/server/test_replica.py` on a clock.
"""

from __future__ import annotations

import copy
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np

from echelon.server import wire
from echelon.server.actions import CONTROL, LINK, PEER, Action, Close, Persist, Send
from echelon.server.controller import Controller, members, moving
from echelon.server.covers import Cover, Covers
from echelon.server.links import Sent
from echelon.server.map import Map
from echelon.server.outbox import Outbox, Section
from echelon.server.replica import Replica
from tests.server.tiny import TinyStore


class Broken(AssertionError):  # noqa: N818 (what it found)
    """An invariant does not hold; `trail` says how one gets there."""

    def __init__(self, what: str, trail: tuple[str, ...] = ()) -> None:
        super().__init__(what)
        self.what, self.trail = what, trail


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is explored."""

    servers: int = 2
    replicas: int = 2
    shards: int = 1
    workers: int = 1
    pushes: int = 2
    crash: int = 0
    judge: int = 0
    cut: int = 0
    controller: int = 0
    join: int = 0
    drain: int = 0
    aggregate: bool = False
    #: Learners that caught up are taken in one by one, not all together.
    single: bool = False
    #: What has happened already (labels of steps; "calm": until nothing moves); the budget pays for it.
    before: tuple[str, ...] = ()


#: A connection: its two ends, the caller first. Of a message queue: (connection, direction).
Ends = tuple[str, str]


@dataclass
class Wire:
    """One connection: what is under way in each direction. `number` tells it from earlier ones between the same ends."""

    number: int
    there: tuple[bytes, ...] = ()
    back: tuple[bytes, ...] = ()


@dataclass
class Server:
    """A server process: before it joined, `replica` is None."""

    name: str
    incarnation: int = 0
    replica: Replica | None = None
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


_PARSED: dict[bytes, wire.Frame] = {}


def parsed(message: bytes) -> wire.Frame:
    """The frame of a message; frames are never changed."""
    found = _PARSED.get(message)
    if found is None:
        if len(_PARSED) > 200_000:
            _PARSED.clear()
        found = _PARSED[message] = wire.parse(np.frombuffer(message, np.uint8))
    return found


_SHARED = (int, str, float, bytes, bool, type(None), wire.Frame, Map, Section, Sent, Cover, Covers)


def copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy, but for what never changes; what is shared inside stays shared."""
    if isinstance(value, _SHARED):
        return value
    if isinstance(value, np.ndarray):
        return value.copy()
    memo = {} if memo is None else memo
    kind = type(value)
    if kind is dict:
        return {key: copied(each, memo) for key, each in value.items()}
    if kind is list:
        return [copied(each, memo) for each in value]
    if kind is tuple:
        return tuple([copied(each, memo) for each in value])
    if kind is deque:
        return deque([copied(each, memo) for each in value])
    if kind is set:
        return set(value)
    if callable(value):
        return value
    if id(value) in memo:
        return memo[id(value)]
    made = memo[id(value)] = kind.__new__(kind)
    for name in getattr(kind, "__slots__", ()) or value.__dict__:
        object.__setattr__(made, name, copied(getattr(value, name), memo))
    return made


_SKIPPED = {"counts", "_taking", "_asked_at", "down", "settings", "reports", "_load", "_declare", "requests", "covers"}


def frozen(value: Any) -> Any:
    """A hashable picture of a state."""
    if value is None or isinstance(value, int | str | float | bytes | bool):
        return value
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Cover):
        return value.wire.tobytes()
    if isinstance(value, wire.Frame):
        return value.raw.tobytes()
    if isinstance(value, Map):
        if "_frozen" not in value.__dict__:
            value.__dict__["_frozen"] = repr(value.document())
        return value.__dict__["_frozen"]
    if isinstance(value, dict):
        return frozenset(
            [(key if isinstance(key, str | int) else frozen(key), frozen(each)) for key, each in value.items()]
        )
    if isinstance(value, list | tuple | deque):
        return tuple([frozen(each) for each in value])
    if isinstance(value, set | frozenset):
        return frozenset([frozen(each) for each in value])
    if is_dataclass(value):
        return tuple([frozen(getattr(value, each.name)) for each in fields(value)])
    if callable(value):
        return None
    names = getattr(type(value), "__slots__", ()) or value.__dict__
    return tuple([frozen(getattr(value, name)) for name in names if name not in _SKIPPED])


#: Nodes by their pictures: equal ones are one object, which nobody changes; and what an event makes of a node.
_NODES: dict[int, Any] = {}
_AFTER: dict[Any, tuple[Any, list[Any]]] = {}


def canonical(node: Any) -> Any:
    """The one node of this picture."""
    return _NODES.setdefault(hash(frozen(node)), node)


def forget() -> None:
    """Nothing is remembered of earlier explorations (or of code that was another then)."""
    _NODES.clear()
    _AFTER.clear()
    _PARSED.clear()


def _server(call: str) -> Callable[..., list[Action]]:
    def run(server: Server, now: float, *args: Any) -> list[Action]:
        if server.replica is None:
            return []
        return list(getattr(server.replica, call)(now, *args))

    return run


def _framed(call: str) -> Callable[..., list[Action]]:
    def run(server: Server, now: float, peer: Any, message: bytes) -> list[Action]:
        assert server.replica is not None
        return list(getattr(server.replica, call)(now, peer, parsed(message)))

    return run


def _controlled(server: Server, now: float, message: bytes) -> list[Any]:
    """A frame of the controller at a server."""
    frame, out = parsed(message), []
    if frame.kind == wire.MAP:
        server.incarnation, server.joined = frame.meta["incarnation"], True
        new = Map.from_document(frame.meta["map"])
        if server.replica is None:
            store = TinyStore(new.shards)
            server.replica = Replica(name=server.name, incarnation=server.incarnation, store=store, shards=new.shards)
            server.replica.parts = 1  # of a snapshot under way at once: pushes come between them
        out += server.replica.on_map(now, new, frame.meta["specs"])
        out += server.replica.on_controller(now)
    elif frame.kind == wire.REFUSED:
        out.append("anew")
    elif frame.kind == wire.GRANT:
        if server.replica is not None and server.joined:
            new = Map.from_document(frame.meta["map"])
            seat = new.servers.get(server.name)
            if seat is None or seat.incarnation != server.incarnation:
                out.append("anew")
            else:
                out += server.replica.on_map(now, new, frame.meta["specs"])
    elif server.replica is not None:
        out += server.replica.on_control(now, frame)
    if "anew" in out:
        server.replica, server.incarnation, server.joined = None, 0, False
    return out


def _ticked(core: Controller, now: float, dead: str | None) -> list[Action]:
    """The controller's tick, when everyone who has a connection has just been heard."""
    core._ticked = now
    for session in core.sessions.values():
        session.heard = now
    if dead is not None:
        core.absent["server", dead] = now
    return core.on_tick(now)


def _mapped(worker: Worker, now: float, message: bytes) -> list[Any]:
    frame = parsed(message)
    if frame.kind != wire.MAP:
        return []
    new = Map.from_document(frame.meta["map"])
    if "incarnation" in frame.meta:
        worker.incarnation = frame.meta["incarnation"]
    if worker.outbox is None:
        worker.outbox = Outbox(new)
        return [new.version]
    return [new.version, *worker.outbox.install(new)]


def _answered(worker: Worker, now: float, message: bytes) -> list[Any]:
    frame = parsed(message)
    section = worker.flying.pop(frame.request, None)
    if frame.kind == wire.ACK and section is not None and worker.outbox is not None:
        worker.outbox.acknowledge(section)
    return []


def _lost_head(worker: Worker, now: float, head: str) -> list[Any]:
    if worker.outbox is not None:
        worker.outbox.lose(head)
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


_EVENTS: dict[str, Callable[..., list[Any]]] = {
    "frame": _framed("on_frame"),
    "answer": _framed("on_answer"),
    "controlled": _controlled,
    "link": _server("on_link"),
    "link lost": _server("on_link_lost"),
    "peer lost": _server("on_peer_lost"),
    "server tick": _server("on_tick"),
    "unjoined": lambda server, now: setattr(server, "joined", False) or [],
    "heard": lambda core, now, peer, message: core.on_frame(now, peer, parsed(message)),
    "lost": lambda core, now, peer: core.on_lost(now, peer),
    "tick": _ticked,
    "map": _mapped,
    "answered": _answered,
    "lose": _lost_head,
    "regain": lambda worker, now, head: [] if worker.outbox is None else worker.outbox.regain(head),
    "push": _made,
    "posted": _posted,
    "begins": lambda worker, now, left: setattr(worker, "left", left) or [],
}


class World:
    """One state of everything. Nodes are copied when they are written to, and shared with other states before."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.budget = {name: getattr(case, name) for name in ("crash", "judge", "cut", "controller", "join", "drain")}
        self.now = 0.0
        self.nodes: dict[str, Any] = {}
        self.disk: dict[str, Any] | None = None
        self.wires: dict[Ends, Wire] = {}
        self.numbers = 0
        #: What was acknowledged: (worker, shard) -> seq; per shard the latest epoch of a head that did it.
        self.acked: dict[tuple[str, int], int] = {}
        self.epochs: dict[int, int] = {}
        self.trail: tuple[str, ...] = ()
        self.generations: dict[Ends, int] = {}

    def clone(self) -> World:
        """A state to go on from."""
        other = copy.copy(self)
        other.budget, other.nodes, other.acked = dict(self.budget), dict(self.nodes), dict(self.acked)
        other.epochs, other.generations = dict(self.epochs), dict(self.generations)
        other.wires = {ends: Wire(each.number, each.there, each.back) for ends, each in self.wires.items()}
        return other

    def run(self, name: str, event: str, *args: Any) -> list[Any]:
        """Something happens to a node: what it wants done. The same event on an equal node is worked out once."""
        node = self.nodes[name]
        key = (id(node), event, self.now, args)
        found = _AFTER.get(key)
        if found is None:
            fresh = copied(node)
            actions = _EVENTS[event](fresh, self.now, *args)
            found = _AFTER[key] = (canonical(fresh), actions)
        self.nodes[name] = found[0]
        return found[1]

    def key(self) -> int:
        """What tells states apart."""
        parts: list[Any] = [
            tuple(self.budget.values()),
            self.now,
            frozenset(self.acked.items()),
            frozenset(self.epochs.items()),
        ]
        parts += [(name, id(node)) for name, node in sorted(self.nodes.items())]
        parts += [(ends, each.number, each.there, each.back) for ends, each in sorted(self.wires.items())]
        return hash(tuple(parts))

    # The network

    def connect(self, caller: str, listener: str) -> None:
        """A new connection between two."""
        ends = (caller, listener)
        self.generations[ends] = self.generations.get(ends, 0) + 1
        self.wires[ends] = Wire(self.generations[ends])
        if listener == "controller":
            self._joins(caller)
        elif caller in self.servers():
            self.act(caller, self.run(caller, "link", listener))
        else:
            self._post(caller, self.run(caller, "regain", listener))

    def disconnect(self, ends: Ends) -> None:
        """A connection ends; both see it, and what was under way is gone."""
        gone = self.wires.pop(ends, None)
        if gone is None:
            return
        caller, listener = ends
        if listener == "controller":
            if listener in self.nodes:
                self.act(listener, self.run(listener, "lost", (caller, gone.number)))
            if isinstance(self.nodes.get(caller), Server):
                self.run(caller, "unjoined")
            return
        if listener in self.nodes:
            self.act(listener, self.run(listener, "peer lost", (caller, gone.number)))
        if isinstance(self.nodes.get(caller), Server):
            self.act(caller, self.run(caller, "link lost", listener))
        elif caller in self.nodes:
            self.run(caller, "lose", listener)

    def reconnect(self) -> None:
        """Whoever misses a connection that it wants makes it."""
        again = True
        while again:
            again = False
            for caller, listener in list(self.wanted()):
                if (caller, listener) not in self.wires and caller in self.nodes and listener in self.nodes:
                    self.connect(caller, listener)
                    again = True

    def wanted(self) -> Iterator[Ends]:
        """The connections that nodes would have."""
        for name, node in self.nodes.items():
            if name != "controller":
                yield name, "controller"
            if isinstance(node, Server) and node.replica is not None:
                for other in node.replica.links:
                    yield name, other
            if isinstance(node, Worker) and node.outbox is not None:
                for route in node.outbox.routes:
                    yield name, route.head

    def servers(self) -> list[str]:
        """Names of live server processes."""
        return [name for name, node in self.nodes.items() if isinstance(node, Server)]

    def workers(self) -> list[str]:
        """Names of workers."""
        return [name for name, node in self.nodes.items() if isinstance(node, Worker)]

    def put(self, ends: Ends, back: bool, kind: int, request: int, meta: dict[str, Any], arrays: Any = ()) -> None:
        """Send a message, if there is a connection."""
        each = self.wires.get(ends)
        if each is None:
            return
        message = b"".join(wire.encode(kind, request, meta, arrays))
        if back:
            each.back = (*each.back, message)
        else:
            each.there = (*each.there, message)

    # Nodes

    def _joins(self, name: str) -> None:
        node = self.nodes[name]
        role = "server" if isinstance(node, Server) else "worker"
        meta = {"role": role, "id": name, "incarnation": node.incarnation or None, "address": "", "host": name}
        self.put((name, "controller"), False, wire.JOIN, 1, meta)

    def act(self, name: str, actions: list[Any]) -> None:
        """Do what a state machine wants."""
        for action in actions:
            if action == "anew":
                for ends in [each for each in self.wires if name in each]:
                    self.disconnect(ends)
                return
            if isinstance(action, Send):
                if name == "controller":
                    who, number = action.whom  # type: ignore[misc]
                    if (who, name) in self.wires and self.wires[who, name].number == number:
                        self.put((who, name), True, action.kind, action.request, action.meta, action.arrays)
                elif action.to == PEER:
                    who, number = action.whom  # type: ignore[misc]
                    if (who, name) in self.wires and self.wires[who, name].number == number:
                        if action.kind == wire.ACK:
                            self._acknowledged(name, who, action)
                        self.put((who, name), True, action.kind, action.request, action.meta, action.arrays)
                elif action.to == LINK:
                    self.put((name, str(action.whom)), False, action.kind, action.request, action.meta, action.arrays)
                elif self.nodes[name].joined:
                    assert action.to == CONTROL
                    self.put((name, "controller"), False, action.kind, action.request, action.meta, action.arrays)
            elif isinstance(action, Persist):
                self.disk = action.document
            elif isinstance(action, Close):
                if name == "controller" or action.to == PEER:
                    who, number = action.whom  # type: ignore[misc]
                    if (who, name) in self.wires and self.wires[who, name].number == number:
                        self.disconnect((who, name))
                else:
                    self.disconnect((name, str(action.whom)))

    def _acknowledged(self, head: str, worker: str, action: Send) -> None:
        section = self.nodes[worker].flying.get(action.request)
        if section is None:
            return
        replica = self.nodes[head].replica
        for shard in section.cover.tolist():
            key = (worker, shard)
            epoch = replica.map.epochs[shard]
            # A former head may be late in saying what all replicas had before it was replaced; it may not add to that.
            if epoch < self.epochs.get(shard, 0) and not self._known(worker, shard, section.seq):
                self.fail(f"{head} acknowledges on shard {shard} in epoch {epoch} after epoch {self.epochs[shard]} did")
            self.epochs[shard] = max(epoch, self.epochs.get(shard, 0))
            self.acked[key] = max(self.acked.get(key, 0), section.seq)

    def _known(self, worker: str, shard: int, seq: int) -> bool:
        """Whether the shard's present head has a push."""
        assert self.disk is not None
        known = Map.from_document(self.disk["map"])
        node = self.nodes.get(known.heads[shard] or "")
        if node is None or node.replica is None:
            return True
        slot = node.replica.state.windows.slots.get((worker, self.nodes[worker].incarnation))
        return slot is not None and int(node.replica.state.windows.last[slot, shard]) >= seq

    def fail(self, what: str) -> None:
        """An invariant is broken."""
        raise Broken(what, self.trail)

    def deliver(self, ends: Ends, back: bool) -> None:
        """The oldest message of a connection arrives."""
        each = self.wires[ends]
        if back:
            message, each.back = each.back[0], each.back[1:]
        else:
            message, each.there = each.there[0], each.there[1:]
        caller, listener = ends
        name = caller if back else listener
        node = self.nodes[name]
        if name == "controller":
            self.act(name, self.run(name, "heard", (caller, each.number), message))
        elif isinstance(node, Worker):
            if listener == "controller":
                news = self.run(name, "map", message)
                if news:
                    self.put((name, listener), False, wire.WATCH, 2, {"after": news[0]})
                    self._post(name, news[1:])
            else:
                self.run(name, "answered", message)
        elif listener == "controller":
            self.act(name, self.run(name, "controlled", message))
        elif node.replica is None:
            self.disconnect(ends)
        elif back:
            self.act(name, self.run(name, "answer", listener, message))
        else:
            self.act(name, self.run(name, "frame", (caller, each.number), message))
        self.reconnect()

    def _post(self, name: str, sections: list[Section[int]]) -> None:
        for section in sections:
            if (name, section.head) not in self.wires:
                self.run(name, "lose", section.head)
                continue
            [request] = self.run(name, "posted", section)
            ids = section.cover.astype(np.int64)
            grads = np.full((len(ids), 1), section.payload, np.int64)
            meta = {
                "version": section.version,
                "worker": name,
                "incarnation": self.nodes[name].incarnation,
                "seq": section.seq,
                "step": section.seq - 1,
                "tick": True,
                "ops": [{"table": "t"}],
            }
            if self.case.aggregate:
                meta["aggregate"] = True
            self.put((name, section.head), False, wire.PUSH, request, meta, [section.cover, ids, grads])

    # Steps

    def push(self, name: str) -> None:
        """A worker makes its next push."""
        number = self.case.pushes - self.nodes[name].left + 1
        # A digit of its own for each push of each worker: the sum says what is in it.
        place = int(name[1:]) * self.case.pushes + number - 1
        self._post(name, self.run(name, "push", 8**place))

    def steps(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        """What may happen next. Messages that change nothing but what the receiver may do later go first, alone."""
        for ends, each in self.wires.items():
            if each.there and _kind(each.there[0]) in _EAGER:
                yield wire.NAMES[_kind(each.there[0])], lambda world, ends=ends: world.deliver(ends, False)
                return
        for ends, each in self.wires.items():
            if each.there:
                yield (
                    f"{wire.NAMES[_kind(each.there[0])]} {ends[0]}>{ends[1]}",
                    lambda world, ends=ends: world.deliver(ends, False),
                )
            if each.back:
                yield (
                    f"{wire.NAMES[_kind(each.back[0])]} {ends[1]}>{ends[0]}",
                    lambda world, ends=ends: world.deliver(ends, True),
                )
        for name, node in self.nodes.items():
            if isinstance(node, Worker) and node.left and node.outbox is not None and len(node.outbox) < 2:
                yield f"push {name}", lambda world, name=name: world.push(name)
        if "controller" in self.nodes:
            trial = copy.copy(self)
            trial.nodes = dict(self.nodes)
            if trial.run("controller", "tick", None):
                yield "tick", World.tick
        else:
            yield "controller starts", World.start
        yield from self._misfortunes()

    def _misfortunes(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        budget, up = self.budget, "controller" in self.nodes
        names = self.servers()
        if budget["crash"] and len(names) > 1:
            for name in names:
                yield f"crash {name}", lambda world, name=name: world.crash(name)
        if budget["judge"] and up:
            for name in names:
                if self.nodes[name].joined:
                    yield f"judge {name}", lambda world, name=name: world.judge(name)
        if budget["cut"]:
            for ends in self.wires:
                yield f"cut {ends[0]}-{ends[1]}", lambda world, ends=ends: world.cut(ends)
        if budget["controller"] and up:
            yield "controller crashes", World.lose
        if budget["join"]:
            yield "join", World.join
        if budget["drain"] and up:
            for name in names:
                yield f"drain {name}", lambda world, name=name: world.drain(name)

    def calm(self) -> None:
        """Everything that is under way arrives, everything that can wait is done; no new pushes."""
        for _ in range(40):
            while busy := [(ends, bool(each.back)) for ends, each in self.wires.items() if each.there or each.back]:
                for ends, back in busy:
                    if ends in self.wires and (self.wires[ends].back if back else self.wires[ends].there):
                        self.deliver(ends, back)
            self.tick()

    def tick(self) -> None:
        """The controller does what can wait."""
        self.act("controller", self.run("controller", "tick", None))
        self.reconnect()

    def crash(self, name: str) -> None:
        """A server is gone, with all that it held."""
        self.budget["crash"] -= 1
        self._remove(name)
        if "controller" in self.nodes:
            self._bury(name)
        self.reconnect()

    def _remove(self, name: str) -> None:
        self.nodes.pop(name)
        for ends in [each for each in self.wires if name in each]:
            self.disconnect(ends)

    def judge(self, name: str) -> None:
        """The controller takes a live server for dead; what that one sent is still under way."""
        self.budget["judge"] -= 1
        self.disconnect((name, "controller"))
        self._bury(name)
        self.reconnect()

    def _bury(self, name: str) -> None:
        self.act("controller", self.run("controller", "tick", name))

    def cut(self, ends: Ends) -> None:
        """A connection breaks and is made again."""
        self.budget["cut"] -= 1
        self.disconnect(ends)
        self.reconnect()

    def lose(self) -> None:
        """The controller crashes; its disk stays."""
        self.budget["controller"] -= 1
        self.nodes.pop("controller")
        for ends in [each for each in self.wires if each[1] == "controller"]:
            self.disconnect(ends)

    def start(self) -> None:
        """The controller comes back."""
        self.nodes["controller"] = canonical(self._controller(self.disk))
        self.reconnect()

    def _controller(self, document: dict[str, Any] | None) -> Controller:
        case = self.case
        return Controller(document, shards=case.shards, replicas=case.replicas, expect=case.servers, now=self.now)

    def join(self) -> None:
        """A new server."""
        self.budget["join"] -= 1
        name = f"s{self.case.servers}"
        self.nodes[name] = canonical(Server(name=name))
        self.reconnect()

    def drain(self, name: str) -> None:
        """A server is to be emptied."""
        self.budget["drain"] -= 1
        message = b"".join(wire.encode(wire.DRAIN, 1, {"server": name}))
        self.act("controller", self.run("controller", "heard", ("admin", 0), message))

    # What must hold

    def check(self) -> None:
        """The invariants of every state."""
        case = self.case
        for name in self.servers():
            replica = self.nodes[name].replica
            if replica is None:
                continue
            state = replica.state
            for shard in range(case.shards):
                want = 0
                held = sum(
                    int(entry.frame.arrays[2][0, 0])
                    for each in state.pending.values()
                    for entry in each
                    if shard in entry.shards
                )
                for (worker, _), slot in state.windows.slots.items():
                    first = int(worker[1:]) * case.pushes
                    want += sum(8 ** (first + number) for number in range(int(state.windows.last[slot, shard])))
                if state.store.rows[shard] + held != want:
                    self.fail(
                        f"{name} has {oct(int(state.store.rows[shard]))} on shard {shard} where its windows say {oct(want)}"
                    )
        if self.disk is None:
            return
        known = Map.from_document(self.disk["map"])
        for (worker, shard), seq in self.acked.items():
            for name in known.chains[shard]:
                node = self.nodes.get(name)
                if node is None or node.replica is None or node.incarnation != known.servers[name].incarnation:
                    continue
                slot = node.replica.state.windows.slots.get((worker, self.nodes[worker].incarnation))
                have = 0 if slot is None else int(node.replica.state.windows.last[slot, shard])
                if have < seq:
                    self.fail(
                        f"{name}, of the chain of shard {shard}, has {have} pushes of {worker}; {seq} are acknowledged"
                    )

    def settle(self) -> None:
        """The network behaves, time passes: everything must come to its end."""
        if "controller" not in self.nodes:
            self.start()
        for turn in range(60):
            self._drain_wires()
            if turn % 2 == 0 and self._done():
                break
            self.now += 1.0
            self.act("controller", self.run("controller", "tick", None))
            for name in self.servers():
                self.act(name, self.run(name, "server tick"))
                server = self.nodes[name]
                if server.joined and server.replica is not None:
                    self.put((name, "controller"), False, wire.BEAT, 0, {"version": server.replica.map.version})
            self.reconnect()
        self._finished()

    def _drain_wires(self) -> None:
        for _ in range(5000):
            busy = [(ends, bool(each.back)) for ends, each in self.wires.items() if each.there or each.back]
            for name in self.workers():
                worker = self.nodes[name]
                if worker.left and worker.outbox is not None and len(worker.outbox) < 2:
                    self.push(name)
                    busy.append((("", ""), False))
            if not busy:
                return
            for ends, back in busy:
                if ends in self.wires and (self.wires[ends].back if back else self.wires[ends].there):
                    self.deliver(ends, back)
                    self.check()
        self.fail("messages go on for ever")

    def _done(self) -> bool:
        core = self.nodes["controller"]
        if core.map.lost or any(core.map.learners):
            return bool(core.map.lost)
        if any(name not in self.nodes for name in core.map.servers):
            return False
        if any(self.nodes[name].replica is None for name in self.servers()):
            return False
        return all(not self.nodes[name].left and not len(self.nodes[name].outbox) for name in self.workers())

    def _finished(self) -> None:
        core = self.nodes["controller"]
        if core.map.lost:
            return
        for name in self.workers():
            worker = self.nodes[name]
            if worker.left or len(worker.outbox):
                self.fail(f"{name} ends with {worker.left} pushes to make and {len(worker.outbox)} unanswered")
        places = self.case.workers * self.case.pushes
        whole = sum(8**place for place in range(places))
        for shard, chain in enumerate(core.map.chains):
            digests = set()
            for name in chain:
                state = self.nodes[name].replica.state
                digests.add(state.digest(shard))
                if state.store.rows[shard] != whole:
                    self.fail(
                        f"{name} ends with {oct(int(state.store.rows[shard]))} on shard {shard}, not {oct(whole)}"
                    )
            if len(digests) > 1:
                self.fail(f"replicas of shard {shard} on {chain} are not equal at the end")


#: A watch or a report of an installed map that comes late is a tick of the controller that comes late; a greeting that comes late is a
#: connection that is made late.
_EAGER = {wire.WATCH, wire.INSTALLED, wire.HAIL, wire.BEHIND}


def _kind(message: bytes) -> int:
    return int.from_bytes(message[4:6], "little")


def begin(case: Case) -> World:
    """All have joined, and nothing is under way."""
    world = World(case)
    world.nodes["controller"] = canonical(world._controller(None))
    for number in range(case.servers):
        world.nodes[f"s{number}"] = canonical(Server(name=f"s{number}"))
    world.reconnect()
    for _ in range(3):
        world._drain_wires()
        world.tick()
    for number in range(case.workers):
        world.nodes[f"w{number}"] = canonical(Worker(name=f"w{number}", left=0))
        world.reconnect()
        world._drain_wires()
    for name in world.servers():
        world.act(name, world.run(name, "server tick"))
    world._drain_wires()
    for name in world.workers():
        world.run(name, "begins", case.pushes)
    assert not any(each.there or each.back for each in world.wires.values())
    return world


@dataclass(frozen=True, kw_only=True)
class Found:
    """What an exploration saw."""

    states: int
    ends: int
    seconds: float
    whole: bool


def explore(case: Case, *, seconds: float = 1e9, states: int = 10**9, seed: int = 0) -> Found:
    """All that can happen in a case, or as much as time allows (then in an order that the seed draws). Raises Broken."""
    calm, members.CALM = members.CALM, 0.0
    together, moving.TOGETHER = moving.TOGETHER, 0.0 if case.single else moving.TOGETHER
    forget()
    began = time.monotonic()
    drawn = random.Random(seed)
    try:
        first = begin(case)
        for label in case.before:
            dict(first.steps() if label != "calm" else {"calm": World.calm}.items())[label](first)
        seen = {first.key()}
        stack = deque([first])
        ends = 0
        while stack:
            if time.monotonic() - began > seconds or len(seen) >= states:
                return Found(states=len(seen), ends=ends, seconds=time.monotonic() - began, whole=False)
            # Half of the time the shortest story, half of the time the longest: early mistakes are met soon, and so are ends.
            world = stack.pop() if drawn.random() < 0.5 else stack.popleft()
            choices = list(world.steps())
            if not [label for label, _ in choices if not label.startswith(("crash", "judge", "cut", "join", "drain"))]:
                ends += 1
                end = world.clone()
                try:
                    end.settle()
                except Broken as broken:
                    raise Broken(broken.what, (*world.trail, "the end")) from None
            drawn.shuffle(choices)
            for label, step in choices:
                other = world.clone()
                other.trail = (*world.trail, label)
                try:
                    step(other)
                    other.check()
                except Broken as broken:
                    raise Broken(broken.what, other.trail) from None
                except Exception as error:
                    raise Broken(f"{type(error).__name__}: {error}", other.trail) from error
                key = other.key()
                if key not in seen:
                    seen.add(key)
                    stack.append(other)
        return Found(states=len(seen), ends=ends, seconds=time.monotonic() - began, whole=True)
    finally:
        members.CALM, moving.TOGETHER = calm, together
