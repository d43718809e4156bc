"""A replica by itself and in pairs, on a clock: order, windows, leases, links that break, garbage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echelon.server.protocol import wire
from echelon.server.protocol.actions import LINK, PEER, Close, Send
from echelon.server.protocol.shard_map import ServerEntry, ShardMap
from echelon.server.replica import events
from echelon.server.replica.shard_state import ReplicaDiverged, ShardState
from echelon.server.replica.state import LEASE, ReplicaState
from tests.server.fake_store import TinyStore

SEATS = {name: ServerEntry(address="", host=name, incarnation=number) for number, name in enumerate("abc", start=1)}
W, X = "worker", "other worker"


def mapped(version: int, *chains: str, **more: Any) -> ShardMap:
    """A map by its chains, heads first."""
    count = len(chains)
    fields: dict[str, Any] = {"epochs": (1,) * count, "learners": ((),) * count, "workers": {"0": 9, "1": 10}}
    return ShardMap(
        version=version, servers=SEATS, chains=tuple(tuple(chain) for chain in chains), **{**fields, **more}
    )


def framed(kind: int, request: int, meta: dict[str, Any], arrays: Any = ()) -> wire.Frame:
    """A frame as it comes off the wire."""
    return wire.parse(wire.join_buffers(wire.encode(kind, request, meta, arrays)))


def pushed(seq: int, value: int = 1, *, shards: int = 1, worker: str = "0", **more: Any) -> wire.Frame:
    """A push of one number to every shard."""
    cover = np.arange(shards, dtype=np.uint16)
    meta = {"version": 1, "worker": worker, "incarnation": 9 + int(worker), "seq": seq, "step": seq - 1, "tick": True}
    return framed(
        wire.PUSH,
        abs(seq),
        {**meta, "ops": [{"table": "t"}], **more},
        [cover, cover.astype(np.int64), np.full((shards, 1), value)],
    )


def pulled(request: int, *, step: int = 0, bound: int | None = None, shards: int = 1, version: int = 1) -> wire.Frame:
    """A read of every shard."""
    cover = np.arange(shards, dtype=np.uint16)
    meta = {"version": version, "worker": "0", "incarnation": 9, "step": step, "bound": bound}
    return framed(wire.PULL, request, {**meta, "ops": [{"table": "t", "wire": "f4"}]}, [cover, cover.astype(np.int64)])


class Net:
    """Replicas and the links between them, which can be held up or cut."""

    def __init__(self, *names: str, shards: int = 1) -> None:
        self.now = 0.0
        self.nodes = {
            name: ReplicaState(
                name=name, incarnation=SEATS[name].incarnation, shards=ShardState(TinyStore(shards), shards)
            )
            for name in names
        }
        self.up: set[tuple[str, str]] = set()
        self.lose: set[tuple[str, str]] = set()
        self.told: list[tuple[str, int, dict[str, Any]]] = []
        self.answers: list[tuple[Any, str, int, dict[str, Any], list[Any]]] = []

    def do(self, name: str, actions: list[Any]) -> None:
        """Carry frames until nothing moves."""
        for action in actions:
            if isinstance(action, Send) and action.channel == LINK:
                if (name, action.peer) in self.up:
                    peer = ("from", name)
                    self.do(
                        str(action.peer),
                        events.on_frame(self.nodes[str(action.peer)], self.now, peer, framed(*action[2:])),
                    )
            elif isinstance(action, Send) and action.channel == PEER:
                if isinstance(action.peer, tuple):
                    head = action.peer[1]
                    if (head, name) in self.up and (name, head) not in self.lose:
                        self.do(head, events.on_link_frame(self.nodes[head], self.now, name, framed(*action[2:])))
                else:
                    arrays = [each.tolist() for each in action.arrays]
                    self.answers.append(
                        (action.peer, wire.KIND_NAMES[action.kind], action.request_id, action.meta, arrays)
                    )
            elif isinstance(action, Send):
                self.told.append((name, action.kind, action.meta))
            elif isinstance(action, Close) and action.channel == PEER:
                self.answers.append((action.peer, "closed", 0, {}, []))

    def install(self, new: ShardMap, *names: str) -> None:
        """Give a map; make the links that are wanted."""
        for name in names or tuple(self.nodes):
            self.do(name, events.on_map(self.nodes[name], self.now, new, []))
        self.link()

    def link(self) -> None:
        """Make the links that are wanted and are not there."""
        for name, node in self.nodes.items():
            for other in list(node.links):
                if (name, other) not in self.up and other in self.nodes:
                    self.up.add((name, other))
                    self.do(name, events.on_link_up(node, self.now, other))

    def cut(self, name: str, other: str) -> None:
        """A link breaks."""
        self.up.discard((name, other))
        self.do(name, events.on_link_lost(self.nodes[name], self.now, other))
        self.do(other, events.on_peer_lost(self.nodes[other], self.now, ("from", name)))

    def send(self, name: str, frame: wire.Frame, peer: Any = W) -> list[tuple[str, dict[str, Any], list[Any]]]:
        """A worker's frame; all that is answered to anyone since."""
        self.answers.clear()
        self.do(name, events.on_frame(self.nodes[name], self.now, peer, frame))
        return self.heard()

    def heard(self) -> list[tuple[str, dict[str, Any], list[Any]]]:
        """Answers to workers since they were last asked for."""
        found = [(kind, meta, arrays) for _, kind, _, meta, arrays in self.answers]
        self.answers.clear()
        return found

    def pass_time(self, seconds: float, *names: str) -> None:
        """Time passes, with ticks."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now += 0.05
            for name in names or tuple(self.nodes):
                self.do(name, events.on_tick(self.nodes[name], self.now))

    def rows(self, name: str) -> list[int]:
        """What a replica holds."""
        return [int(each) for each in self.nodes[name].shards.store.rows]  # type: ignore[attr-defined]


@pytest.fixture
def pair() -> Net:
    """Two replicas of one shard, the first its head."""
    net = Net("a", "b")
    net.install(mapped(1, "ab"))
    return net


def test_a_push_is_answered_when_both_have_it(pair: Net) -> None:
    """Once each, also when it is sent again; those that are ahead wait for their turn."""
    pair.lose.add(("b", "a"))
    assert pair.send("a", pushed(1)) == []
    assert pair.rows("b") == [1]
    pair.lose.clear()
    pair.cut("a", "b")
    pair.link()
    assert [kind for kind, _, _ in pair.heard()] == ["ACK"]
    assert pair.send("a", pushed(1)) == [("ACK", {"seq": 1}, [])]
    assert pair.send("a", pushed(3)) == []
    assert pair.send("a", pushed(2)) == [("ACK", {"seq": 2}, []), ("ACK", {"seq": 3}, [])]
    assert pair.rows("a") == pair.rows("b") == [3]
    assert pair.nodes["a"].shards.digest(0) == pair.nodes["b"].shards.digest(0)


def test_what_is_sent_again_waits_for_the_backup_too(pair: Net) -> None:
    """A repeated push is not known to be on the backup because the head has it."""
    pair.cut("a", "b")
    assert pair.send("a", pushed(1)) == []
    assert pair.send("a", pushed(1)) == []
    pair.link()
    assert [kind for kind, _, _ in pair.heard()] == ["ACK", "ACK"]


def test_a_refused_push_stays_refused(pair: Net) -> None:
    """Counted on all replicas, applied on none, and told so again."""
    assert pair.send("a", pushed(1, -1))[0][0] == "REFUSED"
    kind, meta, _ = pair.send("a", pushed(1, -1))[0]
    assert (kind, meta["message"]) == (
        "REFUSED",
        "push 1 was refused before, but the answer was lost; nothing of it was applied",
    )
    assert pair.send("a", pushed(2))[0][0] == "ACK"
    assert pair.rows("a") == pair.rows("b") == [1]


def test_a_replaced_head_never_acknowledges(pair: Net) -> None:
    """Neither by entries that are refused, nor when that answer is lost with its link."""
    assert pair.send("a", pushed(1))[0][0] == "ACK"
    pair.install(mapped(2, "b", epochs=(2,)), "b")
    pair.lose.add(("b", "a"))
    assert pair.send("a", pushed(2)) == []
    pair.lose.clear()
    pair.cut("a", "b")
    pair.link()
    assert [kind for kind, _, _ in pair.heard()] == ["STALE_MAP"]
    assert pair.rows("b") == [1]


def test_a_link_that_is_made_again_counts_from_one() -> None:
    """A learner that was a backup before is sent all of its snapshot."""
    net = Net("a", "b", "c")
    net.install(mapped(1, "ab"))
    for seq in range(1, 6):
        net.send("a", pushed(seq))
    net.install(mapped(2, "ac"))
    net.pass_time(1.0)
    net.send("a", pushed(6))
    assert net.rows("b") == [0]
    net.install(mapped(3, "ac", learners=(("b",),)))
    net.up.discard(("a", "b"))
    net.link()
    net.pass_time(1.0)
    assert net.rows("b") == [6]
    assert wire.CAUGHT_UP in [kind for _, kind, _ in net.told]


def test_equal_numbers_are_not_equal_states() -> None:
    """After a failover two replicas have as many entries, and not the same: the head's count."""
    net = Net("a", "b", "c")
    net.install(mapped(1, "abc"))
    assert net.send("a", pushed(1))[0][0] == "ACK"
    net.up.discard(("a", "b"))
    net.send("a", pushed(2, 10))  # only c has it besides a
    assert net.rows("c") == [11]
    assert net.rows("b") == [1]
    alone = mapped(2, "b", epochs=(2,))
    net.do("b", events.on_map(net.nodes["b"], net.now, alone, []))
    net.send("b", pushed(1, 100, worker="1", version=2))
    assert net.nodes["b"].shards.lsn[0] == net.nodes["c"].shards.lsn[0]
    net.install(mapped(3, "bc", epochs=(2,)), "b", "c")
    assert net.rows("c") == net.rows("b") == [101]
    assert net.nodes["b"].shards.digest(0) == net.nodes["c"].shards.digest(0)


