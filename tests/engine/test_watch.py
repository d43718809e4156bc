"""Ranks that come apart end the run, with the rank, the tensor and the cause; ranks that do not, train on."""

from __future__ import annotations

import pytest
import torch

from echelon.engine.checks.divergence_monitor import strided_digest
from echelon.engine.checks.replica_check import all_words_equal, checksum
from echelon.testing.rank_pool import RankPool
from tests.engine import apart


@pytest.mark.slow
def test_ranks_that_come_apart_are_told_of(ranks: RankPool) -> None:
    found = ranks.run(2, "tests.engine.apart:outcomes", list(apart.CASES))
    for name, (_, _, said) in apart.CASES.items():
        for each in found:
            message, steps = each[name]
            assert (said in message) if said else not message, (name, message)
            assert steps == (3 if not said else steps)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("plan", ["dp=2 micro=3", "dp=2 zero=2 micro=3"])
def test_running_statistics_are_exact_where_ranks_call_unequally_often(
    ranks: RankPool, momentum: float | None, plan: str
) -> None:
    assert max(ranks.run(2, "tests.engine.apart:running", momentum, plan)) < 1e-12


def test_a_checksum_sees_every_bit_and_every_place() -> None:
    value = torch.randn(700)
    assert checksum(value) == checksum(value.clone())
    for place in (0, 350, 699):
        other = value.clone()
        other.view(torch.int32)[place] ^= 1
        assert checksum(other) != checksum(value)
    swapped = value.clone()
    swapped[0], swapped[600] = value[600], value[0]
    assert checksum(swapped) != checksum(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_checksum_takes_every_kind_and_layout(dtype: torch.dtype) -> None:
    value = torch.randn(4, 3, 5, 7).to(dtype)
    for each in (value, value.to(memory_format=torch.channels_last), value[1:, :, ::2], value[0, 0, 0, 0], value[:0]):
        assert checksum(each) == checksum(each.clone())


def test_words_are_equal_only_where_they_are() -> None:
    assert all_words_equal(3, 3 * 9.0, 3 * 81.0)
    assert not all_words_equal(3, 9.0 + 9.0 + 10.0, 81.0 + 81.0 + 100.0)
    large = float(0xFFFFF)
    assert all_words_equal(500, 500 * large, 500 * large**2)
    assert not all_words_equal(500, 500 * large - 1, 499 * large**2 + (large - 1) ** 2)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
)
def test_samples_of_every_kind_and_layout_are_told_apart(dtype: torch.dtype) -> None:
    value = (torch.arange(24).reshape(4, 6) % 5).to(dtype)
    graph = value.clone().requires_grad_() if dtype == torch.float64 else value
    for one in (value, value.t(), value[:, ::2], value[0, 1], graph, value.to(torch.complex64).conj()):
        other = one.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
        assert strided_digest([one], 3) == strided_digest([other], 3)
        last = other.view(-1)[-1:]
        last.copy_(torch.full_like(last, float(not last.to(torch.complex64).real.item())))
        assert strided_digest([one], 3) != strided_digest([other], 3)
    assert strided_digest([value], 3) != strided_digest([value.reshape(6, 4)], 3)
