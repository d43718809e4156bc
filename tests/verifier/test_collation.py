"""Batches of ranks are joined for one device only where each sample has its row."""

from __future__ import annotations

import pytest
import torch

from echelon.verifier.reference_data import UnjoinableError, join_batches


def test_rows_of_samples_are_joined() -> None:
    found = join_batches([(torch.zeros(2, 3), torch.ones(2)), (torch.ones(1, 3), torch.zeros(1))], [2, 1])
    assert found[0].shape == (3, 3)
    assert found[1].tolist() == [1, 1, 0]


def test_bags_and_their_offsets_are_not() -> None:
    """Offsets count rows of their own part: joined, they would name rows of another sample."""
    bags = [(torch.arange(5), torch.tensor([0, 2])), (torch.arange(3), torch.tensor([0, 1]))]
    with pytest.raises(UnjoinableError):
        join_batches(bags, [2, 2])
