"""The controller by itself, on a clock: who is in the map, and that it is on the disk before anyone hears of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.errors import DocumentError, ServerError
from echelon.server.controller import events, rebalance
from echelon.server.controller.events import SERVER_RECONNECT_GRACE, WORKER_LEASE, make_report
from echelon.server.controller.members import REBALANCE_DELAY
from echelon.server.controller.shard_placement import build_chain, compute_target_chains, interleave_hosts
from echelon.server.controller.state import REJOIN_GRACE, SERVER_LEASE, open_controller
from echelon.server.protocol import wire
from echelon.server.protocol.actions import LogEvent, Persist, Send, WriteManifest
from echelon.server.protocol.shard_map import ShardMap
from echelon.server.status import format_summary


class Job:
    """A controller, and everyone who speaks to it."""

    def __init__(self, document: dict[str, Any] | None = None, **options: Any) -> None:
        self.now = 100.0
        self.disk = document
        self.core = open_controller(document, now=self.now, **{"num_shards": 8, "replicas": 2, "expect": 2, **options})
        self.heard: list[tuple[Any, int, int, dict[str, Any]]] = []
        self.notes: list[str] = []
        self.names: dict[Any, str] = {}
        self.manifests: list[dict[str, Any]] = []
        #: Why no manifest can be written.
        self.full: str | None = None

    def do(self, actions: list[Any]) -> None:
        """What it wants; maps must be on the disk before they are sent."""
        for action in actions:
            if isinstance(action, Persist):
                self.disk = action.document
            elif isinstance(action, Send):
                if "map" in action.meta:
                    assert self.disk is not None
                    assert self.disk["map"] == action.meta["map"], "seen before it was written"
                self.heard.append((action.peer, action.kind, action.request_id, action.meta))
            elif isinstance(action, LogEvent):
                self.notes.append(action.event)
            elif isinstance(action, WriteManifest):
                self.manifests.append(action.document)
                self.do(events.on_manifest(self.core, self.full))

    def say(self, peer: Any, kind: int, meta: dict[str, Any], request: int = 1) -> list[tuple[int, dict[str, Any]]]:
        """A frame of somebody; what that one hears."""
        self.heard.clear()
        frame = wire.parse(wire.join_buffers(wire.encode(kind, request, meta)))
        self.do(events.on_frame(self.core, self.now, peer, frame))
        return [(kind, meta) for whom, kind, _, meta in self.heard if whom == peer]

    def join(self, name: str, role: str = "server", life: int | None = None, host: str = "") -> dict[str, Any]:
        """Somebody joins; what was answered."""
        meta = {"role": role, "id": name, "incarnation": life, "address": f"{name}:1", "host": host or name}
        self.names[name] = name
        answers = self.say(name, wire.JOIN, meta)
        self.install()
        mine = [meta for whom, kind, _, meta in self.heard if whom == name and kind in (wire.MAP, wire.REFUSED)]
        return mine[-1] if mine else dict(answers[-1][1]) if answers else {}

    def install(self) -> None:
        """All servers can hold what is declared, and have the map."""
        for number in list(self.core.declarations):
            for peer, session in list(self.core.sessions.items()):
                if session.role == "server":
                    frame = wire.parse(wire.join_buffers(wire.encode(wire.DONE, 0, {"of": number})))
                    self.do(events.on_frame(self.core, self.now, peer, frame))
        for peer, session in list(self.core.sessions.items()):
            if session.role == "server":
                frame = wire.parse(
                    wire.join_buffers(wire.encode(wire.MAP_INSTALLED, 0, {"version": self.core.map.version}))
                )
                self.do(events.on_frame(self.core, self.now, peer, frame))

    def pass_time(self, seconds: float, *silent: str) -> None:
        """Time passes; all but these are heard of and install what they are given."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now += 0.05
            for peer in list(self.core.sessions):
                if peer not in silent:
                    self.core.sessions[peer].last_heard = self.now
            self.do(events.on_tick(self.core, self.now))
            for peer, session in self.core.sessions.items():
                if session.role == "server" and peer not in silent:
                    session.map_version = self.core.map.version

    def learn(self) -> None:
        """Every learner catches up, every handing over is drained, until nothing moves."""
        for _ in range(50):
            before = self.core.map.version
            known = self.core.map
            for shard, learners in enumerate(known.learners):
                for learner in learners:
                    life = known.servers[learner].incarnation
                    meta = {"shard": shard, "learner": learner, "incarnation": life, "version": known.version}
                    self.say(known.heads[shard], wire.CAUGHT_UP, meta)
            self.heard.clear()
            self.pass_time(REBALANCE_DELAY + 0.2)
            for head, kind, _, meta in list(self.heard):
                if kind == wire.HANDOVER:
                    self.say(head, wire.DRAINED, {"shards": meta["shards"], "version": self.core.map.version})
                    self.pass_time(0.2)
            if self.core.map.version == before:
                return
        raise AssertionError("it never settles")


