"""The fair ending of a world: the network behaves, time passes, and everything must come to its end."""

from __future__ import annotations

from echelon.server.protocol import wire
from tests.server.model.holds import check, finished
from tests.server.model.misfortunes import push, start
from tests.server.model.world import World


def settle(world: World) -> None:
    """The network behaves, time passes: everything must come to its end."""
    if "controller" not in world.nodes:
        start(world)
    for turn in range(60):
        drain_wires(world)
        if turn % 2 == 0 and _done(world):
            break
        world.now += 1.0
        world.act("controller", world.run("controller", "tick", None))
        for name in world.servers():
            world.act(name, world.run(name, "server tick"))
            server = world.nodes[name]
            if server.joined and server.replica is not None:
                world.put((name, "controller"), False, wire.HEARTBEAT, 0, {"version": server.replica.map.version})
        world.reconnect()
    finished(world)


def drain_wires(world: World) -> None:
    """Everything that is under way arrives, and workers push as they can."""
    for _ in range(5000):
        busy = [(ends, bool(each.back)) for ends, each in world.wires.items() if each.there or each.back]
        for name in world.workers():
            worker = world.nodes[name]
            if worker.left and worker.outbox is not None and len(worker.outbox) < 2:
                push(world, name)
                busy.append((("", ""), False))
        if not busy:
            return
        for ends, back in busy:
            if ends in world.wires and (world.wires[ends].back if back else world.wires[ends].there):
                world.deliver(ends, back)
                check(world)
    world.fail("messages go on for ever")


def _done(world: World) -> bool:
    core = world.nodes["controller"]
    if core.map.lost_shards or any(core.map.learners):
        return bool(core.map.lost_shards)
    if any(name not in world.nodes for name in core.map.servers):
        return False
    if any(world.nodes[name].replica is None for name in world.servers()):
        return False
    return all(not world.nodes[name].left and not len(world.nodes[name].outbox) for name in world.workers())
