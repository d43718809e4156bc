"""Data sets, collate functions and batches of unusual kinds."""

from __future__ import annotations

import dataclasses
import os
import random
import tempfile
from collections import UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from bench.adversary.kit import (
    CLASSES,
    SAMPLES,
    WIDTH,
    Net,
    Samples,
    accuracy,
    classes,
    cross_entropy,
    held_out,
    integers,
    net,
    numbers,
    plain,
    sgd,
)
from bench.adversary.spec import Spec, job


class Odd(nn.Module):
    """f(-x) = -f(x): a sample and its target may both change sign without changing the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class Flipped(Dataset[Any]):
    """Each sample with a random sign, of which an odd model's loss does not depend, if all who compute a sample see the same sign."""

    def __init__(self, sign: Any) -> None:
        self.x, self.y, self.sign = numbers(SAMPLES, WIDTH), numbers(SAMPLES, 3, seed=4), sign

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sign = self.sign()
        return self.x[index] * sign, self.y[index] * sign


def squared(output: Tensor, batch: Any) -> Tensor:
    return (output - batch[-1]).pow(2).mean()


def flipped(sign: Any) -> Spec:
    return Spec(model=lambda: Odd().double(), loss=squared, optimizer=sgd(0.05), data=Flipped(sign))


@job("samples that change with the operating system's entropy at every read", owner="watch", refusable="tp pp")
def own_entropy() -> Spec:
    return flipped(lambda: 1 if os.urandom(1)[0] < 128 else -1)


@job("samples that change with a generator of the data set's own", owner="watch", refusable="tp pp")
def own_generator() -> Spec:
    generator = random.Random()
    return flipped(lambda: generator.choice([-1, 1]))


@job("augmentation by torch's global generator", owner="inputs")
def drawn_by_torch() -> Spec:
    return flipped(lambda: 1 if torch.rand(()) < 0.5 else -1)


@job("augmentation by NumPy's global generator", owner="inputs")
def drawn_by_numpy() -> Spec:
    return flipped(lambda: 1 if numpy.random.rand() < 0.5 else -1)


@job("augmentation by Python's global generator, from the second epoch on", owner="inputs")
def drawn_late() -> Spec:
    calls = [0]

    def sign() -> int:
        calls[0] += 1
        return random.choice([-1, 1]) if calls[0] > 40 else 1

    return flipped(sign)


@job("a collate function that draws", owner="inputs")
def drawing_collate() -> Spec:
    def collate(rows: list[Any]) -> Any:
        sign = torch.where(torch.rand(len(rows), 1) < 0.5, 1.0, -1.0).double()
        return torch.stack([x for x, _ in rows]) * sign, torch.stack([y for _, y in rows]) * sign

    data = TensorDataset(numbers(SAMPLES, WIDTH), numbers(SAMPLES, 3, seed=4))
    return Spec(model=lambda: Odd().double(), loss=squared, optimizer=sgd(0.05), data=data, collate=collate)


@dataclasses.dataclass
class Batch:
    x: Tensor
    y: Tensor
    names: list[str]


@job("dataclass batches with a list of strings", owner="inputs")
def dataclass_batches() -> Spec:
    x, y = classes().tensors
    rows = [(x[place], y[place], f"sample {place}") for place in range(SAMPLES)]

    def collate(chosen: list[Any]) -> Batch:
        return Batch(torch.stack([r[0] for r in chosen]), torch.stack([r[1] for r in chosen]), [r[2] for r in chosen])

    return Spec(
        model=net(), optimizer=sgd(), data=Samples(rows), collate=collate, inputs=lambda batch: ((batch.x,), {}),
        loss=lambda output, batch: F.cross_entropy(output, batch.y),
    )  # fmt: skip


Pair = namedtuple("Pair", "features label")


@job("samples that are named tuples", owner="inputs")
def named_tuples() -> Spec:
    x, y = classes().tensors
    rows = [Pair(x[place], y[place]) for place in range(SAMPLES)]
    return Spec(
        model=net(), optimizer=sgd(), data=Samples(rows), inputs=lambda batch: ((batch.features,), {}),
        loss=lambda output, batch: F.cross_entropy(output, batch.label),
    )  # fmt: skip


