"""The map: a document that goes round, and refuses what is none."""

from __future__ import annotations

import json

import pytest

from echelon.errors import DocumentError
from echelon.server.protocol.shard_map import ServerEntry, ShardMap, empty_map

SEATS = {
    name: ServerEntry(address="127.0.0.1:1", host="a", incarnation=number) for number, name in enumerate("abc", start=1)
}


def example() -> ShardMap:
    """Four shards on three servers."""
    return ShardMap(
        version=7,
        servers=SEATS,
        chains=(("a", "b"), ("b", "c"), ("a", "b"), ()),
        epochs=(1, 7, 1, 3),
        learners=((), ("a",), (), ()),
        workers={"0": 4},
        lost_shards={3: ("c", "b")},
        restored_from={2: ("/checkpoint", 5)},
        rolled_back_shards=frozenset({2}),
    )


def test_round_trip() -> None:
    """Through JSON and back."""
    known = example()
    assert ShardMap.from_document(json.loads(json.dumps(known.to_document()))) == known
    assert ShardMap.from_document(empty_map(8).to_document()) == empty_map(8)


def test_views() -> None:
    """Who heads and holds what."""
    known = example()
    assert known.heads == ("a", "b", "a", None)
    assert known.head_mask("a").tolist() == [True, False, True, False]
    assert known.replica_mask("a").tolist() == [True, True, True, False]
    assert known.replica_mask("c").tolist() == [False, True, False, False]


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
        ShardMap.from_document(example().to_document() | change)
    with pytest.raises(DocumentError):
        ShardMap.from_document({})
    with pytest.raises(DocumentError, match="power of two"):
        empty_map(3)