@pytest.fixture
def job() -> Job:
    """Two servers and a worker."""
    made = Job()
    for name in ("a", "b"):
        made.join(name)
    made.join("0", "worker")
    return made


def test_shards_are_placed_when_all_expected_are_here() -> None:
    """And spread over hosts and servers."""
    made = Job(expect=3)
    made.join("a", host="one")
    made.join("b", host="one")
    assert not any(made.core.map.chains)
    made.join("c", host="two")
    known = made.core.map
    assert {len(chain) for chain in known.chains} == {2}
    assert all(len({known.servers[name].host for name in chain}) == 2 for chain in known.chains)
    assert compute_target_chains(known, 2) == list(known.chains)


def test_some_servers_are_replicas_only() -> None:
    """With heads=1 one server heads everything, and whoever does goes on when others join or it was another before."""
    made = Job(expect=2, settings={"heads": 1})
    made.join("a", host="one")
    made.join("b", host="two")
    assert set(made.core.map.chains) == {("a", "b")}
    taken_over = replace(made.core.map, chains=(("b",),) * made.core.map.num_shards)
    assert set(compute_target_chains(taken_over, 2, max_heads=1)) == {("b", "a")}
    assert {chain[0] for chain in compute_target_chains(taken_over, 2, max_heads=2)} == {"a", "b"}


def test_a_worker_is_answered_when_all_servers_count_it(job: Job) -> None:
    """Before, another could run ahead of it unseen."""
    job.heard.clear()
    assert job.say("1", wire.JOIN, {"role": "worker", "id": "1", "incarnation": None, "address": "", "host": ""}) == []
    job.install()
    assert [kind for whom, kind, _, _ in job.heard if whom == "1"] == [wire.MAP]
    assert set(job.core.map.workers) == {"0", "1"}


def test_a_dead_server_leaves_its_chains(job: Job) -> None:
    """When it is silent, or a moment after its connection ends; its successor heads what it headed."""
    job.pass_time(SERVER_LEASE + 0.2, "a")
    known = job.core.map
    assert set(known.servers) == {"b"}
    assert set(known.chains) == {("b",)}
    assert known.epochs[0] == known.version
    assert job.join("a", life=1)["error"] == "Out"
    again = job.join("a")
    assert again["incarnation"] > 2
    job.learn()
    assert {len(chain) for chain in job.core.map.chains} == {2}


def test_a_connection_that_is_made_again_is_no_death(job: Job) -> None:
    """A cut is mended within a moment; a kill is not."""
    version = job.core.map.version
    job.do(events.on_peer_lost(job.core, job.now, "a"))
    job.pass_time(SERVER_RECONNECT_GRACE / 2)
    job.join("a", life=job.core.map.servers["a"].incarnation)
    job.pass_time(1.0)
    assert job.core.map.version == version
    job.do(events.on_peer_lost(job.core, job.now, "a"))
    job.pass_time(SERVER_RECONNECT_GRACE + 0.1)
    assert set(job.core.map.servers) == {"b"}


def test_shards_without_a_replica_are_lost_until_theirs_is_back(job: Job) -> None:
    """One that was only stopped comes back with what nobody else has; one that was killed does not."""
    lives = {name: seat.incarnation for name, seat in job.core.map.servers.items()}
    job.pass_time(1.0, "b")
    job.pass_time(1.0, "a", "b")
    assert len(job.core.map.lost_shards) == 8
    assert job.join("b", life=lives["b"])["error"] == "Out"
    back = job.join("a", life=lives["a"])
    assert "error" not in back
    assert set(job.core.map.chains) == {("a",)}
    assert not job.core.map.lost_shards
    job.pass_time(1.0, "a")
    job.join("a")
    assert len(job.core.map.lost_shards) == 8
    job.pass_time(REJOIN_GRACE + 1)
    assert len(job.core.map.lost_shards) == 8


