"""Blocks that hand on hidden states, and their comparison with themselves on parts of the sequence, called on every rank of the pool."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.engine.parallel.data_parallel import sum_gradients
from echelon.engine.parallel.shard_layout import TPShard, local_regions
from echelon.engine.parallel.tensor_parallel import find_tp_shards, install_tensor_parallel, shard_parameters
from echelon.engine.parallel.tp_collectives import TPCommunicator
from echelon.engine.process_groups import WorldCommunicator
from echelon.partition.find_sequence_parallel import find_segments
from echelon.partition.find_tp import find_tensor_cuts
from echelon.plan.mesh import Mesh
from echelon.world import World


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Attention(nn.Module):
    """`first`: the sequence comes before the samples. `joined`: its heads see each other, so that they cannot be cut."""

    def __init__(self, first: bool, *, joined: bool = False) -> None:
        super().__init__()
        self.heads, self.first, self.joined = 6, first, joined
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.first else x
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, 2).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        out = F.normalize(out, dim=-1) if self.joined else out
        return self.out(out.transpose(0, 1) if self.first else out)


class Block(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(12), nn.LayerNorm(12), Attention(first)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    def __init__(self, *, first: bool = False, kind: Any = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(first) for _ in range(3))
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def torch_own(first: bool) -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(12, 6, 24, dropout=0.0, batch_first=not first), 3, enable_nested_tensor=False
    )


#: The sequence comes before the samples, or not; torch's own layers, or ours.
CASES = {
    "blocks": lambda: Stack(),
    "blocks, time first": lambda: Stack(first=True),
    "torch's": lambda: torch_own(False),
    "torch's, time first": lambda: torch_own(True),
}


@dataclass(frozen=True)
class Compared:
    units: int
    worst: dict[str, float]
    kept: float  #: bytes that backward needs, as a share of those without parts of the sequence
    unsummed: float  #: how far a norm's gradient is off before it is added up


def compare(world: World, name: str) -> Compared:
    """A stack on parts of sequences of several lengths, beside itself on one device."""
    ranks = WorldCommunicator(world, torch.device("cpu"))
    try:
        return _compare(TPCommunicator(ranks.create_axes(Mesh(tp=world.size))[0]["tp"]), ranks, name)
    finally:
        ranks.close()


def _compare(axis: TPCommunicator, ranks: WorldCommunicator, name: str) -> Compared:
    torch.manual_seed(1)
    whole, first = CASES[name]().double(), "first" in name
    probe = copy.deepcopy(whole).eval()

    def batch(length: int) -> Tensor:
        return numbers(length, 4, 12, seed=length) if first else numbers(4, length, 12, seed=length)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * numbers(*x.shape, seed=9)).sum()

    placements = find_tensor_cuts(probe, lambda: loss(probe, batch(8)), axis.size).placements
    found = find_segments(probe, lambda: loss(probe, batch(8)), axis.size, placements)
    models = []
    for segments in ((), found.segments):
        parted = copy.deepcopy(whole)
        kept = find_tp_shards(parted, found.placements, axis)
        install_tensor_parallel(parted, found.placements, axis, segments)
        shard_parameters(parted, kept)
        models.append(parted)
    plain, parted = models
    partial = [parted.get_parameter(name) for segment in found.segments for name in segment.partial_gradients]
    worst = dict.fromkeys(("outputs", "inputs", "gradients", "evaluated"), 0.0)
    lengths = (8, 7, 11, 2)  # those that cannot be dealt out evenly, and to each rank
    for length in lengths:
        inputs = [batch(length).requires_grad_(True) for _ in range(2)]
        outs = [model(x) for model, x in zip((whole, parted), inputs, strict=True)]
        worst["outputs"] = max(worst["outputs"], _apart(*outs))
        for out in outs:
            (out * numbers(*out.shape, seed=9)).sum().backward()
        worst["inputs"] = max(worst["inputs"], _apart(*(x.grad for x in inputs)))
        with torch.no_grad():
            evaluated = [model.eval()(batch(length)) for model in (whole, parted)]
        worst["evaluated"] = max(worst["evaluated"], _apart(*evaluated))
        whole.train(), parted.train()
    norm = next(name for name in found.segments[0].partial_gradients if "norm1.weight" in name)
    unsummed = _apart(whole.get_parameter(norm).grad, parted.get_parameter(norm).grad)
    sum_gradients(partial, ranks)
    mine = dict(parted.named_parameters())
    for each, value in whole.named_parameters():
        worst["gradients"] = max(worst["gradients"], _apart(value.grad, mine[each].grad, kept.get(each)))
    kept_bytes = [_kept(model, batch(8)) for model in (plain, parted)]
    return Compared(len(found.segments[0].blocks), worst, kept_bytes[1] / kept_bytes[0], unsummed)


def _kept(model: nn.Module, x: Tensor) -> int:
    """Bytes that backward needs, but for the parameters'."""
    seen: dict[int, int] = {}
    own = {value.untyped_storage().data_ptr() for value in model.parameters()}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        out = model(x)
    del out
    return sum(seen.values())


def _apart(full: Tensor | None, mine: Tensor | None, piece: TPShard | None = None) -> float:
    assert full is not None
    assert mine is not None
    scale = float(full.detach().abs().max())
    parts = [full.detach()[r.slices] - r.values.detach() for r in local_regions(mine, piece)]
    return max((float(each.abs().max()) for each in parts if each.numel()), default=0.0) / scale
