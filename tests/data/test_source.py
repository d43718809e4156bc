"""Sources: the same batches as torch makes, the same augmentation on any rank, and messages that name the sample."""

from __future__ import annotations

import ctypes
import itertools
import pickle
import random
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate, random_split

from echelon.data.open_data import open_source
from echelon.data.source import GatherSource, SampleSource, Source
from echelon.errors import DataError
from tests.flow.jobs import make

IDS = np.array([3, 17, 0, 8, 5])
POINT = namedtuple("POINT", "x y")


class Squares(Dataset[Any]):
    """Plain samples in Python."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((2, 3), float(index)), "y": index * index, "name": str(index)}


class Noisy(Squares):
    """Augmented: draws from the generator that `kind` names, for all samples or from `first` on."""

    def __init__(self, kind: str, first: int = 0) -> None:
        self.kind, self.first = kind, first

    def __getitem__(self, index: int) -> Any:
        if index < self.first:
            return torch.zeros(4)
        draw = {"torch": torch.rand, "python": lambda n: [random.random() for _ in range(n)], "numpy": np.random.rand}
        return torch.as_tensor(np.asarray(draw[self.kind](4)))


class Many(Squares):
    """Reads many at once, as HF data sets do; `noise` augments."""

    def __init__(self, noise: bool = False) -> None:
        self.calls: list[list[int]] = []
        self.noise = noise

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls.append(indices)
        return [torch.tensor(float(index)) + (torch.rand(()) if self.noise else 0) for index in indices]


def same(left: Any, right: Any) -> bool:
    """Equal in structure, type and value."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


COLUMNS = TensorDataset(torch.randn(20, 3, 4), torch.arange(20))
DATA = {
    "tensors": COLUMNS,
    "strided tensors": TensorDataset(torch.randn(4, 20).T, torch.randn(20, 6)[:, ::2]),
    "tensors of types that NumPy lacks": TensorDataset(
        torch.randn(20, 3).bfloat16(), torch.zeros(20).to(torch.float8_e5m2)
    ),
    "small numbers, truths, unsigned": TensorDataset(
        torch.arange(20).half(), torch.arange(20) > 9, torch.arange(20).to(torch.uint16)
    ),
    "conjugated tensor": TensorDataset(torch.randn(20, 2, dtype=torch.complex64).conj()),
    "a tensor with gradients": TensorDataset(torch.randn(20, 2, requires_grad=True)),
    "an array of text": np.array([str(index) for index in range(20)]),
    "an array of the other byte order": np.arange(20).astype(">i4"),
    "subset with places from the end": Subset(COLUMNS, list(range(-20, 0))),
    "one column": TensorDataset(torch.arange(20)),
    "subset of tensors": Subset(COLUMNS, list(range(19, -1, -1))),
    "subset of a subset": Subset(Subset(COLUMNS, list(range(19, -1, -1))), list(range(18))),
    "random_split": random_split(COLUMNS, [18, 2])[0],
    "a tensor": torch.randn(20, 5),
    "an array": np.arange(60.0).reshape(20, 3),
    "an array of numbers": np.arange(20, dtype=np.float32),
    "a reversed array": np.arange(20)[::-1],
    "a list of tuples": [(torch.tensor([i]), i, float(i)) for i in range(20)],
    "a list of namedtuples": [POINT(i, torch.tensor(i)) for i in range(20)],
    "a tuple of samples": tuple((i, torch.tensor(i)) for i in range(20)),
    "a data set": Squares(),
    "subset of a data set": Subset(Squares(), list(range(19, -1, -1))),
    "many at once": Many(),
}


@pytest.mark.parametrize("name", DATA)
def test_batches_are_what_torch_makes(name: str) -> None:
    data = DATA[name]
    want = default_collate(
        [data[int(index)] if not isinstance(data, Many) else torch.tensor(float(index)) for index in IDS]
    )
    source = open_source(data)
    assert len(source) == len(data)
    for _ in range(2):  # the first batch is read more carefully than the others
        assert same(source.read_batch(IDS, 0), want)


@pytest.mark.parametrize("name", DATA)
def test_parts_are_the_batch_cut(name: str) -> None:
    source = open_source(DATA[name])
    for _ in range(2):
        parts = source.read_micro_batches(IDS, [2, 1, 2], 0)
        want = [source.read_batch(part, 0) for part in (IDS[:2], IDS[2:3], IDS[3:])]
        assert same(parts, want)


GATHERED = [
    *(
        "tensors",
        "strided tensors",
        "tensors of types that NumPy lacks",
        "small numbers, truths, unsigned",
        "one column",
    ),
    *("subset of tensors", "subset of a subset", "subset with places from the end", "random_split"),
    *("a tensor", "an array", "an array of numbers", "a reversed array"),
]


@pytest.mark.parametrize("name", DATA)
def test_columns_in_memory_are_gathered(name: str) -> None:
    assert open_source(DATA[name]).supports_gather == (name in GATHERED)