class Encoding(UserDict):  # type: ignore[type-arg]
    """A mapping that is not a dict, as tokenizers return."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: Any) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.data.items()})


@job("batches that are a UserDict (BatchEncoding)", owner="inputs")
def user_dicts() -> Spec:
    x, y = classes().tensors
    rows = [(x[place], y[place]) for place in range(SAMPLES)]

    def collate(chosen: list[Any]) -> Encoding:
        return Encoding({"x": torch.stack([r[0] for r in chosen]), "labels": torch.stack([r[1] for r in chosen])})

    return Spec(
        model=net(), optimizer=sgd(), data=Samples(rows), collate=collate,
        inputs=lambda batch: ((batch["x"],), {}), loss=lambda output, batch: F.cross_entropy(output, batch["labels"]),
    )  # fmt: skip


@job("batches of None, numbers and nested lists beside tensors", owner="inputs")
def mixed_containers() -> Spec:
    x, y = classes().tensors

    def collate(chosen: list[Any]) -> Any:
        return {
            "x": [torch.stack([r[0] for r in chosen]), None],
            "meta": (len(chosen), None),
            "y": torch.stack([r[1] for r in chosen]),
        }

    return Spec(
        model=net(), optimizer=sgd(), data=TensorDataset(x, y), collate=collate,
        inputs=lambda batch: ((batch["x"][0],), {}), loss=lambda output, batch: F.cross_entropy(output, batch["y"]),
    )  # fmt: skip


@job("samples whose text is encoded inside forward", owner="inputs")
def text_in_forward() -> Spec:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.rest = nn.Embedding(26, WIDTH), Net()

        def forward(self, text: list[str]) -> Tensor:
            rows = [self.table(torch.tensor([ord(letter) - 97 for letter in each])).mean(0) for each in text]
            return self.rest(torch.stack(rows))

    texts = [
        "".join(chr(97 + int(each)) for each in integers(26, 2 + place % 5, seed=place)) for place in range(SAMPLES)
    ]
    rows = list(zip(texts, integers(CLASSES, SAMPLES).tolist(), strict=True))
    return Spec(model=lambda: Reader().double(), loss=cross_entropy, optimizer=sgd(), data=Samples(rows))


@job("padding to the longest of the batch: a masked mean inside forward", owner="inputs")
def variable_length() -> Spec:
    rows = [
        (numbers(2 + place % 5, WIDTH, seed=place), int(integers(CLASSES, 1, seed=place))) for place in range(SAMPLES)
    ]

    def collate(chosen: list[Any]) -> Any:
        x = nn.utils.rnn.pad_sequence([r[0] for r in chosen], batch_first=True)
        return x, torch.tensor([len(r[0]) for r in chosen]), torch.tensor([r[1] for r in chosen])

    class Pooled(Net):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            mask = torch.arange(x.shape[1]) < lengths[:, None]
            return super().forward((x * mask[..., None]).sum(1) / lengths[:, None])

    return Spec(
        model=lambda: Pooled().double(), loss=cross_entropy, optimizer=sgd(), data=Samples(rows), collate=collate
    )


@job("padding to the longest of the batch, and a model that sees the padding", refusable="dp micro zero shares")
def padding_leaks() -> Spec:
    rows = [
        (numbers(2 + place % 5, WIDTH, seed=place), int(integers(CLASSES, 1, seed=place))) for place in range(SAMPLES)
    ]

    def collate(chosen: list[Any]) -> Any:
        return nn.utils.rnn.pad_sequence([r[0] for r in chosen], batch_first=True), torch.tensor([r[1] for r in chosen])

    class Pooled(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mean(1))

    return Spec(
        model=lambda: Pooled().double(), loss=cross_entropy, optimizer=sgd(), data=Samples(rows), collate=collate
    )


class Stream(IterableDataset[Any]):
    """A stream of pairs that ends after 30."""

    def __iter__(self) -> Iterator[Any]:
        x, y = classes().tensors
        yield from zip(x, y, strict=True)


@job("an IterableDataset that ends and begins again", owner="inputs")
def stream() -> Spec:
    return Spec(model=net(), loss=cross_entropy, optimizer=sgd(), data=Stream(), steps=10)


class Epochs(Stream):
    """Its order follows set_epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        x, y = classes().tensors
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        yield from ((x[each], y[each]) for each in order)


@job("an IterableDataset with set_epoch", owner="inputs")
def stream_epochs() -> Spec:
    return Spec(model=net(), loss=cross_entropy, optimizer=sgd(), data=Epochs(), steps=10)


class RankStream(Stream):
    """Deals its samples out by rank, as WebDataset users do."""

    def __iter__(self) -> Iterator[Any]:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        for place, pair in enumerate(super().__iter__()):
            if place % world == rank:
                yield pair


@job("a stream that deals its samples out by rank itself", owner="watch", refusable="dp zero shares tp pp")
def stream_by_rank() -> Spec:
    return Spec(model=net(), loss=cross_entropy, optimizer=sgd(), data=RankStream(), steps=6)


@job("a last batch of one sample", owner="inputs", refusable="dp")
def last_batch_of_one() -> Spec:
    return Spec(**plain(data=classes(25)))


@job("a batch larger than the data", owner="inputs")
def batch_larger_than_data() -> Spec:
    return Spec(**plain(data=classes(7), batch_size=16))


@job("drop_last with uneven data", owner="inputs")
def drops_last() -> Spec:
    return Spec(**plain(drop_last=True, epochs=3))


@job("a batch of three over two ranks", owner="inputs")
def odd_batch() -> Spec:
    return Spec(**plain(batch_size=3))


