"""Ways to read the same data, shuffled, one process: ours, a bare NumPy gather, and what people use instead."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from echelon.data import Loader, open_source
from echelon.data.packed.from_arrays import ArrayPackingSource
from echelon.data.packed.pack import pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Arrays on the disk: one row of each is a sample."""

    name: str
    arrays: dict[str, np.ndarray]
    batch: int

    @property
    def samples(self) -> int:
        """Number of rows."""
        return len(next(iter(self.arrays.values())))

    def part(self, rank: int, ranks: int) -> Material:
        """A rank's equal part of it, by itself."""
        size = self.samples // ranks
        return replace(self, arrays={name: rows[rank * size : (rank + 1) * size] for name, rows in self.arrays.items()})


def images(folder: Path, samples: int) -> Material:
    """Pictures of 3 x 32 x 32 bytes and their labels."""
    draw = np.random.default_rng(0)
    pixels = _kept(
        folder / "pixels.npy", np.uint8, (samples, 3, 32, 32), lambda n: draw.integers(0, 256, (n, 3, 32, 32), np.uint8)
    )
    labels = _kept(folder / "labels.npy", np.int64, (samples,), lambda n: draw.integers(0, 10, n))
    return Material(name="images 3x32x32", arrays={"image": pixels, "label": labels}, batch=64)


def tokens(folder: Path, samples: int) -> Material:
    """Rows of 129 tokens: 128 to read, 128 to foretell."""
    draw = np.random.default_rng(1)
    rows = _kept(folder / "tokens.npy", np.int64, (samples, 129), lambda n: draw.integers(0, 50_000, (n, 129)))
    return Material(name="token rows", arrays={"tokens": rows}, batch=16)


def _kept(path: Path, dtype: Any, shape: tuple[int, ...], make: Any) -> np.ndarray:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = np.lib.format.open_memmap(path, "w+", dtype, shape)
        for start in range(0, shape[0], 8192):
            stop = min(start + 8192, shape[0])
            kept[start:stop] = make(stop - start)
        kept.flush()
    return np.load(path, mmap_mode="r")


class Reader(ABC):
    """A contender: `advance(n)` reads n batches, of epoch after epoch."""

    name: str
    needs: str | None = None
    #: Whether it can go on in mid-epoch, and on another number of ranks.
    resumes: str = "no"

    def __init__(self, material: Material, folder: Path, *, rank: int = 0, ranks: int = 1) -> None:
        """Of several `ranks` each gets its part as a data set of its own: the least work that any way of sharing could leave it."""
        self.material, self.batch = material if ranks == 1 else material.part(rank, ranks), material.batch
        self.prepare(folder / (type(self).__name__ + (f"-{rank}-of-{ranks}" if ranks > 1 else "")))
        self._batches = self._endless()

    @abstractmethod
    def prepare(self, folder: Path) -> None:
        """Write the data as this one wants it, if it is not there."""

    @abstractmethod
    def epoch(self, number: int) -> Iterator[Any]:
        """The batches of an epoch."""

    def _endless(self) -> Iterator[Any]:
        number = 0
        while True:
            yield from self.epoch(number)
            number += 1

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            next(self._batches)

    def close(self) -> None:
        self._batches = iter(())

    @classmethod
    def missing(cls) -> bool:
        """Whether the package that it needs is not installed."""
        return cls.needs is not None and find_spec(cls.needs.partition(".")[0]) is None


class Bare(Reader):
    """NumPy's memory map, indexed with sorted numbers. A baseline: no loader, nothing is checked."""

    name = "NumPy memmap, sorted"
    resumes = "by hand"

    def prepare(self, folder: Path) -> None:
        self._arrays = list(self.material.arrays.values())

    def epoch(self, number: int) -> Iterator[Any]:
        order = np.random.default_rng(number).permutation(self.material.samples)
        for start in range(0, len(order) - self.batch + 1, self.batch):
            yield [torch.from_numpy(rows) for rows in self.rows(np.sort(order[start : start + self.batch]))]

    def rows(self, ids: np.ndarray) -> list[np.ndarray]:
        """Of each array the rows `ids`."""
        return [array[ids] for array in self._arrays]