def write(job: Job, number: int) -> None:
    """All heads write their shards of a checkpoint."""
    for shard in range(8):
        meta = {"id": number, "shard": shard, "file": f"{shard}", "sha256": "", "bytes": 1, "lsn": 3}
        job.say(job.core.map.heads[shard], wire.CHECKPOINT_WRITTEN, meta)


def test_a_checkpoint_that_cannot_be_completed_is_refused(job: Job) -> None:
    """And is not what lost shards go back to; the next one may be."""
    job.say("admin", wire.CHECKPOINT, {"path": "folder"}, 7)
    job.full = "no room"
    write(job, 1)
    assert [each for each in job.heard if each[0] == "admin"] == [
        ("admin", wire.REFUSED, 7, {"error": "CheckpointError", "message": "no room"})
    ]
    assert job.core.last_checkpoint is None
    job.full = None
    job.say("admin", wire.CHECKPOINT, {"path": "folder"}, 8)
    write(job, 2)
    assert ("admin", wire.DONE, 8, {"path": "folder", "bytes": 8}) in job.heard
    assert job.disk is not None
    assert job.disk["checkpoint"] == "folder"


def test_all_who_ask_for_a_checkpoint_are_answered(job: Job) -> None:
    """Workers that all ask for the same one; also where it is refused."""
    job.say("0", wire.CHECKPOINT, {"path": "folder"}, 7)
    job.say("1", wire.CHECKPOINT, {"path": "folder"}, 9)
    write(job, 1)
    done = {"path": "folder", "bytes": 8}
    assert job.heard == [("0", wire.DONE, 7, done), ("1", wire.DONE, 9, done)]
    job.say("0", wire.CHECKPOINT, {"path": "folder"}, 8)
    job.say("1", wire.CHECKPOINT, {"path": "folder"}, 10)
    assert job.say("2", wire.CHECKPOINT, {"path": "other"}, 3)[0][0] == wire.REFUSED
    job.say("a", wire.CHECKPOINT_WRITTEN, {"id": 2, "error": "no room"})
    refused = {"error": "CheckpointError", "message": "no room"}
    assert job.heard == [("0", wire.REFUSED, 8, refused), ("1", wire.REFUSED, 10, refused)]


def test_lost_shards_go_back_to_the_checkpoint(job: Job) -> None:
    """After a grace; and stay lost if it cannot be read."""
    job.say("admin", wire.CHECKPOINT, {"path": "folder"}, 7)
    write(job, 1)
    assert job.manifests[0]["count"] == job.core.last_incarnation
    assert job.core.last_checkpoint == "folder"
    job.pass_time(1.0, "a", "b")
    job.join("c")
    assert len(job.core.map.lost_shards) == 8
    job.pass_time(REJOIN_GRACE + 1)
    known = job.core.map
    assert not known.lost_shards
    assert known.restored_from[0][0] == "folder"
    assert known.rolled_back_shards == set(range(8))
    assert "restored" in job.notes
    job.say("c", wire.RESTORE_FAILED, {"shard": 5, "why": "damaged", "version": known.version})
    job.pass_time(REJOIN_GRACE + 1)
    assert list(job.core.map.lost_shards) == [5]
    assert any("cannot be read: damaged" in line for line in format_summary(make_report(job.core)))


def test_a_shard_that_is_lost_ends_the_checkpoint_that_is_being_written(job: Job) -> None:
    """Whether its servers died or it could not be read: nobody would write it any more."""
    job.say("admin", wire.CHECKPOINT, {"path": "folder"}, 7)
    job.say(job.core.map.heads[5], wire.RESTORE_FAILED, {"shard": 5, "why": "damaged", "version": job.core.map.version})
    told = [(kind, meta["message"]) for whom, kind, _, meta in job.heard if whom == "admin"]
    assert told == [
        (wire.REFUSED, "folder: shards [5] were lost while it was written; write a checkpoint once they are back")
    ]
    assert "are lost" in job.say("admin", wire.CHECKPOINT, {"path": "other"}, 8)[0][1]["message"]


