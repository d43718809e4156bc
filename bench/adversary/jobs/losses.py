"""Losses that are not means over independent samples, or are means over something else than samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from bench.adversary.kit import (
    CLASSES,
    SAMPLES,
    WIDTH,
    Net,
    Samples,
    classes,
    cross_entropy,
    integers,
    net,
    numbers,
    plain,
    sgd,
)
from bench.adversary.spec import Spec, job

#: A batch in parts has another loss, for DDP as well.
COUPLED = "dp micro zero shares"


def labelled(rare: float, seed: int = 5) -> TensorDataset:
    """Classes of which about a share `rare` is to be ignored."""
    x, y = classes().tensors
    drop = torch.rand(SAMPLES, generator=torch.Generator().manual_seed(seed)) < rare
    return TensorDataset(x, y.masked_fill(drop, -100))


@job("ignore_index on half of the samples: mean over unequal counts", refusable=COUPLED)
def ignored_often() -> Spec:
    return Spec(**plain(data=labelled(0.5)))


@job("ignore_index on one sample of thirty: unequal counts that a first look does not show", refusable=COUPLED)
def ignored_rarely() -> Spec:
    return Spec(**plain(data=labelled(0.04)))


@job("ignore_index appears only from the third epoch on", refusable=COUPLED)
def ignored_late() -> Spec:
    x, y = classes(200, seed=3).tensors
    y = y.clone()
    y[199] = y[150] = -100
    return Spec(**plain(data=TensorDataset(x, y), steps=25))


@job("class weights: the mean is weighed by the classes of the batch", refusable=COUPLED)
def class_weights() -> Spec:
    weights = torch.tensor([0.2, 1.0, 3.0, 0.5], dtype=torch.float64)
    return Spec(**plain(loss=lambda output, batch: F.cross_entropy(output, batch[-1], weight=weights)))


@job("a mask per token: sum over mask divided by its sum", refusable=COUPLED)
def masked_mean() -> Spec:
    mask = (numbers(SAMPLES, 5, seed=9) > 0).double()
    mask[:, 0] = 1
    data = TensorDataset(numbers(SAMPLES, 5, WIDTH), mask, numbers(SAMPLES, 5, seed=4))

    def loss(output: Tensor, batch: Any) -> Tensor:
        error = (output[..., 0] - batch[2]) ** 2
        return (error * batch[1]).sum() / batch[1].sum()

    return Spec(model=net(1), loss=loss, optimizer=sgd(), data=data, inputs=lambda batch: ((batch[0],), {}))


@job("boolean indexing, then mean", refusable=COUPLED)
def boolean_mean() -> Spec:
    data = TensorDataset(numbers(SAMPLES, WIDTH), numbers(SAMPLES, 3, seed=4))

    def loss(output: Tensor, batch: Any) -> Tensor:
        wanted = batch[-1] > -0.5
        return (output[wanted] - batch[-1][wanted]).abs().mean()

    return Spec(model=net(3), loss=loss, optimizer=sgd(), data=data)


@job("(sum, count) with the true count")
def sum_and_count() -> Spec:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(output, batch[-1], reduction="sum"), (batch[-1] != -100).sum()

    return Spec(**plain(data=labelled(0.5), loss=loss))


@job("(sum, count) where a rank counts nothing at all")
def count_of_zero() -> Spec:
    x, y = classes().tensors
    y = torch.where(torch.arange(SAMPLES) % 4 == 0, y, -100)

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(output, batch[-1], reduction="sum"), (batch[-1] != -100).sum()

    return Spec(**plain(data=TensorDataset(x, y), loss=loss, eval_data=None, metrics={}))


@job("reduction='sum': the gradient grows with the batch", refusable=COUPLED)
def reduction_sum() -> Spec:
    return Spec(
        **plain(
            loss=lambda output, batch: F.cross_entropy(output, batch[-1], reduction="sum"),
            optimizer=sgd(0.01), eval_data=None, metrics={},
        )
    )  # fmt: skip


@job("sum over the batch divided by a constant batch size: short batches weigh less", refusable=COUPLED)
def divided_by_constant() -> Spec:
    return Spec(
        **plain(
            loss=lambda output, batch: F.cross_entropy(output, batch[-1], reduction="sum") / 8,
            eval_data=None, metrics={},
        )
    )  # fmt: skip


@job("contrastive loss: every sample is a negative of every other", refusable=COUPLED)
def contrastive() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        z = F.normalize(output, dim=-1)
        return F.cross_entropy(z @ F.normalize(batch[-1], dim=-1).T / 0.2, torch.arange(len(z)))

    data = TensorDataset(numbers(SAMPLES, WIDTH), numbers(SAMPLES, 5, seed=4))
    return Spec(model=net(5), loss=loss, optimizer=sgd(), data=data)


@job("triplets mined inside the batch", refusable=COUPLED)
def triplet_mining() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        distance = (output[:, None] - output[None]).pow(2).sum(-1)
        same = batch[-1][:, None] == batch[-1][None]
        hardest = (distance * same).max(1).values
        nearest = (distance + 1e3 * same).min(1).values
        return F.softplus(hardest - nearest).mean()

    return Spec(**plain(loss=loss, optimizer=sgd(0.01), eval_data=None, metrics={}))


@job("root of a mean", refusable=COUPLED)
def root_mean_square() -> Spec:
    data = TensorDataset(numbers(SAMPLES, WIDTH), numbers(SAMPLES, 3, seed=4))
    return Spec(
        model=net(3), loss=lambda output, batch: F.mse_loss(output, batch[-1]).sqrt(), optimizer=sgd(), data=data
    )


@job("perplexity: the exponential of a mean", refusable=COUPLED)
def perplexity() -> Spec:
    return Spec(
        **plain(
            loss=lambda output, batch: cross_entropy(output, batch).exp(),
            optimizer=sgd(0.02),
            eval_data=None,
            metrics={},
        )
    )


@job("correlation between prediction and target over the batch", refusable=COUPLED)
def correlation() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        a, b = output[:, 0] - output[:, 0].mean(), batch[-1] - batch[-1].mean()
        return -(a * b).sum() / (a.norm() * b.norm() + 1e-9)

    data = TensorDataset(numbers(SAMPLES, WIDTH), numbers(SAMPLES, seed=4))
    return Spec(model=net(1), loss=loss, optimizer=sgd(), data=data)


@job("dice over the whole batch", refusable=COUPLED)
def dice() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        p = output.sigmoid()
        return 1 - (2 * (p * batch[-1]).sum() + 1) / (p.sum() + batch[-1].sum() + 1)

    data = TensorDataset(numbers(SAMPLES, WIDTH), (numbers(SAMPLES, 6, seed=4) > 0.8).double())
    return Spec(model=net(6), loss=loss, optimizer=sgd(), data=data)


@job("dice per sample, then a mean: as harmless as it looks different")
def dice_per_sample() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        p = output.sigmoid()
        return (1 - (2 * (p * batch[-1]).sum(1) + 1) / (p.sum(1) + batch[-1].sum(1) + 1)).mean()

    data = TensorDataset(numbers(SAMPLES, WIDTH), (numbers(SAMPLES, 6, seed=4) > 0.8).double())
    return Spec(model=net(6), loss=loss, optimizer=sgd(), data=data)


@job("focal loss normalised by the number of positives", refusable=COUPLED)
def focal_by_positives() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        p = output.sigmoid()
        each = F.binary_cross_entropy_with_logits(output, batch[-1], reduction="none") * (p - batch[-1]).abs() ** 2
        return each.sum() / batch[-1].sum().clamp(min=1)

    data = TensorDataset(numbers(SAMPLES, WIDTH), (numbers(SAMPLES, 6, seed=4) > 1.0).double())
    return Spec(model=net(6), loss=loss, optimizer=sgd(), data=data)


@job("the worst sample of the batch decides", refusable=COUPLED)
def max_over_batch() -> Spec:
    return Spec(
        **plain(
            loss=lambda output, batch: F.cross_entropy(output, batch[-1], reduction="none").max(),
            eval_data=None, metrics={},
        )
    )  # fmt: skip


@job("hardest half of the batch (online hard example mining)", refusable=COUPLED)
def hard_examples() -> Spec:
    return Spec(
        **plain(
            loss=lambda output, batch: F.cross_entropy(output, batch[-1], reduction="none").topk(len(output) // 2)[0].mean(),
            eval_data=None, metrics={},
        )
    )  # fmt: skip


@job("median over the batch", refusable=COUPLED)
def median_over_batch() -> Spec:
    return Spec(
        **plain(
            loss=lambda output, batch: F.cross_entropy(output, batch[-1], reduction="none").median(),
            eval_data=None, metrics={},
        )
    )  # fmt: skip


@job("two terms, each a mean over its own count", refusable=COUPLED)
def two_counts() -> Spec:
    x, y = labelled(0.5).tensors
    boxes = numbers(SAMPLES, CLASSES, seed=8)

    def loss(output: Tensor, batch: Any) -> Tensor:
        positive = batch[1] >= 2
        located = F.l1_loss(output[positive], batch[2][positive]) if positive.any() else output.sum() * 0
        return F.cross_entropy(output, batch[1]) + 0.5 * located

    return Spec(
        model=net(), loss=loss, optimizer=sgd(), data=TensorDataset(x, y.abs() % CLASSES, boxes),
        inputs=lambda batch: ((batch[0],), {}),
    )  # fmt: skip


@job("a mean plus the variance of the batch (VICReg)", refusable=COUPLED)
def variance_term() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return cross_entropy(output, batch) + 0.3 * F.relu(1 - output.var(0).add(1e-4).sqrt()).mean()

    return Spec(**plain(loss=loss, eval_data=None, metrics={}))


@job("cross-correlation matrix of the batch (Barlow twins)", refusable=COUPLED)
def barlow_twins() -> Spec:
    def loss(output: Tensor, batch: Any) -> Tensor:
        a = (output - output.mean(0)) / (output.std(0) + 1e-6)
        b = (batch[-1] - batch[-1].mean(0)) / (batch[-1].std(0) + 1e-6)
        c = a.T @ b / len(a)
        return ((c - torch.eye(len(c), dtype=c.dtype)) ** 2).sum()

    data = TensorDataset(numbers(SAMPLES, WIDTH), numbers(SAMPLES, 5, seed=4))
    return Spec(model=net(5), loss=loss, optimizer=sgd(0.05), data=data)


class Tempered(Net):
    """A head whose temperature is learned; the loss is in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature.exp()