class Taken(Bare):
    """The same by `take` on the map as a plain array, which is NumPy's other way to gather."""

    name = "NumPy memmap, sorted, take"

    def prepare(self, folder: Path) -> None:
        self._arrays = [np.asarray(array) for array in self.material.arrays.values()]

    def rows(self, ids: np.ndarray) -> list[np.ndarray]:
        return [array.take(ids, axis=0) for array in self._arrays]


class Echelon(Reader):
    """A packed data set."""

    name = "echelon"
    resumes = "any step, any number of ranks"
    shards = 1

    def __init__(self, material: Material, folder: Path, *, rank: int = 0, ranks: int = 1) -> None:
        # One data set for all ranks: each reads its part of the global batch.
        self._rank, self._ranks = rank, ranks
        super().__init__(material, folder)
        self.material = self.material.part(rank, ranks)

    def prepare(self, folder: Path) -> None:
        names = list(self.material.arrays)
        sample: Any = names[0] if len(names) == 1 else {"tuple": names}
        pack(
            ArrayPackingSource(self.material.arrays, sample, {"source": self.material.name}), folder, shards=self.shards
        )
        self._source = open_source(str(folder))

    def epoch(self, number: int) -> Iterator[Any]:
        order = self._source.make_order(batch=self.batch * self._ranks, seed=0)
        loader = Loader(self._source, order, dp_rank=self._rank, dp_size=self._ranks, micro_batch_size=None)
        for step in loader.steps(number * order.steps_per_epoch, (number + 1) * order.steps_per_epoch):
            yield step.micro_batches[0].batch


class EchelonShards(Echelon):
    """The same in 16 files."""

    name = "echelon, 16 files"
    shards = 16


class _Rows(Dataset[Any]):
    def __init__(self, material: Material) -> None:
        self._arrays = [np.asarray(array) for array in material.arrays.values()]

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, number: int) -> Any:
        found = tuple(torch.from_numpy(np.array(array[number])) for array in self._arrays)
        return found if len(found) > 1 else found[0]


class _Together(_Rows):
    def __getitems__(self, numbers: list[int]) -> Any:
        return [torch.from_numpy(array[numbers]) for array in self._arrays]


class Torch(Reader):
    """torch's DataLoader, sample by sample."""

    name = "torch DataLoader"

    def prepare(self, folder: Path) -> None:
        self._rows = _Rows(self.material)

    def loader(self, **how: Any) -> Any:
        return DataLoader(self._rows, batch_size=self.batch, shuffle=True, drop_last=True, **how)

    def epoch(self, number: int) -> Iterator[Any]:
        yield from self.loader()


class TorchTogether(Torch):
    """torch's DataLoader with a data set that is written by hand to read a batch at once and checks nothing: as fast as it can be made."""

    name = "torch DataLoader, __getitems__"

    def prepare(self, folder: Path) -> None:
        self._rows = _Together(self.material)

    def loader(self, **how: Any) -> Any:
        return super().loader(collate_fn=lambda batch: batch, **how)


class Stateful(Torch):
    """torchdata's DataLoader that resumes."""

    name, needs, resumes = "torchdata StatefulDataLoader", "torchdata", "same ranks"

    def loader(self, **how: Any) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(self._rows, batch_size=self.batch, shuffle=True, drop_last=True, **how)


class HuggingFace(Reader):
    """HF datasets in torch's format, read by batches."""

    name, needs, resumes = "HF datasets", "datasets", "partly"

    def prepare(self, folder: Path) -> None:
        import datasets

        datasets.disable_progress_bars()
        if not folder.exists():
            kinds = {
                name: datasets.Array3D(array.shape[1:], str(array.dtype))
                if array.ndim == 4
                else datasets.List(datasets.Value(str(array.dtype)), length=array.shape[1])
                if array.ndim == 2
                else datasets.Value(str(array.dtype))
                for name, array in self.material.arrays.items()
            }
            columns = {name: np.asarray(array) for name, array in self.material.arrays.items()}
            datasets.Dataset.from_dict(columns, datasets.Features(kinds)).save_to_disk(str(folder))
        self._data = datasets.load_from_disk(str(folder)).with_format("torch")

    def epoch(self, number: int) -> Iterator[Any]:
        order = np.random.default_rng(number).permutation(self.material.samples)
        for start in range(0, len(order) - self.batch + 1, self.batch):
            yield self._data[order[start : start + self.batch]]


