"""Packings and readers that are killed at any moment: nothing wrong is left behind, and the next one goes on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.kill_tests import kill_packing, kill_readers, unbroken
from bench.sample_dataset import make

pytestmark = pytest.mark.slow


@pytest.mark.journey
def test_killed_packings_go_on_to_the_same_bytes(tmp_path: Path) -> None:
    """A sample of what `python -m bench.damage` does a hundred times."""
    right, seconds = unbroken(tmp_path / "whole")
    draw = random.Random(3)
    found = [kill_packing(tmp_path / f"set-{turn}", right, draw.random() * seconds, draw) for turn in range(3)]
    assert [problem for each in found for problem in each.wrong] == []
    assert sum(each.kills for each in found) >= 2


@pytest.mark.slow
def test_killed_readers_never_spoil_the_cache(tmp_path: Path) -> None:
    """A sample of what `python -m bench.damage` does a hundred times: two at a time fill a small cache."""
    right = make(tmp_path / "far", 400, shards=8)
    assert kill_readers(f"file://{tmp_path / 'far'}", right, tmp_path / "cache", 4, random.Random(1)) == []
