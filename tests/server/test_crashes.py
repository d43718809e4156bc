"""Faults on real servers: a few seeded schedules here (`python -m bench.crashes` runs hundreds), and whether their judge would notice."""

from __future__ import annotations

import numpy as np
import pytest

from bench.crashes import draw, run
from bench.histories import KEYS, LIVES, Life, check, failover

SHARDS = np.arange(KEYS) % 8


def honest() -> tuple[Life, np.ndarray]:
    """A life of three pushes, of which two are acknowledged, and the table after all of them."""
    life = Life(
        column=1,
        pushes=[(1, 1.0, [0, 8, 1], [2, 3, 1]), (2, 2.0, [0, 1], [1, 1]), (3, 3.0, [0, 9], [5, 5])],
        acknowledged=[(1, 1.5), (2, 2.5)],
    )
    final = np.zeros((KEYS, LIVES))
    for _, _, keys, amounts in life.pushes:
        np.add.at(final[:, 1], keys, amounts)
    return life, final


def test_an_honest_history_passes_with_and_without_what_was_not_acknowledged():
    life, final = honest()
    life.reads.append((1.6, 1.9, [0, 8, 1], final[[0, 8, 1]].tolist()))
    life.reads[0][3][0][1], life.reads[0][3][2][1] = 2, 1
    assert check([life], final, SHARDS) == []
    final[0, 1] -= 5  # the third push reached shard 1 (key 9) and not shard 0
    assert check([life], final, SHARDS) == []


@pytest.mark.parametrize(
    ("key", "by", "said"),
    [(0, -6, "lost"), (0, +1, "no number"), (1, -1, "no number"), (2, 1, "no number"), (0, -1, "no number")],
)
def test_a_lost_or_repeated_push_is_noticed(key, by, said):
    life, final = honest()
    final[key, 1] += by
    [wrong] = check([life], final, SHARDS)
    assert said in wrong


def test_a_stale_read_and_one_from_the_future_are_noticed():
    life, final = honest()
    early = final.copy()
    early[0] = 0
    life.reads.append((1.6, 1.9, [0], early[[0]].tolist()))
    assert ["lost" in each for each in check([life], final, SHARDS)] == [True]
    life.reads[0] = (1.6, 1.9, [0], final[[0]].tolist())
    assert ["future" in each for each in check([life], final, SHARDS)] == [True]


def test_a_foreign_column_and_an_unfinished_flush_are_noticed():
    life, final = honest()
    final[3, 7] = 1
    life.finished = True
    assert len(check([life], final, SHARDS)) == 2


def test_failover_is_the_time_until_a_later_push_is_acknowledged():
    life, _ = honest()
    assert failover([life], 1.2) == pytest.approx(1.3)
    assert failover([life], 2.7) is None


def test_schedules_are_the_same_for_the_same_seed_and_leave_a_replica_alive():
    for number in range(200):
        schedule = draw(3, number, replicas=2, servers=4, workers=2)
        assert schedule == draw(3, number, replicas=2, servers=4, workers=2)
        away = [each for each in schedule.faults if each.whom == "server" and each.what != "cut"]
        assert len(away) <= 1


def test_nothing_is_lost_or_doubled_under_faults(tmp_path):
    results = list(run(range(3), seed=1, folder=tmp_path, replicas=2, staleness=None))
    assert [result.wrong for result in results] == [[], [], []]
    assert all(result.pushes for result in results)
