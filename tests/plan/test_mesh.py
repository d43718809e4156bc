"""Ranks and coordinates are two names of the same thing, and groups partition the ranks."""

from __future__ import annotations

import pytest
from hypothesis import given

from echelon.plan.mesh import AXES, Mesh
from tests.plan.strategies import meshes


@given(meshes)
def test_rank_and_coordinate_are_a_bijection(mesh: Mesh) -> None:
    places = [mesh.coordinate(rank) for rank in range(mesh.ranks)]
    assert [mesh.rank(**place) for place in places] == list(range(mesh.ranks))
    assert len({tuple(place.items()) for place in places}) == mesh.ranks


@given(meshes)
def test_groups_partition_the_ranks(mesh: Mesh) -> None:
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.ranks))
        assert all(len(group) == getattr(mesh, axis) for group in groups)
        for group in groups:
            assert [mesh.coordinate(rank)[axis] for rank in group] == list(range(getattr(mesh, axis)))


def test_tensor_ranks_are_neighbours() -> None:
    assert Mesh(dp=2, tp=2).groups("tp") == ((0, 1), (2, 3))


@pytest.mark.parametrize("sizes", [{"dp": 0}, {"tp": -1}, {"pp": 1.5}, {"dp": 2, "ep": 3}])
def test_impossible_sizes_are_named(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{list(sizes)[-1]}="):
        Mesh(**sizes)


def test_a_place_outside_is_named() -> None:
    with pytest.raises(ValueError, match=r"dp=2 is outside 0\.\.1"):
        Mesh(dp=2).rank(dp=2)
    with pytest.raises(ValueError, match="zp: no such axis"):
        Mesh(dp=2).rank(zp=0)
    with pytest.raises(ValueError, match="rank 2 is not in a mesh of 2"):
        Mesh(dp=2).coordinate(2)
