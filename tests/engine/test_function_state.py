"""What a loss keeps between calls comes back after a resume, and trial calls leave it as it was."""

from __future__ import annotations

import json
import random
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from echelon.engine.checkpoint.function_state import FunctionState, preserve_function_state
from echelon.engine.checkpoint.reachable_state import flatten_changes, nest_changes
from echelon.engine.checkpoint.run_attributes import ModelState
from echelon.engine.run import Run
from echelon.errors import JobError
from echelon.partition.complete_plan import complete
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from echelon.trials.isolation import IsolatedJob
from echelon.world import World
from tests.engine.jobs import mlp

#: What a loss returns, given the output's mean.
Loss = Callable[[Tensor, Any], Tensor]


class Kept:
    """A loss whose factor `advance` moves on."""

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        return output.mean() * (1 + self.advance(output.detach().mean()))

    def advance(self, mean: Tensor) -> Any:
        raise NotImplementedError


class MadeLate(Kept):
    def advance(self, mean: Tensor) -> float:
        if not hasattr(self, "calls"):
            self.calls = 0
        self.calls += 1
        return 0.1 * self.calls


class OtherDtype(Kept):
    """Begins as a whole number and becomes a mean."""

    def __init__(self) -> None:
        self.mean = torch.tensor(0)

    def advance(self, mean: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * mean
        return self.mean


class SharedStart(Kept):
    """Two names for one tensor, of which one gets another."""

    def __init__(self) -> None:
        self.zero = self.mean = torch.zeros(())

    def advance(self, mean: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * mean
        return self.mean + 10 * self.zero


class SharedInPlace(Kept):
    """Two names for one tensor, which changes."""

    def __init__(self) -> None:
        self.one = self.other = torch.zeros(2)

    def advance(self, mean: Tensor) -> Tensor:
        self.one += mean
        return self.one.sum() + self.other.sum()


class Expanded(Kept):
    def __init__(self) -> None:
        self.weight = torch.ones(1).expand(4)

    def advance(self, mean: Tensor) -> Tensor:
        self.weight = 0.9 * self.weight + mean
        return self.weight.sum()


class NumPy(Kept):
    def __init__(self) -> None:
        self.scalar, self.single, self.row = np.float32(0), np.zeros(()), np.zeros(3)

    def advance(self, mean: Tensor) -> float:
        self.scalar = np.float32(self.scalar + np.float32(0.5))
        self.single += 1
        self.row[1] += 2
        return float(self.scalar + self.single + self.row.sum())


class Generators(Kept):
    def __init__(self) -> None:
        self.torch, self.python = torch.Generator().manual_seed(1), random.Random(1)
        self.numpy, self.old = np.random.default_rng(1), np.random.RandomState(1)

    def advance(self, mean: Tensor) -> float:
        drawn = float(torch.rand((), generator=self.torch)) + self.python.random()
        return drawn + float(self.numpy.random()) + float(self.old.rand())


class SystemEntropy(Kept):
    """A generator without state, whose numbers go to a log."""

    def __init__(self) -> None:
        self.random, self.log = random.SystemRandom(), [0.0]

    def advance(self, mean: Tensor) -> float:
        self.log.append(self.random.random())
        return float(len(self.log))


class Phase:
    def __init__(self) -> None:
        self.calls = 0


class Curriculum(Kept):
    """Objects that change places."""

    def __init__(self) -> None:
        self.warm, self.main, self.calls = Phase(), Phase(), 0
        self.phase = self.warm

    def advance(self, mean: Tensor) -> float:
        self.calls += 1
        self.phase = self.warm if self.calls <= 2 else self.main
        self.phase.calls += 1
        return 0.1 * self.warm.calls + 0.5 * self.main.calls


class Queue(Kept):
    """Containers of many kinds, objects and tensors in them."""

    def __init__(self) -> None:
        self.phases, self.table = [Phase(), Phase()], {"first": torch.zeros(2), 2: [1.0]}
        self.recent, self.counts, self.seen = deque([0.0], maxlen=3), defaultdict(lambda: 1), {0}
        self.nested = ([0], {"deep": [0]})

    def advance(self, mean: Tensor) -> float:
        self.phases.reverse()
        self.phases[0].calls += 1
        self.table["first"] += 1
        self.table[len(self.table) + 2] = [float(len(self.table))]
        self.recent.append(len(self.recent) / 10)
        self.counts["a"] += 2
        self.seen.add(len(self.seen))
        self.nested[0][0] += 1
        self.nested[1]["deep"].append(1)
        held = sum(float(torch.as_tensor(each).sum()) for each in self.table.values())
        deep = self.nested[0][0] + len(self.nested[1]["deep"])
        return self.phases[0].calls + held + sum(self.recent) + self.counts["a"] + len(self.seen) + deep


class Counted(Kept):
    """A counter of the class."""

    calls = 0

    def advance(self, mean: Tensor) -> float:
        type(self).calls += 1
        return 0.1 * self.calls


class Slotted(Kept):
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def advance(self, mean: Tensor) -> float:
        self.calls += 1
        return 0.1 * self.calls


class Teacher(Kept):
    """An average of the outputs in a tensor that is too large for JSON, and a module."""

    def __init__(self) -> None:
        self.bank, self.norm = torch.zeros(600_000), nn.BatchNorm1d(1)

    def advance(self, mean: Tensor) -> Tensor:
        self.bank.data.mul_(0.9).add_(mean)  # torch counts no change of .data
        self.norm(mean * torch.ones(4, 1) + torch.arange(4.0)[:, None])
        return self.bank[7] + self.norm.running_mean.sum()


def own_attribute() -> Loss:
    def loss(output: Tensor, batch: Any) -> Tensor:
        loss.calls += 1  # type: ignore[attr-defined]
        return output.mean() * loss.calls  # type: ignore[attr-defined]

    loss.calls = 0  # type: ignore[attr-defined]
    return loss


def closure() -> Loss:
    calls, late = 0, None

    def loss(output: Tensor, batch: Any, seen: list[int] = [], *, named: dict[str, int] = {}) -> Tensor:  # noqa: B006
        nonlocal calls, late
        calls, late = calls + 1, (late or ()) + (1,)
        seen.append(calls)
        named["calls"] = calls
        return output.mean() * (calls + len(seen) + len(late) + named["calls"])

    return loss


def bound() -> Loss:
    return MadeLate().__call__


def parted() -> Loss:
    def loss(output: Tensor, batch: Any, state: dict[str, int]) -> Tensor:
        state["calls"] += 1
        return output.mean() * state["calls"]

    return partial(loss, state={"calls": 0})


calls = 0


def of_module(output: Tensor, batch: Any) -> Tensor:
    global calls
    calls += 1
    return output.mean() * calls


def global_counter() -> Loss:
    global calls
    calls = 0
    return of_module


def counted() -> Loss:
    Counted.calls = 0
    return Counted()


LOSSES: dict[str, Callable[[], Loss]] = {
    each.__name__: each
    for each in (
        *(MadeLate, OtherDtype, SharedStart, SharedInPlace, Expanded, NumPy, Generators, Curriculum, Queue, Slotted),
        *(Teacher, SystemEntropy, counted, own_attribute, closure, bound, parted, global_counter),
    )
}
MODEL = nn.Linear(2, 2)


def values(loss: Loss, start: int, stop: int) -> list[float]:
    return [float(loss(torch.full((2, 2), 1.0 + at), None)) for at in range(start, stop)]


@pytest.mark.parametrize("name", LOSSES)
def test_it_comes_back(name: str) -> None:
    loss = LOSSES[name]()
    unbroken = values(loss, 0, 7)
    loss, tensors = LOSSES[name](), dict[str, Tensor]()
    before = FunctionState(mlp(loss=loss), MODEL)
    assert not before.changed_objects()
    values(loss, 0, 4)

    def put(path: str, value: Tensor) -> str:
        tensors[path] = value.clone()
        return path

    changes, lost = before.collect_changes(put)
    assert before.changed_objects()
    assert changes
    assert not lost
    stored = flatten_changes(json.loads(json.dumps(nest_changes(changes))))
    loss = LOSSES[name]()
    assert not FunctionState(mlp(loss=loss), MODEL).restore(stored, tensors.__getitem__)
    assert values(loss, 4, 7) == unbroken[4:]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("begun", [0, 2])
def test_trial_calls_leave_no_trace(name: str, begun: int) -> None:
    loss = LOSSES[name]()
    unbroken = values(loss, 0, 5)
    loss = LOSSES[name]()
    values(loss, 0, begun)
    with preserve_function_state(mlp(loss=loss), MODEL):
        values(loss, begun, begun + 3)
    assert values(loss, begun, 5) == unbroken[begun:]


def test_the_systems_entropy_takes_no_state() -> None:
    """A checkpoint holds that of a generator which the job has replaced since."""

    class Drawing(Kept):
        def __init__(self, generator: random.Random) -> None:
            self.random = generator

        def advance(self, mean: Tensor) -> float:
            return self.random.random()

    loss = Drawing(random.Random(1))
    state = FunctionState(mlp(loss=loss), MODEL)
    values(loss, 0, 1)
    changes, lost = state.collect_changes(lambda path, value: path)
    assert changes
    assert not lost
    loss = Drawing(random.SystemRandom())
    stored = flatten_changes(json.loads(json.dumps(nest_changes(changes))))
    FunctionState(mlp(loss=loss), MODEL).restore(stored, lambda path: torch.zeros(()))
    assert values(loss, 0, 1)[0] != values(loss, 1, 2)[0]


def test_a_large_tensor_cannot_be_put_back() -> None:
    class Bank(Kept):
        def __init__(self) -> None:
            self.bank = torch.zeros(2**24 + 1)

        def advance(self, mean: Tensor) -> Tensor:
            self.bank += mean
            return self.bank[0]

    loss = Bank()
    with (
        pytest.raises(JobError, match=r"loss\.bank: it changes in place, .* buffer of the model"),
        preserve_function_state(mlp(loss=loss), MODEL),
    ):
        values(loss, 0, 1)


@pytest.mark.parametrize("name", ["own_attribute", "counted", "closure", "global_counter"])
def test_proofs_have_their_own(name: str) -> None:
    loss = LOSSES[name]()
    unbroken = values(loss, 0, 2)
    loss = LOSSES[name]()
    isolated = IsolatedJob(mlp(loss=loss))
    with isolated.active():
        assert isolated.job.loss is not None
        values(isolated.job.loss, 0, 3)
    assert values(loss, 0, 2) == unbroken


def test_what_cannot_be_stored_is_named() -> None:
    class Odd(Kept):
        def __init__(self) -> None:
            self.phase, self.sparse, self.log = Phase(), torch.eye(2).to_sparse(), [0.0]
            self.own: list[Any] = []
            self.own.append(self.own)

        def advance(self, mean: Tensor) -> float:
            self.phase, self.sparse = Phase(), 2 * self.sparse
            self.log += [0.0] * 100_000
            return 0.0

    loss = Odd()
    state = FunctionState(mlp(loss=loss), MODEL)
    values(loss, 0, 1)
    _, lost = state.collect_changes(lambda path, value: path)
    assert [each.partition(":")[0] for each in lost] == ["loss.phase", "loss.sparse", "loss.log"]
    assert "Phase" in lost[0]
    assert "100,001 items" in lost[2]


def test_the_models_own_is_not_the_losss() -> None:
    class Penalty(Kept):
        def __init__(self, weight: Tensor) -> None:
            self.weight, self.calls = weight, 0

        def advance(self, mean: Tensor) -> Tensor:
            self.calls += 1
            return self.weight.detach().sum()

    model = nn.Linear(2, 2)
    loss = Penalty(model.weight)
    state = FunctionState(mlp(loss=loss), model)
    values(loss, 0, 1)
    with torch.no_grad():
        model.weight.zero_()
    changes, lost = state.collect_changes(lambda path, value: path)
    assert changes == {("loss", ".calls"): {"value": 1}}
    assert not lost


def test_a_warning_names_what_a_checkpoint_lacks(tmp_path: Path) -> None:
    class Renewed(Kept):
        def advance(self, mean: Tensor) -> float:
            self.phase = Phase()
            return 0.0

    warnings: list[str] = []
    with Run(mlp(loss=Renewed()), Plan(), World(), warn=warnings.append) as run:
        for batch in run.batches(2):
            run.step(batch)
            run.save(tmp_path / str(run.step_number))
    (warning,) = [each for each in warnings if "loss.phase" in each]
    assert "a resumed run starts with its initial value" in warning


class Counting(nn.Module):
    """A loss with a running mean in a tensor: calls without numbers would leave a tensor without numbers there."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.mean = 0, torch.zeros(())

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(output, batch[-1])
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss * (1 + 0.1 * self.mean + 0.01 * self.calls)


def trained(world: World, plan: str, folder: str, steps: int, resume: bool) -> tuple[list[float], int]:
    """The losses on this rank, and how often the loss was called."""
    job = mlp(loss=Counting())
    with Run(job, complete(from_text(plan), job), world) as run:
        if resume:
            run.load(Path(folder))
        losses = [float(run.step(batch).loss) for batch in run.batches(steps)]
        if not resume:
            run.save(Path(folder))
    assert isinstance(job.loss, Counting)
    return losses, job.loss.calls


def test_a_pipeline_keeps_what_the_last_stage_counted(ranks: RankPool, tmp_path: Path) -> None:
    unbroken, _ = trained(World(), "dp=1", str(tmp_path / "whole"), 4, False)
    begun = ranks.run(2, trained, "pp=2 micro=16", str(tmp_path / "here"), 2, False)
    assert [calls for _, calls in begun] == [0, 2]
    rest, _ = trained(World(), "dp=1", str(tmp_path / "here"), 4, True)
    assert begun[0][0] + rest == pytest.approx(unbroken, rel=1e-5)


class Mixed(Counting):
    """Adds averages whose counts have other ratios in every batch."""

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        return super().forward(output, batch) + output[batch[-1] > 0].mean()


@pytest.mark.parametrize("kind", [Counting, Mixed])
@pytest.mark.parametrize("steps", [0, 2])
def test_an_evaluation_calls_the_loss_once_per_batch(kind: type[Counting], steps: int) -> None:
    """Mixed: after a second pass over the set."""
    loss = kind()
    job = mlp(loss=loss, eval_data=mlp().data)
    with Run(job, Plan(), World()) as run:
        for batch in run.batches(steps):
            run.step(batch)
        run.evaluate()
        assert run.evaluation_loss.weighs_by_samples == (kind is Mixed)
        assert loss.calls == steps + -(-len(job.eval_data) // job.batch_size)  # type: ignore[arg-type]


class Recurrent(nn.Module):
    """torch's layer keeps lists of its parameters; this one keeps another."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.calls = nn.GRU(2, 2), 0
        self.listed = [*self.rnn.parameters()]


def test_lists_of_parameters_are_no_state() -> None:
    model = Recurrent()
    state = ModelState(model)
    model.calls = 1
    with torch.no_grad():
        for value in model.parameters():
            value += 1
    model.rnn.weight_ih_l0 = nn.Parameter(model.rnn.weight_ih_l0.detach().clone())  # torch makes its lists again
    model.listed = [*model.rnn.parameters()][:2]
    changes, lost = state.collect_changes(lambda path, value: path)
    assert changes == {("model", ".calls"): {"value": 1}}
    assert not lost


class Logging:
    """A loss that keeps its values, which differ by rank, and counts its calls, which do not."""

    def __init__(self) -> None:
        self.values, self.calls = list[float](), 0

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        value = nn.functional.cross_entropy(output, batch[-1])
        self.values.append(float(value.detach()))
        self.calls += 1
        return value


def logged(world: World, folder: str, unproved: bool) -> list[str]:
    """Two steps and a checkpoint; the warnings."""
    warnings: list[str] = []
    job = mlp(loss=Logging())
    with Run(job, from_text("dp=2"), world, warn=warnings.append) as run:
        run.attributes.is_unproved = unproved
        for batch in run.batches(2):
            run.step(batch)
        run.save(Path(folder))
    return warnings


@pytest.mark.parametrize("unproved", [True, False])
def test_a_checkpoint_names_what_data_ranks_hold_apart(ranks: RankPool, tmp_path: Path, unproved: bool) -> None:
    """Without a proof the loss may read it: no rank's value is stored. With one the first rank's is. A resumed run names it either way."""
    (written, others) = ranks.run(2, logged, str(tmp_path / "here"), unproved)
    about = [each for each in written if each.startswith("values of loss=")]
    assert len(about) == (2 if unproved else 0), written
    if unproved:
        assert "data ranks hold different values after step 1" in about[0]
        assert "the ranks' values differ: checkpoints do not hold it" in about[1]
    assert not any("calls of loss=" in each for each in (*written, *others))
    resumed: list[str] = []
    loss = Logging()
    with Run(mlp(loss=loss), Plan(), World(), warn=resumed.append) as run:
        run.load(tmp_path / "here")
    (warning,) = resumed
    assert warning.startswith("values of loss=: the data ranks that wrote the checkpoint held different values")
    assert ("starts with its initial value" in warning) == unproved
    assert (len(loss.values), loss.calls) == (0 if unproved else 2, 2)