def test_who_expires_rows_is_answered_also_when_servers_die_or_are_cut_off(job: Job) -> None:
    """Done when all servers have; refused where one died before it said so; one whose connection ended is asked again."""
    assert job.say("admin", wire.EXPIRE, {"table": "emb", "older": 3})[0][0] == wire.REFUSED
    job.say("0", wire.DECLARE, {"spec": {"what": "table", "name": "emb", "dim": 2}})
    job.install()

    def answers(request: int) -> list[tuple[int, str]]:
        mine = [(kind, meta) for whom, kind, number, meta in job.heard if whom == "admin" and number == request]
        return [(kind, meta.get("message", "")) for kind, meta in mine]

    def expire(request: int) -> int:
        job.say("admin", wire.EXPIRE, {"table": "emb", "older": 3}, request)
        return next(meta["of"] for _, kind, _, meta in job.heard if kind == wire.EXPIRE)

    number = expire(7)
    job.say("a", wire.DONE, {"of": number})
    assert answers(7) == []
    job.say("b", wire.DONE, {"of": number})
    assert answers(7) == [(wire.DONE, "")]

    number = expire(8)
    job.say("a", wire.DONE, {"of": number})
    job.do(events.on_peer_lost(job.core, job.now, "b"))
    life = job.core.map.servers["b"].incarnation
    meta = {"role": "server", "id": "b", "incarnation": life, "address": "b:1", "host": "b"}
    job.say("b again", wire.JOIN, meta)
    job.pass_time(0.1)
    assert [each["of"] for whom, kind, _, each in job.heard if (whom, kind) == ("b again", wire.EXPIRE)] == [number]
    job.say("b again", wire.DONE, {"of": number})
    assert answers(8) == [(wire.DONE, "")]

    number = expire(9)
    job.say("a", wire.DONE, {"of": number})
    job.pass_time(SERVER_LEASE + 0.2, "b again")
    ((kind, message),) = answers(9)
    assert kind == wire.REFUSED
    assert message.startswith("emb: b died meanwhile, and may leave old rows")
    job.pass_time(SERVER_LEASE + 0.2, "a")
    assert "there is no server" in job.say("admin", wire.EXPIRE, {"table": "emb", "older": 3}, 10)[0][1]["message"]


def test_rows_expire_again_where_a_head_changed_meanwhile(job: Job) -> None:
    """A shard that was handed over between two answers was expired by neither."""
    job.say("0", wire.DECLARE, {"spec": {"what": "table", "name": "emb", "dim": 2}})
    job.install()
    job.say("admin", wire.EXPIRE, {"table": "emb", "older": 3}, 7)
    first = next(meta["of"] for _, kind, _, meta in job.heard if kind == wire.EXPIRE)
    job.say("a", wire.DONE, {"of": first})
    epochs = job.core.map.epochs
    job.core.map = replace(job.core.map, epochs=(epochs[0] + 1, *epochs[1:]))
    job.say("b", wire.DONE, {"of": first})
    again = {meta["of"] for _, kind, _, meta in job.heard if kind == wire.EXPIRE} - {first}
    assert len(again) == 1
    done = lambda: [number for whom, kind, number, _ in job.heard if (whom, kind) == ("admin", wire.DONE)]  # noqa: E731
    for name, number in (("a", first), ("b", first), ("a", again.copy().pop())):
        job.say(name, wire.DONE, {"of": number})
        assert 7 not in done()
    job.say("b", wire.DONE, {"of": again.pop()})
    assert done() == [7]


def test_join_and_drain_move_shards_and_keep_replicas(job: Job) -> None:
    """Every chain always has as many members as before; at the end all is balanced, and nothing is on who leaves."""
    job.join("c")
    job.learn()
    known = job.core.map
    heads = {name: known.heads.count(name) for name in "abc"}
    assert sorted(heads.values()) == [2, 3, 3]
    assert {len(chain) for chain in known.chains} == {2}
    job.say("admin", wire.DRAIN, {"server": "a"}, 5)
    job.learn()
    known = job.core.map
    assert not any("a" in chain for chain in known.chains)
    assert {len(chain) for chain in known.chains} == {2}
    assert job.say("admin", wire.DRAIN, {"server": "x"})[0][0] == wire.REFUSED


def test_a_learner_is_taken_in_under_the_head_that_said_so(job: Job) -> None:
    """What a head that is gone said of it counts no more."""
    job.join("c")
    job.pass_time(REBALANCE_DELAY + 0.2)
    known = job.core.map
    shard = next(number for number, learners in enumerate(known.learners) if "c" in learners)
    meta = {"shard": shard, "learner": "c", "incarnation": known.servers["c"].incarnation, "version": known.version}
    head = known.heads[shard]
    job.say(head, wire.CAUGHT_UP, meta)
    job.do(events.on_peer_lost(job.core, job.now, head))
    job.core.disconnect_deadlines["server", head] = job.now
    job.pass_time(0.05)
    assert "c" not in job.core.map.chains[shard]


