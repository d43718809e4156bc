"""User code that calls torch.distributed or torch.compile itself: trials on one rank meet no other rank and compile nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import all_reduce, get_world_size
from torch.nn import functional as F

import echelon
from echelon.engine.process_groups import WorldCommunicator
from echelon.flow import gate
from echelon.observer import read_events
from echelon.plan.text import from_text
from echelon.profiler import profile
from echelon.testing.rank_pool import RankPool
from echelon.trials.trial_context import single_process_world
from echelon.verifier.verify import verify
from echelon.world import World
from tests.flow.jobs import make


class Logs(nn.Sequential):
    """Sums a number for its log over all ranks."""

    def forward(self, values: Tensor) -> Tensor:
        if dist.is_initialized():
            all_reduce(torch.tensor(float(len(values))))
        return super().forward(values)


def gathered(values: Tensor) -> Tensor:
    """Those of all ranks, as open_clip gathers them."""
    if not dist.is_initialized() or get_world_size() == 1:
        return values
    parts = [torch.zeros_like(values) for _ in range(get_world_size())]
    dist.all_gather(parts, values.detach().contiguous())
    parts[dist.get_rank()] = values
    return torch.cat(parts)


def contrastive(output: Tensor, batch: Any) -> Tensor:
    """Every sample against those of all ranks."""
    mine, theirs = gathered(F.normalize(output, dim=-1)), gathered(F.normalize(batch[0], dim=-1))
    return F.cross_entropy(mine @ theirs.T / 0.2, torch.arange(len(mine)))


def layers(kind: type[nn.Sequential] = nn.Sequential) -> nn.Module:
    return kind(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))


def trained(world: World, loss: str, folder: str, plan: str, cache: str) -> None:
    """Train a job with collectives of its own on this rank."""
    os.environ["ECHELON_CACHE"], os.environ["ECHELON_VERIFY"] = cache, "1"
    gate.MIN_SECONDS = 30.0 if "pp" not in plan else 8.0
    of_logs = {"model": lambda: layers(Logs), "loss": lambda output, batch: F.mse_loss(output, batch[0])}
    of_gather = {"model": layers, "loss": contrastive}
    echelon.train(make(**(of_logs if loss == "log" else of_gather)), plan, out=Path(folder), quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "plan", "runs", "words"),
    [
        ("log", "dp=2", "dp=2", ""),
        ("gather", "tp=2", "dp=1", "does not compute what one device computes"),
        ("gather", "pp=2", "dp=1", "its ranks wait for each other (rank 1 at "),
    ],
)
def test_collectives_of_the_job_neither_hang_nor_abort(
    tmp_path: Path, known_machine: Path, loss: str, plan: str, runs: str, words: str
) -> None:
    folder = tmp_path / "run"
    with RankPool() as ranks:  # its own: a deadlock that was given up leaves a thread of the job in its process
        ranks.run(2, trained, loss, str(folder), plan, str(known_machine), init_process_group=False, timeout=120)
    events = read_events(folder)
    assert [event.data["plan"] for event in events if event.kind == "start"] == [runs]
    assert sum(event.kind == "step" for event in events) == 12
    assert any(words in event.data["message"] for event in events if event.kind == "warning") or not words


def alone_and_together(world: World) -> list[float]:
    """Collectives of rank 0 alone, then one of all ranks, over a group that all of them make."""
    ranks, found = WorldCommunicator(world), []
    if world.is_main:
        for _ in range(2):
            with single_process_world():
                value, parts = torch.ones(2), [torch.zeros(2)]
                all_reduce(value)
                dist.all_gather(parts, value)
                dist.all_reduce(value, group=dist.new_group([0]))
                dist.barrier()
                found += [float(value.sum()), float(parts[0].sum()), get_world_size(), dist.get_rank()]
    both = torch.ones(1)
    dist.all_reduce(both, group=dist.new_group([0, 1]))
    ranks.close()
    return [*found, float(both)]


def test_one_rank_is_a_world_of_its_own(ranks: RankPool) -> None:
    assert ranks.run(2, alone_and_together, init_process_group=False) == [[2.0, 2.0, 1, 0] * 2 + [2.0], [2.0]]


def some_after_alone(world: World) -> float:
    """Ranks 0 and 2 exchange a number in a group of theirs, after rank 0 has been alone."""
    ranks = WorldCommunicator(world)
    if world.is_main:
        for _ in range(2):
            with single_process_world():
                dist.new_group([0])
    both = torch.ones(1)
    if world.rank != 1:
        dist.all_reduce(both, group=dist.new_group([0, 2], use_local_synchronization=True))
    ranks.close()
    return float(both)


@pytest.mark.slow
def test_some_ranks_meet_after_one_was_alone(ranks: RankPool) -> None:
    assert ranks.run(3, some_after_alone, init_process_group=False, timeout=30) == [2.0, 1.0, 2.0]


class Counting:
    """A backend of torch.compile that counts what it compiles."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.compiled += 1
        return graph.forward  # type: ignore[no-any-return]


def compiled_model(backend: Counting) -> nn.Module:
    return torch.compile(layers(), backend=backend)  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch._dynamo itself
@pytest.mark.parametrize("factory", [compiled_model, None])
def test_trials_compile_nothing(factory: Callable[[Counting], nn.Module] | None, tmp_path: Path) -> None:
    torch._dynamo.reset()
    backend = Counting()

    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(output, batch[0])

    compiled: Any = torch.compile(loss, backend=backend) if factory is None else loss
    job = make(model=(lambda: factory(backend)) if factory else layers, loss=compiled, epochs=1)
    profile(job)
    assert verify(job, from_text("dp=1 micro=4"), world=World()).verified
    assert backend.compiled == 0
    echelon.train(job, "dp=1", out=tmp_path / "run", quiet=True)
    assert backend.compiled > 0
