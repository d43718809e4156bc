"""Number formats: float32, complex, integers, half precision inside, mixtures."""

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
    Block,
    Net,
    classes,
    cross_entropy,
    integers,
    numbers,
    plain,
    sgd,
)
from bench.adversary.spec import Spec, job


def single() -> TensorDataset:
    x, y = classes().tensors
    return TensorDataset(x.float(), y)


@job("float32 throughout", owner="gate")
def float32() -> Spec:
    return Spec(model=Net, loss=cross_entropy, optimizer=sgd(), data=single(), tolerance=2e-4)


@job("float32 model with AdamW: small gradients are normalised", owner="gate")
def float32_adam() -> Spec:
    return Spec(
        model=Net, loss=cross_entropy, data=single(), tolerance=5e-3,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-4),
    )  # fmt: skip


class Complex(nn.Module):
    """A complex filter between real layers."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(WIDTH // 2 + 1, dtype=torch.complex64))
        self.rest = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH))


@job("complex parameters and FFT", owner="cuts")
def complex_parameters() -> Spec:
    return Spec(model=Complex, loss=cross_entropy, optimizer=sgd(), data=single(), tolerance=2e-4)


@job("float64 layers inside of a float32 model", owner="cuts")
def mixed_width() -> Spec:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.exact, self.head = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(self.exact(x.double()).float())

    return Spec(model=Mixed, loss=cross_entropy, optimizer=sgd(), data=single(), tolerance=2e-4)


@job("a bf16 layer inside of a float32 model", owner="verifier")
def half_layer() -> Spec:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.coarse = Block(), nn.Linear(WIDTH, WIDTH).bfloat16()
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.block(x)
            return self.head(x + self.coarse(x.bfloat16()).float())

    return Spec(model=Half, loss=cross_entropy, optimizer=sgd(), data=single(), tolerance=5e-2)


@job("integer buffers that are weights (a quantised table)", owner="cuts")
def integer_buffers() -> Spec:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", integers(255, 12, WIDTH).to(torch.uint8))
            self.scale, self.rest = nn.Parameter(torch.full((WIDTH,), 0.01)), Net()

        def forward(self, ids: Tensor) -> Tensor:
            return self.rest((self.table[ids].to(self.scale.dtype) - 127) * self.scale)

    data = TensorDataset(integers(12, SAMPLES), integers(CLASSES, SAMPLES, seed=3))
    return Spec(model=lambda: Quantised().double(), loss=cross_entropy, optimizer=sgd(1e-4), data=data)


@job("a loss in float32 of a float64 model", owner="gate")
def narrow_loss() -> Spec:
    return Spec(
        **plain(loss=lambda output, batch: F.cross_entropy(output.float(), batch[-1]), eval_data=None, metrics={}),
        tolerance=1e-5,
    )


@job("torch.set_default_dtype(float64) in the job file", owner="inputs")
def default_dtype() -> Spec:
    def model() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return Net()
        finally:
            torch.set_default_dtype(before)

    return Spec(**plain(model=model))


@job("values of very different size in one tensor", owner="gate")
def wide_range() -> Spec:
    x, y = classes().tensors
    scale = torch.tensor([10.0 ** (place - 6) for place in range(WIDTH)], dtype=torch.float64)
    return Spec(**plain(data=TensorDataset(x * scale, y), optimizer=sgd(1e-3)))


@job("bf16 autocast by the job", owner="gate")
def autocast() -> Spec:
    def spec(**changes: Any) -> Spec:
        return Spec(model=Net, loss=cross_entropy, optimizer=sgd(0.01), data=single(), tolerance=5e-2, **changes)

    def objective(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(batch[0]), batch[1])

    return spec(precision="bf16", objective=objective)


@job("a gradient that is exactly zero for most parameters", owner="gate")
def dead_units() -> Spec:
    class Dead(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.relu(x - 1.5))

    return Spec(**plain(model=lambda: Dead().double()))


@job("non-contiguous parameters", owner="cuts")
def strided_parameters() -> Spec:
    def model() -> nn.Module:
        made = Net().double()
        made.head.weight = nn.Parameter(numbers(WIDTH, CLASSES, seed=9).t() * 0.3)
        return made

    return Spec(**plain(model=model))
