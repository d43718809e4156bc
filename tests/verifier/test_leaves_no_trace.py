"""Profiles, proofs and spot checks leave the process as they found it: the training's model is the first that counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks
from torch.utils.data import Dataset, IterableDataset

from echelon.engine.run import Run
from echelon.errors import DataError
from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.profiler.profile_model import profile
from echelon.testing.models import MLP
from echelon.verifier.verify import verify
from echelon.world import World
from tests.engine.jobs import classes, mlp, numbers


def net() -> nn.Module:
    return MLP(width=12, layers=3, inputs=8, classes=4)


def trained(job: Job, *, proved: bool) -> list[float]:
    """The losses of a run, after a profile and a proof or without them."""
    if proved:
        with contextlib.suppress(DataError):  # a stream that ends before the proof does
            verify(job, Plan(), profile=profile(job))
    with Run(job, Plan(), World()) as run:
        return [float(run.step(batch).loss) for batch in run.batches()]


@pytest.fixture
def torch_restored() -> Iterator[None]:
    """Puts back what a test patches."""
    before, hooked = F.relu, dict(hooks._global_forward_hooks)
    yield
    F.relu = before
    hooks._global_forward_hooks.clear()
    hooks._global_forward_hooks.update(hooked)


def patching() -> nn.Module:
    """Wraps a function of torch at each call."""
    before = F.relu
    F.relu = lambda *given, **named: before(*given, **named) * 0.7
    return net()


def hooking() -> nn.Module:
    """Registers a hook of every module at each call."""
    hooks.register_module_forward_hook(lambda module, given, output: output * 0.8 if isinstance(module, MLP) else None)
    return net()


@pytest.mark.usefixtures("torch_restored")
@pytest.mark.parametrize("factory", [patching, hooking])
def test_a_factory_that_changes_torch_changes_it_once(factory: Any) -> None:
    before, hooked = F.relu, dict(hooks._global_forward_hooks)
    proved = trained(mlp(model=factory), proved=True)
    F.relu = before
    hooks._global_forward_hooks.clear()
    hooks._global_forward_hooks.update(hooked)
    assert proved == trained(mlp(model=factory), proved=False)


REGISTRY: list[nn.Module] = []


class Registered(nn.Linear):
    """Enters itself in a global list."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        REGISTRY.append(self)


def penalised(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[-1]) + sum(each.weight.pow(2).sum() for each in REGISTRY)


def test_models_that_are_built_for_a_proof_leave_registries() -> None:
    proved = trained(mlp(model=Registered, loss=penalised), proved=True)
    assert len(REGISTRY) == 1
    REGISTRY.clear()
    assert proved == trained(mlp(model=Registered, loss=penalised), proved=False)
    REGISTRY.clear()


class Once(IterableDataset[Any]):
    """Can be read once."""

    def __init__(self) -> None:
        self.source = iter(zip(numbers(64, 8), classes(64), strict=True))

    def __iter__(self) -> Iterator[Any]:
        return self.source


class Pointer(IterableDataset[Any]):
    """Goes on from a counter of its own."""

    def __init__(self) -> None:
        self.samples, self.at = (numbers(64, 8), classes(64)), 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 64:
            self.at += 1
            yield tuple(each[self.at - 1] for each in self.samples)


@pytest.mark.parametrize("stream", [Once, Pointer])
def test_a_stream_that_can_be_read_once_is_not_used_up(stream: Any) -> None:
    def job() -> Job:
        return mlp(data=stream(), steps=4, epochs=None, eval_data=None, metrics={})

    assert trained(job(), proved=True) == trained(job(), proved=False)


class Normalised(Dataset[Any]):
    """Subtracts a running mean of what it has read, or edits its own samples."""

    def __init__(self, *, edits: bool) -> None:
        self.rows, self.labels, self.edits = numbers(32, 8), classes(32), edits
        self.mean = numbers(8) * 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        if self.edits:
            row *= 0.5
            return row, self.labels[index]
        self.mean = 0.9 * self.mean + 0.1 * row
        return row - self.mean, self.labels[index]


@pytest.mark.parametrize("edits", [False, True])
def test_readings_for_a_proof_leave_no_trace_in_a_data_set(edits: bool) -> None:
    def job() -> Job:
        return mlp(data=Normalised(edits=edits), eval_data=None, metrics={})

    assert trained(job(), proved=True) == trained(job(), proved=False)


def learned(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    weights = 0.5 + output[:, 0].sigmoid()
    return (weights * F.cross_entropy(output, batch[-1], reduction="none")).sum(), weights.sum()


def quotient(output: Tensor, batch: Any) -> Tensor:
    total, count = learned(output, batch)
    return total / count


def test_a_count_that_is_learned_has_a_gradient() -> None:
    assert trained(mlp(loss=learned), proved=False) == trained(mlp(loss=quotient), proved=False)