class Lit(Reader):
    """litdata's streaming data set."""

    name, needs, resumes = "litdata", "litdata", "same ranks"

    def prepare(self, folder: Path) -> None:
        from litdata.streaming import Cache

        if not folder.exists():
            cache = Cache(str(folder), chunk_bytes="64MB")
            for number in range(self.material.samples):
                cache[number] = _dictionary(self.material, number)
            cache.done()
            cache.merge()
        self._folder = folder

    def epoch(self, number: int) -> Iterator[Any]:
        from litdata import StreamingDataLoader, StreamingDataset

        data = StreamingDataset(str(self._folder), shuffle=True, seed=number, drop_last=True)
        yield from StreamingDataLoader(data, batch_size=self.batch, num_workers=0, drop_last=True)


class Mosaic(Reader):
    """mosaicml-streaming."""

    name, needs, resumes = "mosaicml-streaming", "streaming", "yes"

    def prepare(self, folder: Path) -> None:
        _import_streaming()
        from streaming import MDSWriter

        if not folder.exists():
            kinds = {
                name: f"ndarray:{array.dtype}:{','.join(map(str, array.shape[1:]))}" if array.ndim > 1 else "int"
                for name, array in self.material.arrays.items()
            }
            with MDSWriter(out=str(folder), columns=kinds) as writer:
                for number in range(self.material.samples):
                    writer.write(
                        {
                            name: array[number] if array.ndim > 1 else int(array[number])
                            for name, array in self.material.arrays.items()
                        }
                    )
        self._folder = folder

    def epoch(self, number: int) -> Iterator[Any]:
        from streaming import StreamingDataset

        if not hasattr(self, "_data"):
            self._data = StreamingDataset(local=str(self._folder), shuffle=True, batch_size=self.batch)
        yield from DataLoader(self._data, batch_size=self.batch, drop_last=True)


def _import_streaming() -> None:
    """It imports torchvision for image sets that are not read here: where that is missing, empty modules do for the moment."""
    if "streaming" in sys.modules or find_spec("torchvision") is not None:
        return
    names = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")
    empty: dict[str, Any] = {name: ModuleType(name) for name in names}
    for name, module in empty.items():
        module.__spec__ = ModuleSpec(name, None)
    empty["torchvision.datasets"].VisionDataset = object
    empty["torchvision.transforms.functional"].to_tensor = None
    sys.modules.update(empty)
    try:
        import_module("streaming")
    finally:
        for name in names:
            del sys.modules[name]


class Web(Reader):
    """webdataset, shuffled in a buffer of a thousand."""

    name, needs = "webdataset", "webdataset"

    def prepare(self, folder: Path) -> None:
        import webdataset

        if not folder.exists():
            folder.mkdir(parents=True)
            with webdataset.ShardWriter(f"{folder}/%05d.tar", maxcount=10_000, verbose=0) as writer:
                for number in range(self.material.samples):
                    sample = {f"{name}.npy": np.asarray(array[number]) for name, array in self.material.arrays.items()}
                    writer.write({"__key__": f"{number:09d}", **sample})
        self._files = [str(path) for path in sorted(folder.glob("*.tar"))]

    def epoch(self, number: int) -> Iterator[Any]:
        import webdataset

        names = [f"{name}.npy" for name in self.material.arrays]
        data = webdataset.WebDataset(self._files, shardshuffle=len(self._files), seed=number, empty_check=False)
        yield from data.shuffle(1000).decode().to_tuple(*names).batched(self.batch, partial=False)


def _dictionary(material: Material, number: int) -> dict[str, Any]:
    return {name: torch.from_numpy(np.array(array[number])) for name, array in material.arrays.items()}


SAMPLES = {"images": 50_000, "tokens": 100_000}
MAKERS = {"images": images, "tokens": tokens}
READERS: tuple[type[Reader], ...] = (
    Bare, Taken, Echelon, EchelonShards, TorchTogether, Torch, Stateful, HuggingFace, Lit, Mosaic, Web,
)  # fmt: skip
#: NumPy's, which ours are compared with; and ours, which must be faster than all others.
BARE: tuple[type[Reader], ...] = (Bare, Taken)
OURS: tuple[type[Reader], ...] = (Echelon, EchelonShards)
