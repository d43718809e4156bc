"""Vectors, tables and interfaces: batch norm, ranking, shared towers, records, adapters, Keras."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from echelon.job import Job
from tests.zoo.data import SAMPLES, numbers, sgd, train, whole


def mlp_norm() -> Job:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(20, 96), nn.BatchNorm1d(96), nn.ReLU(inplace=True),
            nn.Linear(96, 96, bias=False), nn.BatchNorm1d(96), nn.ReLU(inplace=True), nn.Dropout(0.3),
            nn.Linear(96, 96), nn.BatchNorm1d(96, affine=False), nn.PReLU(), nn.Linear(96, 4),
        )  # fmt: skip

    return train(
        name="mlp-norm",
        model=model,
        data=TensorDataset(numbers(33, 20, seed=90), whole(4, 33, seed=91)),
        loss=lambda output, batch: F.cross_entropy(output, batch[1], weight=None),
        optimizer=sgd,
        batch_size=12,  # of 33: the last has 9, which are two samples and more for each of four ranks
    )


class Dlrm(nn.Module):
    """Tables of embeddings by bags, a small network for the numbers, and the product of every pair."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, 16, mode="sum", sparse=sparse) for rows in (100, 500, 1000))
        self.bottom = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, bags: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = self.bottom(dense)
        rows = [x, *(bag(ids, offsets) for bag, (ids, offsets) in zip(self.bags, bags, strict=True))]
        stacked = torch.cat(rows, dim=1).view(x.shape[0], -1, 16)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        i, j = torch.tril_indices(products.shape[1], products.shape[2], -1, device=x.device)
        return self.top(torch.cat([x, products[:, i, j]], dim=1)).squeeze(1)


class Clicks(Dataset[tuple[Tensor, list[Tensor], Tensor]]):
    """Numbers, three lists of unequal length, and whether it was clicked."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, list[Tensor], Tensor]:
        lengths = whole(4, 3, low=1, seed=1000 + i).tolist()
        ids = [
            whole(rows, n, seed=2000 + 3 * i + k)
            for k, (rows, n) in enumerate(zip((100, 500, 1000), lengths, strict=True))
        ]
        return numbers(7, seed=3000 + i), ids, (numbers(1, seed=4000 + i)[0] > 0).float()


def _bags(
    samples: list[tuple[Tensor, list[Tensor], Tensor]],
) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]:
    dense, lists, clicked = zip(*samples, strict=True)
    bags = []
    for column in zip(*lists, strict=True):
        lengths = torch.tensor([len(each) for each in column])
        bags.append((torch.cat(column), lengths.cumsum(0) - lengths))
    return torch.stack(dense), bags, torch.stack(clicked)


def _clicked(output: Tensor, batch: tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, batch[2])


def dlrm() -> Job:
    return train(
        name="dlrm",
        model=lambda: Dlrm(sparse=False),
        data=Clicks(),
        collate=_bags,
        loss=_clicked,
        optimizer=lambda params: torch.optim.Adagrad(params, lr=0.01),
    )


def dlrm_sparse() -> Job:
    """As DLRM is usually trained: the tables' gradients are sparse tensors."""
    return train(
        name="dlrm-sparse",
        model=lambda: Dlrm(sparse=True),
        data=Clicks(),
        collate=_bags,
        loss=_clicked,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )


class Siamese(nn.Module):
    """One tower, used twice; the two views of a pair are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv1d(4, 16, 5, padding=2), nn.ReLU(True), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(16 * 8, 128), nn.ReLU(True),
            nn.Linear(128, 32),
        )  # fmt: skip
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = F.normalize(self.tower(a), dim=1), F.normalize(self.tower(b), dim=1)
        return (left - right).norm(dim=1) * self.temperature.exp()


def siamese() -> Job:
    def loss(output: Tensor, batch: list[Tensor]) -> Tensor:
        same = batch[2]
        return (same * output.square() + (1 - same) * F.relu(4.0 - output).square()).mean()

    return train(
        name="siamese",
        model=Siamese,
        data=TensorDataset(
            numbers(SAMPLES, 4, 16, seed=92), numbers(SAMPLES, 4, 16, seed=93), whole(2, SAMPLES, seed=94).float()
        ),
        loss=loss,
        clip_norm=2.0,
    )


@dataclass
class Diagnosis:
    """What the model of records gives."""

    logits: Tensor
    risk: Tensor
    hidden: list[Tensor]


class Records(nn.Module):
    """A nested dict in, a dataclass out, parts in a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.kind = nn.Conv2d(1, 8, 3), nn.Embedding(4, 16)
        self.scales = nn.ParameterDict({"age": nn.Parameter(torch.randn(16)), "bias": nn.Parameter(torch.zeros(16))})
        self.body, self.logits, self.risk = nn.Linear(8 * 36 + 32, 64), nn.Linear(64, 3), nn.Linear(64, 1)

    def forward(self, image: Tensor, patient: dict[str, Tensor]) -> Diagnosis:
        seen = F.relu(self.image(image)).flatten(1)
        age = patient["age"][:, None] * self.scales["age"] + self.scales["bias"]
        hidden = torch.tanh(self.body(torch.cat([seen, age, self.kind(patient["kind"])], dim=1)))
        return Diagnosis(logits=self.logits(hidden), risk=self.risk(hidden)[:, 0], hidden=[seen, hidden])


def records() -> Job:
    images, ages, kinds = numbers(SAMPLES, 1, 8, 8, seed=95), numbers(SAMPLES, seed=96), whole(4, SAMPLES, seed=97)
    risks, labels = numbers(SAMPLES, seed=98), whole(3, SAMPLES, seed=99)

    def loss(output: Diagnosis, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output.logits, batch["label"]) + F.mse_loss(output.risk, batch["risk"])

    return train(
        name="records",
        model=Records,
        data=[
            {"image": images[i], "patient": {"age": ages[i], "kind": kinds[i]}, "label": labels[i], "risk": risks[i]}
            for i in range(SAMPLES)
        ],
        loss=loss,
    )


class Adapted(nn.Module):
    """A frozen layer and a small trained correction: LoRA."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, base.in_features) / 8)
        self.up = nn.Parameter(torch.randn(base.out_features, 4) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def lora() -> Job:
    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 5))
        for i, part in enumerate(net):
            if isinstance(part, nn.Linear):
                net[i] = Adapted(part)
        return net

    return train(
        name="lora",
        model=model,
        data=TensorDataset(numbers(SAMPLES, 16, seed=100), whole(5, SAMPLES, seed=101)),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
    )


def keras() -> Job:
    """Keras 3 makes torch modules of its layers; images have their channels last."""

    def model() -> nn.Module:
        os.environ["KERAS_BACKEND"] = "torch"  # read by keras when it is first imported
        import keras
        from keras import layers

        keras.utils.set_random_seed(0)  # keras has its own idea of a seed
        inputs = keras.Input((12, 12, 1))
        x = layers.Conv2D(16, 3, activation="relu", name="conv")(inputs)
        x = layers.MaxPooling2D()(x)
        x = layers.Flatten()(x)
        x = layers.LayerNormalization(name="norm")(layers.Dense(64, activation="gelu", name="hidden")(x))
        return keras.Model(inputs, layers.Dense(10, name="out")(x))

    return train(
        name="keras",
        model=model,
        data=TensorDataset(numbers(SAMPLES, 12, 12, 1, seed=102), whole(10, SAMPLES, seed=103)),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
    )
