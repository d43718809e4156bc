"""Models with one thing to cut each, and their comparison with themselves cut, called on every rank of the pool."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._pytree import tree_leaves

from echelon.engine.parallel.data_parallel import sum_gradients
from echelon.engine.parallel.shard_layout import TPShard, local_regions
from echelon.engine.parallel.tensor_parallel import find_tp_shards, install_tensor_parallel, shard_parameters
from echelon.engine.parallel.tp_collectives import TPCommunicator
from echelon.engine.process_groups import WorldCommunicator
from echelon.engine.run import Run
from echelon.partition.find_tp import find_tensor_cuts
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.world import World
from tests.zoo import ZOO


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


class Heads(nn.Module):
    """Attention that keeps its count of heads in an attribute; queries, keys and values in one projection or in three."""

    def __init__(self, heads: int, groups: int, *, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = heads, groups
        if fused:
            self.qkv = nn.Linear(10, 4 * (heads + 2 * groups))
        else:
            # A bias of the keys has no gradient but rounding.
            self.q, self.k, self.v = (nn.Linear(10, 4 * count, bias=False) for count in (heads, groups, groups))
        self.out, self.fused = nn.Linear(4 * heads, 10), fused

    def forward(self, x: Tensor) -> Tensor:
        many, few = self.num_heads, self.num_key_value_heads
        parts = self.qkv(x).split([4 * many, 4 * few, 4 * few], -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)
        k, v = (each.repeat_interleave(many // few, 1) for each in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Scaled(nn.Module):
    """Parameters that act on all columns alike: a learnt scale, and a norm of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 8)
        self.scale, self.weight = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = F.rms_norm(self.up(x).unflatten(-1, (-1, 4)), (4,), self.weight)
        return self.down(heads.flatten(-2) * self.scale)


class Wide(nn.Module):
    """Calls one module with more than one argument."""

    def __init__(self, inner: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.inner, self.args, self.kwargs = inner, args, kwargs

    def forward(self, *inputs: Any) -> Any:
        return self.inner(*inputs, *self.args, **self.kwargs)


class ByName(nn.Module):
    """Calls modules one after another, by the name of their argument, the last one with more arguments."""

    def __init__(self, *modules: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.inner, self.kwargs = nn.ModuleList(modules), kwargs

    def forward(self, x: Tensor) -> Tensor:
        *first, last = self.inner
        for each in first:
            x = each(input=x)
        out: Tensor = last(input=x, **self.kwargs)
        return out


class Force(nn.Module):
    """A derivative of a network, so that training differentiates twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.last = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            y = self.last(torch.tanh(self.pair(x))).square()
            return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


class Nano(nn.Module):
    """Attention as nanoGPT has it: the width is that of the input."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.n_head, self.n_embd = heads, 12
        self.c_attn, self.c_proj = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Inline(nn.Module):
    """Attention and a perceptron in one block, by the input's width."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(x)))


class Codebook(nn.Module):
    """A table that is called, and read beside."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.table.weight).argmin(-1)
        return self.out(self.table(nearest)) + x @ self.table.weight.t()[:, :4]


class Shared(nn.Module):
    """One input for three layers: without gradients, then frozen, and after a change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8)
        self.second.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        with torch.no_grad():
            first = self.first(x)
        return first + self.second(x) + self.third(x.mul_(2.0))


class Scored(nn.Module):
    """A head whose logits go to a cross entropy, on the way that `way` says."""

    def __init__(self, way: Callable[[Tensor], Tensor], target: Tensor, *, named: bool = False, **options: Any) -> None:
        super().__init__()
        self.named = named
        self.head, self.way, self.target, self.options = nn.Linear(12, 7), way, target, options

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(input=x) if self.named else self.head(x)
        return F.cross_entropy(self.way(logits), self.target, **self.options)


class Kept(nn.Module):
    """Logits that are scored, and read otherwise too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.head(x)
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)(logits.view(-1, logits.size(-1)), ids(7, 15))
        return loss, logits, logits.softmax(-1).square()


class Masked(nn.Conv2d):
    """As PixelCNN has it: a forward of its own, with a part of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones_like(self.weight)
        mask[..., -1, :] = 0
        return self._conv_forward(x, self.weight * mask, self.bias)


class Regularised(nn.Module):
    """Two layers, of which one is asked to have orthogonal columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.down(self.up(x).relu()), (self.up.weight.T @ self.up.weight).square().sum()


class Penalised(nn.Module):
    """Hidden states that are penalised in training, by way of an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
        self.block[1].register_forward_hook(self._note)

    def _note(self, _: nn.Module, __: Any, hidden: Tensor) -> None:
        self.penalty = hidden.abs().mean()

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(x)
        return out + self.penalty if self.training else out


def _normed() -> nn.Module:
    """A weight that a hook makes of two others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer: nn.Module = nn.utils.weight_norm(nn.Linear(24, 4))
    layer.weight = layer.weight.detach()  # as it is, it could not be copied
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), layer)