def test_reads_end_with_the_lease(pair: Net) -> None:
    """A head that its backup does not answer stops reading; the backup that takes over waits until that is so."""
    pair.pass_time(0.2)
    assert pair.send("a", pulled(1))[0][0] == "ROWS"
    pair.lose.add(("b", "a"))
    pair.pass_time(LEASE + 0.05, "a")
    assert pair.send("a", pulled(2)) == []
    pair.lose.clear()
    pair.pass_time(0.2)
    assert [kind for kind, _, _ in pair.heard()] == ["ROWS"]
    pair.install(mapped(2, "b", epochs=(2,)), "b")
    assert pair.send("b", pulled(3, version=2)) == []
    # The head that was does not know yet, and has its lease: it may read, for as long as the new one does not.
    pair.pass_time(LEASE - 0.1, "b")
    assert pair.heard() == []
    pair.pass_time(0.2, "b")
    assert [kind for kind, _, _ in pair.heard()] == ["ROWS"]
    assert pair.send("a", pulled(4)) == []


def test_staleness_holds_reads_back(pair: Net) -> None:
    """A worker reads step c only when all have done c - s."""
    pair.pass_time(0.2)
    for seq in range(1, 4):
        pair.send("a", pushed(seq))
    assert pair.send("a", pulled(1, step=3, bound=2)) == []
    assert pair.send("a", pulled(2, step=3, bound=3))[0][0] == "ROWS"
    assert pair.send("a", pulled(3, step=3))[0][0] == "ROWS"
    kinds = [kind for kind, _, _ in pair.send("a", pushed(1, worker="1"), peer=X)]
    assert sorted(kinds) == ["ACK", "ROWS"]
    # One that left is not waited for.
    assert pair.send("a", pulled(4, step=9, bound=0)) == []
    pair.install(mapped(2, "ab", workers={}))
    assert [kind for kind, _, _ in pair.heard()] == ["ROWS"]