@job("a learned scalar temperature: a parameter without dimensions")
def learned_temperature() -> Spec:
    return Spec(**plain(model=lambda: Tempered().double()))


class Penalised(Net):
    """Returns logits and the norm of its own weights."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), sum(each.pow(2).sum() for each in self.parameters())


@job("a penalty on weights, returned by forward", owner="cuts", refusable="tp pp")
def weight_penalty() -> Spec:
    return Spec(
        **plain(
            model=lambda: Penalised().double(), eval_data=None, metrics={},
            loss=lambda output, batch: F.cross_entropy(output[0], batch[-1]) + 1e-2 * output[1],
        )
    )  # fmt: skip


@job("a loss that reads the weights of the job's own module instance", owner="verifier", refusable="tp pp zero")
def reads_module() -> Spec:
    torch.manual_seed(0)
    model = Net().double()

    def loss(output: Tensor, batch: Any) -> Tensor:
        return cross_entropy(output, batch) + 1e-2 * model.head.weight.pow(2).sum()

    return Spec(**plain(model=model, loss=loss, eval_data=None, metrics={}))


class Warming:
    """A loss object that counts its calls: later terms weigh more."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        return cross_entropy(output, batch) * (1 + 0.1 * self.calls)


@job("a loss object that counts its own calls", owner="verifier", refusable="micro pp")
def stateful_loss() -> Spec:
    return Spec(**plain(loss=Warming(), eval_data=None, metrics={}))


