"""Data sets that keep something from one reading to the next."""

from __future__ import annotations

import gc
import itertools
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from tests.engine.jobs import classes, numbers

#: For modules that test data sets which leave files open: these are collected before the next test, which would fail for them.
LEAVES_FILES_OPEN = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.usefixtures("collected")]


@pytest.fixture
def collected() -> Iterator[None]:
    yield
    gc.collect()


class Plain(Dataset[Any]):
    """Keeps nothing."""

    def __init__(self) -> None:
        self.rows, self.labels, self.reads = numbers(32, 8), classes(32), 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.row(index), self.labels[index]

    def row(self, index: int) -> Any:
        return self.rows[index]


class Read(Plain):
    """Counts its reads."""

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return super().__getitem__(index)


class Harder(Read):
    """Other samples after 20 reads."""

    def row(self, index: int) -> Any:
        return self.rows[index] * (1 if self.reads <= 20 else 2)


class Normalised(Read):
    """Subtracts a running mean."""

    mean: Any = 0.0

    def row(self, index: int) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * self.rows[index]
        return self.rows[index] - self.mean


class InPlace(Read):
    """Edits its samples."""

    def row(self, index: int) -> Any:
        self.rows[index] *= 0.5
        return self.rows[index]


class Previous(Read):
    """Mixes in the sample that was read before."""

    def __init__(self) -> None:
        super().__init__()
        self.last = [0]

    def row(self, index: int) -> Any:
        before, self.last[0] = self.last[0], index
        return self.rows[index] + 0.1 * self.rows[before]


class Closure(Plain):
    """A transform counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        calls = 0

        def transform(row: Any) -> Any:
            nonlocal calls
            calls += 1
            return row * calls

        self.transform = transform

    def row(self, index: int) -> Any:
        return self.transform(self.rows[index])


class Lines(Plain):
    """Reads on in a file: scales samples by the lines."""

    def __init__(self) -> None:
        super().__init__()
        with tempfile.NamedTemporaryFile("w") as made:
            made.writelines(f"{number}\n" for number in range(1, 1000))
            made.flush()
            self.file: Any = Path(made.name).open()  # noqa: SIM115 (it stays open)

    def row(self, index: int) -> Any:
        return self.rows[index] * float(self.file.readline())


class Iterated(Lines):
    """Iterates over the lines, so that the file does not report where it is."""

    def row(self, index: int) -> Any:
        return self.rows[index] * float(next(self.file))


class Remembered(Plain):
    """Counts in a function with a cache."""

    def __init__(self) -> None:
        super().__init__()
        calls: list[int] = []

        @lru_cache
        def count(index: int) -> int:
            calls.append(index)
            return len(calls)

        self.count = count

    def row(self, index: int) -> Any:
        return self.rows[index] * self.count(index)


class RememberedByMethod(Plain):
    """Counts in a method with a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count(1)

    @lru_cache  # noqa: B019 (as users do)
    def count(self, index: int) -> int:
        return next(self.calls)

    def row(self, index: int) -> Any:
        return self.rows[index] * self.count(index)


class Drawn(Plain):
    """Draws from an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = itertools.count(1)

    def row(self, index: int) -> Any:
        return self.rows[index] * next(self.scales)


class LinesElsewhere(Lines):
    """Reads on in a file that a function holds."""

    def __init__(self) -> None:
        super().__init__()
        file, self.file = self.file, None
        self.line = lambda: float(file.readline())

    def row(self, index: int) -> Any:
        return self.rows[index] * self.line()


class Slotted(Plain):
    """Counts in an object without `__dict__`."""

    class Count:
        __slots__ = ("value",)

    def __init__(self) -> None:
        super().__init__()
        self.count = Slotted.Count()
        self.count.value = 0

    def row(self, index: int) -> Any:
        self.count.value += 1
        return self.rows[index] * self.count.value


class OfClass(Plain):
    """Counts in its class."""

    count = 0

    def row(self, index: int) -> Any:
        OfClass.count += 1
        return self.rows[index] * OfClass.count


_calls = 0


class OfModule(Plain):
    """Counts in a global."""

    def row(self, index: int) -> Any:
        global _calls
        _calls += 1
        return self.rows[index] * _calls


class Replacing(Plain):
    """Replaces an object of its own."""

    @dataclass(frozen=True)
    class Progress:
        reads: int = 1

    def __init__(self) -> None:
        super().__init__()
        self.progress = Replacing.Progress()

    def row(self, index: int) -> Any:
        self.progress = Replacing.Progress(self.progress.reads + 1)
        return self.rows[index] * self.progress.reads


def _scaled(count: list[int], row: Any) -> Any:
    count[0] += 1
    return row * count[0]


class Arguments(Plain):
    """Counts in an argument of a partial."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = partial(_scaled, [0])

    def row(self, index: int) -> Any:
        return self.transform(self.rows[index])


class Rare(Plain):
    """One sample, which the first step does not read, changes all that are read after it."""

    scale = 1

    def row(self, index: int) -> Any:
        if index == 24:  # of step 4
            self.scale = 2
        return self.rows[index] * self.scale


class Entropy(Read):
    """Flips samples by a generator that nobody seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random()

    def row(self, index: int) -> Any:
        return self.rows[index] * self.random.random()


class Cached(Read):
    """Keeps what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Any] = {}

    def row(self, index: int) -> Any:
        return self.cache.setdefault(index, self.rows[index] * 2)


class Drawing(Read):
    """Flips samples by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(3)

    def row(self, index: int) -> Any:
        return self.rows[index].flip(0) if self.random.random() < 0.5 else self.rows[index]


class DrawingElsewhere(Plain):
    """Flips samples by a generator that a function holds."""

    def __init__(self) -> None:
        super().__init__()
        draws = random.Random(3)
        self.flips = lambda: draws.random() < 0.5

    def row(self, index: int) -> Any:
        return self.rows[index].flip(0) if self.flips() else self.rows[index]


class Reopened(Plain):
    """Reads on in shards, and closes one before it opens the next."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        for shard in range(100):
            Path(self.folder.name, str(shard)).write_text(f"{shard + 1}\n" * 3)
        self.shard = 0
        self.file = Path(self.folder.name, "0").open()  # noqa: SIM115 (it stays open)

    def row(self, index: int) -> Any:
        line = self.file.readline()
        if not line:
            self.file.close()
            self.shard += 1
            self.file = Path(self.folder.name, str(self.shard)).open()  # noqa: SIM115 (it stays open)
            line = self.file.readline()
        return self.rows[index] * float(line)


class Opening(Read):
    """Opens a file at the first read."""

    def __init__(self) -> None:
        super().__init__()
        self.file: Any = None

    def row(self, index: int) -> Any:
        if self.file is None:
            self.file = open(os.devnull, "rb")  # noqa: SIM115 (it stays open, as users' files do)
        return self.rows[index]


class Failing(Read):
    """Cannot read one sample, which the first step does not need."""

    def row(self, index: int) -> Any:
        if self.reads > 20:
            raise ValueError("a broken file")
        return self.rows[index]