def test_a_synchronous_step_is_applied_once(pair: Net) -> None:
    """When all have ticked, the same on both replicas; a read of the next step waits for it."""
    pair.pass_time(0.2)
    pair.send("a", pushed(1, 2, aggregate=True))
    assert pair.rows("a") == [0]
    assert pair.send("a", pulled(7, step=1, bound=0)) == []
    answered = pair.send("a", pushed(1, 3, worker="1", aggregate=True), peer=X)
    assert [arrays for kind, _, arrays in answered if kind == "ROWS"] == [[[[5]]]]
    assert pair.rows("a") == pair.rows("b") == [5]
    # What is pending moves with a snapshot.
    pair.send("a", pushed(2, 4, aggregate=True))
    state = pair.nodes["a"].shards
    other = ShardState(TinyStore(1), 1)
    other.install(0, state.snapshot(0))
    assert other.digest(0) == state.digest(0)


def test_workers_are_counted_from_the_least_clock(pair: Net) -> None:
    """A new worker begins where the slowest is; the log says so to all replicas."""
    pair.pass_time(0.2)
    for seq in range(1, 4):
        pair.send("a", pushed(seq))
        pair.send("a", pushed(seq, worker="1"), peer=X)
    meta = {"version": 1, "worker": "2", "incarnation": 11}
    clock = framed(wire.CLOCK, 1, meta, [np.zeros(1, np.uint16)])
    assert pair.send("a", clock) == []
    pair.install(mapped(2, "ab", workers={"0": 9, "1": 10, "2": 11}))
    told = {"min": 3, "max": 3, "furthest": 3, "pending": False}
    assert pair.heard() == [("CLOCK_REPLY", told, [])]
    assert pair.nodes["a"].shards.digest(0) == pair.nodes["b"].shards.digest(0)


