"""Every way in which people average a loss, and the count that the graph gives for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.loss_counts import read_counts, recount_term, repeat_samples

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, -100, 3, 2, 1])
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 4.0])
MASK = Y >= 0
P = nn.Parameter(torch.ones(3, 3))


def rows(x: Tensor) -> Tensor:
    return F.cross_entropy(x, Y, reduction="none")


#: name -> (loss, its counts). Six rows of four numbers; five rows have labels.
LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "ignored label": (lambda x: F.cross_entropy(x, Y), [5]),
    "class weights": (lambda x: F.cross_entropy(x, Y, weight=WEIGHTS), [0.5 + 1 + 4 + 2 + 1]),
    "label smoothing": (lambda x: F.cross_entropy(x, Y, label_smoothing=0.5), [10, 5 / 0.125]),
    "images": (lambda x: F.cross_entropy(x.T.reshape(2, 2, 2, 3), torch.ones(2, 2, 3).long()), [12]),
    "soft targets": (lambda x: F.cross_entropy(x, torch.rand(6, 4)), [6]),
    "selected": (lambda x: rows(x)[MASK].mean(), [5]),
    "sum over mask": (lambda x: (rows(x) * MASK).sum() / MASK.sum(), [5]),
    "sum over number": (lambda x: rows(x).sum() / MASK.sum().item(), [5]),
    "summed labels": (lambda x: F.cross_entropy(x, Y, reduction="sum") / MASK.sum(), [5]),
    "rows, summed": (lambda x: F.l1_loss(x[MASK], torch.zeros(5, 4), reduction="sum") / max(1, int(MASK.sum())), [5]),
    "summed logits": (
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(6, 4), reduction="sum") * (1 / MASK.sum()),
        [5],
    ),
    "summed squares": (lambda x: F.mse_loss(x, torch.zeros(6, 4), reduction="sum") / 5 / 2, [10]),
    "a plain sum by reduction": (lambda x: F.cross_entropy(x, Y, reduction="sum"), []),
    "reciprocal": (lambda x: (rows(x) * MASK).sum() * (1 / MASK.sum()), [5]),
    "reciprocal of nothing": (lambda x: (rows(x) * 0.0).sum() * torch.zeros(()), [0]),
    "mean times zero": (lambda x: 0.0 * x.square().mean(), [0]),
    "term times zero": (lambda x: F.cross_entropy(x, Y) + 0.0 * x.square().mean(), [5]),
    "product": (lambda x: torch.einsum("i,i->", rows(x), MASK.float()) / MASK.sum(), [5]),
    "squares": (lambda x: F.mse_loss(x, torch.zeros(6, 4)), [24]),
    "absolute": (lambda x: F.l1_loss(x, torch.zeros(6, 4)), [24]),
    "huber": (lambda x: F.huber_loss(x, torch.zeros(6, 4)), [24]),
    "logits": (lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(6, 4)), [24]),
    "margins": (lambda x: F.multi_margin_loss(x, Y.clamp(min=0)), [6]),
    "batchmean": (lambda x: F.kl_div(x, torch.ones(6, 4), reduction="batchmean"), [6]),
    "per sample": (lambda x: ((x * x).sum(1) / 3).mean(), [6]),
    "half, recast": (lambda x: F.cross_entropy(x.bfloat16(), Y).double().reshape(1)[0], [5]),
    "two terms": (lambda x: 0.5 * F.cross_entropy(x, Y) + x.square().mean() / 3, [10, 72]),
    "stacked": (lambda x: torch.stack([F.cross_entropy(x, Y), x.mean()]).sum(), [5, 24]),
    "penalty": (lambda x: F.cross_entropy(x, Y) + x.square().sum(), [5]),
    "penalty by a factor": (lambda x: F.cross_entropy(x, Y) + 0.1 * P.square().sum() + P.abs().mean(), [5]),
    "orthogonal": (lambda x: F.cross_entropy(x, Y) + 0.1 * (P @ P.T - torch.eye(3)).square().sum(), [5]),
    "error of a layer": (lambda x: F.cross_entropy(x, Y) + (torch.ones(6, 3) @ P).square().sum() / 6, [5, 6]),
    "centres": (lambda x: (P[None] - torch.ones(6, 3, 3)).square().mean(), [54]),
    "learned factor": (lambda x: F.cross_entropy(x, Y) * nn.Parameter(torch.tensor(2.0)), [2.5]),
    "recounted": (lambda x: F.cross_entropy(x, Y) * MASK.sum() / 8, [8]),
    "plain sum": (lambda x: x.square().sum(), []),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_graph_gives_what_each_mean_divides_by(name: str) -> None:
    loss, counts = LOSSES[name]
    reading = read_counts(loss(X @ nn.Parameter(torch.eye(4))))
    assert [float(term.count) for term in reading.terms] == pytest.approx(counts)
    assert not reading.opaque_operators


@pytest.mark.parametrize("name", [name for name in LOSSES if name.startswith("summed")])
def test_sums_by_reduction_are_left_to_models_that_know_their_number_of_labels(name: str) -> None:
    loss = LOSSES[name][0](X @ nn.Parameter(torch.eye(4)))
    assert not read_counts(loss, accept_sums=False).terms


def test_a_connectionist_loss_averages_over_samples_and_not_over_labels() -> None:
    scores = torch.randn(10, 2, 4, requires_grad=True).log_softmax(-1)
    loss = F.ctc_loss(scores, torch.ones(2, 3).long(), torch.tensor([10, 10]), torch.tensor([3, 2]))
    assert [term.count for term in read_counts(loss).terms] == [2]


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: x.square().mean().sqrt(),
        lambda x: x.logsumexp((0, 1)),
        lambda x: 1 - x.sigmoid().sum() / (x.sigmoid().sum() + 3),
    ],
)
def test_what_is_no_sum_of_means_is_named(loss: Callable[[Tensor], Tensor]) -> None:
    reading = read_counts(loss(X @ nn.Parameter(torch.eye(4))))
    assert not reading.terms
    assert reading.opaque_operators


def test_without_a_graph_nothing_is_read() -> None:
    assert not read_counts(torch.ones(())).terms


@pytest.mark.parametrize("rows", [1, 2])
def test_a_batch_of_one_sample_reads_like_any_other(rows: int) -> None:
    each = F.mse_loss(X[:rows] @ nn.Parameter(torch.eye(4)), X[:rows], reduction="none").sum(1)
    for loss in (each.mean(), each.sum() / rows, each.sum().reshape(1).mean() / rows):
        (term,) = read_counts(loss).terms
        assert term.count == rows


@pytest.mark.parametrize(("positives", "least"), [(0, 1), (1, 1), (2, 1), (0.25, 1), (0, 10), (3, 10), (12, 10)])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "focal"])
def test_what_a_minimum_hides_is_counted(positives: float, least: float, masked: bool) -> None:
    weights = torch.zeros(4)
    weights[:1] = positives
    output = (X @ nn.Parameter(torch.eye(4)))[:4, 0]

    def again(times: int) -> Tensor:
        y, weight = repeat_samples((output, weights), 4, times)
        each = y.square() * weight if masked else y.square()
        return 0.5 * each.sum() / weight.sum().clamp(min=least)

    term, sure = recount_term(read_counts(again(1)).terms, again)
    assert sure == (not masked or positives > 0)  # a sum of zero does not show whether it grows
    assert term is not None
    assert term.count == 2 * positives
    assert term.scale == 2 * max(positives, least)
    assert term.is_clamped == (positives < least)


def test_a_count_that_does_not_follow_its_samples_is_not_taken_for_zero() -> None:
    output = (X @ nn.Parameter(torch.eye(4)))[:4, 0]
    boxes = torch.tensor([2])  # of all samples together, by their number

    def again(times: int) -> Tensor:
        y, given = repeat_samples((output, boxes), 4, times)
        return y[given].square().sum() / max(len(given), 1)

    assert recount_term(read_counts(again(1)).terms, again) == (None, False)
    assert repeat_samples((output, {"lengths": [1, 1, 1, 1]}), 4, 2) is None
