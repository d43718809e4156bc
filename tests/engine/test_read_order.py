"""Data sets whose samples depend on what was read before are found; those that only count, cache or draw are not taken for such."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

from echelon.engine.checks import read_order_check
from echelon.engine.checks.read_order_check import require_independent_samples
from echelon.errors import VerificationError
from echelon.trials.dataset_state import DatasetState, preserve_datasets
from tests.engine.jobs import mlp
from tests.engine.stateful_datasets import (
    LEAVES_FILES_OPEN,
    Arguments,
    Cached,
    Closure,
    Drawing,
    DrawingElsewhere,
    Drawn,
    Failing,
    Harder,
    InPlace,
    Iterated,
    Lines,
    LinesElsewhere,
    Normalised,
    OfClass,
    OfModule,
    Opening,
    Plain,
    Previous,
    Read,
    Remembered,
    RememberedByMethod,
    Reopened,
    Replacing,
    Slotted,
    collected,  # noqa: F401 (a fixture)
)

pytestmark = LEAVES_FILES_OPEN

#: Samples depend on earlier readings, which the data set itself keeps.
DEPENDENT = [
    Harder,
    Normalised,
    InPlace,
    Previous,
    Closure,
    Slotted,
    Replacing,
    Arguments,
    Lines,
    LinesElsewhere,
    Iterated,
    Drawn,
    Remembered,
    RememberedByMethod,
    Reopened,
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*DEPENDENT, OfClass, OfModule])
def test_samples_that_depend_on_earlier_readings_are_found(kind: type[Plain]) -> None:
    for data in (kind(), Subset(kind(), range(30))):
        with pytest.raises(VerificationError, match=r"sample \d+ differs (when|after) .* train in one process"):
            require_independent_samples(mlp(data=data, batch_size=8, epochs=2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Read, Cached, Drawing, DrawingElsewhere, Failing])
def test_others_are_not_taken_for_such(kind: type[Plain]) -> None:
    assert read_order_check.find_history_dependence(mlp(data=kind(), batch_size=8, epochs=2)) is None


def test_a_file_that_a_trial_opened_is_opened_again() -> None:
    data = Opening()
    require_independent_samples(mlp(data=data, batch_size=8, epochs=2))
    assert data.file is None
    data[0]
    data.file.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*DEPENDENT, Cached, Drawing, DrawingElsewhere])
def test_trials_leave_no_trace(kind: type[Plain]) -> None:
    data, untouched = kind(), kind()
    with contextlib.suppress(VerificationError):
        require_independent_samples(mlp(data=data, batch_size=8, epochs=2))
    for index in (3, 1, 2, 3):
        assert torch.equal(data[index][0], untouched[index][0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Closure, Lines, LinesElsewhere, Iterated, Reopened])
def test_trials_in_the_middle_leave_no_trace(kind: type[Plain]) -> None:
    data, untouched = kind(), kind()
    for index in (0, 1):
        assert torch.equal(data[index][0], untouched[index][0])
    with preserve_datasets(data):
        data[5]
    for index in (3, 1, 2, 3):
        assert torch.equal(data[index][0], untouched[index][0])


class Item:
    def __init__(self) -> None:
        self.reads = 0


class Collate:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, items: list[Any]) -> None:
        self.calls += 1
        for item, _ in items:
            item.reads += 1


def test_collation_in_a_trial_leaves_no_trace() -> None:
    collate, data = Collate(), [(Item(), 0), (Item(), 1)]
    with preserve_datasets(data, collate):
        collate(data)
        assert collate.calls == data[1][0].reads == 1
    assert collate.calls == data[1][0].reads == 0


def test_what_is_too_large_to_be_put_back_is_seen_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.trials.dataset_state._MAX_COPIED_BYTES", 64)
    data = InPlace()
    held = DatasetState(data)
    assert not held.has_unrestorable_changes()
    data[0]
    assert held.has_unrestorable_changes()
    with pytest.raises(VerificationError, match="read again"):
        require_independent_samples(mlp(data=InPlace(), batch_size=8, epochs=2))


def test_further_readings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_order_check, "_EXTRA_READS", 8)
    most = 0

    class Watched(Read):
        def row(self, index: int) -> Any:
            nonlocal most
            most = max(most, self.reads)
            return self.rows[index]

    data = Watched()
    require_independent_samples(mlp(data=data, batch_size=8, epochs=1000))
    assert most < 64
    assert data.reads == 0
