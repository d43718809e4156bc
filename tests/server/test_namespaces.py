"""Two hosts as network namespaces, one of them cut off: see bench/hosts.py."""

from __future__ import annotations

import pytest

from bench.hosts import forbidden, judged, run
from tests.sampling import only_whole

REASON = forbidden()


@only_whole
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_host_that_is_cut_off_costs_nothing_that_was_acknowledged():
    result = run(seconds=1.0)
    assert result["wrong"] == []
    assert result["pushes"] > 0
    assert None not in result["waits"]


def test_a_host_whose_failover_never_ended_is_wrong_and_the_other_keeps_its_time():
    rows, wrong = judged({"wrong": [], "waits": [0.5, 0.7], "pushes": 9})
    assert all(row.good for row in rows)
    assert wrong == []
    rows, wrong = judged({"wrong": [], "waits": [None, 0.7], "pushes": 9})
    assert [row.good for row in rows] == [False, True]
    assert rows[1].what["what"].startswith("host b")
    assert rows[1].value == 0.7
    assert ["host a" in each for each in wrong] == [True]
