"""Measuring processes: started with the environment that all processes of ours get."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import echelon
from echelon.hardware import measure_cluster
from echelon.plan.document_cache import DocumentCache
from tests.simulator.cases import make_cluster

ROOT = Path(echelon.__file__).parent


@pytest.mark.parametrize("room", ["plan", "profiler", "simulator", "planner", "verifier"])
def test_the_environment_is_read_elsewhere(room: str) -> None:
    for path in (ROOT / room).glob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"environ", "getenv"}, path


def test_what_was_measured_is_not_lost_to_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(measure_cluster, "_count_gpus", lambda: 0)
    monkeypatch.setattr(measure_cluster, "_measure_cluster", lambda *_: make_cluster())
    found = measure_cluster.measure(store=DocumentCache(tmp_path / "file" / "cache"))
    assert found.nodes == make_cluster().nodes
    assert "cannot be cached there (Not a directory)" in found.notes[0]
    assert "ECHELON_CACHE" in found.notes[0]
    assert measure_cluster.measure(store=DocumentCache(tmp_path / "cache")).notes == ()


def test_measuring_processes_have_their_threads_and_find_echelon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = tmp_path / "python"
    names = ["OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PYTHONPATH", "PYTHONWARNINGS"]
    probe.write_text("#!/bin/sh\n" + "\n".join(f'echo "\\"${name}\\""' for name in names))
    probe.chmod(0o755)
    monkeypatch.setattr(measure_cluster.sys, "executable", str(probe))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with measure_cluster._worker_processes("cpu", 1, 3, tmp_path) as (process,):
        assert process.stdout is not None
        said = [json.loads(line) for line in process.stdout]
    assert said == ["3", "lo", "lo", f"{ROOT.parent}:/elsewhere", "ignore"]