def test_a_former_life_is_refused(pair: Net) -> None:
    """A worker that was started again has its former pushes refused, not applied."""
    pair.install(mapped(2, "ab", workers={"0": 20}))
    assert pair.send("a", pushed(1))[0][1]["error"] == "Superseded"


def test_newer_maps_are_waited_for(pair: Net) -> None:
    """Frames of a map that is not here yet wait; those of an older one are sent back."""
    assert pair.send("b", pushed(1))[0][0] == "STALE_MAP"
    assert pair.send("b", pushed(1, version=2)) == []
    pair.install(mapped(2, "ba", epochs=(2,)))
    assert [kind for kind, _, _ in pair.heard()] == ["ACK"]
    # A map without oneself is the controller's to say, not a neighbour's.
    pair.install(replace(mapped(3, "a"), servers={"a": SEATS["a"]}), "b")
    assert pair.nodes["b"].map.version == 2


def test_garbage_closes_its_connection_only(pair: Net) -> None:
    """Frames that are none of a worker's, now or when their turn comes, end that worker's connection and nothing else."""
    cover = np.zeros(1, np.uint16)
    bad = [
        framed(wire.PUSH, 1, {}, [cover]),
        framed(wire.PUSH, 1, {"version": 1}, []),
        pushed(1, version="x"),
        pushed(1, lr={"t": 10**400}),
        pushed(1, lr={"t": float("1e308") * 10}),
        pushed(1, lr={"t": 1e301}),
        pushed(1, lr={"t": True}),
        pushed(-1),
        framed(wire.PULL, 1, {"version": 1, "ops": []}, [np.full(1, 7, np.uint16)]),
        framed(wire.PULL, 1, {"version": 1, "ops": [{"table": "t"}], "bound": None, "step": 0}, [cover]),
        framed(wire.LOG_ENTRY, 1, {"n": 1, "v": 1}, [cover]),
        framed(wire.MAP_UPDATE, 1, {"map": {}, "specs": []}),
        framed(wire.HELLO, 1, {"member": 1}),
        framed(99, 1, {}),
    ]
    pair.pass_time(0.2)
    for frame in bad:
        assert pair.send("a", frame) == [("closed", {}, [])], frame
    # One that has to wait first.
    late = pushed(2, ops=[{"table": "t"}, {"table": "u"}])
    assert pair.send("a", late) == []
    assert ("closed", {}, []) in pair.send("a", pushed(1), peer=X)
    assert pair.rows("a") == pair.rows("b") == [1]


def test_what_does_not_follow_ends_a_replica(pair: Net) -> None:
    """A backup that cannot take what its head took must not go on as one."""
    pair.send("a", pushed(1))
    pair.nodes["b"].shards.dedup.last_seq[:] = 5
    with pytest.raises(ReplicaDiverged):
        pair.send("a", pushed(2))


def test_a_replica_that_cannot_be_reached_is_told_of(pair: Net) -> None:
    """The controller sees both; only the head knows that they do not see each other."""
    pair.cut("a", "b")
    assert events.unreachable_replicas(pair.nodes["a"], pair.now) == []
    pair.pass_time(1.2, "a")
    assert events.unreachable_replicas(pair.nodes["a"], pair.now) == ["b"]


