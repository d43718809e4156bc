"""Whether bench.garbage would notice a process that gives way (that none does: test_process.py)."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from bench.garbage import attack
from echelon.server import Servers


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["server", "controller"])
def test_a_process_that_ends_under_attack_is_counted(whom: str) -> None:
    with Servers(2, replicas=2, shards=16) as servers:
        child = servers.controller if whom == "controller" else next(iter(servers.servers.values()))
        threading.Timer(1.0, os.kill, (child.pid, signal.SIGKILL)).start()
        seen = attack(servers, 1_000_000, 1)
    assert seen["crashes"] == 1
    assert seen["strangers"] < seen["frames"] // 2
