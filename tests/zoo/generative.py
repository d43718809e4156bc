"""Models of their own inputs: an autoencoder with noise, a flow, diffusion, a codebook."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from echelon.job import Job
from tests.zoo.data import SAMPLES, numbers, train


class Vae(nn.Module):
    """PyTorch's example, with its summed loss made a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 144), nn.Linear(144, 8), nn.Linear(144, 8)
        self.fc3, self.fc4 = nn.Linear(8, 144), nn.Linear(144, 64)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(h), self.fc22(h)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(self.reparameterize(mu, logvar))))), mu, logvar


def vae() -> Job:
    def loss(output: tuple[Tensor, Tensor, Tensor], batch: list[Tensor]) -> Tensor:
        made, mu, logvar = output
        found = F.binary_cross_entropy(made, batch[0].view(-1, 64), reduction="sum")
        return (found - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())) / len(made)

    return train(
        name="vae",
        model=Vae,
        data=TensorDataset(numbers(SAMPLES, 1, 8, 8, seed=50).sigmoid()),
        inputs=lambda batch: (batch, {}),
        loss=loss,
    )


class Coupling(nn.Module):
    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.flip = flip
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0])
        self.net = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x @ self.mix
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        scale, shift = self.net(a).chunk(2, dim=1)
        scale = torch.tanh(scale)
        return torch.cat([a, b * scale.exp() + shift], dim=1), scale.sum(1) + torch.linalg.slogdet(self.mix)[1]


class Flow(nn.Module):
    """RealNVP with Glow's mixing: the loss is the likelihood, with determinants."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Coupling(flip=bool(i % 2)) for i in range(6))
        self.loc: Tensor
        self.scale: Tensor
        self.register_buffer("loc", torch.zeros(8))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for step in self.steps:
            x, gained = step(x)
            total = total + gained
        return total + torch.distributions.Normal(self.loc, self.scale).log_prob(x).sum(1)


def flow() -> Job:
    return train(
        name="flow",
        model=Flow,
        data=TensorDataset(numbers(SAMPLES, 8, seed=51)),
        inputs=lambda batch: (batch, {}),
        loss=lambda output, batch: -output.mean(),
        clip_norm=10.0,
    )


class Denoiser(nn.Module):
    """DDPM: draws a time and noise for each sample, and predicts the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 48))
        self.first, self.norm = nn.Conv2d(1, 48, 3, padding=1), nn.GroupNorm(8, 48)
        self.second, self.last = nn.Conv2d(48, 48, 3, padding=1), nn.Conv2d(48, 1, 3, padding=1)
        self.kept: Tensor
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, 100, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        kept = self.kept[t].view(-1, 1, 1, 1)
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        rates = torch.exp(-math.log(10000) * torch.arange(8, device=x.device) / 8)
        angles = t[:, None].to(x.dtype) * rates[None]
        when = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        h = F.silu(self.norm(self.first(noisy)) + when[:, :, None, None])
        return F.mse_loss(self.last(h + F.silu(self.second(h))), noise)


def diffusion() -> Job:
    return train(
        name="diffusion",
        model=Denoiser,
        data=TensorDataset(numbers(SAMPLES, 1, 8, 8, seed=52)),
        inputs=lambda batch: (batch, {}),
        loss=lambda output, batch: output,
    )


class VqVae(nn.Module):
    """The nearest of a codebook's vectors, with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(True), nn.Conv2d(16, 24, 3, padding=1))
        self.codebook = nn.Embedding(600, 24)
        self.codebook.weight.data.uniform_(-1.0, 1.0)
        self.decoder = nn.Sequential(nn.Conv2d(24, 16, 3, padding=1), nn.ReLU(True), nn.ConvTranspose2d(16, 1, 4, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x).permute(0, 2, 3, 1).contiguous()
        code = torch.cdist(z.view(-1, 24), self.codebook.weight).argmin(1)
        q = self.codebook(code).view_as(z)
        commit = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
        return self.decoder((z + (q - z).detach()).permute(0, 3, 1, 2)), commit


def vqvae() -> Job:
    return train(
        name="vqvae",
        model=VqVae,
        data=TensorDataset(numbers(SAMPLES, 1, 8, 8, seed=53)),
        inputs=lambda batch: (batch, {}),
        loss=lambda output, batch: F.mse_loss(output[0], batch[0]) + output[1],
    )