def test_pairs_that_do_not_reach_each_other_are_parted(job: Job) -> None:
    """The head's word counts; the other one is not dead."""
    job.say("a", wire.HEARTBEAT, {"version": job.core.map.version, "cut": ["b"]})
    known = job.core.map
    assert set(known.servers) == {"a", "b"}
    assert {chain for chain in known.chains if chain[0] == "a"} == {("a",)}
    assert {chain for chain in known.chains if chain[0] == "b"} == {("b", "a")}
    job.pass_time(2.0)
    assert not any(job.core.map.learners[shard] for shard, chain in enumerate(job.core.map.chains) if chain == ("a",))


def test_workers_leave_by_lease(job: Job) -> None:
    """A silent one is not waited for; one that was started again goes before its former life."""
    job.pass_time(WORKER_LEASE + 0.2, "0")
    assert job.core.map.workers == {}
    life = job.join("0", "worker")["incarnation"]
    assert job.join("0", "worker", life=life - 1)["error"] == "Superseded"
    assert [kind for kind, _ in job.say("0", wire.LEAVE, {})] == [wire.DONE]
    assert job.core.map.workers == {}


def test_a_new_life_goes_on_from_the_disk(job: Job) -> None:
    """It knows the map, and waits for its members before it judges them."""
    job.say("0", wire.DECLARE, {"spec": {"what": "table", "name": "emb", "dim": 2}})
    job.install()
    assert len(job.core.specs) == 1
    again = Job(job.disk)
    assert again.core.map == job.core.map
    assert again.core.specs == job.core.specs
    again.pass_time(REJOIN_GRACE - 0.1)
    assert set(again.core.map.servers) == {"a", "b"}
    again.join("a", life=again.core.map.servers["a"].incarnation)
    again.pass_time(0.3)
    assert set(again.core.map.servers) == {"a"}
    with pytest.raises(DocumentError, match="format"):
        open_controller({"format": 99})
    with pytest.raises(DocumentError, match="not a controller's document"):
        open_controller({"format": 1})


def test_a_restore_is_not_forgotten() -> None:
    """Neither by a crash before the first placement, nor the lives that its windows know."""
    made = Job(restore=("folder", [{"what": "table", "name": "emb"}], 40))
    assert made.join("a")["incarnation"] == 41
    again = Job(made.disk)
    again.join("a", life=41)
    again.join("b")
    assert again.core.map.restored_from[3][0] == "folder"
    assert not again.core.map.rolled_back_shards


def test_declared_once(job: Job) -> None:
    """The same again is answered, another under the same name refused; all servers have it first."""
    spec = {"what": "table", "name": "emb", "dim": 2}
    assert job.say("0", wire.DECLARE, {"spec": spec}) == []
    job.install()
    assert [whom for whom, kind, _, _ in job.heard if kind == wire.DONE] == ["0"]
    assert job.say("0", wire.DECLARE, {"spec": spec})[0][0] == wire.DONE
    assert job.say("0", wire.DECLARE, {"spec": spec | {"dim": 3}})[0][0] == wire.REFUSED


def test_what_a_server_cannot_hold_is_not_declared(job: Job) -> None:
    """Every server says so first; only then is it on the disk, and whoever asked meanwhile is answered too."""
    spec, before = {"what": "table", "name": "emb", "dim": 2}, job.disk
    job.say("0", wire.DECLARE, {"spec": spec})
    offers = [meta for whom, kind, _, meta in job.heard if kind == wire.DECLARE]
    assert [each["spec"] for each in offers] == [spec, spec]
    job.say("a", wire.DONE, {"of": offers[0]["of"], "error": None})
    assert job.say("1", wire.DECLARE, {"spec": spec}, request=7) == []
    assert job.say("1", wire.DECLARE, {"spec": spec | {"dim": 3}})[0][0] == wire.REFUSED
    assert job.disk == before
    job.say("b", wire.DONE, {"of": offers[0]["of"], "error": "no room"})
    refused = [(whom, meta["message"]) for whom, kind, _, meta in job.heard if kind == wire.REFUSED]
    assert refused == [("0", "server b cannot hold it: no room"), ("1", "server b cannot hold it: no room")]
    assert job.disk == before
    job.say("0", wire.DECLARE, {"spec": spec})
    job.pass_time(2 * SERVER_LEASE, "b")  # asks those who did not answer again, and does not wait for the dead
    job.install()
    assert job.core.specs == [spec]


