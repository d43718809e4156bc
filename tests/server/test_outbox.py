"""The outbox under every kind of trouble: each push reaches each shard once and in order, whatever is cut, refused or moved."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.server.client.outbox import Outbox, Section
from echelon.server.client.routing import RoutingTable

SHARDS = 4
SERVERS = ("a", "b", "c")


@dataclass(frozen=True)
class Map:
    version: int
    chains: tuple[tuple[str, ...], ...]
    epochs: tuple[int, ...]

    def move(self, shard: int, chain: tuple[str, ...]) -> Map:
        """Another chain for a shard; its epoch begins anew only with another head."""
        epoch = self.epochs[shard] if self.chains[shard][0] == chain[0] else self.version + 1
        chains = (*self.chains[:shard], chain, *self.chains[shard + 1 :])
        epochs = (*self.epochs[:shard], epoch, *self.epochs[shard + 1 :])
        return Map(self.version + 1, chains, epochs)


FIRST = Map(1, (("a", "b"), ("a", "b"), ("b", "c"), ("c", "a")), (1, 1, 1, 1))


@dataclass
class Shard:
    """What the chain as a whole holds: `held` of it is on every replica, and so survives its head."""

    applied: list[int] = field(default_factory=list)
    held: int = 0


@dataclass
class Cable:
    """A connection: sections on their way, and those that the head has applied and not answered yet. A cut cable may still deliver."""

    head: str
    up: deque[Section[int]] = field(default_factory=deque)
    applied: list[Section[int]] = field(default_factory=list)
    whole: bool = True


class Cluster:
    """Servers that fence and skip as echelon's do, each with a map of its own age; one worker with an outbox."""

    def __init__(self) -> None:
        self.maps = [FIRST]
        self.known = dict.fromkeys(SERVERS, FIRST)
        self.shards = [Shard() for _ in range(SHARDS)]
        self.outbox: Outbox[int] = Outbox(FIRST)
        self.cables: list[Cable] = [Cable(name) for name in SERVERS]
        self.wanted = FIRST.version
        self.acknowledged = 0

    def send(self, sections: list[Section[int]]) -> None:
        for section in sections:
            [cable] = [each for each in self.cables if each.head == section.head and each.whole]
            cable.up.append(section)

    def push(self) -> None:
        self.send(self.outbox.push(self.outbox.last_seq + 1))

    def deliver(self, cable: Cable) -> None:
        """The head reads one section: holds, refuses or applies it."""
        if not cable.up:
            return
        section, mine = cable.up[0], self.known[cable.head]
        if section.map_version > mine.version:
            return
        cable.up.popleft()
        if any(mine.chains[s][0] != cable.head or section.map_version < mine.epochs[s] for s in section.shards):
            if cable.whole and mine.version > self.outbox.map_version:
                self.wanted = max(self.wanted, mine.version)
            return
        for each in section.shards:
            # A head that was replaced and does not know it yet changes only what will be thrown away.
            if section.map_version < self.maps[-1].epochs[each]:
                continue
            applied = self.shards[each].applied
            if not applied or applied[-1] < section.seq:
                applied.append(section.seq)
        cable.applied.append(section)

    def answer(self, cable: Cable, which: int) -> None:
        """Every backup has one of the applied sections: the head says so. A head that is fenced by a newer map cannot."""
        if not cable.applied:
            return
        section = cable.applied.pop(which % len(cable.applied))
        newest = self.maps[-1]
        if any(section.map_version < newest.epochs[s] for s in section.shards):
            return
        for each in section.shards:
            shard = self.shards[each]
            assert section.seq in shard.applied, "answered, though a failover has dropped it"
            shard.held = max(shard.held, shard.applied.index(section.seq) + 1)
        if cable.whole:
            self.acknowledged += self.outbox.acknowledge(section)

    def fail_over(self, shard: int, chain: tuple[str, ...], kept: int) -> None:
        """The controller gives a shard another chain. What not all replicas held may be gone."""
        self.maps.append(self.maps[-1].move(shard, chain))
        each = self.shards[shard]
        if self.maps[-1].epochs[shard] == self.maps[-1].version:
            each.applied = each.applied[: max(each.held, len(each.applied) - kept)]

    def tell_server(self, name: str, version: int) -> None:
        self.known[name] = self.maps[max(self.known[name].version, version) - 1]

    def tell_worker(self, version: int) -> None:
        self.send(self.outbox.install_map(self.maps[version - 1]))

    def cut(self, name: str) -> None:
        for cable in self.cables:
            cable.whole &= cable.head != name
        self.outbox.mark_unreachable(name)
        self.cables.append(Cable(name))
        self.send(self.outbox.mark_reachable(name))

    def check(self) -> None:
        for shard in self.shards:
            assert shard.applied == list(range(1, len(shard.applied) + 1)), "lost, twice or out of order"
            assert len(shard.applied) >= self.acknowledged, "acknowledged and not there"

    def settle(self) -> None:
        """The trouble ends: all hear the newest map, all cables deliver."""
        for name in SERVERS:
            self.tell_server(name, self.maps[-1].version)
        assert self.wanted <= self.maps[-1].version
        self.tell_worker(self.maps[-1].version)
        for _ in range(1000):
            for cable in self.cables:
                self.deliver(cable)
                self.answer(cable, 0)
        self.check()


