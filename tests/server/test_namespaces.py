"""Two hosts as network namespaces, one of them cut off: see bench/hosts.py."""

from __future__ import annotations

import pytest

from bench.hosts import forbidden, run
from tests.whole import only_whole

REASON = forbidden()


@only_whole
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_host_that_is_cut_off_costs_nothing_that_was_acknowledged():
    result = run(seconds=1.0)
    assert result["wrong"] == []
    assert result["pushes"] > 0
    assert None not in result["waits"]