@pytest.mark.parametrize(
    ("kind", "meta"),
    [
        (wire.JOIN, {}),
        (wire.JOIN, {"role": "king"}),
        (wire.JOIN, {"role": "worker", "id": "x", "incarnation": -5}),
        (wire.WATCH, {"after": "x"}),
        (wire.DECLARE, {"spec": 3}),
        (wire.CAUGHT_UP, {"shard": 0}),
        (wire.HEARTBEAT, {"version": 1}),
        (wire.EXPIRE, {"table": "emb", "older": -1}),
        (wire.CHECKPOINT, {}),
        (99, {}),
    ],
)
def test_garbage(job: Job, kind: int, meta: dict[str, Any]) -> None:
    """Refused or hung up on; the map stays as it is."""
    before = job.core.map
    job.say("stranger", kind, meta)
    assert job.core.map == before
    assert ShardMap.from_document(job.core.map.to_document()) == before


def test_rings() -> None:
    """Neighbours are on different hosts, and a chain leaves its host as soon as it can."""
    made = Job(expect=9)
    for name, host in zip("abcdef", "xxxyyz", strict=True):
        made.join(name, host=host)
    servers = made.core.map.servers
    order = interleave_hosts(servers)
    assert sorted(order) == list("abcdef")
    assert [servers[name].host for name in order[:3]] == ["x", "y", "z"]
    for name in order:
        assert len({servers[each].host for each in build_chain(name, order, servers, 3)}) == 3


