"""What is pulled and pushed, cut by route: each id once, on its own route, whatever the map lacks."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.server.client.requests import Pull, Push, TablePull, TablePush
from echelon.server.client.routing import RoutingTable
from echelon.server.protocol.hashing import shard_of
from echelon.server.protocol.specs import Table
from echelon.server.protocol.wire_dtypes import quantize

CHAINS = [("a", "b"), ("b", "a"), (), ("a", "b")]
IDS = np.arange(500) // 2
TABLE = Table(name="t", dim=4)


def roads(chains: list[tuple[str, ...]] = CHAINS) -> RoutingTable:
    return RoutingTable.from_chains(chains)


@pytest.mark.parametrize("large", [1 << 20, 1000])
def test_a_pull_asks_for_each_id_once_by_its_route_or_by_none(large, monkeypatch):
    monkeypatch.setattr("echelon.server.client.requests.MAX_ROWS_BYTES", large)
    order = roads().group_ids(IDS)
    pull = Pull(step=0, staleness=None, tables={"t": TablePull(TABLE, "f4", order, np.empty((250, 4), "f4"))})
    asked: dict[int, tuple[str, ...]] = {}
    for route, part in pull.split_by_route(roads()):
        _, [cover, ids] = part.build_frame()
        assert ids.size * 16 <= large
        assert list(cover) == ([] if route is None else [s for s, chain in enumerate(CHAINS) if chain == route.chain])
        assert asked.keys().isdisjoint(ids.tolist())
        asked |= dict.fromkeys(ids.tolist(), () if route is None else route.chain)
    assert asked == {i: CHAINS[s] for i, s in enumerate(shard_of(np.arange(250), 4))}


def test_of_a_push_each_route_gets_its_own_also_routes_of_a_later_map():
    order = roads().group_ids(IDS)
    values = order.sum_gradients(np.repeat(IDS, 4).reshape(500, 4).astype("f4"))
    parcel = Push(roads(), {}, [TablePush(TABLE, order, values)], [])
    later = roads([("b",), ("a",), ("a",), ("b",)])
    for those in (parcel.routing_table, later):
        for route in those.routes:
            ops, [cover, ids, sums] = parcel.build_frame(route, route.shards)
            assert (ops, list(cover)) == ([{"table": "t"}], list(route.shards))
            assert set(ids.tolist()) == {i for i in IDS.tolist() if shard_of(np.array([i]), 4)[0] in route.shards}
            assert np.array_equal(sums[:, 3], 2 * ids)


@pytest.mark.parametrize("wire", ["f4", "f2", "i1"])
@pytest.mark.parametrize("chains", [[("a",)] * 4, CHAINS])
@pytest.mark.parametrize("again", [False, True])
def test_rows_lie_in_their_places_however_they_come_in(wire, chains, again):
    order = roads(chains).group_ids(IDS)
    wanted = TablePull(TABLE, wire, order, np.full((250, 4), -1, "f4"))
    pull = Pull(step=0, staleness=None, tables={"t": wanted})
    parts = [part for _, part in pull.split_by_route(roads(chains))]
    if again:
        parts = [each for part in parts for _, each in pull.reroute_part(part, roads(CHAINS[::-1]))]
    for part in parts:
        _, [_, ids] = part.build_frame()
        part.store_reply(quantize(np.repeat(ids % 64, 4).reshape(-1, 4).astype("f4"), wire))
    np.testing.assert_allclose(wanted.grouped_ids.expand(wanted.rows)[:, 3], IDS % 64, rtol=1e-6)


def test_rows_of_another_shape_or_kind_are_not_taken_as_they_are():
    order = roads([("a",)]).group_ids(IDS)
    for rows in (np.ones((250, 4), "f8"), np.ones((1, 4), "f4")):
        wanted = TablePull(TABLE, "f4", order, np.zeros((250, 4), "f4"))
        wanted.store_rows(slice(0, 250), rows)
        assert (wanted.rows.shape, wanted.rows.dtype) == ((250, 4), np.float32)
    with pytest.raises(ValueError, match="broadcast"):
        wanted.store_rows(slice(0, 10), np.ones((250, 4), "f4"))
