"""The protocol under all interleavings of small cases; and that the exploration finds mistakes that are put there.

Larger cases: `python -m bench.explore`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from echelon.server.controller import members
from echelon.server.controller.state import ControllerState
from echelon.server.protocol import wire
from echelon.server.protocol.shard_sets import ShardSet
from echelon.server.replica import backup, catch_up, events, map_change, push, replication
from echelon.server.replica.replica_link import ReplicaLink
from echelon.server.replica.shard_state import ShardState
from echelon.server.replica.state import ReplicaState
from tests.server.model import Broken, Case, explore


@pytest.mark.parametrize(
    "case",
    [
        Case(pushes=2, crash=1),
        Case(pushes=2, cut=1),
        Case(pushes=1, controller=1, crash=1),
        Case(pushes=1, join=1),
        Case(pushes=1, servers=1, replicas=1, judge=1),
    ],
    ids=lambda case: " ".join(f"{name}={value}" for name, value in vars(case).items() if value),
)
def test_every_interleaving(case: Case) -> None:
    """Nothing acknowledged is lost, nothing is applied twice, every run ends, to the last state."""
    found = explore(case)
    assert found.whole
    assert found.ends


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(pushes=1, judge=1),
        Case(pushes=1, servers=3, judge=1, crash=1),
        Case(pushes=1, judge=1, cut=1),
        Case(pushes=2, shards=2, join=1, crash=2, before=("push w0", "calm", "join", "calm", "crash s2")),
        Case(pushes=1, servers=3, replicas=3, workers=2, crash=1),
        Case(pushes=1, servers=3, shards=2, drain=1),
        Case(pushes=1, servers=3, shards=2, drain=1, single=True),
        Case(pushes=1, crash=2, join=1, before=("crash s1", "join")),
        Case(pushes=1, workers=2, aggregate=True, crash=1),
    ],
    ids=lambda case: " ".join(f"{name}={value}" for name, value in vars(case).items() if value),
)
def test_a_part_of_larger_cases(case: Case) -> None:
    """The same for as many states as a second or so allows, an end among them."""
    assert explore(case, states=1500, ends=1, seconds=60, seed=3).ends


def without_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backup, "accepts", lambda replica, head, version, shard_set: np.ones(len(shard_set), bool))


def answered_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        replication,
        "ack_when_replicated",
        lambda replica, ack: replica.send_to_peer(ack.peer, ack.answer[0], ack.request_id, ack.answer[1]),
    )


def without_windows(patch: pytest.MonkeyPatch) -> None:
    whole = ShardState.install

    def install(self: ShardState, shard: int, parts: Any) -> None:
        front, frames = parts[0]
        whole(self, shard, [(front | {"windows": []}, frames), *parts[1:]])

    patch.setattr(ShardState, "install", install)


def learner_too_soon(patch: pytest.MonkeyPatch) -> None:
    whole = catch_up.mark_synced

    def mark_synced(replica: ReplicaState, now: float, link: ReplicaLink, shard: int) -> None:
        if link.is_learner[shard]:
            link.is_synced[shard] = True
            catch_up.report_caught_up(replica, link, shard)
        else:
            whole(replica, now, link, shard)

    patch.setattr(catch_up, "mark_synced", mark_synced)


def repeated_too_soon(patch: pytest.MonkeyPatch) -> None:
    whole = push.try_push

    def try_push(replica: ReplicaState, now: float, peer: Any, frame: wire.Frame, shard_set: ShardSet) -> bool:
        dedup, meta = replica.shards.dedup, frame.meta
        slot = dedup.slots.get((meta["worker"], meta["incarnation"]))
        if (
            slot is not None
            and replica.is_head[shard_set.index].all()
            and (dedup.last_seq[slot, shard_set.index] >= meta["seq"]).all()
        ):
            replica.send_to_peer(peer, wire.ACK, frame.request_id, {"seq": meta["seq"]})
            return True
        return whole(replica, now, peer, frame, shard_set)

    patch.setattr(push, "try_push", try_push)


def alone_by_itself(patch: pytest.MonkeyPatch) -> None:
    whole = events.on_link_lost

    def on_link_lost(replica: ReplicaState, now: float, server: str) -> list[Any]:
        if server in replica.links:
            replica.links[server].is_backup[:] = False
            replica.update_ready()
            map_change._recheck_pending_acks(replica)
        return whole(replica, now, server) + replica.take_actions()

    patch.setattr(events, "on_link_lost", on_link_lost)


def refusals_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backup, "with_refused_shards", lambda replica, head_id, answer: answer)
    patch.setattr(ReplicaLink, "peer_map_version", property(lambda self: 0, lambda self, version: None), raising=False)


def links_numbered_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaLink, "link_id", property(lambda self: 1, lambda self, number: None), raising=False)


def overtaken_snapshots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replication, "defer_entry", lambda transfer, frame, applied, meta: None)


def early_heirs(patch: pytest.MonkeyPatch) -> None:
    whole = members.remove_dead

    def remove_dead(controller: ControllerState, now: float, dead: Any) -> None:
        learners = enumerate(controller.map.learners)
        controller.caught_up = {(shard, name): now for shard, names in learners for name in names}
        whole(controller, now, dead)

    patch.setattr(members, "remove_dead", remove_dead)


USED = ("push w0", "calm", "join", "calm", "crash s2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        (without_fence, Case(pushes=1, judge=1)),
        (answered_early, Case(pushes=1, crash=1)),
        (without_windows, Case(pushes=1, crash=1, join=1, before=("crash s1", "join"))),
        (learner_too_soon, Case(pushes=1, crash=1, join=1, before=("crash s1", "join"))),
        (repeated_too_soon, Case(pushes=1, cut=1, crash=1)),
        (alone_by_itself, Case(pushes=1, cut=1, crash=1)),
        (refusals_lost, Case(pushes=1, judge=1, cut=1)),
        (overtaken_snapshots, Case(pushes=1, crash=1, join=1, before=("crash s1", "join"))),
        (early_heirs, Case(pushes=1, crash=2, join=1, before=("crash s1", "join"))),
        (links_numbered_alike, Case(pushes=2, shards=2, join=1, crash=2, before=USED)),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_mistakes_are_found(
    mistake: Callable[[pytest.MonkeyPatch], None], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mistake that would lose or repeat a push breaks an invariant in some interleaving."""
    mistake(monkeypatch)
    with pytest.raises(Broken) as caught:
        explore(case, seconds=60)
    assert caught.value.trail
