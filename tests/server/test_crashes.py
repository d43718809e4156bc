"""Faults on real servers: a few seeded schedules here (`python -m bench.crashes` runs hundreds), and whether their judge would notice."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time

import numpy as np
import pytest

from bench.chaos_cluster import Result, Schedule, Yard
from bench.crashes import _publish, draw
from bench.history_check import KEYS, LIVES, Life, check, failover, outlast
from bench.moves import judged

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


def record(path, *lines):
    """What a worker writes down as it happens."""
    with open(path, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_the_load_goes_on_until_it_has_overcome_the_fault(tmp_path):
    path, died = tmp_path / "0.jsonl", time.monotonic()
    record(path, ("push", 1, died - 1, [0], [1]), ("ok", 1, died - 0.5), ("push", 2, died - 0.1, [0], [1]))

    def overcome():
        time.sleep(0.5)
        record(path, ("ok", 2, time.monotonic()), ("push", 3, time.monotonic(), [0], [1]))
        time.sleep(0.3)
        record(path, ("ok", 3, time.monotonic()))

    load = threading.Thread(target=overcome)
    load.start()
    assert outlast({0: path}, [died - 2, died], patience=30, pause=0.01)
    assert 0.8 <= failover([Life.read(path, 0)], died) < 30
    load.join()


@pytest.mark.parametrize("how", [{"patience": 0.1}, {"patience": 30, "going": lambda: False}])
def test_a_load_that_does_not_get_over_a_fault_is_not_waited_for_without_end(tmp_path, how):
    record(tmp_path / "0.jsonl", ("push", 1, 1.0, [0], [1]), ("ok", 1, 3.0))
    began = time.monotonic()
    assert not outlast({0: tmp_path / "0.jsonl"}, [2.0], pause=0.01, **how)
    assert time.monotonic() - began < 20


def test_a_failover_that_never_ended_is_missed(tmp_path):
    settings = argparse.Namespace(seed=0, json=tmp_path / "rows.json")
    result = Result(Schedule(number=0, faults=(), seconds=0.0), failovers=[("kill", 0.3), ("kill", 0.4)])
    assert _publish([result], settings, 1.0) == 0
    result.failovers.append(("kill", None))
    assert _publish([result], settings, 1.0) == 1
    missed = [row for row in json.loads(settings.json.read_text())["rows"] if not row["good"]]
    assert [(row["what"]["what"], row["value"]) for row in missed] == [("failovers that never ended", 1)]


def test_a_quiet_phase_without_pushes_is_no_measure_of_the_others():
    phases = [("quiet", 0.0, 4.0), ("a server joins", 4.0, 8.0)]
    steady = Life(column=0, acknowledged=[(number, number / 100) for number in range(1, 801)])
    assert all(row.good for row in judged([steady], phases))
    halting = Life(column=0, acknowledged=[each for each in steady.acknowledged if not 4.5 < each[1] < 7.0])
    assert [row.what["phase"] for row in judged([halting], phases) if not row.good] == ["a server joins"]
    for silent in ([], [Life(column=0, acknowledged=[(1, 1.0)])]):
        assert [row.what["phase"] for row in judged(silent, phases) if not row.good] == ["quiet"]


def test_schedules_are_the_same_for_the_same_seed_and_leave_a_replica_alive():
    for number in range(200):
        schedule = draw(3, number, replicas=2, servers=4, workers=2)
        assert schedule == draw(3, number, replicas=2, servers=4, workers=2)
        away = [each for each in schedule.faults if each.whom == "server" and each.what != "cut"]
        assert len(away) <= 1


@pytest.fixture(scope="module")
def yard(tmp_path_factory):
    made = Yard(tmp_path_factory.mktemp("yard"), servers=4, replicas=2, workers=2, staleness=None)
    yield made
    made.close()


@pytest.mark.journey
def test_nothing_is_lost_or_doubled_under_faults(yard):
    results = [yard.run(draw(1, number, replicas=2, servers=4, workers=2)) for number in range(3)]
    assert [result.wrong for result in results] == [[], [], []]
    assert all(result.pushes for result in results)


@pytest.mark.slow
def test_a_death_that_nobody_pushed_after_yet_is_waited_for(yard, monkeypatch):
    """Workers stand still from before a server's death until after the schedule's end: who stops the load there sees no failover."""
    faults = yard._faults

    def held(schedule, lives, current, begin):
        faults(schedule, lives, current, begin)
        for process, *_ in lives:
            os.kill(process.pid, signal.SIGSTOP)
        os.kill(yard.servers.servers[yard.names()[0]].pid, signal.SIGKILL)
        died = time.monotonic()
        for process, *_ in lives:
            threading.Timer(1.0, os.kill, (process.pid, signal.SIGCONT)).start()
        return [("kill", died)]

    monkeypatch.setattr(yard, "_faults", held)
    result = yard.run(Schedule(number=3, faults=(), seconds=0.3))
    assert result.wrong == []
    [(what, wait)] = result.failovers
    assert what == "kill"
    assert wait is not None