@job("label smoothing with ignored labels: two different denominators in one call", refusable=COUPLED)
def label_smoothing() -> Spec:
    return Spec(
        **plain(data=labelled(0.3), loss=lambda output, batch: F.cross_entropy(output, batch[-1], label_smoothing=0.2))
    )


@job("KL divergence with reduction='batchmean'")
def kl_batchmean() -> Spec:
    data = TensorDataset(numbers(SAMPLES, WIDTH), numbers(SAMPLES, CLASSES, seed=4).softmax(-1))
    return Spec(
        model=net(), optimizer=sgd(), data=data,
        loss=lambda output, batch: F.kl_div(output.log_softmax(-1), batch[-1], reduction="batchmean"),
    )  # fmt: skip


@job("CTC with its default mean, which divides by each sample's own length")
def ctc_mean() -> Spec:
    lengths = integers(3, SAMPLES, seed=6) + 1
    targets = integers(CLASSES - 1, SAMPLES, 3, seed=7) + 1
    data = TensorDataset(numbers(SAMPLES, 7, WIDTH), targets, lengths)

    def loss(output: Tensor, batch: Any) -> Tensor:
        steps = torch.full((len(output),), 7)
        return F.ctc_loss(output.log_softmax(-1).transpose(0, 1), batch[1], steps, batch[2])

    return Spec(model=net(), loss=loss, optimizer=sgd(), data=data, inputs=lambda batch: ((batch[0],), {}))


