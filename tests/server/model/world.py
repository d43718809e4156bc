"""One state of everything: nodes, connections and what is under way on them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.server.client.outbox import Section
from echelon.server.protocol import wire
from echelon.server.protocol.actions import CONTROL, LINK, PEER, Close, Persist, Send
from tests.server.model.case import Broken, Case
from tests.server.model.holds import acknowledged
from tests.server.model.nodes import Server, Worker
from tests.server.model.pictures import Memory

#: A connection: its two ends, the caller first. Of a message queue: (connection, direction).
Ends = tuple[str, str]


@dataclass
class Wire:
    """One connection: what is under way in each direction. `number` tells it from earlier ones between the same ends."""

    number: int
    there: tuple[bytes, ...] = ()
    back: tuple[bytes, ...] = ()


class World:
    """One state of everything. Nodes are copied when they are written to, and shared with other states before."""

    def __init__(self, case: Case, memory: Memory) -> None:
        self.case, self.memory = case, memory
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
        self.nodes[name], actions = self.memory.after(self.nodes[name], event, self.now, args)
        return actions

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
            self.post(caller, self.run(caller, "regain", listener))

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
                for route in node.outbox.routing_table.routes:
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
                    who, number = action.peer  # type: ignore[misc]
                    if (who, name) in self.wires and self.wires[who, name].number == number:
                        self.put((who, name), True, action.kind, action.request_id, action.meta, action.arrays)
                elif action.channel == PEER:
                    who, number = action.peer  # type: ignore[misc]
                    if (who, name) in self.wires and self.wires[who, name].number == number:
                        if action.kind == wire.ACK:
                            acknowledged(self, name, who, action)
                        self.put((who, name), True, action.kind, action.request_id, action.meta, action.arrays)
                elif action.channel == LINK:
                    self.put(
                        (name, str(action.peer)), False, action.kind, action.request_id, action.meta, action.arrays
                    )
                elif self.nodes[name].joined:
                    assert action.channel == CONTROL
                    self.put((name, "controller"), False, action.kind, action.request_id, action.meta, action.arrays)
            elif isinstance(action, Persist):
                self.disk = action.document
            elif isinstance(action, Close):
                if name == "controller" or action.channel == PEER:
                    who, number = action.peer  # type: ignore[misc]
                    if (who, name) in self.wires and self.wires[who, name].number == number:
                        self.disconnect((who, name))
                else:
                    self.disconnect((name, str(action.peer)))

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
                    self.post(name, news[1:])
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

    def post(self, name: str, sections: list[Section[int]]) -> None:
        """A worker sends what it can of its pushes."""
        for section in sections:
            if (name, section.head) not in self.wires:
                self.run(name, "lose", section.head)
                continue
            [request] = self.run(name, "posted", section)
            ids = section.shards.astype(np.int64)
            grads = np.full((len(ids), 1), section.payload, np.int64)
            meta = {
                "version": section.map_version,
                "worker": name,
                "incarnation": self.nodes[name].incarnation,
                "seq": section.seq,
                "step": section.seq - 1,
                "tick": True,
                "ops": [{"table": "t"}],
            }
            if self.case.aggregate:
                meta["aggregate"] = True
            self.put((name, section.head), False, wire.PUSH, request, meta, [section.shards, ids, grads])
