"""What may happen next in a world: messages arrive, workers push, and misfortunes that the case has a budget for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from echelon.server.controller.state import ControllerState, open_controller
from echelon.server.protocol import wire
from tests.server.model.nodes import Server, Worker
from tests.server.model.world import Ends, World

#: A watch or a report of an installed map that comes late is a tick of the controller that comes late; a greeting that comes late is a
#: connection that is made late.
_EAGER = {wire.WATCH, wire.MAP_INSTALLED, wire.HELLO, wire.MAP_REQUEST}


def _kind(message: bytes) -> int:
    return int.from_bytes(message[4:6], "little")


def push(world: World, name: str) -> None:
    """A worker makes its next push."""
    number = world.case.pushes - world.nodes[name].left + 1
    # A digit of its own for each push of each worker: the sum says what is in it.
    place = int(name[1:]) * world.case.pushes + number - 1
    world.post(name, world.run(name, "push", 8**place))


def steps(world: World) -> Iterator[tuple[str, Callable[[World], None]]]:
    """What may happen next. Messages that change nothing but what the receiver may do later go first, alone."""
    for ends, each in world.wires.items():
        if each.there and _kind(each.there[0]) in _EAGER:
            yield wire.KIND_NAMES[_kind(each.there[0])], lambda world, ends=ends: world.deliver(ends, False)
            return
    for ends, each in world.wires.items():
        if each.there:
            yield (
                f"{wire.KIND_NAMES[_kind(each.there[0])]} {ends[0]}>{ends[1]}",
                lambda world, ends=ends: world.deliver(ends, False),
            )
        if each.back:
            yield (
                f"{wire.KIND_NAMES[_kind(each.back[0])]} {ends[1]}>{ends[0]}",
                lambda world, ends=ends: world.deliver(ends, True),
            )
    for name, node in world.nodes.items():
        if isinstance(node, Worker) and node.left and node.outbox is not None and len(node.outbox) < 2:
            yield f"push {name}", lambda world, name=name: push(world, name)
    if "controller" in world.nodes:
        trial = copy.copy(world)
        trial.nodes = dict(world.nodes)
        if trial.run("controller", "tick", None):
            yield "tick", tick
    else:
        yield "controller starts", start
    yield from _misfortunes(world)


def _misfortunes(world: World) -> Iterator[tuple[str, Callable[[World], None]]]:
    budget, up = world.budget, "controller" in world.nodes
    names = world.servers()
    if budget["crash"] and len(names) > 1:
        for name in names:
            yield f"crash {name}", lambda world, name=name: crash(world, name)
    if budget["judge"] and up:
        for name in names:
            if world.nodes[name].joined:
                yield f"judge {name}", lambda world, name=name: judge(world, name)
    if budget["cut"]:
        for ends in world.wires:
            yield f"cut {ends[0]}-{ends[1]}", lambda world, ends=ends: cut(world, ends)
    if budget["controller"] and up:
        yield "controller crashes", lose
    if budget["join"]:
        yield "join", join
    if budget["drain"] and up:
        for name in names:
            yield f"drain {name}", lambda world, name=name: drain(world, name)


def calm(world: World) -> None:
    """Everything that is under way arrives, everything that can wait is done; no new pushes."""
    for _ in range(40):
        while busy := [(ends, bool(each.back)) for ends, each in world.wires.items() if each.there or each.back]:
            for ends, back in busy:
                if ends in world.wires and (world.wires[ends].back if back else world.wires[ends].there):
                    world.deliver(ends, back)
        tick(world)


def tick(world: World) -> None:
    """The controller does what can wait."""
    world.act("controller", world.run("controller", "tick", None))
    world.reconnect()


def crash(world: World, name: str) -> None:
    """A server is gone, with all that it held."""
    world.budget["crash"] -= 1
    _remove(world, name)
    if "controller" in world.nodes:
        _bury(world, name)
    world.reconnect()


def _remove(world: World, name: str) -> None:
    world.nodes.pop(name)
    for ends in [each for each in world.wires if name in each]:
        world.disconnect(ends)


def judge(world: World, name: str) -> None:
    """The controller takes a live server for dead; what that one sent is still under way."""
    world.budget["judge"] -= 1
    world.disconnect((name, "controller"))
    _bury(world, name)
    world.reconnect()


def _bury(world: World, name: str) -> None:
    world.act("controller", world.run("controller", "tick", name))


def cut(world: World, ends: Ends) -> None:
    """A connection breaks and is made again."""
    world.budget["cut"] -= 1
    world.disconnect(ends)
    world.reconnect()


def lose(world: World) -> None:
    """The controller crashes; its disk stays."""
    world.budget["controller"] -= 1
    world.nodes.pop("controller")
    for ends in [each for each in world.wires if each[1] == "controller"]:
        world.disconnect(ends)


def start(world: World) -> None:
    """The controller comes back."""
    world.nodes["controller"] = world.memory.canonical(controller(world, world.disk))
    world.reconnect()


def controller(world: World, document: dict[str, Any] | None) -> ControllerState:
    """The controller as its disk has it."""
    case = world.case
    return open_controller(document, num_shards=case.shards, replicas=case.replicas, expect=case.servers, now=world.now)


def join(world: World) -> None:
    """A new server."""
    world.budget["join"] -= 1
    name = f"s{world.case.servers}"
    world.nodes[name] = world.memory.canonical(Server(name=name))
    world.reconnect()


def drain(world: World, name: str) -> None:
    """A server is to be emptied."""
    world.budget["drain"] -= 1
    message = b"".join(wire.encode(wire.DRAIN, 1, {"server": name}))
    world.act("controller", world.run("controller", "heard", ("admin", 0), message))