def test_workers_that_left_long_ago_are_over_for_ever(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that is here, nor one that left lately; many at a time, and not before all that left are known."""
    monkeypatch.setattr(rebalance, "WORKER_RETENTION", 5.0)
    monkeypatch.setattr(rebalance, "FORGET_BATCH_SIZE", 3)
    here = job.core.map.workers["0"]
    gone = []
    for number in range(4):
        gone.append(job.join(f"x{number}", "worker")["incarnation"])
        job.say(f"x{number}", wire.LEAVE, {})
        job.install()
    job.pass_time(3.0)
    late = job.join("late", "worker")["incarnation"]
    job.say("late", wire.LEAVE, {})
    job.install()
    assert job.core.map.horizon == 0
    job.pass_time(2.5)
    known = job.core.map
    assert [known.is_expired(life) for life in (*gone, here, late, late + 1)] == [True] * 4 + [False] * 3
    assert "has expired" in job.join("x0", "worker", life=gone[0])["message"]
    assert job.join("late", "worker", life=late)["incarnation"] == late
    assert ShardMap.from_document(known.to_document()) == known
    assert Job(job.disk).core.map.is_expired(gone[0])


def test_the_lives_of_a_restored_job_are_over() -> None:
    """Its windows came with the checkpoint; nobody of that job comes here."""
    made = Job(restore=("folder", [], 41))
    assert made.core.map.is_expired(41)
    for name in ("a", "b"):
        made.join(name)
    assert not made.core.map.is_expired(made.join("0", "worker")["incarnation"])


def test_learners_are_taken_in_together_and_inherit_from_the_last_replica(job: Job) -> None:
    """One map for all that caught up; and one that caught up lacks nothing where the last replica dies."""
    job.core.replicas = 1
    job.pass_time(REBALANCE_DELAY + 0.2)
    job.learn()
    job.core.replicas = 2
    job.pass_time(REBALANCE_DELAY + 0.2)
    known = job.core.map
    mine = [shard for shard, head in enumerate(known.heads) if head == "a"]
    assert all(known.learners[shard] == ("b",) for shard in mine)
    life = known.servers["b"].incarnation
    for shard in mine[:-1]:
        job.say("a", wire.CAUGHT_UP, {"shard": shard, "learner": "b", "incarnation": life, "version": known.version})
    job.pass_time(0.2)
    assert job.core.map.version == known.version
    del job.core.sessions["a"]
    job.do(events.on_peer_lost(job.core, job.now, "a"))
    job.core.disconnect_deadlines["server", "a"] = job.now
    job.pass_time(0.1)
    assert [job.core.map.chains[shard] for shard in mine[:-1]] == [("b",)] * (len(mine) - 1)
    assert list(job.core.map.lost_shards) == mine[-1:]


def test_the_lease_is_as_long_as_one_says() -> None:
    """Machines that starve their processes need more patience than the default's."""
    made = Job(lease=3.0)
    for name in ("a", "b"):
        made.join(name)
    made.pass_time(2.8, "a")
    assert "a" in made.core.map.servers
    made.pass_time(0.4, "a")
    assert "a" not in made.core.map.servers
    with pytest.raises(ServerError, match=r"lease: 0\.1 s; use 0\.5 to 60 s"):
        Job(lease=0.1)


def test_a_life_that_was_never_given_is_refused(job: Job) -> None:
    """It would lock the name: whoever joins under it later is a former life."""
    assert job.join("1", "worker", life=2**61)["error"] == "Superseded"
    assert "error" not in job.join("1", "worker")


def test_an_heir_is_here(job: Job) -> None:
    """A learner that caught up, and whose connection was lost since, inherits nothing."""
    job.core.replicas = 1
    job.pass_time(REBALANCE_DELAY + 0.2)
    job.learn()
    job.core.replicas = 2
    job.pass_time(REBALANCE_DELAY + 0.2)
    known = job.core.map
    mine = [shard for shard, head in enumerate(known.heads) if head == "a"]
    life = known.servers["b"].incarnation
    job.say("a", wire.CAUGHT_UP, {"shard": mine[0], "learner": "b", "incarnation": life, "version": known.version})
    for name in ("a", "b"):
        del job.core.sessions[name]
    job.core.disconnect_deadlines |= {("server", "a"): job.now, ("server", "b"): job.now + 9.0}
    job.do(events.on_tick(job.core, job.now))
    assert mine[0] in job.core.map.lost_shards


def test_one_head_of_several_servers_is_followed_by_one() -> None:
    """heads=1: at failover, when another server fills the gap, and where shards go back to a checkpoint."""
    made = Job(expect=3, settings={"heads": 1})
    for name in ("a", "b", "c"):
        made.join(name)
    assert set(made.core.map.chains) == {("a", "b")}
    made.pass_time(1.0, "a")
    assert set(made.core.map.heads) == {"b"}
    made.pass_time(REBALANCE_DELAY + 0.2)
    made.learn()
    assert set(made.core.map.chains) == {("b", "c")}
    made.core.last_checkpoint = "folder"
    made.pass_time(1.0, "b", "c")
    assert len(made.core.map.lost_shards) == 8
    for name in ("d", "e"):
        made.join(name)
    made.pass_time(REJOIN_GRACE + 1)
    assert set(made.core.map.heads) == {"d"}


def test_lost_redundancy_is_said() -> None:
    """Counted against what is wished, also where the servers there are could hold no more."""
    job = Job()
    job.join("a")
    job.join("b")
    assert make_report(job.core)["short"] == 0
    job.pass_time(1.0, "b")
    found = make_report(job.core)
    assert (found["short"], found["owed"]) == (8, 0)
    words = "\n".join(format_summary(found))
    assert "8 shards have 1 of 2 replicas; one more death loses them" in words
    assert "echelon server start --controller" in words
    job.pass_time(1.0, "a")
    assert "if one that was only stopped" in "\n".join(format_summary(make_report(job.core)))


def test_a_beat_that_crosses_the_answer_to_leaving_is_no_garbage() -> None:
    job = Job()
    job.join("a")
    job.join("b")
    job.join("0", "worker")
    job.say("0", wire.LEAVE, {})
    job.say("0", wire.HEARTBEAT, {})
    assert "garbage" not in job.notes


def test_what_differs_in_a_spec_is_named() -> None:
    job = Job()
    job.join("a")
    job.join("b")
    spec = {"name": "emb", "dim": 4, "rule": {"kind": "sgd", "lr": 1.0}}
    job.say("0", wire.DECLARE, {"spec": spec})
    job.install()
    (_, refusal), *_ = job.say("0", wire.DECLARE, {"spec": {**spec, "rule": {"kind": "sgd", "lr": 0.5}}})
    assert "emb: rule.lr was declared as 1.0 and is 0.5 now; use" in refusal["message"]