def _attention(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(12, 3, **options)


class OfOne(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, inner: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.inner, self.kwargs = inner, kwargs

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, x, x, **self.kwargs)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    #: Path -> cut that is expected.
    cuts: dict[str, str] = field(default_factory=dict)


def _x() -> tuple[Tensor]:
    return (numbers(3, 5, 12),)


def _image(channels: int = 6) -> Callable[[], tuple[Tensor]]:
    return lambda: (numbers(3, channels, 7, 7),)


_MASK = torch.ones(5, 5, dtype=torch.bool).triu(1)
_PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])

CASES: dict[str, Case] = {
    "odd width": Case(
        lambda: nn.Sequential(nn.Linear(12, 63), nn.GELU(), nn.Linear(63, 4)), _x, {"0": "column", "2": "row"}
    ),
    "odd heads": Case(lambda: Heads(5, 5, fused=False), lambda: (numbers(2, 5, 10),), {"q": "column", "out": "row"}),
    "odd fused heads": Case(lambda: Heads(5, 5, fused=True), lambda: (numbers(2, 5, 10),), {"qkv": "column"}),
    "grouped heads": Case(lambda: Heads(12, 6, fused=False), lambda: (numbers(2, 5, 10),), {"k": "column", "out": "row"}),
    "grouped fused heads": Case(lambda: Heads(12, 6, fused=True), lambda: (numbers(2, 5, 10),), {"qkv": "column"}),
    "one key": Case(lambda: Heads(6, 1, fused=False), lambda: (numbers(2, 5, 10),), {"q": "gather", "out": "gather"}),
    "nanoGPT": Case(lambda: Nano(4), _x, {"c_attn": "column", "c_proj": "row"}),
    "inline attention": Case(Inline, _x, {"qkv": "column", "out": "row", "up": "column", "down": "row"}),
    "attention": Case(_attention(batch_first=True), lambda: (numbers(3, 5, 12), numbers(3, 4, 12, seed=1), numbers(3, 4, 12, seed=2)), {"": "attention"}),
    "attention of one": Case(lambda: OfOne(nn.MultiheadAttention(12, 6)), _x, {"inner": "attention"}),
    "attention without weights": Case(lambda: OfOne(nn.MultiheadAttention(12, 3, batch_first=True), need_weights=False, attn_mask=_MASK, key_padding_mask=_PADDING), _x, {"inner": "attention"}),
    "attention with a hint": Case(lambda: OfOne(nn.MultiheadAttention(12, 3, batch_first=True), need_weights=False, attn_mask=_MASK, is_causal=True), _x, {"inner": "attention"}),
    "attention with weights by head": Case(lambda: OfOne(nn.MultiheadAttention(12, 5 - 1, bias=False, batch_first=True), average_attn_weights=False, attn_mask=numbers(5, 5)), _x, {"inner": "attention"}),
    "attention with a mask by head": Case(lambda: OfOne(nn.MultiheadAttention(12, 3, batch_first=True), attn_mask=numbers(9, 5, 5)), _x, {"inner": "attention"}),
    "attention without a batch": Case(_attention(), lambda: (numbers(5, 12), numbers(4, 12, seed=1), numbers(4, 12, seed=2)), {"": "attention"}),
    "attention to other widths": Case(_attention(kdim=7, vdim=8), lambda: (numbers(5, 3, 12), numbers(4, 3, 7, seed=1), numbers(4, 3, 8, seed=2)), {"": "attention"}),
    "attention with added keys": Case(_attention(add_bias_kv=True), lambda: (numbers(5, 3, 12),) * 3, {"": "stored", "out_proj": "stored"}),
    "encoder layer": Case(lambda: Wide(nn.TransformerEncoderLayer(12, 4, 24, dropout=0.0, batch_first=True), src_key_padding_mask=_PADDING), _x, {"inner.self_attn": "attention", "inner.linear1": "column"}),
    "encoder": Case(lambda: Wide(nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 24, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False), src_key_padding_mask=_PADDING), _x, {"inner.layers.1.self_attn": "attention", "inner.layers.1.linear2": "row"}),
    "decoder layer": Case(lambda: nn.TransformerDecoderLayer(12, 4, 24, dropout=0.0), lambda: (numbers(5, 3, 12), numbers(4, 3, 12, seed=1)), {"multihead_attn": "attention"}),
    "table": Case(lambda: nn.Sequential(nn.Embedding(11, 6, padding_idx=7), nn.Linear(6, 4)), lambda: (ids(11, 4, 9),), {"0": "vocabulary", "1": "gather"}),
    "bags": Case(lambda: nn.EmbeddingBag(11, 6, mode="sum"), lambda: (ids(11, 4, 9), None, numbers(4, 9)), {"": "vocabulary"}),
    "bags with offsets": Case(lambda: nn.EmbeddingBag(11, 6, mode="sum", include_last_offset=True), lambda: (ids(11, 9), torch.tensor([0, 3, 3, 9])), {"": "vocabulary"}),
    "mean bags": Case(lambda: nn.EmbeddingBag(11, 6), lambda: (ids(11, 4, 9),), {"": "stored"}),
    "recurrence": Case(lambda: nn.LSTM(12, 5, 2, bidirectional=True), _x, {"": "stored"}),
    "cell": Case(lambda: nn.GRUCell(12, 5), lambda: (numbers(3, 12),), {"": "stored"}),
    "groups": Case(lambda: nn.Conv2d(6, 12, 3, groups=3), _image(), {"": "gather"}),
    "depthwise": Case(lambda: nn.Conv2d(6, 6, 3, groups=6), _image(), {"": "gather"}),
    "transposed": Case(lambda: nn.ConvTranspose2d(6, 5, 3, stride=2), _image(), {"": "gather"}),
    "transposed groups": Case(lambda: nn.ConvTranspose2d(6, 12, 3, groups=6), _image(), {"": "gather"}),
    "convolutions": Case(
        lambda: nn.Sequential(nn.Conv2d(6, 12, 3), nn.BatchNorm2d(12), nn.ReLU(True), nn.Conv2d(12, 12, 3, groups=12), nn.BatchNorm2d(12, affine=False), nn.PReLU(12), nn.Conv2d(12, 4, 1)),
        _image(), {"0": "column", "1": "between", "3": "between", "4": "between", "5": "between", "6": "row"},
    ),
    "group norm": Case(lambda: nn.Sequential(nn.Conv1d(6, 12, 3), nn.GroupNorm(6, 12), nn.SiLU(), nn.Conv1d(12, 4, 1)), lambda: (numbers(3, 6, 9),), {"0": "column", "1": "between", "3": "row"}),
    "too few groups": Case(lambda: nn.Sequential(nn.Conv1d(6, 12, 3), nn.GroupNorm(1, 12), nn.SiLU(), nn.Conv1d(12, 4, 1)), lambda: (numbers(3, 6, 9),), {"0": "gather", "3": "gather"}),
    "flattened": Case(lambda: nn.Sequential(nn.Conv2d(6, 12, 3), nn.ReLU(True), nn.Flatten(), nn.Linear(300, 4)), _image(), {"0": "column", "3": "row"}),
    "derivative": Case(Force, lambda: (numbers(5, 6),), {"pair.0": "column", "pair.2": "row", "last": "gather"}),
    "codebook": Case(Codebook, lambda: (numbers(5, 6),), {"table": "stored", "out": "gather"}),
    "weight norm": Case(lambda: nn.Sequential(weight_norm(nn.Conv1d(6, 8, 3)), nn.ReLU()), lambda: (numbers(3, 6, 9),), {"0.parametrizations.weight": "stored"}),
    "weight norm by a hook": Case(_normed, _x, {"0": "gather", "2": "stored"}),
    "regularised": Case(Regularised, _x, {"up": "stored", "down": "gather"}),
    "penalised": Case(Penalised, _x, {"block.0": "gather", "block.2": "gather"}),
    "masked convolution": Case(lambda: nn.Sequential(nn.Conv2d(6, 12, 1), nn.ReLU(), Masked(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 4, 1)), _image(), {"0": "gather", "2": "stored"}),
    "logits": Case(lambda: Scored(lambda x: x.flatten(0, 1), ids(7, 15)), _x, {"head": "logits"}),
    "logits with ignored rows": Case(lambda: Scored(lambda x: x.float().double().reshape(15, 7), ids(7, 15).where(torch.arange(15) > 4, -1), ignore_index=-1, reduction="sum"), _x, {"head": "logits"}),
    "logits in the middle": Case(lambda: Scored(lambda x: x.transpose(1, 2), ids(7, 3, 5), label_smoothing=0.2), _x, {"head": "logits"}),
    "logits permuted": Case(lambda: Scored(lambda x: x.permute(0, 2, 1), ids(7, 3, 5), reduction="none"), _x, {"head": "logits"}),
    "logits shifted": Case(lambda: Scored(lambda x: x[:, :-1].contiguous().view(-1, 7), ids(7, 12)), _x, {"head": "logits"}),
    "logits shifted from the end": Case(lambda: Scored(lambda x: x[..., 1:, :].flatten(end_dim=1), ids(7, 12)), _x, {"head": "logits"}),
    "logits with weights": Case(lambda: Scored(lambda x: x.flatten(0, 1), ids(7, 15), weight=numbers(7).abs()), _x, {"head": "logits"}),
    "logits in part": Case(lambda: Scored(lambda x: x[..., :5].flatten(0, 1), ids(5, 15)), _x, {"head": "logits"}),
    "logits turned": Case(lambda: Scored(lambda x: x.transpose(1, 2).reshape(15, 7), ids(7, 15)), _x, {"head": "logits"}),
    "logits scaled": Case(lambda: Scored(lambda x: (x / 0.7).flatten(0, 1), ids(7, 15)), _x, {"head": "logits"}),
    "logits kept": Case(Kept, _x, {"head": "logits"}),
    "a pair by name": Case(lambda: ByName(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8)), _x, {"inner.0": "column", "inner.2": "row"}),
    "convolutions by name": Case(lambda: ByName(nn.Conv2d(6, 12, 3), nn.BatchNorm2d(12), nn.Conv2d(12, 4, 1)), _image(), {"inner.0": "column", "inner.1": "between", "inner.2": "row"}),
    "tables by name": Case(lambda: ByName(nn.Embedding(11, 6), nn.Linear(6, 4)), lambda: (ids(11, 4, 9),), {"inner.0": "vocabulary", "inner.1": "gather"}),
    "bags by name": Case(lambda: ByName(nn.EmbeddingBag(11, 6, mode="sum"), offsets=torch.tensor([0, 3, 5])), lambda: (ids(11, 9),), {"inner.0": "vocabulary"}),
    "transposed to a size": Case(lambda: Wide(nn.ConvTranspose2d(6, 5, 3, stride=2), output_size=(16, 16)), _image(), {"inner": "gather"}),
    "transposed groups by name": Case(lambda: ByName(nn.ConvTranspose2d(6, 12, 3, stride=2, groups=6), output_size=[16, 16]), _image(), {"inner.0": "gather"}),
    "logits by name": Case(lambda: Scored(lambda x: x.flatten(0, 1), ids(7, 15), named=True), _x, {"head": "logits"}),
    "attention by name": Case(lambda: Wide(nn.MultiheadAttention(12, 3), key=numbers(4, 5, 12), value=numbers(4, 5, 12, seed=1)), _x, {"inner": "attention"}),
    "learnt scale": Case(Scaled, _x, {"up": "column", "down": "row"}),
    "changed input": Case(Shared, lambda: (numbers(5, 6),), {"first": "gather", "third": "gather"}),
}  # fmt: skip