def test_a_read_only_memory_map_is_gathered_in_place(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(60.0).reshape(20, 3))
    rows = np.load(tmp_path / "rows.npy", mmap_mode="r")
    source = open_source(rows)
    assert source.supports_gather
    assert torch.equal(source.read_batch(IDS, 0), torch.from_numpy(np.array(rows)[IDS]))


def test_a_subclass_of_tensor_dataset_keeps_its_own_samples() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return tuple(2 * part for part in super().__getitem__(index))

    assert torch.equal(open_source(Doubled(torch.arange(20))).read_batch(IDS, 0)[0], 2 * torch.from_numpy(IDS))


def test_own_collate_sees_samples() -> None:
    source = open_source(COLUMNS, collate=lambda samples: [label.item() for _, label in samples])
    assert source.read_batch(IDS, 0) == IDS.tolist()


# Random numbers


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
@pytest.mark.parametrize("first", [0, 10])
def test_augmentation_depends_on_the_sample_alone(kind: str, first: int) -> None:
    def sample(source: Source, index: int, epoch: int = 0) -> list[float]:
        return source.read_batch(np.array([index]), epoch)[0].tolist()

    whole = open_source(Noisy(kind, first), seed=5).read_batch(np.arange(20), 0).tolist()
    alone = open_source(Noisy(kind, first), seed=5)
    shares = open_source(Noisy(kind, first), seed=5).read_micro_batches(np.arange(19, -1, -1), [3, 7, 10], 0)
    assert [sample(alone, index) for index in range(20)] == whole
    assert torch.cat(shares).flip(0).tolist() == whole
    assert len({tuple(row) for row in whole[first:]}) == 20 - first
    assert sample(alone, 15, epoch=1) != whole[15]
    assert sample(open_source(Noisy(kind, first), seed=6), 15) != whole[15]


def test_data_that_begins_to_draw_late_is_noticed() -> None:
    source = open_source(Noisy("numpy", first=10))
    source.read_batch(np.arange(5), 0)  # nothing drawn: from here on it is read without seeding
    late = source.read_batch(np.array([12, 13]), 0)
    assert torch.equal(late, open_source(Noisy("numpy", first=10)).read_batch(np.arange(20), 0)[12:14])


def test_many_at_once_that_draw_are_read_one_by_one() -> None:
    whole = open_source(Many(noise=True)).read_batch(IDS, 0)
    assert torch.equal(torch.cat(open_source(Many(noise=True)).read_micro_batches(IDS, [1, 4], 0)), whole)


def test_many_at_once_are_read_at_once() -> None:
    data = Many()
    open_source(data).read_micro_batches(IDS, [2, 3], 0)
    assert data.calls == [IDS.tolist()]


def test_a_collate_that_draws_is_repeatable() -> None:
    def mask(samples: list[Any]) -> Tensor:
        return torch.rand(len(samples))

    first, second = (open_source([1, 2, 3, 4], collate=mask) for _ in range(2))
    got = [first.read_batch(np.array([0, 1]), 0), first.read_batch(np.array([2, 3]), 0)]
    assert torch.equal(second.read_batch(np.array([2, 3]), 0), got[1])
    assert not torch.equal(*got)


@pytest.mark.parametrize(
    "data", [Noisy("torch"), Noisy("python"), Noisy("numpy"), Noisy("numpy", 10), Many(True), Squares()]
)
def test_loading_leaves_the_trainings_generators_alone(data: Any) -> None:
    def drawn() -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]

    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    want = [drawn() for _ in range(4)]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    source, got = open_source(data), []
    for ids in (np.arange(5), np.arange(20), np.arange(20)):
        got.append(drawn())
        source.read_batch(ids, 0)
    assert [*got, drawn()] == want


def test_generators_are_put_back_after_an_error() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            raise KeyError(index)

    torch.manual_seed(1)
    want = torch.rand(2)
    torch.manual_seed(1)
    source = open_source(Broken("torch"))
    with pytest.raises(DataError):
        source.read_batch(IDS, 0)
    assert torch.equal(torch.rand(2), want)


# What is no data set, and samples that fail


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


