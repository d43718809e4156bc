"""The benches of data run from start to end, on little data, and say what they should."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench import data, data_stall, loaders
from bench.cold_readers import forget, in_memory, main
from tests.sampling import only_whole


def test_forgotten_pages_are_not_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(2**20))
    assert in_memory(tmp_path) == 1.0
    forget(tmp_path)
    assert in_memory(tmp_path) == 0.0


def test_every_loader_is_a_rival_and_ours_is_held_against_numpy() -> None:
    material = loaders.Material(name="rows", arrays={"x": np.zeros((4, 2))}, batch=2)
    fast = dict.fromkeys(loaders.READERS, 80.0) | {loaders.Bare: 90.0, loaders.Taken: 100.0, loaders.Torch: 81.0}
    rows = {row.what["reader"]: row for row in data._compared(material, "", fast)}
    others = [reader for reader in loaders.READERS if reader not in (*loaders.BARE, *loaders.OURS)]
    assert {rows[reader.name].limit for reader in others} == {1.0}
    assert [name for name, row in rows.items() if not row.good] == ["torch DataLoader"]
    assert rows["echelon"].value == 80 / 90
    assert rows["echelon"].text.endswith("0.89 of NumPy, 0.80 of its take")
    slow = {row.what["reader"]: row for row in data._compared(material, "", fast | {loaders.Echelon: 62.0})}
    assert not slow["echelon"].good


@pytest.mark.slow
@pytest.mark.parametrize(("state", "before"), [("cold", 0), ("bare", 0), ("fresh", 0), ("warm", 25)])
@pytest.mark.parametrize("reader", [loaders.Bare, loaders.Echelon, loaders.Torch])
def test_all_readers_are_treated_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: type[loaders.Reader], state: str, before: int
) -> None:
    """What is read before the clock starts: nothing by a process that begins cold or fresh, an epoch by one that is warm."""
    seen: list[int] = []
    monkeypatch.setitem(loaders.SAMPLES, "tokens", 400)
    monkeypatch.setattr(reader, "advance", lambda self, steps: seen.append(steps))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(readline=lambda: seen.append(-1)))
    assert main([reader.__name__, "tokens", str(tmp_path), "0", "1", state, "1", "9"]) == 0
    begun = seen.index(-1)
    assert (sum(seen[:begun]), sum(seen[begun + 1 :])) == (before, 25)


@only_whole
def test_readers_take_turns_and_run_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = (*loaders.BARE, *loaders.OURS, loaders.Torch)
    monkeypatch.setattr(loaders, "READERS", chosen)
    monkeypatch.setattr(data, "READERS", chosen)
    place = ["--folder", str(tmp_path / "f"), "--json", str(tmp_path / "j")]
    words = ["--only", "tokens", "--what", "speed,fresh,cold,ranks", "--seconds", "1", "--rounds", "3", *place]
    ended = data.main(words)
    rows = json.loads((tmp_path / "j").read_text())["rows"]
    assert len(rows) == 5 + 10 + 10 + 5
    assert ended == (not all(row["good"] for row in rows))
    assert data.main(["--what", "memory", "--gigabytes", "0.05", "--without", "peers"]) == 0


@only_whole
def test_waiting_is_a_share_of_the_step(tmp_path: Path) -> None:
    assert data_stall.main(["--tiny", "--workers", "1", "--json", str(tmp_path / "j")]) == 0
    rows = json.loads((tmp_path / "j").read_text())["rows"]
    assert [0 <= row["value"] <= 1 for row in rows] == [True, True]
