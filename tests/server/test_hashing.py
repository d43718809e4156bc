"""Which shard has what: the same everywhere and for ever, so the numbers themselves are tested."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.server import kernels
from echelon.server.protocol.hashing import block_shards, hash_name, mix64, shard_of
from echelon.server.protocol.specs import Dense, Rule, StoreError


def plain_mix(x: int) -> int:
    x &= 2**64 - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
    return x ^ (x >> 31)


@given(st.integers(-(2**63), 2**63 - 1), st.sampled_from([1, 2, 256, 65536]))
def test_the_hash_is_splitmix_and_its_highest_bits_choose(number, shards):
    assert int(mix64(np.array([number]))[0]) == plain_mix(number)
    assert int(kernels.mix64(np.uint64(number & (2**64 - 1)))) == plain_mix(number)
    assert int(shard_of(np.array([number]), shards)[0]) == plain_mix(number) * shards >> 64


def test_ids_in_a_row_spread_evenly():
    counts = np.bincount(shard_of(np.arange(1 << 16), 256), minlength=256)
    assert 200 < counts.min() <= counts.max() < 320


def test_names_and_blocks_have_fixed_places():
    assert hash_name("emb") == 12576442170892187285
    spread = block_shards(Dense(name="w", size=100 * 65536), 256)
    assert spread[:4].tolist() == [76, 148, 222, 217]
    assert len(set(spread)) > 50
    whole = block_shards(Dense(name="w", size=100 * 65536, rule=Rule(kind="lamb")), 256)
    assert set(whole.tolist()) == {76}


@pytest.mark.parametrize("shards", [0, 3, 131072, True, 2.0])
def test_shards_are_a_power_of_two(shards):
    with pytest.raises(StoreError, match=r"shards: .*power of two"):
        shard_of(np.arange(3), shards)
