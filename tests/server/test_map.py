"""The map: a document that goes round, and refuses what is none."""

from __future__ import annotations

import json

import pytest

from echelon.errors import DocumentError
from echelon.server.protocol.shard_map import Map, Seat, empty

SEATS = {name: Seat(address="127.0.0.1:1", host="a", incarnation=number) for number, name in enumerate("abc", start=1)}


def example() -> Map:
    """Four shards on three servers."""
    return Map(
        version=7,
        servers=SEATS,
        chains=(("a", "b"), ("b", "c"), ("a", "b"), ()),
        epochs=(1, 7, 1, 3),
        learners=((), ("a",), (), ()),
        workers={"0": 4},
        lost={3: ("c", "b")},
        sources={2: ("/checkpoint", 5)},
        revived=frozenset({2}),
    )


def test_round_trip() -> None:
    """Through JSON and back."""
    known = example()
    assert Map.from_document(json.loads(json.dumps(known.document()))) == known
    assert Map.from_document(empty(8).document()) == empty(8)


def test_views() -> None:
    """Who heads and holds what."""
    known = example()
    assert known.heads == ("a", "b", "a", None)
    assert {chain: shards.tolist() for chain, shards in known.routes.items()} == {("a", "b"): [0, 2], ("b", "c"): [1]}
    assert known.headed_by("a").tolist() == [True, False, True, False]
    assert known.held_by("a").tolist() == [True, True, True, False]
    assert known.held_by("c").tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": [1]},
        {"chains": [9, 0, 0, 0]},
        {"kinds": 3},
        {"kinds": [["a", "a"], ["a"], ["b", "c"], ["x"], []]},
        {"servers": {"a": ["x"]}},
        {"version": None},
        {"lost": [1]},
    ],
)
def test_no_map(change: dict) -> None:
    """Anything else is an error of ours."""
    with pytest.raises(DocumentError):
        Map.from_document(example().document() | change)
    with pytest.raises(DocumentError):
        Map.from_document({})
    with pytest.raises(DocumentError, match="power of two"):
        empty(3)