@job("ConcatDataset of Subsets", owner="inputs")
def nested_datasets() -> Spec:
    one, two = classes(20, seed=1), classes(20, seed=3)
    return Spec(**plain(data=ConcatDataset([Subset(one, range(3, 18)), Subset(two, [5, 5, 2, 19, 0])])))


@job("a data set that counts its own reads", owner="inputs", refusable="")
def counts_reads() -> Spec:
    class Counting(Samples):
        reads = 0

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            return super().__getitem__(index)

    x, y = classes().tensors
    return Spec(**plain(data=Counting(list(zip(x, y, strict=True)))))


@job("NumPy structured samples of mixed dtypes", owner="inputs")
def numpy_samples() -> Spec:
    x, y = classes().tensors
    rows = [{"x": x[place].numpy(), "w": numpy.float32(1 + place % 3), "y": int(y[place])} for place in range(SAMPLES)]

    class Weighted(Net):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return super().forward(x) * w[:, None]

    return Spec(
        model=lambda: Weighted().double(), optimizer=sgd(), data=Samples(rows),
        loss=lambda output, batch: F.cross_entropy(output, batch["y"]),
    )  # fmt: skip


@job("samples in a plain list of pairs", owner="inputs")
def plain_list() -> Spec:
    return Spec(**plain(data=list(zip(*classes(40).tensors, strict=True)), steps=14))


class Mapped(Dataset[Any]):
    """Features in a memory map."""

    def __init__(self) -> None:
        x, self.y = classes(64).tensors
        with tempfile.TemporaryDirectory() as folder:  # the mapping outlives its name
            numpy.save(f"{folder}/features.npy", x.numpy())
            self.x = numpy.load(f"{folder}/features.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.x[index].copy()), self.y[index]


@job("samples from a memory map", owner="inputs")
def memory_map() -> Spec:
    return Spec(**plain(data=Mapped(), steps=16))


@job("mixup inside collate: samples of a micro-batch are mixed", refusable="dp micro zero shares")
def mixup() -> Spec:
    def collate(rows: list[Any]) -> Any:
        x, y = torch.stack([r[0] for r in rows]), F.one_hot(torch.stack([r[1] for r in rows]), CLASSES).double()
        return 0.7 * x + 0.3 * x.roll(1, 0), 0.7 * y + 0.3 * y.roll(1, 0)

    return Spec(model=net(), loss=cross_entropy, optimizer=sgd(), data=classes(), collate=collate)


# Metrics


def area(model: nn.Module, samples: list[Any]) -> dict[str, float]:
    """The true area under the curve over all samples."""
    x, y = torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])
    output = model(x)
    return {"loss": float(F.cross_entropy(output, y)), "auc": float(auc(output, (x, y)))}


def auc(output: Tensor, batch: Any) -> Tensor:
    score, positive = output[:, 0], batch[-1] == 0
    return (score[positive][:, None] > score[~positive][None]).double().mean()


@job("a metric that is not a mean over samples: AUC", owner="inputs", refusable="dp micro zero shares pp tp")
def auc_metric() -> Spec:
    return Spec(**plain(metrics={"auc": auc}), whole_metrics=area)


@job("a metric as (sum, count) over the positives only", owner="inputs")
def recall_metric() -> Spec:
    def recall(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        positive = batch[-1] == 0
        return ((output.argmax(-1) == 0) & positive).sum(), positive.sum()

    return Spec(**plain(metrics={"recall": recall, "accuracy": accuracy}))


@job("evaluation on fewer samples than ranks", owner="inputs")
def one_evaluation_sample() -> Spec:
    x, y = held_out().tensors
    return Spec(**plain(eval_data=TensorDataset(x[:1], y[:1])))


def counted(average: Any, **changes: Any) -> Spec:
    """Each sample with whether its label counts: all do in training, eight of 27 in evaluation."""

    def loss(output: Tensor, batch: Any) -> Any:
        total = (F.cross_entropy(output, batch[1], reduction="none") * batch[2]).sum()
        return average(total, batch[2].sum().clamp(min=1))

    def samples(size: int, counting: int, seed: int) -> TensorDataset:
        return TensorDataset(*classes(size, seed=seed).tensors, (torch.arange(size) < counting).double())

    return Spec(
        model=net(), loss=loss, optimizer=sgd(), data=samples(40, 40, 1), inputs=lambda batch: ((batch[0],), {}),
        eval_data=samples(27, 8, 7), **changes,
    )  # fmt: skip


@job("evaluation by a loss and a metric with clamped counts: some batches count nothing", owner="inputs")
def evaluation_clamped() -> Spec:
    def recall(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return ((output.argmax(-1) == batch[1]) * batch[2]).sum(), batch[2].sum().clamp(min=1)

    return counted(torch.div, metrics={"recall": recall})


@job("evaluation by a loss that returns (sum, clamped count): some batches count nothing", owner="inputs")
def evaluation_sum_and_count() -> Spec:
    return counted(lambda total, count: (total, count))
