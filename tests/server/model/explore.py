"""All worlds that a case can come to."""

from __future__ import annotations

import random
import time
from collections import deque

from echelon.server.controller import members, rebalance
from tests.server.model.case import Broken, Case, Found
from tests.server.model.ending import drain_wires, settle
from tests.server.model.holds import check
from tests.server.model.misfortunes import calm, controller, steps, tick
from tests.server.model.nodes import Server, Worker
from tests.server.model.pictures import Memory
from tests.server.model.world import World


def begin(case: Case) -> World:
    """All have joined, and nothing is under way."""
    world = World(case, Memory())
    canonical = world.memory.canonical
    world.nodes["controller"] = canonical(controller(world, None))
    for number in range(case.servers):
        world.nodes[f"s{number}"] = canonical(Server(name=f"s{number}"))
    world.reconnect()
    for _ in range(3):
        drain_wires(world)
        tick(world)
    for number in range(case.workers):
        world.nodes[f"w{number}"] = canonical(Worker(name=f"w{number}", left=0))
        world.reconnect()
        drain_wires(world)
    for name in world.servers():
        world.act(name, world.run(name, "server tick"))
    drain_wires(world)
    for name in world.workers():
        world.run(name, "begins", case.pushes)
    assert not any(each.there or each.back for each in world.wires.values())
    return world


def explore(case: Case, *, seconds: float = 1e9, states: int = 10**9, ends: int = 0, seed: int = 0) -> Found:
    """All that can happen in a case, or as much as time allows (then in an order that the seed draws). Raises Broken.

    Of a part: at least so many states and so many ends, unless the time is over.
    """
    waits, members.REBALANCE_DELAY = members.REBALANCE_DELAY, 0.0
    together, rebalance.LEARNER_BATCH_DELAY = (
        rebalance.LEARNER_BATCH_DELAY,
        0.0 if case.single else rebalance.LEARNER_BATCH_DELAY,
    )
    began = time.monotonic()
    drawn = random.Random(seed)
    try:
        first = begin(case)
        for label in case.before:
            dict(steps(first) if label != "calm" else {"calm": calm}.items())[label](first)
        seen = {first.key()}
        stack = deque([first])
        ended = 0
        while stack:
            if time.monotonic() - began > seconds or (len(seen) >= states and ended >= ends):
                return Found(states=len(seen), ends=ended, seconds=time.monotonic() - began, whole=False)
            # Half of the time the shortest story, half of the time the longest: early mistakes are met soon, and so are ends.
            world = stack.pop() if drawn.random() < 0.5 else stack.popleft()
            choices = list(steps(world))
            if not [label for label, _ in choices if not label.startswith(("crash", "judge", "cut", "join", "drain"))]:
                ended += 1
                end = world.clone()
                try:
                    settle(end)
                except Broken as broken:
                    raise Broken(broken.what, (*world.trail, "the end")) from None
            drawn.shuffle(choices)
            for label, step in choices:
                other = world.clone()
                other.trail = (*world.trail, label)
                try:
                    step(other)
                    check(other)
                except Broken as broken:
                    raise Broken(broken.what, other.trail) from None
                except Exception as error:
                    raise Broken(f"{type(error).__name__}: {error}", other.trail) from error
                key = other.key()
                if key not in seen:
                    seen.add(key)
                    stack.append(other)
        return Found(states=len(seen), ends=ended, seconds=time.monotonic() - began, whole=True)
    finally:
        members.REBALANCE_DELAY, rebalance.LEARNER_BATCH_DELAY = waits, together