chains = st.permutations(SERVERS).flatmap(lambda order: st.sampled_from([tuple(order[:n]) for n in (1, 2, 3)]))
number = st.integers(0, 7)
acts = st.one_of(
    st.just(("push",)),
    st.tuples(st.just("deliver"), number),
    st.tuples(st.just("answer"), number, number),
    st.tuples(st.just("move"), st.integers(0, SHARDS - 1), chains, number),
    st.tuples(st.just("server"), st.sampled_from(SERVERS), number),
    st.tuples(st.just("worker"), number),
    st.tuples(st.just("cut"), st.sampled_from(SERVERS)),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(st.lists(acts, max_size=60))
def test_each_push_reaches_each_shard_once_and_in_order(script):
    cluster = Cluster()
    for act, *values in script:
        match act:
            case "push":
                cluster.push()
            case "deliver":
                cluster.deliver(cluster.cables[values[0] % len(cluster.cables)])
            case "answer":
                cluster.answer(cluster.cables[values[0] % len(cluster.cables)], values[1])
            case "move":
                cluster.fail_over(values[0], values[1], values[2])
            case "server":
                cluster.tell_server(values[0], 1 + values[1] % len(cluster.maps))
            case "worker":
                cluster.tell_worker(1 + values[0] % len(cluster.maps))
            case "cut":
                cluster.cut(values[0])
        cluster.check()
    cluster.settle()
    assert len(cluster.outbox) == 0
    assert cluster.acknowledged == cluster.outbox.last_seq
    assert all(len(shard.applied) == cluster.outbox.last_seq for shard in cluster.shards)


def test_a_section_covers_its_route_and_all_sections_cover_all():
    outbox: Outbox[str] = Outbox(FIRST)
    sections = outbox.push("gradients")
    assert [(each.head, list(each.shards)) for each in sections] == [("a", [0, 1]), ("b", [2]), ("c", [3])]
    assert all(each.covers_route and each.payload == "gradients" and each.seq == 1 for each in sections)
    assert [outbox.acknowledge(each) for each in sections] == [0, 0, 1]
    assert (len(outbox), outbox.oldest_pending_seq) == (0, None)


def test_only_what_is_unacknowledged_is_sent_again():
    outbox: Outbox[str] = Outbox(FIRST)
    first, second = outbox.push("one"), outbox.push("two")
    outbox.acknowledge(first[0])
    again = outbox.install_map(FIRST.move(0, ("b", "c")))
    # Shards 0 and 1 of the second push were one section: an epoch overtook one of them, so both are given again.
    assert [(each.seq, each.head, list(each.shards), each.map_version) for each in again] == [
        (2, "b", [0], 2),
        (2, "a", [1], 2),
    ]
    assert not again[0].covers_route
    assert again[1].covers_route
    outbox.acknowledge(second[0])  # the old answer was on its way: it counts
    assert outbox.oldest_pending_seq == 1
    assert outbox.install_map(FIRST) == []


def test_an_unreachable_head_gets_everything_in_order_when_it_is_back():
    outbox: Outbox[str] = Outbox(FIRST)
    outbox.push("one")
    outbox.mark_unreachable("b")
    assert [each.head for each in outbox.push("two")] == ["a", "c"]
    assert [(each.seq, each.head) for each in outbox.mark_reachable("b")] == [(1, "b"), (2, "b")]
    assert outbox.mark_reachable("b") == []


def test_a_refused_section_is_not_sent_again_and_says_nothing_of_the_one_before():
    outbox: Outbox[str] = Outbox(FIRST)
    first, second = outbox.push("one"), outbox.push("two")
    outbox.refuse(second[1])
    outbox.mark_unreachable("b")
    assert [(each.seq, each.head) for each in outbox.mark_reachable("b")] == [(1, "b")]
    for each in (*first, second[0], second[2]):
        outbox.acknowledge(each)
    assert len(outbox) == 0


def test_shards_without_a_living_replica_are_on_no_route():
    chains = [("a",), (), ("a",)]
    [route] = RoutingTable.from_chains(chains).routes
    assert list(route.shards) == [0, 2]
    outbox: Outbox[str] = Outbox(replace(FIRST, chains=tuple(chains), epochs=(1, 1, 1)))
    for each in outbox.push("one"):
        outbox.acknowledge(each)
    assert len(outbox) == 1
    [late] = outbox.install_map(Map(2, (("a",), ("b",), ("a",)), (1, 2, 1)))
    assert np.array_equal(late.shards, [1])
    assert outbox.acknowledge(late) == 1