def test_a_head_without_replicas_doubts_itself(pair: Net) -> None:
    """Where there should be replicas, one that does not hear the controller may have been replaced, and nobody would tell it."""
    alone = pair.nodes["a"]
    pair.install(mapped(2, "a"), "a")
    alone.target_replicas = 2
    pair.pass_time(0.5, "a")
    assert pair.send("a", pushed(1))[0][0] == "ACK"
    pair.pass_time(1.0, "a")
    assert pair.send("a", pushed(2)) == []
    assert pair.send("a", pulled(3)) == []
    alone.controller_heard_at = pair.now
    pair.pass_time(0.1, "a")
    assert sorted(kind for kind, _, _ in pair.heard()) == ["ACK", "ROWS"]


def test_restored_shards_take_what_comes_next() -> None:
    """A shard that went back to a checkpoint while workers went on: the next push may leave a gap, and clocks do not hold back."""
    made = Net("a")
    made.install(mapped(1, "a"))
    for seq in range(1, 4):
        made.send("a", pushed(seq))
    kept = made.nodes["a"].shards.snapshot(0)
    net = Net("a", "b")
    for node in net.nodes.values():
        node.load_shard = lambda folder, shard: kept
    net.install(mapped(5, "ab", epochs=(5,), restored_from={0: ("folder", 5)}, rolled_back_shards=frozenset({0})))
    assert net.send("a", pushed(9)) == []
    for name in "ab":
        net.do(name, events.load_next_shard(net.nodes[name], net.now))
    net.pass_time(1.0)
    assert [kind for kind, _, _ in net.heard()] == ["ACK"]
    assert net.send("a", pulled(1, step=9, bound=0))[0][0] == "ROWS"
    assert net.send("a", pushed(11)) == []
    assert net.rows("a") == net.rows("b") == [4]


def test_rows_expire_on_all_that_is_headed_before_that_is_said() -> None:
    """Also on shards that hand over just then."""
    net = Net("a", "b")
    net.install(mapped(1, "ab"))
    net.do("a", events.on_controller_frame(net.nodes["a"], net.now, framed(wire.HANDOVER, 0, {"shards": [0]})))
    before = int(net.nodes["a"].shards.lsn[0])
    net.do(
        "a",
        events.on_controller_frame(
            net.nodes["a"], net.now, framed(wire.EXPIRE, 0, {"table": "t", "older": 1, "of": 5})
        ),
    )
    assert wire.DONE not in [kind for _, kind, _ in net.told]
    net.pass_time(5.0)  # nobody takes it over: it is taken back
    assert [meta for _, kind, meta in net.told if kind == wire.DONE] == [{"of": 5}]
    assert net.nodes["a"].shards.lsn[0] == net.nodes["b"].shards.lsn[0] == before + 1


def test_pushes_do_not_wait_for_pauses_between_snapshots_of_backups() -> None:
    """After a head's death those that lack its last entry are brought up one after the other, without a tick between them."""
    net = Net("a", "b", "c", shards=4)
    net.install(mapped(1, "abc", "abc", "abc", "abc"))
    net.cut("a", "c")
    net.send("a", pushed(1, shards=4))
    net.up -= {("a", "b")}
    net.lose.add(("c", "b"))
    net.install(mapped(2, "bc", "bc", "bc", "bc", epochs=(2,) * 4), "b")
    net.nodes["b"].links["c"].next_transfer_at = net.now + 10.0  # as after a learner's
    net.lose.clear()
    net.cut("b", "c")
    net.link()
    assert net.rows("b") == net.rows("c") == [1] * 4
    assert [kind for kind, _, _ in net.send("b", pushed(2, shards=4, version=2))] == ["ACK"]


def test_unreadable_checkpoints_are_told_of() -> None:
    """The shard is given back; the server goes on."""
    net = Net("a", shards=2)
    net.install(mapped(1, "a", "a"))
    net.send("a", pushed(1, shards=2))
    net.nodes["a"].load_shard = lambda folder, shard: [][0]
    net.install(mapped(2, "a", "a", epochs=(1, 2), restored_from={1: ("folder", 2)}))
    net.do("a", events.load_next_shard(net.nodes["a"], net.now))
    assert wire.RESTORE_FAILED in [kind for _, kind, _ in net.told]
    assert net.rows("a")[0] == 1


