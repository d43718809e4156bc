"""The store of one server: what is pushed is what is read, moved and digested."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.server.kinds import Dense, Rule, StoreError, Table
from echelon.server.store import Store

SHARDS = 8


def stamps(lsn: int) -> np.ndarray:
    return np.full(SHARDS, lsn, np.int64)


def test_a_shard_moves_whole():
    here, there = (Store(shards=SHARDS, memory=64 << 20) for _ in range(2))
    for store in (here, there):
        store.declare(Table(name="emb", dim=4, rule=Rule(kind="adagrad", lr=0.1)))
        store.declare(Dense(name="w", size=70000, rule=Rule(kind="sgd", lr=0.5)))
    ids = np.arange(-50, 50)
    here.apply("emb", ids, np.ones((100, 4)), lsn=stamps(3))
    here.apply("w", np.arange(2), [np.ones(65536), np.ones(70000 - 65536)], lsn=stamps(4))
    for shard in range(SHARDS):
        there.install(shard, here.snapshot(shard))
        assert there.digest(shard) == here.digest(shard)
    np.testing.assert_array_equal(here.read("emb", ids)[0], there.read("emb", ids)[0])
    assert (there.read_blocks("w", np.array([1]))[0] == -0.5).all()
    assert sorted(there.changed("emb", range(SHARDS), stamps(2))) == ids.tolist()


def test_another_spec_under_the_same_name_is_refused():
    store = Store(shards=SHARDS, memory=64 << 20)
    store.declare(Table(name="emb", dim=4))
    with pytest.raises(StoreError, match=r"emb: declared as .*dim=4.*now as .*dim=8"):
        store.declare(Table(name="emb", dim=8))