class Centres(Net):
    """Class centres that the loss pulls features to: parameters that only some samples touch."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Embedding(CLASSES, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = super().forward(x)
        return out, self.centres(y)


@job("center loss: class centres are parameters and only a batch's classes move")
def center_loss() -> Spec:
    def loss(output: Any, batch: Any) -> Tensor:
        return F.cross_entropy(output[0], batch[1]) + 0.1 * (output[0] - output[1]).pow(2).sum(-1).mean()

    return Spec(
        model=lambda: Centres().double(), loss=loss, optimizer=sgd(), data=classes(),
        inputs=lambda batch: ((batch[0], batch[1]), {}),
    )  # fmt: skip


@job("samples weigh as the batch's own weights say: sum(w l) / sum(w)", refusable=COUPLED)
def importance_weights() -> Spec:
    data = TensorDataset(numbers(SAMPLES, WIDTH), numbers(SAMPLES, seed=3).exp(), integers(CLASSES, SAMPLES))

    def loss(output: Tensor, batch: Any) -> Tensor:
        each = F.cross_entropy(output, batch[2], reduction="none")
        return (each * batch[1]).sum() / batch[1].sum()

    return Spec(model=net(), loss=loss, optimizer=sgd(), data=data, inputs=lambda batch: ((batch[0],), {}))


@job("geometric mean: the exponential of the mean of logarithms", refusable=COUPLED)
def geometric_mean() -> Spec:
    data = TensorDataset(numbers(SAMPLES, WIDTH), numbers(SAMPLES, 3, seed=4))
    return Spec(
        model=net(3), optimizer=sgd(), data=data,
        loss=lambda output, batch: ((output - batch[-1]).pow(2).mean(-1) + 0.1).log().mean().exp(),
    )  # fmt: skip


@job("a loss that depends on how many samples the batch has", refusable=COUPLED)
def reads_batch_size() -> Spec:
    return Spec(
        **plain(
            loss=lambda output, batch: cross_entropy(output, batch) * (1 + len(output) / 10),
            eval_data=None,
            metrics={},
        )
    )


def proxied(**options: Any) -> Spec:
    """Learned vectors, one for each class, that the loss holds and the optimizer trains beside the model."""
    vectors = nn.Parameter(numbers(CLASSES, CLASSES, seed=11) * 0.3)

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": list(params)}, {"params": [vectors], "lr": 0.3}], lr=0.1, momentum=0.9)

    return Spec(
        **plain(
            loss=lambda output, batch: F.cross_entropy(-torch.cdist(output, vectors), batch[-1]),
            optimizer=optimizer,
            **options,
        )
    )


@job("class proxies: the loss holds parameters that the optimizer trains", refusable="tp pp")
def proxies() -> Spec:
    return proxied()


@job("class proxies, and clipping that looks at the model's gradients alone", refusable="tp pp")
def proxies_clipped() -> Spec:
    return proxied(clip_norm=0.1)


@job("ragged lists of strings per sample, collated by hand, mean over all tokens", refusable=COUPLED)
def ragged_tokens() -> Spec:
    table = {chr(97 + place): numbers(WIDTH, seed=100 + place) for place in range(8)}
    lengths = integers(5, SAMPLES, seed=6) + 1
    samples = [
        (
            "".join(chr(97 + int(each)) for each in integers(8, int(size), seed=200 + place)),
            int(integers(CLASSES, 1, seed=300 + place)),
        )
        for place, size in enumerate(lengths)
    ]

    def collate(rows: list[Any]) -> Any:
        x = torch.cat([torch.stack([table[letter] for letter in text]) for text, _ in rows])
        y = torch.cat([torch.full((len(text),), label) for text, label in rows])
        return x, y

    return Spec(model=net(), loss=cross_entropy, optimizer=sgd(), data=Samples(samples), collate=collate)
