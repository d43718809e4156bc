"""Ranks that made different data are told before the first step; data that merely draws is none of that."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from echelon.data.sample_digest import digest
from echelon.engine.run import Run
from echelon.errors import DataError
from echelon.partition.complete_plan import complete
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.engine.jobs import DATA, classes, mlp, numbers


class Drawing(Dataset[Any]):
    """Draws for each sample from `kind`: a global generator, or one of its own that differs between ranks."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.own = kind, random.Random(rank)

    def __len__(self) -> int:
        return 53

    def __getitem__(self, index: int) -> Any:
        number = {"global": lambda: torch.rand(()).item(), "own": self.own.random}[self.kind]()
        return torch.full((8,), number), index % 4


class Seldom(Drawing):
    """Augments few samples: on rank 1 the first two readings of sample 0, and one in ten later ones."""

    def __init__(self, rank: int) -> None:
        super().__init__("own", rank)
        self.rank, self.reads = rank, 0

    def __getitem__(self, index: int) -> Any:
        self.reads += index == 0
        flipped = self.rank == 1 and index == 0 and (self.reads <= 2 or self.reads % 10 == 0)
        return torch.ones(8) * (-1 if flipped else 1), index % 4


class Broken(Drawing):
    def __getitem__(self, index: int) -> Any:
        raise OSError(f"sample {index} is lost")


def started(world: World, kind: str, plan: str = "dp=2") -> str:
    """The message with which a run over this data is refused on this rank."""
    rank = world.rank
    last, middle = numbers(53, 8), numbers(53, 8)
    last[-1] += rank
    middle[13] += rank
    data: dict[str, Any] = {
        "each its own": TensorDataset(numbers(53, 8, seed=rank), classes(53)),
        "last": TensorDataset(last, classes(53)),
        "middle": TensorDataset(middle, classes(53)),
        "list": [(row, 0) for row in numbers(53, 8, seed=rank)],
        "middle of a list": list(zip(middle, classes(53), strict=True)),
        "equal": DATA,
        "equal list": list(zip(*DATA.tensors, strict=True)),
        "global": Drawing("global", rank),
        "own": Drawing("own", rank),
        "own, one seed": Drawing("own", 0),
        "seldom": Seldom(rank),
        "broken": Broken("own", rank),
    }
    try:
        job = mlp(data=data[kind])
        with Run(job, complete(from_text(plan), job), world):
            return "started"
    except DataError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("each its own", "the ranks have different data: sample 0 differs on rank 1 from rank 0's"),
        ("list", "the ranks have different data: sample 0 differs on rank 1"),
        ("last", "the ranks have different data: sample 52 differs on rank 1"),
        ("middle", "the ranks have different data: sample 13 differs on rank 1"),
        ("middle of a list", "the ranks have different data: sample 13 differs on rank 1"),
        ("equal", "started"),
        ("equal list", "started"),
        ("global", "started"),
        ("own", "started"),
        ("seldom", "started"),
        ("broken", "started"),
    ],
)
def test_different_data_is_refused(ranks: RankPool, kind: str, words: str) -> None:
    assert all(words in said for said in ranks.run(2, "tests.engine.test_equal_data:started", kind))


@pytest.mark.parametrize(
    ("kind", "words"), [("own", "sample 0 differs on rank 1 from rank 0's"), ("own, one seed", "started")]
)
def test_ranks_that_compute_the_same_samples_together_must_draw_the_same(
    ranks: RankPool, kind: str, words: str
) -> None:
    assert all(words in said for said in ranks.run(2, "tests.engine.test_equal_data:started", kind, "tp=2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan", "words"),
    [
        ("stream dealt out", "tp=2", "ranks 0 and 1 compute the same samples together (tp, pp), and their first batches differ"),
        ("stream dealt out", "dp=2 pp=2 micro=4", "compute the same samples together (tp, pp), and their first batches differ"),
        ("evaluation dealt out", "tp=2", "ranks 0 and 1 compute the same samples together (tp, pp), and their first batches differ"),
        ("same stream", "dp=2 tp=2", "no error"),
        ("stream ends", "tp=2", "the stream ended early on rank 0"),
    ],
)  # fmt: skip
def test_a_stream_that_deals_its_samples_out_is_refused(ranks: RankPool, name: str, plan: str, words: str) -> None:
    found = ranks.run(from_text(plan).ranks, "tests.engine.jobs:failure", name, plan)
    assert all(words in each for each in found), found


class Thing:
    pass


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (torch.arange(6)[::2], torch.tensor([0, 2, 4]), True),
        (torch.tensor(1.0), torch.tensor(1.0), True),
        (torch.tensor(1.0), torch.tensor(2.0), False),
        (torch.ones(2, 3), torch.ones(3, 2), False),
        (torch.ones(2), torch.ones(2).bfloat16(), False),
        (torch.tensor([1 + 1j]).conj(), torch.tensor([1 - 1j]), True),
        (np.arange(3), np.arange(3), True),
        (np.array([Thing(), 1], object), np.array([Thing(), 1], object), True),
        (np.array([Thing(), 1], object), np.array([Thing(), 2], object), False),
        ({"a": 1, "b": "x"}, {"b": "x", "a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a", "b", "c"}, {"c", "b", "a"}, True),
        ((1, [2.0, None]), (1, [2.0, None]), True),
        ((1, 2), [1, 2], False),
        (Thing(), Thing(), True),
    ],
)
def test_a_digest_is_the_content(left: Any, right: Any, same: bool) -> None:
    assert (digest(left) == digest(right)) == same