class Targets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 7)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), target)


#: Models, inputs that are right, and such as one device refuses.
STRANGE: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], tuple[Any, ...]]] = {
    "id": (lambda: nn.Embedding(11, 6), (ids(11, 4),), (torch.tensor([3, 11]),)),
    "negative id": (lambda: nn.Embedding(11, 6), (ids(11, 4),), (torch.tensor([3, -1]),)),
    "bag": (lambda: nn.EmbeddingBag(11, 6, mode="sum"), (ids(11, 2, 4),), (torch.tensor([[3, 11]]),)),
    "target": (Targets, (numbers(3, 12), torch.tensor([0, 6, -100])), (numbers(3, 12), torch.tensor([0, 7, 1]))),
    "negative target": (Targets, (numbers(3, 12), ids(7, 3)), (numbers(3, 12), torch.tensor([0, -1, 1]))),
}


@dataclass(frozen=True)
class Compared:
    """A model and itself cut: the cuts, the worst relative difference by kind, and the share of the parameters kept here."""

    cuts: dict[str, str]
    worst: dict[str, float]
    share: float
    gathers: int  #: tensors that were put together in one forward


class Counting(TPCommunicator):
    """Counts what is put together."""

    gathers = 0

    def gather_from_region(self, x: Tensor, dim: int, shard_sizes: Any) -> Tensor:
        self.gathers += 1
        return super().gather_from_region(x, dim, shard_sizes)


