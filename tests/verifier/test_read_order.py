"""Data sets whose samples depend on what was read before are found; those that only count, cache or draw are not taken for such."""

from __future__ import annotations

import contextlib
import os
import random
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset

from echelon.errors import VerificationError
from echelon.profiler.data_state import DataState
from echelon.verifier import read_order
from echelon.verifier.read_order import require_independent_samples
from tests.engine.jobs import classes, mlp, numbers


class Read(Dataset[Any]):
    """Counts its reads."""

    def __init__(self) -> None:
        self.rows, self.labels, self.reads = numbers(32, 8), classes(32), 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.row(index), self.labels[index]

    def row(self, index: int) -> Any:
        return self.rows[index]


class Harder(Read):
    """Other samples after 20 reads."""

    def row(self, index: int) -> Any:
        return self.rows[index] * (1 if self.reads <= 20 else 2)


class Normalised(Read):
    """Subtracts a running mean."""

    mean: Any = 0.0

    def row(self, index: int) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * self.rows[index]
        return self.rows[index] - self.mean


class InPlace(Read):
    """Edits its samples."""

    def row(self, index: int) -> Any:
        self.rows[index] *= 0.5
        return self.rows[index]


class Previous(Read):
    """Mixes in the sample that was read before."""

    def __init__(self) -> None:
        super().__init__()
        self.last = [0]

    def row(self, index: int) -> Any:
        before, self.last[0] = self.last[0], index
        return self.rows[index] + 0.1 * self.rows[before]


class Cached(Read):
    """Keeps what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Any] = {}

    def row(self, index: int) -> Any:
        return self.cache.setdefault(index, self.rows[index] * 2)


class Drawing(Read):
    """Flips samples by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(3)

    def row(self, index: int) -> Any:
        return self.rows[index].flip(0) if self.random.random() < 0.5 else self.rows[index]


class Opening(Read):
    """Opens a file at the first read."""

    def __init__(self) -> None:
        super().__init__()
        self.file: Any = None

    def row(self, index: int) -> Any:
        if self.file is None:
            self.file = open(os.devnull, "rb")  # noqa: SIM115 (it stays open, as users' files do)
        return self.rows[index]


class Failing(Read):
    """Cannot read one sample, which the first step does not need."""

    def row(self, index: int) -> Any:
        if self.reads > 20:
            raise ValueError("a broken file")
        return self.rows[index]


@pytest.mark.parametrize("kind", [Harder, Normalised, InPlace, Previous])
def test_samples_that_depend_on_earlier_readings_are_found(kind: type[Read]) -> None:
    for data in (kind(), Subset(kind(), range(30))):
        with pytest.raises(VerificationError, match=r"sample \d+ is another when .* train in one process"):
            require_independent_samples(mlp(data=data, batch=8, epochs=2))


@pytest.mark.parametrize("kind", [Read, Cached, Drawing, Failing])
def test_others_are_not_taken_for_such(kind: type[Read]) -> None:
    assert read_order._history_dependence(mlp(data=kind(), batch=8, epochs=2)) is None


def test_a_file_that_was_opened_stays_open() -> None:
    data = Opening()
    require_independent_samples(mlp(data=data, batch=8, epochs=2))
    with data.file:
        assert not data.file.closed


@pytest.mark.parametrize("kind", [Harder, Normalised, InPlace, Previous, Cached, Drawing])
def test_trials_leave_no_trace(kind: type[Read]) -> None:
    data, untouched = kind(), kind()
    with contextlib.suppress(VerificationError):
        require_independent_samples(mlp(data=data, batch=8, epochs=2))
    for index in (3, 1, 2, 3):
        assert torch.equal(data[index][0], untouched[index][0])


def test_what_is_too_large_to_be_put_back_is_seen_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.profiler.data_state._COPIED", 64)
    data = InPlace()
    held = DataState(data)
    assert not held.unrestorable()
    data[0]
    assert held.unrestorable()
    with pytest.raises(VerificationError, match="read again"):
        require_independent_samples(mlp(data=InPlace(), batch=8, epochs=2))


def test_further_readings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_order, "_MORE", 8)
    most = 0

    class Watched(Read):
        def row(self, index: int) -> Any:
            nonlocal most
            most = max(most, self.reads)
            return self.rows[index]

    data = Watched()
    require_independent_samples(mlp(data=data, batch=8, epochs=1000))
    assert most < 64
    assert data.reads == 0