class NoItems:
    def __len__(self) -> int:
        return 3


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (NoLength(), r"NoLength has no length: give it `__len__`"),
        (iter([1]), r"list_iterator has no length"),
        (NoItems(), r"NoItems has no `__getitem__`"),
        ([], r"list is empty: a training or an evaluation needs at least one sample"),
        (TensorDataset(torch.zeros(0, 3)), r"TensorDataset is empty"),
        ((torch.zeros(9, 2), torch.zeros(9)), r"tuple of 2 tensors, which is columns.*TensorDataset\(\*data\)"),
        ((np.zeros(9),), r"tuple of 1 arrays, which is columns"),
        ({"train": [1], "test": [2]}, r"dict with the keys 'train', 'test': give one of its data sets"),
        ("data/train", r"'data/train' is text: give a torch Dataset"),
        (DataLoader([1, 2]), r"data is a DataLoader: give its data set, data=loader.dataset"),
        (Subset(COLUMNS, [3, 20]), r"Subset has the index 20, its data set 20 samples: give"),
        (Endless(), r"Endless is a stream \(IterableDataset\)"),
        (torch.tensor(3.0), r"tensor has no length"),
    ],
)
def test_what_is_no_data_set(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_source(data)


class Damaged(Squares):
    def __getitem__(self, index: int) -> Any:
        if index == 8:
            raise OSError("image 8 is truncated")
        return index


class DamagedMany(Damaged):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class TogetherOnly(Squares):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        if len(indices) > 1:
            raise OSError("too many files open")
        return indices


class Forgetful(Squares):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return indices[1:]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            Damaged(),
            r"Damaged: sample 8 of 20 could not be read: OSError: image 8 is truncated; repair it or leave it out",
        ),
        (DamagedMany(), r"DamagedMany: sample 8 of 20 could not be read: OSError: image 8 is truncated"),
        (
            TogetherOnly(),
            r"samples \[3, 17, 0, 8, 5\], read together with `__getitems__`, of 20 could not be read: OSError",
        ),
        (Forgetful(), r"Forgetful: `__getitems__` returned 4 samples for the 5 indices"),
        (
            [(torch.zeros(6 if index == 8 else 5), 0) for index in range(20)],
            r"samples 3 and 8 cannot be put into one batch as torch does.*sample 3 is \(float32\[5\], int\), "
            r"sample 8 is \(float32\[6\], int\); make them alike",
        ),
        (
            [{"x": [object()] * 9} for _ in range(20)],
            r"samples 3, 17, 0, 8, 5, each \{x: \[object, .* 9 in all\]\}, cannot be",
        ),
    ],
)
def test_samples_that_fail_are_named(data: Any, message: str) -> None:
    source = open_source(data)
    for ids in (IDS, IDS):
        with pytest.raises(DataError, match=message) as caught:
            source.read_batch(ids, 0)
    assert caught.value.__cause__ is not None or isinstance(data, Forgetful)


def test_a_collate_that_fails_is_blamed() -> None:
    source = open_source([1, 2, 3], collate=lambda samples: samples[9])
    with pytest.raises(
        DataError, match=r"samples 0, 1, each int.*by the job's collate=; repair collate= \(IndexError: list"
    ):
        source.read_batch(np.array([0, 1]), 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [*GATHERED, "a data set", "a list of namedtuples", "a list of tuples"])
def test_pinned_batches(name: str) -> None:
    source = open_source(DATA[name])
    pinned, plain = source.read_batch(IDS, 0, pin=True), source.read_batch(IDS, 0)
    values = pinned.values() if isinstance(pinned, dict) else [pinned] if isinstance(pinned, Tensor) else pinned
    tensors = [value for value in values if isinstance(value, Tensor)]
    assert tensors
    assert all(tensor.is_pinned() for tensor in tensors)
    assert same(pinned, plain)


def test_kinds() -> None:
    assert isinstance(open_source(COLUMNS), GatherSource)
    assert isinstance(open_source(COLUMNS, collate=default_collate), SampleSource)


def test_a_source_in_a_spawned_worker_finds_that_workers_generators() -> None:
    here = SampleSource(Noisy("python"))
    elsewhere = ctypes.create_string_buffer(
        4 * 625
    )  # what is in another process at the address of this one's generator
    here._rng._python_address = ctypes.addressof(elsewhere)
    there = pickle.loads(pickle.dumps(here))
    before = random.getstate()
    assert torch.equal(there.read_batch(IDS, 0), SampleSource(Noisy("python")).read_batch(IDS, 0))
    assert random.getstate() == before


class Lists(Squares):
    """As Hugging Face's Dataset without a format: Python lists, or tensors once asked for them."""

    __module__ = "datasets.arrow_dataset"

    def __init__(self, kind: str | None = None) -> None:
        self.format = {"type": kind}

    def with_format(self, kind: str) -> Lists:
        return Lists(kind)

    def __getitem__(self, index: int) -> Any:
        return {"ids": torch.tensor([index, 1]) if self.format["type"] == "torch" else [index, 1]}


def test_hugging_face_sets_are_asked_for_tensors_unless_they_have_a_format_or_a_collate() -> None:
    assert open_source(Lists()).read_batch(IDS, 0)["ids"].tolist() == [[3, 1], [17, 1], [0, 1], [8, 1], [5, 1]]
    assert len(open_source(Lists("custom")).read_batch(IDS, 0)["ids"]) == 2
    assert open_source(Lists(), collate=list).read_batch(IDS, 0)[0] == {"ids": [3, 1]}
    job = make(data=Lists())
    assert job.data.format == {"type": "torch"}
    assert make(data=Lists(), collate=list).data.format == {"type": None}
