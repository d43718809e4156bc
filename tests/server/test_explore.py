"""The protocol under all interleavings of small cases; and that the exploration finds mistakes that are put there.

Larger cases: `python -m bench.explore`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from echelon.server.controller import Controller
from echelon.server.protocol import wire
from echelon.server.protocol.shard_sets import ShardSet
from echelon.server.replica import Replica
from echelon.server.replica.replica_link import ReplicaLink
from echelon.server.replica.shard_state import ShardState
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
    patch.setattr(Replica, "_accepts", lambda self, head, version, cover: np.ones(len(cover), bool))


def answered_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Replica,
        "_ack_when_replicated",
        lambda self, ack: self._send_to_peer(ack.peer, ack.answer[0], ack.request_id, ack.answer[1]),
    )


def without_windows(patch: pytest.MonkeyPatch) -> None:
    whole = ShardState.install

    def install(self: ShardState, shard: int, parts: Any) -> None:
        front, frames = parts[0]
        whole(self, shard, [(front | {"windows": []}, frames), *parts[1:]])

    patch.setattr(ShardState, "install", install)


def learner_too_soon(patch: pytest.MonkeyPatch) -> None:
    whole = Replica._mark_synced

    def equal(self: Replica, now: float, link: Any, shard: int) -> None:
        if link.is_learner[shard]:
            link.is_synced[shard] = True
            self._report_caught_up(link, shard)
        else:
            whole(self, now, link, shard)

    patch.setattr(Replica, "_mark_synced", equal)


def repeated_too_soon(patch: pytest.MonkeyPatch) -> None:
    whole = Replica._try_push

    def push(self: Replica, now: float, peer: Any, frame: wire.Frame, cover: ShardSet) -> bool:
        slot = self.state.dedup.slots.get((frame.meta["worker"], frame.meta["incarnation"]))
        if (
            slot is not None
            and self.is_head[cover.index].all()
            and (self.state.dedup.last_seq[slot, cover.index] >= frame.meta["seq"]).all()
        ):
            self._send_to_peer(peer, wire.ACK, frame.request_id, {"seq": frame.meta["seq"]})
            return True
        return whole(self, now, peer, frame, cover)

    patch.setattr(Replica, "_try_push", push)


def alone_by_itself(patch: pytest.MonkeyPatch) -> None:
    whole = Replica.on_link_lost

    def lost(self: Replica, now: float, server: str) -> list[Any]:
        if server in self.links:
            self.links[server].is_backup[:] = False
            self._update_ready()
            self._recheck_pending_acks()
        return whole(self, now, server) + self._take_actions()

    patch.setattr(Replica, "on_link_lost", lost)


def refusals_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "_with_refused_shards", lambda self, who, answer: answer)
    patch.setattr(ReplicaLink, "peer_map_version", property(lambda self: 0, lambda self, version: None), raising=False)


def links_numbered_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaLink, "link_id", property(lambda self: 1, lambda self, number: None), raising=False)


def overtaken_snapshots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "_defer_entry", lambda self, transfer, frame, applied_shards, is_noop: None)


def early_heirs(patch: pytest.MonkeyPatch) -> None:
    whole = Controller._remove_dead

    def bury(self: Controller, now: float, dead: Any) -> None:
        self._caught_up = {(shard, name): now for shard, names in enumerate(self.map.learners) for name in names}
        whole(self, now, dead)

    patch.setattr(Controller, "_remove_dead", bury)


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
