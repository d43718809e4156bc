"""Optimizers that need whole tensors train under every plan as a plain loop in one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from echelon.engine.data_setup import seed_step
from echelon.engine.parallel.full_tensor_optimizer import assign_owners
from echelon.engine.run import Run
from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests import optimizers as own
from tests.optimizers import matrices_and_rest
from tests.sampling import only_whole, some

STEPS, SEED = 7, 3
DATA = TensorDataset(
    torch.randn(16, 6, generator=torch.Generator().manual_seed(1)),
    torch.randint(0, 3, (16,), generator=torch.Generator().manual_seed(2)),
)

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "muon": matrices_and_rest(lambda values: torch.optim.Muon(values, lr=1e-2)),
    "lamb": lambda params: own.Lamb(params, lr=0.02),
    "lars": lambda params: own.Lars(params, lr=0.02),
    "lars from step 5": lambda params: own.Lars(params, lr=0.02, begin=5),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),
    "shampoo": lambda params: own.Shampoo(params, lr=0.02),
    "d-adaptation": own.DAdapt,
    "clip inside": own.ClipInside,
    "nvlamb": lambda params: own.NvLamb(params, lr=0.02),
    "sgld": own.Sgld,
    "noise of numpy": own.NumpyNoise,
    "picky": lambda params: own.Picky(list(params)),
    "looks at values": own.by_value,
    "element-wise without closure": own.Plain,
    "new memory": own.ThroughData,
}
#: torch's Muon computes in bf16: rounding of its input shows at 2**-8 of an update.
BOUNDS = {"muon": 1e-3}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Shapes that two ranks share unevenly, a parameter of one number, one that is never reached."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(x))) * self.temperature


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return Net()


def job(name: str, **changes: Any) -> Job:
    fields: dict[str, Any] = {
        "model": model,
        "loss": lambda output, batch: F.cross_entropy(output, batch[-1]),
        "optimizer": OPTIMIZERS[name],
        "data": DATA,
        "batch_size": 16,
        "epochs": STEPS,
        "seed": SEED,
        "lr_schedule": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    }
    return Job(**fields | changes)


def plain(name: str, steps: int = STEPS) -> dict[str, Tensor]:
    """The parameters that a loop in one process comes to."""
    net = model().double()
    made = OPTIMIZERS[name](list(net.parameters()))
    optimizers = made if isinstance(made, list) else [made]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    inputs, labels = (each.double() if each.is_floating_point() else each for each in DATA.tensors)
    for step in range(steps):
        F.cross_entropy(net(inputs), labels).backward()
        seed_step(torch.device("cpu"), SEED, step, "update")
        for each in optimizers:
            each.step()
        for schedule in schedules:
            schedule.step()
        net.zero_grad()
    return {name: value.detach() for name, value in net.named_parameters()}


def trained(world: World, plan: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """What each job's parameters, state and groups come to under a plan."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        one = job(name)
        with Run(one, complete(from_text(plan), one), world, dtype=torch.float64) as run:
            for batch in run.batches():
                run.step(batch)
            run.synchronize()
            state = run.gather_full_state()
            rates = [group["lr"] for each in run.optimizers for group in each.param_groups]
            found[name] = {
                "rates": rates,
                "whole": {i: sorted(each.owned_names) for i, each in run.full_tensor_optimizers.items()},
            }
            found[name]["d"] = [group.get("d") for each in run.optimizers for group in each.param_groups]
            if state is not None:
                found[name] |= {"parameters": state.parameters, "optimizer": sorted(state.optimizer)}
    return found


def _apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    scale = max(float(value.abs().max()) for value in one.values())
    return max(float((value - other[name]).abs().max()) for name, value in one.items()) / scale


#: A few optimizers for each plan; each kind is under each axis.
CASES = {
    "dp=2": ["sgld", "noise of numpy", "clip inside"],
    "dp=2 zero=1": ["muon", "lamb", "d-adaptation", "looks at values"],
    "dp=2 zero=2 micro=4": ["lars from step 5", "adafactor", "sgld"],
    "dp=2 zero=3": ["shampoo", "nvlamb", "element-wise without closure", "new memory"],
    "tp=2": ["lars", "lars from step 5", "adafactor", "clip inside", "muon", "picky"],
    "pp=2 micro=4": ["d-adaptation", "nvlamb", "noise of numpy", "shampoo"],
    "dp=2 tp=2 zero=1": ["lamb", "sgld"],
    "dp=2 pp=2 micro=2": ["clip inside", "muon"],
}


def _trains_as_plain(ranks: RankPool, plan: str, names: list[str]) -> None:
    every = ranks.run(from_text(plan).ranks, trained, plan, names, timeout=300)
    apart = {name: _apart(plain(name), every[0][name]["parameters"]) for name in names}
    assert {name: size for name, size in apart.items() if size > BOUNDS.get(name, 1e-9)} == {}
    # All ranks have the same settings, those that a step changed too.
    assert all(rank[name][key] == every[0][name][key] for rank in every for name in names for key in ("rates", "d"))


@pytest.mark.slow
@pytest.mark.parametrize("plan", some("whole optimizers", CASES, 2))
def test_it_trains_as_a_plain_loop_does(ranks: RankPool, plan: str) -> None:
    _trains_as_plain(ranks, plan, CASES[plan])


@only_whole
@pytest.mark.parametrize("plan", CASES)
def test_every_optimizer_trains_as_a_plain_loop_does(ranks: RankPool, plan: str) -> None:
    _trains_as_plain(ranks, plan, sorted(OPTIMIZERS.keys() - CASES[plan]))


RESUMED = ["muon", "lamb", "shampoo", "d-adaptation"]


def saved(world: World, folder: str, plan: str, start: int, stop: int) -> dict[str, dict[str, Tensor]]:
    """Go on from step `start` to `stop` and save; the parameters there."""
    found = {}
    for name in RESUMED:
        one = job(name)
        with Run(one, complete(from_text(plan), one), world, dtype=torch.float64) as run:
            if start:
                run.load(Path(folder, name, str(start)))
            for batch in run.batches(stop):
                run.step(batch)
            run.save(Path(folder, name, str(stop)))
            state = run.gather_full_state()
            if state is not None:
                found[name] = state.parameters
    return found


@pytest.mark.slow
def test_its_state_passes_from_plan_to_plan(ranks: RankPool, tmp_path: Path) -> None:
    for plan, start, stop in (("dp=2 zero=1", 0, 3), ("dp=1", 3, 4), ("tp=2", 4, 6), ("pp=2 micro=4", 6, 7)):
        found = ranks.run(from_text(plan).ranks, saved, str(tmp_path), plan, start, stop, timeout=120)[0]
        apart = {name: _apart(plain(name, stop), found[name]) for name in RESUMED}
        assert {name: size for name, size in apart.items() if size > BOUNDS.get(name, 1e-12)} == {}, plan


def test_tensors_are_dealt_out_by_size() -> None:
    assert assign_owners({"a": 1, "b": 9, "c": 5, "d": 4}, 2) == {"b": 0, "c": 1, "d": 1, "a": 0}
    assert assign_owners({"a": 0, "b": 0}, 2) == {"a": 0, "b": 1}
