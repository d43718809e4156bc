"""Questions about some of the shards: quick ways to ask them give what numpy would say."""

from __future__ import annotations

import numpy as np

from echelon.server.protocol.shard_sets import Covers, every, some
from echelon.server.replica.replica_link import Link

SHARDS = 16


def test_flags_of_a_cover_are_asked_as_numpy_asks_them() -> None:
    """Of covers that are slices (all shards, each second one, a single one) and of others; with none, some and all flags set."""
    draw, covers = np.random.default_rng(0), Covers(SHARDS)
    answers = set()
    for shards in (range(SHARDS), range(1, SHARDS, 2), [3], [3, 1, 7]):
        cover = covers.of(np.array(shards, np.uint16))
        for share in (0.0, 0.5, 0.9, 1.0):
            flags = draw.random(SHARDS) < share
            part = flags[list(shards)]
            assert (every(flags[cover.at]), some(flags[cover.at])) == (part.all(), part.any())
            answers.add((every(flags[cover.at]), some(flags[cover.at])))
    assert answers == {(False, False), (False, True), (True, True)}


def test_a_replica_lacks_what_it_does_not_have_of_shards_that_need_it() -> None:
    """Shard by shard, for all that can be so of one."""
    covers, link = Covers(SHARDS), Link("b", 1, SHARDS, 1)
    for shard in range(SHARDS):
        link.backup[shard], link.required[shard] = bool(shard & 1), bool(shard & 2)
        link.synced[shard], link.refused[shard] = bool(shard & 4), bool(shard & 8)
    for shard in range(SHARDS):
        cover = covers.these(np.array([shard]))
        assert link.needed(cover) == bool(shard & 3)
        assert link.lacks(cover) == bool(shard & 3 and (not shard & 4 or shard & 8))
    assert link.lacks(covers.these(np.arange(SHARDS)))
    assert not link.lacks(covers.these(np.array([4, 5, 6, 7])))