def test_lives_that_are_over_are_forgotten_on_all_replicas_and_never_taken_again() -> None:
    """What they pushed stays, how far they got stays; their rows of the windows go to others."""
    net = Net("a", "b", shards=2)
    net.install(mapped(1, "ab", "ab"))
    for seq in (1, 2):
        assert net.send("a", pushed(seq, shards=2, worker="1"), X)[0][0] == "ACK"
    assert net.send("a", pushed(1, shards=2))[0][0] == "ACK"
    net.install(mapped(2, "ab", "ab", workers={"0": 9}, horizon=10, retained_incarnations=frozenset({9})))
    net.pass_time(1.0)
    for name in "ab":
        windows = net.nodes[name].shards.dedup
        assert list(windows.slots) == [("0", 9)]
        assert windows.departed_max_clock.tolist() == [2, 2]
    assert net.nodes["a"].shards.digest(0) == net.nodes["b"].shards.digest(0)
    kind, meta, _ = net.send("a", pushed(3, shards=2, worker="1"), X)[0]
    assert (kind, meta["error"]) == ("REFUSED", "Superseded")
    assert net.send("a", pushed(2, shards=2))[0][0] == "ACK"
    assert net.rows("a") == net.rows("b") == [4, 4]
    slots = {net.nodes["a"].shards.dedup.get_slot(f"new {number}", 11) for number in range(4)}
    assert len(slots) == 4
    assert net.nodes["a"].shards.dedup.slots["0", 9] not in slots
    assert not net.nodes["a"].shards.dedup.last_seq[sorted(slots)].any()


def test_a_first_worker_after_all_were_forgotten_goes_on_where_they_stopped() -> None:
    """Steps are counted for the job, not for the workers that happen to be there."""
    net = Net("a", "b")
    net.install(mapped(1, "ab", workers={"0": 9}))
    for seq in (1, 2, 3):
        net.send("a", pushed(seq))
    net.install(mapped(2, "ab", workers={}, horizon=9))
    net.pass_time(1.0)
    assert not net.nodes["b"].shards.dedup.slots
    net.install(mapped(3, "ab", workers={"0": 20}, horizon=9))
    windows = net.nodes["b"].shards.dedup
    assert windows.clocks[windows.slots["0", 20]].tolist() == [3]


def test_pushes_go_on_between_the_parts_of_a_snapshot() -> None:
    """A learner gets what was pushed meanwhile behind the last part."""
    net = Net("a", "b", "c")
    head, learner = net.nodes["a"], net.nodes["c"]
    head.max_parts_in_flight = 1
    net.install(mapped(1, "ab"))
    assert net.send("a", pushed(1))[0][0] == "ACK"
    for name in "abc":
        net.do(name, events.on_map(net.nodes[name], 0.0, mapped(2, "ab", learners=(("c",),)), []))
    actions = events.on_link_up(head, 0.0, "c")
    for _ in range(2):  # greetings, and how far it is; then the first part is lost
        [asked] = [framed(*each[2:]) for each in actions if isinstance(each, Send) and each.channel == LINK]
        [answer] = [
            framed(*each[2:]) for each in events.on_frame(learner, 0.0, ("from", "a"), asked) if isinstance(each, Send)
        ]
        actions = events.on_link_frame(head, 0.0, "c", answer)
    assert [each.kind for each in actions if isinstance(each, Send)] == [wire.SNAPSHOT]
    assert net.send("a", pushed(2))[0][0] == "ACK"
    net.link()
    assert net.rows("c") == [2]
    assert learner.shards.digest(0) == head.shards.digest(0)
    assert net.send("a", pushed(3))[0][0] == "ACK"
    assert net.rows("c") == [3]


def test_what_follows_from_a_greeting_goes_out_behind_what_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link comes back: the next part of a snapshot must not overtake an entry that was numbered before it."""
    net = Net("a", "c", shards=2)
    head = net.nodes["a"]
    head.max_parts_in_flight = 1
    net.install(mapped(1, "ac", "a"))
    assert net.send("a", pushed(1, shards=2))[0][0] == "ACK"
    whole = events.on_link_frame
    without_acks = lambda *event: [] if event[-1].kind == wire.REPLICA_ACK else whole(*event)  # noqa: E731
    monkeypatch.setattr(events, "on_link_frame", without_acks)
    net.install(mapped(2, "ac", "a", learners=((), ("c",))))  # the first part arrives, its answer does not
    net.up.clear()
    assert net.send("a", pushed(2, shards=2)) == []  # nor does an entry of the other shard
    monkeypatch.setattr(events, "on_link_frame", whole)
    net.cut("a", "c")
    net.link()
    assert [kind for kind, _, _ in net.heard()] == ["ACK"]
    assert net.rows("c") == net.rows("a") == [2, 2]
