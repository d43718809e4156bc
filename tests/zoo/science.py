"""Graphs, molecules, fields and series: message passing, forces, Fourier layers, causal convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import TensorDataset

from echelon.job import Job
from tests.zoo.data import SAMPLES, numbers, sgd, train, whole


class Messages(nn.Module):
    """Each node hears from its neighbours and remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * 32 + 4, 64), nn.ReLU(), nn.Linear(64, 32))
        self.update = nn.GRUCell(32, 32)

    def forward(self, nodes: Tensor, edges: Tensor, features: Tensor) -> Tensor:
        source, target = edges
        sent = self.message(torch.cat([nodes[source], nodes[target], features], dim=1))
        heard = torch.zeros_like(nodes).index_add_(0, target, sent)
        return self.update(heard, nodes)


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(6, 32), nn.ModuleList([Messages(), Messages(), Messages()])
        self.readout = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, nodes: Tensor, edges: Tensor, features: Tensor, graph: Tensor) -> Tensor:
        x = self.embed(nodes)
        for layer in self.layers:
            x = x + layer(x, edges, features)
        pooled = x.new_zeros(int(graph.max()) + 1, 32).index_add_(0, graph, x)
        return self.readout(pooled).squeeze(1)


Graph = tuple[Tensor, Tensor, Tensor, Tensor]


def _join(graphs: list[Graph]) -> tuple[Tensor, ...]:
    """One large graph of separate parts, as PyG has it: no tensor's first dimension is the batch, but the target's."""
    nodes, edges, features, target = zip(*graphs, strict=True)
    sizes = torch.tensor([len(each) for each in nodes])
    starts = sizes.cumsum(0) - sizes
    shifted = [each + start for each, start in zip(edges, starts, strict=True)]
    owner = torch.repeat_interleave(torch.arange(len(graphs)), sizes)
    return torch.cat(nodes), torch.cat(shifted, dim=1), torch.cat(features), owner, torch.stack(target)


def graph() -> Job:
    graphs = []
    for i, n in enumerate(whole(10, SAMPLES, low=3, seed=60).tolist()):
        edges = whole(n, 2, 2 * n, seed=300 + i)
        graphs.append(
            (numbers(n, 6, seed=400 + i), edges, numbers(2 * n, 4, seed=500 + i), numbers(1, seed=600 + i)[0])
        )
    return train(
        name="graph",
        model=GraphNet,
        data=graphs,
        collate=_join,
        loss=lambda output, batch: F.l1_loss(output, batch[-1]),
        clip_norm=1.0,
    )


class Potential(nn.Module):
    """The energy of atoms, and its gradient by their positions: the loss has a derivative of a derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(5, 32)
        self.filter = nn.Sequential(nn.Linear(12, 256), nn.Softplus(), nn.Linear(256, 32))
        self.energy = nn.Sequential(nn.Linear(32, 256), nn.Softplus(), nn.Linear(256, 1))
        self.centres: Tensor
        self.register_buffer("centres", torch.linspace(0.5, 4.0, 12))

    def forward(self, positions: Tensor, kinds: Tensor) -> dict[str, Tensor]:
        positions.requires_grad_(True)
        i, j = torch.triu_indices(positions.shape[1], positions.shape[1], 1, device=positions.device)
        apart = (positions[:, i] - positions[:, j]).norm(dim=-1)
        pair = self.filter(torch.exp(-((apart[..., None] - self.centres) ** 2)))
        atoms = self.kinds(kinds)
        atoms = atoms.index_add(1, i, pair * atoms[:, j]).index_add(1, j, pair * atoms[:, i])
        energy = self.energy(atoms).sum((1, 2))
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return {"energy": energy, "forces": -slope}


def forces() -> Job:
    def loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(output["energy"], batch["energy"]) + 10 * F.mse_loss(output["forces"], batch["forces"])

    samples = zip(
        numbers(SAMPLES, 6, 3, seed=61) * 2, whole(5, SAMPLES, 6, seed=62), numbers(SAMPLES, seed=63),
        numbers(SAMPLES, 6, 3, seed=64), strict=True,
    )  # fmt: skip
    names = ("positions", "kinds", "energy", "forces")
    return train(
        name="forces", model=Potential, data=[dict(zip(names, each, strict=True)) for each in samples], loss=loss
    )


class SpectralConv(nn.Module):
    """The Fourier neural operator's layer as published: its weights are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(1 / 256 * torch.rand(24, 24, 8, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        x_ft = torch.fft.rfft(x)
        out_ft = torch.zeros(x.shape[0], 24, x.size(-1) // 2 + 1, device=x.device, dtype=torch.cfloat)
        out_ft[:, :, :8] = torch.einsum("bix,iox->box", x_ft[:, :, :8], self.weights)
        return torch.fft.irfft(out_ft, n=x.size(-1))


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.out = nn.Linear(2, 24), nn.Linear(24, 1)
        self.spectral = nn.ModuleList(SpectralConv() for _ in range(4))
        self.local = nn.ModuleList(nn.Conv1d(24, 24, 1) for _ in range(4))

    def forward(self, field: Tensor) -> Tensor:
        grid = torch.linspace(0, 1, field.shape[1], device=field.device).expand(field.shape)
        x = self.lift(torch.stack([field, grid.to(field.dtype)], dim=-1)).transpose(1, 2)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return self.out(x.transpose(1, 2)).squeeze(-1)


def fourier() -> Job:
    return train(
        name="fourier",
        model=Fourier,
        data=TensorDataset(numbers(SAMPLES, 32, seed=65), numbers(SAMPLES, 32, seed=66)),
        loss=lambda output, batch: F.mse_loss(output, batch[1]),
    )


class Causal(nn.Module):
    """Two dilated convolutions whose weights are a direction and a length."""

    def __init__(self, inner: int, outer: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.conv1 = weight_norm(nn.Conv1d(inner, outer, 3, padding=self.pad, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(outer, outer, 3, padding=self.pad, dilation=dilation))
        self.shortcut = nn.Conv1d(inner, outer, 1) if inner != outer else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.relu(self.conv1(x)[:, :, : -self.pad].contiguous()), 0.2, self.training)
        y = F.dropout(F.relu(self.conv2(y)[:, :, : -self.pad].contiguous()), 0.2, self.training)
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class Tcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(Causal(4, 32, 1), Causal(32, 32, 2), Causal(32, 32, 4), Causal(32, 32, 8))
        self.linear = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.network(x)[:, :, -1])


def tcn() -> Job:
    return train(
        name="tcn",
        model=Tcn,
        data=TensorDataset(numbers(SAMPLES, 4, 20, seed=67), numbers(SAMPLES, 1, seed=68)),
        loss=lambda output, batch: F.mse_loss(output, batch[1]),
        optimizer=sgd,
        clip_norm=0.5,
    )
