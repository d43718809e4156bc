"""Questions about some of the shards: quick ways to ask them give what numpy would say."""

from __future__ import annotations

import numpy as np

from echelon.server.protocol.shard_sets import ShardSetCache, all_set, any_set
from echelon.server.replica.replica_link import ReplicaLink

SHARDS = 16


def test_flags_of_a_cover_are_asked_as_numpy_asks_them() -> None:
    """Of covers that are slices (all shards, each second one, a single one) and of others; with none, some and all flags set."""
    draw, covers = np.random.default_rng(0), ShardSetCache(SHARDS)
    answers = set()
    for shards in (range(SHARDS), range(1, SHARDS, 2), [3], [3, 1, 7]):
        cover = covers.get(np.array(shards, np.uint16))
        for share in (0.0, 0.5, 0.9, 1.0):
            flags = draw.random(SHARDS) < share
            part = flags[list(shards)]
            assert (all_set(flags[cover.index]), any_set(flags[cover.index])) == (part.all(), part.any())
            answers.add((all_set(flags[cover.index]), any_set(flags[cover.index])))
    assert answers == {(False, False), (False, True), (True, True)}


def test_a_replica_lacks_what_it_does_not_have_of_shards_that_need_it() -> None:
    """Shard by shard, for all that can be so of one."""
    covers, link = ShardSetCache(SHARDS), ReplicaLink("b", 1, SHARDS, 1)
    for shard in range(SHARDS):
        link.is_backup[shard], link.is_required[shard] = bool(shard & 1), bool(shard & 2)
        link.is_synced[shard], link.has_refused[shard] = bool(shard & 4), bool(shard & 8)
    for shard in range(SHARDS):
        cover = covers.from_numbers(np.array([shard]))
        assert link.must_ack(cover) == bool(shard & 3)
        assert link.is_behind(cover) == bool(shard & 3 and (not shard & 4 or shard & 8))
    assert link.is_behind(covers.from_numbers(np.arange(SHARDS)))
    assert not link.is_behind(covers.from_numbers(np.array([4, 5, 6, 7])))
