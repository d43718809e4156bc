"""Batches as trees of tensors: every container that users put into batches keeps its type and its other contents."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from echelon.tree import map_tensors, to_device, tree_flatten, tree_map, tree_tensors, tree_unflatten

Point = namedtuple("Point", "x y")


@dataclass
class Open:
    x: Tensor
    text: str
    size: int = field(init=False, default=3)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    parts: dict[str, Tensor]


class Own(MutableMapping):  # its copy would share the dict inside
    def __init__(self, **values: Any) -> None:
        self._held = values

    def __getitem__(self, key: str) -> Any:
        return self._held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._held[key] = value

    def __delitem__(self, key: str) -> None:
        del self._held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class Attributes(dict):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Tagged(dict):
    tag = ""


def _one() -> Tensor:
    return torch.ones(2)


def _tagged() -> Tagged:
    made = Tagged(x=_one())
    made.tag = "kept"
    return made


CASES = {
    "dict": lambda: {"x": _one(), "s": "text"},
    "ordered": lambda: OrderedDict(x=_one()),
    "list": lambda: [_one(), (_one(), 3)],
    "named tuple": lambda: Point(_one(), "y"),
    "dataclass": lambda: Open(_one(), "text"),
    "frozen dataclass": lambda: Frozen(_one(), {"a": _one()}),
    "UserDict": lambda: UserDict(x=_one(), n=None),
    "own mapping": lambda: Own(x=_one()),
    "attribute dict": lambda: Attributes(x=_one()),
    "dict with attributes": _tagged,
    "namespace": lambda: SimpleNamespace(x=_one(), label="a"),
    "packed sequence": lambda: pack_sequence([torch.ones(2, 1), torch.ones(1, 1)]),
    "distribution": lambda: torch.distributions.Normal(_one(), _one()),
    "strings": lambda: ["a", "b"],
    "size": lambda: torch.Size([2, 3]),
}


@pytest.mark.parametrize("name", CASES)
def test_map_keeps_the_type_and_leaves_the_original_alone(name: str) -> None:
    value = CASES[name]()
    before = [each.clone() for each in tree_tensors(value)]
    doubled = map_tensors(lambda x: x * 2, value)
    assert type(doubled) is type(value)
    assert [each.tolist() for each in tree_tensors(doubled)] == [(each * 2).tolist() for each in before]
    assert [each.tolist() for each in tree_tensors(value)] == [each.tolist() for each in before]
    assert bool(before) == (name not in ("strings", "size"))


def test_other_contents_stay() -> None:
    assert map_tensors(torch.neg, _tagged()).tag == "kept"
    assert map_tensors(torch.neg, Open(_one(), "text")).size == 3
    packed = pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])
    assert map_tensors(Tensor.double, packed).batch_sizes.dtype is torch.int64
    attributes = map_tensors(torch.neg, Attributes(x=_one()))
    assert attributes.x is attributes["x"]


def test_structures_compare_by_type_and_keys_and_hold_no_tensor() -> None:
    first, second = (tree_flatten(Own(x=torch.ones(size)))[1] for size in (2, 5))
    assert first == second
    assert hash(first) == hash(second)
    assert first != tree_flatten(Own(y=_one()))[1]
    leaves, structure = tree_flatten(Frozen(_one(), {"a": _one()}))
    made = tree_unflatten(["x", "a"], structure)
    assert isinstance(made, Frozen)
    assert (made.x, made.parts) == ("x", {"a": "a"})
    assert leaves[0].tolist() == [1, 1]


def test_cycles_and_modules_are_leaves() -> None:
    loop = SimpleNamespace(x=_one())
    loop.self = loop
    assert tree_map(lambda leaf: leaf, loop).self is loop
    module = nn.Linear(1, 1)
    assert tree_map(lambda leaf: leaf, [module])[0] is module


@pytest.mark.extra
def test_batch_encoding() -> None:
    transformers = pytest.importorskip("transformers")
    value = transformers.BatchEncoding({"input_ids": torch.ones(2, 3, dtype=torch.int64), "text": ["a", "b"]})
    moved = to_device(value, torch.device("meta"))
    assert type(moved) is type(value)
    assert moved.input_ids.is_meta
    assert moved["text"] == ["a", "b"]
    assert not value.input_ids.is_meta


def test_to_device_moves_what_moves_itself() -> None:
    class Boxes:
        def to(self, device: torch.device) -> str:
            return f"on {device}"

    assert to_device([Boxes(), Tensor, "text"], torch.device("cpu")) == ["on cpu", Tensor, "text"]
