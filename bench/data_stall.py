"""How long a training on a GPU waits for its data: ResNets on packed images, augmented sample by sample in workers.

    python -m bench.data_stall --device cuda [--only resnet50,resnet18] [--steps 200] [--workers 14] [--json waiting.json]
    python -m bench.data_stall --tiny                 # that it works: a few steps of small models, on a CPU

The images are made here and packed into a temporary folder. Two figures, of which the larger counts: the time from asking for batches
until they are there, page-locked, as a share of the steps; and how much longer the steps take than the same steps with one batch that is
on the device already, which also shows the copies to it and what workers take from the training.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.common import Row, among, machine, publish, tell
from echelon.data import Packed
from echelon.data.loader import MicroBatch
from echelon.data.packed.from_arrays import ArrayPackingSource
from echelon.data.packed.pack import pack
from echelon.engine.run import Run
from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.testing.models import ResNet
from echelon.world import World

#: Share of the step that may go into waiting for data.
MOST = 0.02
_WARM = 40


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1, beside a short cut."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outer, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        cut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        self.shortcut = nn.Identity() if inner == outer and stride == 1 else cut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet50(width: int = 64) -> nn.Module:
    """ResNet-50 for ImageNet; 64 is the full width."""
    blocks, inner = [], width
    for stage, count in enumerate((3, 4, 6, 3)):
        for block in range(count):
            blocks.append(Bottleneck(inner, width << stage, 2 if stage and not block else 1))
            inner = 4 * width << stage
    stem = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 1000))


class FromBytes(nn.Module):
    """A model of images, given bytes: they are a quarter of what would have to be copied."""

    def __init__(self, model: nn.Module, last: bool) -> None:
        super().__init__()
        self.model = model.to(memory_format=torch.channels_last) if last else model  # type: ignore[call-overload]
        self._format = torch.channels_last if last else torch.contiguous_format

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model((pixels.float() / 127.5 - 1).contiguous(memory_format=self._format))


@dataclass(frozen=True, slots=True)
class Resized:
    """As people train on ImageNet: a random part of 8 % to 100 % of the image, of a random ratio, resized, mirrored or not."""

    side: int

    def __call__(self, sample: Any) -> Any:
        pixels, label = sample
        height, width = pixels.shape[1:]
        share, ratio = float(torch.empty(1).uniform_(0.08, 1)), float(torch.empty(1).uniform_(-0.29, 0.29).exp())
        wide = min(width, max(1, round((share * ratio) ** 0.5 * width)))
        high = min(height, max(1, round((share / ratio) ** 0.5 * height)))
        top, left = int(torch.randint(height - high + 1, ())), int(torch.randint(width - wide + 1, ()))
        part = pixels[None, :, top : top + high, left : left + wide]
        made = F.interpolate(part, (self.side, self.side), mode="bilinear", antialias=True)[0]
        return made.flip(-1) if torch.rand(()) < 0.5 else made, label


@dataclass(frozen=True, slots=True)
class Shifted:
    """As people train on CIFAR: a frame of 4 around the image, a random part of the old size, mirrored or not."""

    def __call__(self, sample: Any) -> Any:
        pixels, label = sample
        side = pixels.shape[-1]
        top, left = torch.randint(9, (2,)).tolist()
        made = F.pad(pixels, (4, 4, 4, 4))[:, top : top + side, left : left + side]
        return made.flip(-1) if torch.rand(()) < 0.5 else made, label


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training: images of `side`, as many `samples`, `batch` at a time."""

    name: str
    model: Callable[[], nn.Module]
    transform: Callable[[Any], Any]
    side: int
    samples: int
    batch: int


CASES = {
    "resnet50": Case(
        name="ResNet-50, parts of 256 x 256 as 224 x 224", model=resnet50, transform=Resized(224), side=256, samples=8192, batch=256
    ),
    "resnet18": Case(
        name="ResNet-18, 32 x 32", model=lambda: ResNet(width=64), transform=Shifted(), side=32, samples=50_000, batch=512
    ),
}  # fmt: skip
TINY = {
    "resnet50": replace(CASES["resnet50"], model=lambda: resnet50(4), transform=Resized(32), side=48, samples=64, batch=8),
    "resnet18": replace(CASES["resnet18"], model=lambda: ResNet(width=4), samples=64, batch=8),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Waiting for data, as a share of the step.")
    parser.add_argument("--only", type=among(*CASES), default=list(CASES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    rows = []
    for name in given.only:
        with tempfile.TemporaryDirectory() as place:
            case = (TINY if given.tiny else CASES)[name]
            warm, steps = (2, 6) if given.tiny else (_WARM, given.steps)
            rows.append(tell(measure(case, Path(place) / "set", given.device, given.workers, warm, steps)))
    notes = [f"{given.workers} workers; machine: {machine()}"]
    return publish("waiting for data", rows, json_path=given.json, notes=notes)


def measure(case: Case, folder: Path, device: str, workers: int, warm: int, steps: int) -> Row:
    """Train for `steps`, after `warm` others in which workers begin and kernels are chosen."""
    _pack(case, folder)
    print(f"{case.name}: {case.samples:,} images packed", file=sys.stderr, flush=True)
    job = Job(
        model=lambda: FromBytes(case.model(), device == "cuda"),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        data=Packed(folder, transform=case.transform), batch_size=case.batch, steps=warm + steps,
    )  # fmt: skip
    plan = Plan(precision="bf16") if device == "cuda" else Plan()
    run = Run(job, plan, World(), device=torch.device(device), workers=workers)
    waited, began = [], 0.0
    batch = None
    for batch in run.batches():
        if batch.step == warm:
            _settled(device)
            began = time.perf_counter()
        run.step(batch)
        waited.append(batch.wait_seconds)
    _settled(device)
    spent = time.perf_counter() - began
    assert batch is not None
    there = replace(
        batch, micro_batches=tuple(MicroBatch(run.move_batch(each.batch), each.samples) for each in batch.micro_batches)
    )
    _settled(device)
    began = time.perf_counter()
    for _ in range(steps):
        run.step(there)
    _settled(device)
    bare = time.perf_counter() - began
    share, longer = sum(waited[warm:]) / spent, max(0.0, 1 - bare / spent)
    text = (
        f"waited {share:.2%} of the step; of {spent / steps * 1e3:.1f} ms {longer:.2%} would go with a batch that is on the device already; "
        f"{steps * case.batch / spent:,.0f} images/s, longest wait {max(waited[warm:]) * 1e3:.1f} ms, first batch {waited[0]:.2f} s"
    )
    detail = {"waited": waited[warm:], "seconds": spent, "bare": bare, "workers": workers}
    what = {"training": f"{case.name}, batch {case.batch}", "device": device}
    return Row(what=what, value=max(share, longer), text=text, limit=MOST if device == "cuda" else None, detail=detail)


def _pack(case: Case, folder: Path) -> None:
    """Noise that is smooth, as pictures are; the rows overlap in memory, so that few have to be made."""
    draw = np.random.default_rng(0)
    item = 3 * case.side**2
    noise = np.repeat(draw.integers(0, 256, (item + 4 * case.samples) // 4 + 1, np.uint8), 4)
    rows = np.lib.stride_tricks.as_strided(
        noise, (case.samples, 3, case.side, case.side), (4, case.side**2, case.side, 1)
    )
    arrays = {"image": rows, "label": draw.integers(0, 10, case.samples)}
    pack(ArrayPackingSource(arrays, {"tuple": ["image", "label"]}, {"source": "noise"}), folder, shards=16)


def _settled(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    raise SystemExit(main())
