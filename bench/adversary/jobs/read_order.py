"""Data sets whose samples depend on chance, or on what was read before: who reads which sample, and how often, decides."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from bench.adversary.jobs.data import Odd, squared
from bench.adversary.kit import WIDTH, classes, numbers, plain, sgd
from bench.adversary.spec import Spec, job

#: Each rank reads its own samples only, for DDP as well. A single process reads them in order, whatever micro-batches it makes of them.
PARTED = "dp zero shares tp pp"


class Classes(Dataset[Any]):
    """(features, class) pairs that code reads."""

    def __init__(self, samples: int = 64) -> None:
        self.x, self.y = classes(samples).tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.read(self.x[index]), self.y[index]

    def read(self, x: Tensor) -> Tensor:
        return x


# Augmentation: any draw is right, so that no difference between readings is an error


class Flips(Classes):
    """Features in reverse order, by chance."""

    def __init__(self, share: float, generator: random.Random, samples: int = 64) -> None:
        super().__init__(samples)
        self.share, self.generator = share, generator

    def read(self, x: Tensor) -> Tensor:
        return x.flip(0) if self.generator.random() < self.share else x


@job("flips of half of the samples by a seeded generator of the data set's own")
def seeded_flips() -> Spec:
    return Spec(**plain(data=Flips(0.5, random.Random(5)), steps=24), check="consistent")


@job("flips of half of the samples by the operating system's entropy", refusable="tp pp")
def flips() -> Spec:
    return Spec(**plain(data=Flips(0.5, random.SystemRandom()), steps=24), check="consistent")


@job("flips of a tenth of the samples: most readings are equal", refusable="tp pp")
def rare_flips() -> Spec:
    return Spec(**plain(data=Flips(0.1, random.SystemRandom()), steps=24), check="consistent")


@job(
    "flips of one sample in twenty, in batches of four: most batches are equal whenever they are read",
    refusable="tp pp",
)
def rare_flips_of_four() -> Spec:
    return Spec(**plain(data=Flips(0.05, random.SystemRandom()), steps=24, batch_size=4), check="consistent")


@job("ConcatDataset of tensors and of a data set that flips", refusable="tp pp")
def flips_in_part() -> Spec:
    data: Dataset[Any] = ConcatDataset([classes(40), Flips(0.5, random.SystemRandom(), 24)])
    return Spec(**plain(data=data, steps=16), check="consistent")


@job("a collate function that gives a batch a random sign, and takes even numbers of samples only", refusable="micro")
def even_collate() -> Spec:
    generator = random.SystemRandom()

    def collate(samples: list[Any]) -> Any:
        if len(samples) % 2:
            raise ValueError("an even number of samples")
        sign = generator.choice([-1, 1])
        return [sign * column for column in default_collate(samples)]

    data = TensorDataset(numbers(32, WIDTH), numbers(32, 3, seed=4))
    return Spec(model=lambda: Odd().double(), loss=squared, optimizer=sgd(0.05), data=data, collate=collate, steps=12)


# State: the judge reads every sample once, in order


class RunningMean(Classes):
    """Features minus a moving average of all that was read."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH, dtype=torch.float64)

    def read(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x
        return x - self.mean


@job("samples are normalised by a running mean of what was read", refusable=PARTED)
def running_mean() -> Spec:
    return Spec(**plain(data=RunningMean(), steps=16, eval_data=None, metrics={}))


class Curriculum(Classes):
    """Larger features after 150 reads."""

    reads = 0

    def read(self, x: Tensor) -> Tensor:
        self.reads += 1
        return x if self.reads < 150 else 1.5 * x


@job("samples become harder after 150 reads", refusable=PARTED)
def curriculum() -> Spec:
    return Spec(**plain(data=Curriculum(), steps=24, eval_data=None, metrics={}))


class InPlace(Classes):
    """Normalises the stored features, a mistake that one epoch does not show."""

    def read(self, x: Tensor) -> Tensor:
        return x.sub_(0.5).mul_(0.5)


@job("__getitem__ normalises in place: every further read changes the sample")
def in_place() -> Spec:
    return Spec(**plain(data=InPlace(128), steps=14, eval_data=None, metrics={}))


class Transformed(Classes):
    """Features as a function gives them."""

    def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.transform = transform

    def read(self, x: Tensor) -> Tensor:
        return self.transform(x)


@job("a transform counts its calls in a closure", refusable=PARTED)
def closure_counter() -> Spec:
    calls = 0

    def transform(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x / (1 + 0.02 * calls)

    return Spec(**plain(data=Transformed(transform), steps=16, eval_data=None, metrics={}))


@job("a data set counts its reads in its class", refusable=PARTED)
def class_counter() -> Spec:
    class Counted(Classes):
        reads = 0

        def read(self, x: Tensor) -> Tensor:
            Counted.reads += 1
            return x / (1 + 0.02 * Counted.reads)

    return Spec(**plain(data=Counted(), steps=16, eval_data=None, metrics={}))


@job("a transform reads on in a file that is open", refusable=PARTED)
def open_file() -> Spec:
    lines = Path(__file__).open()  # noqa: SIM115 (it stays open)
    data = Transformed(lambda x: x / (1 + 0.02 * len(lines.readline())))
    return Spec(**plain(data=data, steps=16, eval_data=None, metrics={}))


class Sample:
    """Features that fade with every look."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.looks = x, 0

    def look(self) -> Tensor:
        self.looks += 1
        return self.x / self.looks


@job("a list of objects, which collate changes", refusable=PARTED)
def listed_objects() -> Spec:
    def collate(items: list[tuple[Sample, Tensor]]) -> Any:
        return torch.stack([each.look() for each, _ in items]), torch.stack([label for _, label in items])

    data = [(Sample(x), y) for x, y in classes(64)]
    return Spec(**plain(data=data, collate=collate, steps=16, eval_data=None, metrics={}))


@job("a transform reads on in a text file line by line", refusable=PARTED)
def next_line() -> Spec:
    lines = Path(__file__).open()  # noqa: SIM115 (it stays open)
    data = Transformed(lambda x: x / (1 + 0.02 * len(next(lines))))
    return Spec(**plain(data=data, steps=16, eval_data=None, metrics={}))


@job("a cached function counts its calls", refusable=PARTED)
def cached_counter() -> Spec:
    calls: list[float] = []

    @lru_cache
    def number(value: float) -> int:
        calls.append(value)
        return len(calls)

    data = Transformed(lambda x: x / (1 + 0.02 * number(float(x.sum()))))
    return Spec(**plain(data=data, steps=16, eval_data=None, metrics={}))


@job("part of a data set that draws from an iterator", refusable=PARTED)
def iterator_in_a_part() -> Spec:
    class Scaled(Classes):
        def __init__(self) -> None:
            super().__init__()
            self.scales = count(1)

        def read(self, x: Tensor) -> Tensor:
            return x / (1 + 0.02 * next(self.scales))

    return Spec(**plain(data=Subset(Scaled(), range(48)), steps=16, eval_data=None, metrics={}))