def compare(world: World, names: list[str]) -> dict[str, Compared]:
    """Each case cut over all ranks beside itself."""
    ranks = WorldCommunicator(world, torch.device("cpu"))
    try:
        tensor = ranks.create_axes(Mesh(tp=world.size))[0]["tp"]
        return {name: _compare(Counting(tensor), ranks, CASES[name]) for name in names}
    finally:
        ranks.close()


def _compare(axis: Counting, ranks: WorldCommunicator, case: Case) -> Compared:
    torch.manual_seed(1)
    whole = case.make().double()
    for norm in whole.modules():  # torch begins with zeros and ones, which hide a part that is in the wrong place
        for value in norm.buffers(recurse=False):
            if value.is_floating_point():
                value.copy_(1 + torch.rand_like(value))
    parted = copy.deepcopy(whole)
    probe = copy.deepcopy(whole)
    found = find_tensor_cuts(probe, lambda: _loss(probe(*case.inputs())), axis.size)
    kept = find_tp_shards(parted, found.placements, axis)
    install_tensor_parallel(parted, found.placements, axis)
    shard_parameters(parted, kept)
    worst = {}
    for kind in ("train", "eval"):
        whole.train(kind == "train"), parted.train(kind == "train")
        with torch.set_grad_enabled(kind == "train"):
            given = [[_leaf(each) for each in case.inputs()] for _ in range(2)]
            outs = [model(*inputs) for model, inputs in zip((whole, parted), given, strict=True)]
        if kind == "train":
            gathers = axis.gathers
        worst[kind] = _apart(*(tree_leaves(out) for out in outs))
        if kind == "train":
            for out in outs:
                _loss(out).backward()
            worst["inputs"] = _apart(*([each.grad for each in inputs if _real(each)] for inputs in given))
    mine = dict(parted.named_parameters())
    sum_gradients([mine[name] for each in found.placements for name in each.partial_gradients], ranks)
    for group, values in (
        ("parameters", {n: (v.grad, mine[n].grad) for n, v in whole.named_parameters()}),
        ("buffers", {n: (v, dict(parted.named_buffers())[n]) for n, v in whole.named_buffers()}),
    ):
        worst[group] = max((_parts_apart(*pair, kept.get(n)) for n, pair in values.items()), default=0.0)
    share = sum(p.numel() for p in mine.values()) / sum(p.numel() for p in whole.parameters())
    return Compared({each.path: each.cut for each in found.placements}, worst, share, gathers)


