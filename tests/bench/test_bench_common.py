"""The harness measures what it says it does."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from bench.common import Row, Timing, median, publish, ratio, take_turns


class Sleeper:
    """Takes a known time per step and remembers when it was called."""

    def __init__(self, name: str, seconds: float, calls: list[str]) -> None:
        self.name, self.seconds, self.calls = name, seconds, calls

    def advance(self, steps: int) -> None:
        self.calls.append(self.name)
        time.sleep(self.seconds * steps)

    def close(self) -> None:
        pass


def test_contenders_take_turns_there_and_back() -> None:
    calls: list[str] = []
    contenders = [Sleeper(name, 0.0, calls) for name in "ABC"]
    timings = take_turns(contenders, block=1, rounds=3)
    assert "".join(calls) == "ABC" + "ABCCBA" + "BCAACB" + "CABBAC"
    assert [timing.name for timing in timings] == ["A", "B", "C"]
    assert all(len(timing.wall) == 3 for timing in timings)


def test_the_time_limit_ends_a_race_after_three_rounds() -> None:
    calls: list[str] = []
    take_turns([Sleeper("A", 0.001, calls)], block=1, rounds=100, seconds=0.0, warmup=1)
    assert len(calls) == 1 + 2 * 3


def test_seconds_are_per_step() -> None:
    (found,) = take_turns([Sleeper("A", 0.001, [])], block=50, rounds=3, warmup=1)
    assert 0.001 <= found.step < 0.025
    assert sum(found.cpu) < sum(found.wall) / 2  # asleep


def test_a_ratio_is_formed_round_by_round() -> None:
    """A machine that becomes slower and slower does not change it."""
    ours, theirs = (
        Timing(name=name, wall=tuple(k * i for i in range(1, 40)), cpu=()) for name, k in (("us", 3.0), ("them", 2.0))
    )
    found = ratio(ours, theirs)
    assert found.low == found.median == found.high == pytest.approx(1.5)


def test_the_interval_narrows_with_more_rounds() -> None:
    few, many = (median([1.0 + 0.01 * (i % 7) for i in range(rounds)]) for rounds in (9, 900))
    assert few.low < few.median < few.high
    assert many.high - many.low < few.high - few.low


def test_a_missed_limit_is_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = Row(what={"what": "a"}, value=1.0, text="1.0", limit=1.01)
    bad = Row(what={"what": "b"}, value=1.02, text="1.02", limit=1.01)
    free = Row(what={"what": "c"}, value=9.0, text="9.0")
    assert publish("t", [good, free]) == 0
    assert publish("t", [good, bad, free], json_path=tmp_path / "out.json") == 1
    assert "missed" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["good"] for row in rows] == [True, False, True]
