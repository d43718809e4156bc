"""Trainings that were killed and interrupted end with the bits of an unbroken one; `python -m bench.resume` runs every stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.resume import EVERY, break_and_resume, cells, same_bits
from tests.sampling import only_whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "zero"),
    [
        pytest.param(1, 0, marks=only_whole),
        (2, 2),
        pytest.param(4, 3, marks=only_whole),
    ],
)
def test_killed_and_interrupted_ends_with_the_same_bits(tmp_path: Path, ranks: int, zero: int) -> None:
    cell = cells([ranks], seed=ranks)[zero]
    outcome = break_and_resume(cell, tmp_path)
    assert outcome.different == ()
    after_kill, after_interrupt = outcome.resumed
    assert after_kill % EVERY == 0
    assert after_kill > 0 or outcome.killed < 2 * EVERY
    assert after_interrupt >= outcome.interrupted  # Ctrl-C saves the step it stopped at
    assert outcome.tensors == 11 + 3 * 8  # parameters and buffers; AdamW's step and two moments of each parameter


def test_bits_are_compared_not_values() -> None:
    zero = torch.zeros(3)
    assert same_bits(zero, zero.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero + 1e-30)
    assert not same_bits(zero, zero.double())
    assert same_bits(zero * float("nan"), zero * float("nan"))