def strange(world: World) -> dict[str, str]:
    """What is said of ids and targets that are out of range, by a model cut over all ranks; "": nothing."""
    ranks, told = WorldCommunicator(world, torch.device("cpu")), dict[str, str]()
    try:
        axis = TPCommunicator(ranks.create_axes(Mesh(tp=world.size))[0]["tp"])
        for name, (make, good, bad) in STRANGE.items():
            model = make().double()
            found = find_tensor_cuts(model, lambda model=model, good=good: _loss(model(*good)), axis.size)
            kept = find_tp_shards(model, found.placements, axis)
            install_tensor_parallel(model, found.placements, axis)
            shard_parameters(model, kept)
            told[name] = ""
            model(*good)
            try:
                model(*bad)
            except IndexError as error:
                told[name] = str(error)
    finally:
        ranks.close()
    return told


def _leaf(value: Any) -> Any:
    return value.clone().requires_grad_(True) if _real(value) else value


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _loss(out: Any) -> Tensor:
    parts = [(leaf * numbers(*leaf.shape, seed=9)).sum() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    return torch.stack(parts).sum()


def _apart(left: list[Any], right: list[Any]) -> float:
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None or b is not None]
    return max((_parts_apart(a, b, None) for a, b in pairs if isinstance(a, Tensor)), default=0.0)


def _parts_apart(full: Tensor | None, mine: Tensor | None, piece: TPShard | None) -> float:
    if full is None or mine is None:
        return 0.0 if full is mine else float("inf")
    scale = full.detach().abs().max().clamp(min=1e-30)
    return max(
        (
            float((full[r.slices] - r.values).detach().abs().max() / scale)
            for r in local_regions(mine, piece)
            if r.values.numel()
        ),
        default=0.0,
    )


def save(world: World, name: str, plan: str, folder: str) -> dict[str, Tensor] | None:
    """Two steps of a zoo model, saved; what rank 0 then has of everybody's state."""
    with Run(ZOO[name](), Plan.from_json(plan), world) as run:
        for batch in run.batches(2):
            run.step(batch)
        run.save(folder)
        return _state(run)


def load(world: World, name: str, plan: str, folder: str) -> dict[str, Tensor] | None:
    """The same state, read under any plan."""
    with Run(ZOO[name](), Plan.from_json(plan), world) as run:
        run.load(folder)
        return _state(run)


def _state(run: Run) -> dict[str, Tensor] | None:
    state = run.gather_full_state()
    return None if state is None else {**state.parameters, **state.buffers, **state.optimizer}
