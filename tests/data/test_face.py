"""The names that users of echelon.data see."""

from __future__ import annotations

import pytest

import echelon.data


def test_public_names() -> None:
    assert echelon.data.__all__ == [
        "Loader",
        "MicroBatch",
        "Order",
        "Packed",
        "Source",
        "StepBatch",
        "Stream",
        "StreamLoader",
        "evaluation_batches",
        "evaluation_stream",
        "is_stream",
        "open_source",
        "prepare_dataset",
    ]
    assert all(getattr(echelon.data, name).__name__ == name for name in echelon.data.__all__)


def test_other_names() -> None:
    with pytest.raises(AttributeError, match=r"'echelon.data' has no attribute 'Sampler'"):
        _ = echelon.data.Sampler
