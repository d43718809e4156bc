"""The benches of data run from start to end, on little data, and say what they should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import data, loaders, waiting
from bench.apart import forget, in_memory
from tests.whole import only_whole


def test_forgotten_pages_are_not_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(2**20))
    assert in_memory(tmp_path) == 1.0
    forget(tmp_path)
    assert in_memory(tmp_path) == 0.0


@only_whole
def test_readers_take_turns_and_run_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "READERS", (loaders.Bare, loaders.Echelon, loaders.EchelonShards, loaders.Torch))
    monkeypatch.setattr(data, "READERS", loaders.READERS)
    words = [
        "--only",
        "tokens",
        "--seconds",
        "1",
        "--rounds",
        "3",
        "--folder",
        str(tmp_path / "f"),
        "--json",
        str(tmp_path / "j"),
    ]
    assert data.main(words) in (0, 1)
    rows = json.loads((tmp_path / "j").read_text())["rows"]
    assert len(rows) == 4 + 1 + 4 + 4
    assert data.main(["--what", "memory", "--gigabytes", "0.05"]) == 0


@only_whole
def test_waiting_is_a_share_of_the_step(tmp_path: Path) -> None:
    assert waiting.main(["--tiny", "--workers", "1", "--json", str(tmp_path / "j")]) == 0
    rows = json.loads((tmp_path / "j").read_text())["rows"]
    assert [0 <= row["value"] <= 1 for row in rows] == [True, True]
