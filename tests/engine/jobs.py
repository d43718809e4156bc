"""Small jobs, and what ranks are asked to do with them. Everything here runs inside rank processes too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from echelon.engine import train_step
from echelon.engine.full_state import state_bytes
from echelon.engine.run import Run
from echelon.engine.step_metrics import StepMetrics
from echelon.errors import EchelonError
from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.testing.models import GPT, MLP
from echelon.world import World
from tests.engine.pp_models import (
    Auxiliary,
    Counting,
    Counts,
    Dropping,
    Frozen,
    Hooked,
    Late,
    Noise,
    Orthogonal,
    OwnNoise,
    ReadLast,
    Shortened,
    Tempered,
    Thawing,
    Turned,
    Twice,
    Watched,
)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(count: int, kinds: int = 4, seed: int = 1) -> Tensor:
    return torch.randint(0, kinds, (count,), generator=torch.Generator().manual_seed(seed))


DATA = TensorDataset(numbers(53, 8), classes(53))


def mlp(**changes: Any) -> Job:
    job = Job(
        model=lambda: MLP(width=12, layers=3, inputs=8, classes=4),
        loss=lambda output, batch: F.cross_entropy(output, batch[-1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        data=DATA,
        batch_size=16,
        epochs=1,
    )
    return replace(job, **changes)


def tokens(**changes: Any) -> Job:
    """A GPT whose samples have different numbers of tokens that count: (sum, count)."""
    text = torch.randint(1, 32, (24, 9), generator=torch.Generator().manual_seed(2))
    for row, length in enumerate(torch.randint(2, 9, (24,), generator=torch.Generator().manual_seed(3)).tolist()):
        text[row, length:] = 0

    def loss(output: Tensor, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        target = batch[0][:, 1:]
        # Flat: on a GPU torch adds the two-dimensional form up in whatever order its threads come.
        total = F.cross_entropy(output[:, :-1].flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum")
        return total, (target != 0).sum()

    job = Job(
        model=lambda: GPT(vocab=32, context=9, width=16, layers=2, heads=2),
        loss=loss,
        inputs=lambda batch: ((batch[0],), {}),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=TensorDataset(text),
        batch_size=8,
        epochs=1,
    )
    return replace(job, **changes)


class Lonely(nn.Module):
    """Uses `left` for some samples, `right` for others, and `never` not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        side = x[:, 0] > 0
        out = x.new_zeros(len(x), 4)
        if side.any():
            out[side] = self.left(x[side])
        if not side.all():
            out[~side] = self.right(x[~side])
        return out


class Borrowed(nn.Module):
    """A model that computes with its embedding's weight without calling it: once before the middle layer, once at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(self.embed(ids)))
        nearest = F.softmax(hidden @ self.embed.weight.T, dim=-1) @ self.embed.weight
        return F.linear(torch.tanh(self.second(nearest)), self.embed.weight)


class Lora(nn.Module):
    """A frozen layer and a small trained correction."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 4)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Averages(nn.Module):
    """Keeps averages of what it has seen in buffers, in every way that people do; its output uses those of the steps before."""

    #: Whose changes are the same function of the mean over samples on one device and on several.
    LINEAR = ("always", "late", "fresh", "hidden", "lazy")
    buffer_reductions = {"some": "mean", "late": "mean", "fresh": "mean"}  # noqa: RUF012 (as users write it)

    def __init__(self, *, makes: bool = True) -> None:
        """`makes`: whether forward makes one."""
        super().__init__()
        self.makes = makes
        self.line = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        for name in ("always", "late", "fresh", "hidden", "some", "table"):
            self.register_buffer(name, torch.zeros(8))
        self.register_buffer("lazy", None)
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.line(x + 0.1 * (self.always + self.late + self.fresh + self.hidden + self.some + self.table))
        if self.training:
            self._note(x.detach())
        return out

    def _note(self, x: Tensor) -> None:
        mean = x.mean(0)
        self.calls += 1
        self.always.lerp_(mean, 0.5)
        self.hidden.data.lerp_(mean, 0.25)
        if self.calls > 1:
            self.late.lerp_(mean, 0.5)
            self.fresh = self.fresh * 0.5 + mean * 0.5
            if self.makes:
                self.lazy = mean if self.lazy is None else self.lazy + mean
        if x[0, 0] > 0:  # on some ranks, in some steps
            self.some.lerp_(mean, 0.5)
        if len(self.cache) < len(x):
            self.cache = torch.arange(len(x), dtype=x.dtype)


class Numbers(IterableDataset):
    """A stream of as many samples as `length()` says, or of every `every`th from `first` on, as those do that deal samples out."""

    def __init__(self, length: Callable[[], int], first: int = 0, every: int = 1) -> None:
        self.length, self.first, self.every = length, first, every

    def __iter__(self):  # type: ignore[no-untyped-def]
        for i in range(self.first, self.length(), self.every):
            yield numbers(8, seed=i), torch.tensor(i % 4)


def two_optimizers(named: Any) -> list[torch.optim.Optimizer]:
    """Takes (name, parameter) pairs; biases get a rate and an optimizer of their own."""
    pairs = list(named)
    return [
        torch.optim.AdamW([value for name, value in pairs if name.endswith("weight")], lr=1e-2),
        torch.optim.SGD([value for name, value in pairs if name.endswith("bias")], lr=0.1, momentum=0.9),
    ]


def groups(params: Any) -> torch.optim.Optimizer:
    """Takes parameters and looks at them."""
    params = list(params)
    return torch.optim.AdamW(
        [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.3, "lr": 3e-2},
            {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


def by_depth(named: Any) -> torch.optim.Optimizer:
    """A rate for each layer: as many groups as a stage has parameters."""
    return torch.optim.AdamW(
        [{"params": [value], "lr": 1e-2 * 0.8 ** int(name.split(".")[0])} for name, value in named], weight_decay=0.1
    )


def by_order(params: Any) -> torch.optim.Optimizer:
    """The last two parameters are the head's: of each stage, if nobody looks."""
    params = list(params)
    return torch.optim.AdamW([{"params": params[:-2]}, {"params": params[-2:], "lr": 0.1}], lr=1e-2)


def by_size(params: Any) -> torch.optim.Optimizer:
    """Large matrices have a rate of their own: halves of them are not large."""
    params = list(params)
    large = [value for value in params if value.numel() > 140]
    return torch.optim.AdamW(
        [{"params": large, "lr": 0.1}, {"params": [v for v in params if v.numel() <= 140]}], lr=1e-2
    )


def warmed(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A schedule that holds schedules, each with rates by group."""
    rising = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, falling], [4])


def layered(layers: int, **changes: Any) -> Job:
    parts: dict[str, Any] = {"model": lambda: MLP(width=12, layers=layers, inputs=8, classes=4), "optimizer": by_depth}
    return mlp(**parts | changes)


def counting() -> nn.Module:
    """The model of "layers" with a buffer in its last layer, which no older checkpoint has."""
    model = MLP(width=12, layers=4, inputs=8, classes=4)
    model[-1].register_buffer("seen", torch.zeros(2))
    return model


def head_apart(named: Any, *, leave_out: bool = False) -> list[torch.optim.Optimizer]:
    """An optimizer for the last layer alone; `leave_out`: made only where there is something to train with it."""
    pairs = list(named)
    head = [value for name, value in pairs if name.startswith("6.")]
    rest = [value for name, value in pairs if not name.startswith("6.")]
    kinds = [(torch.optim.SGD, head), (torch.optim.AdamW, rest)]
    return [kind(values, lr=1e-2) for kind, values in kinds if values or not leave_out]


JOBS: dict[str, Callable[[], Job]] = {
    "mlp": mlp,
    "clip": lambda: mlp(clip_norm=0.1),
    "groups by size": lambda: layered(4, optimizer=by_size),
    "groups by order": lambda: layered(4, optimizer=by_order),
    "nothing for the head": lambda: layered(4, optimizer=head_apart),
    "other optimizers": lambda: layered(4, optimizer=lambda named: head_apart(named, leave_out=True)),
    "norm": lambda: mlp(
        model=lambda: MLP(width=12, layers=3, inputs=8, classes=4, norm=True),
        data=TensorDataset(numbers(48, 8), classes(48)),
    ),
    "average": lambda: mlp(model=averaged, data=TensorDataset(numbers(48, 8), classes(48))),
    "tokens": tokens,
    "tied": lambda: tokens(model=lambda: GPT(vocab=32, context=9, width=16, layers=2, heads=2, tied=True)),
    "borrowed": lambda: tokens(model=Borrowed),
    "noise": lambda: mlp(
        model=Noise, loss=lambda out, _: out.square().mean(), optimizer=lambda params: torch.optim.SGD(params, lr=0.0)
    ),
    "own noise": lambda: mlp(
        model=OwnNoise,
        loss=lambda out, _: out.square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
    ),
    "dropping": lambda: mlp(model=Dropping),
    "counting": lambda: mlp(model=Counting),
    "twice": lambda: mlp(model=Twice, batch_size=17),
    "auxiliary": lambda: mlp(model=Auxiliary),
    "turned": lambda: mlp(model=Turned),
    "frozen below": lambda: mlp(model=Frozen, clip_norm=0.1),
    "thawing below": lambda: mlp(model=Thawing, batch_size=16),
    "read last": lambda: mlp(model=ReadLast, clip_norm=0.1),
    "watched": lambda: mlp(model=Watched, batch_size=17),
    "bare head": lambda: tokens(
        model=lambda: GPT(vocab=600, context=9, width=16, layers=1, heads=2, tied=True), clip_norm=0.1
    ),
    "tempered": lambda: mlp(model=Tempered),
    "late": lambda: mlp(model=Late, optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
    "shortened": lambda: mlp(model=Shortened),
    "orthogonal": lambda: mlp(model=Orthogonal),
    "lonely": lambda: mlp(model=Lonely),
    "lora": lambda: mlp(model=Lora),
    "two": lambda: mlp(optimizer=two_optimizers),
    "groups": lambda: mlp(optimizer=groups),
    "schedule": lambda: mlp(
        lr_schedule=lambda o, steps: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=steps)
    ),
    "tensor rate": lambda: mlp(
        optimizer=lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2), foreach=False),
        lr_schedule=lambda made: torch.optim.lr_scheduler.ExponentialLR(made, 0.5),
    ),
    "layers": lambda: layered(4),
    "layers counted": lambda: layered(4, model=counting),
    "uneven layers": lambda: layered(3),
    "warmed layers": lambda: layered(3, lr_schedule=warmed),
    "stream": lambda: mlp(data=Numbers(lambda: 38), epochs=None, steps=5),
    "averages": lambda: mlp(model=Averages),
    "kept averages": lambda: mlp(model=lambda: Averages(makes=False)),
    "dropout": lambda: mlp(model=lambda: nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 4))),
}


def averaged() -> nn.Module:
    """Batch norm with momentum=None: a plain average over all batches."""
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6, momentum=None), nn.ReLU(), nn.Linear(6, 4))


def live(world: World, name: str, plan: str, dtype: torch.dtype | None = None) -> Run:
    """The run of a job under a plan in its short form."""
    job = JOBS[name]()
    return Run(job, complete(from_text(plan), job), world, dtype=dtype)


def losses_of(world: World, name: str, plans: list[str]) -> list[list[float]]:
    """Of two steps under each of some plan documents."""
    found = []
    for plan in plans:
        run = Run(JOBS[name](), Plan.from_json(plan), world, dtype=torch.float64)
        found.append([float(run.step(batch).loss) for batch in run.batches(2)])
        run.close()
    return found


def trained(world: World, name: str, plan: str, *, double: bool = True, steps: int | None = None) -> dict[str, Any]:
    """Train a job and return what it came to."""
    run = live(world, name, plan, torch.float64 if double else None)
    losses = [float(run.step(batch).loss) for batch in run.batches(steps)]
    state = run.gather_full_state()
    rates = [group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups]
    held = state_bytes(run)
    run.close()
    found = {"losses": losses, "rates": rates, "held": held}
    if state is not None:
        found |= {"parameters": state.parameters, "buffers": state.buffers, "optimizer": state.optimizer}
    return found


def apart(world: World, name: str, plan: str) -> list[set[str]]:
    """The buffers that differ between ranks after each step."""
    run = live(world, name, plan)
    found = []
    for batch in run.batches():
        run.step(batch)
        buffers = {key: value.tolist() for key, value in run.model.named_buffers()}
        every = run.ranks.all_gather_object(buffers)
        found.append({key for key in buffers if any(other.get(key) != buffers[key] for other in every)})
    run.close()
    return found


def apart_later(world: World, name: str, plan: str) -> dict[str, Any]:
    """The same in the order in which an accelerator's host goes: it hears of a step after the next one's backward."""
    with patch.object(train_step, "StepMetrics", partial(StepMetrics, deferred=True)):
        run = live(world, name, plan)
    found = []

    def differ() -> set[str]:
        buffers = {key: value.tolist() for key, value in run.model.named_buffers()}
        every = run.ranks.all_gather_object(buffers)
        return {key for key in buffers if any(other.get(key) != buffers[key] for other in every)}

    for batch in run.batches():
        loss = run.backward(batch)
        run.check_last_step()
        run.train_step.last_step = run.update(loss, batch.samples)
        found.append(differ())
    run.check_last_step()
    last, changing = differ(), run.train_step.step_metrics.buffer_tracker.mutable_buffers
    run.close()
    return {"found": found, "last": last, "changing": changing}


def counted(world: World, later: bool) -> tuple[list[str], list[int], int]:
    """What is said of buffers of whole numbers, with those that travelled in each step, and how many calls were counted."""
    said: list[str] = []
    with (
        patch.object(train_step, "StepMetrics", partial(StepMetrics, deferred=later)),
        Run(mlp(model=Counts), from_text("dp=2"), world, warn=said.append) as run,
    ):
        sizes = []
        for batch in run.batches():
            loss = run.backward(batch)
            run.check_last_step()
            run.train_step.last_step = run.update(loss, batch.samples)
            sizes.append(len(run.train_step.step_metrics.buffer_tracker.mutable_buffers or ()))
        return said, sizes, int(run.model.calls)


class HeldElsewhere(nn.Module):
    """Computes with tensors that it holds beside its parameters, as Keras models do; with all of them, or beside a usual layer."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8) if first else nn.Identity()
        self.layer = nn.Linear(8, 4)
        self.held = [self.layer.weight, self.layer.bias]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x), *self.held)


def failure(world: World, name: str, plan: str = "dp=2") -> str:
    """The message with which a job fails on this rank; every rank must fail by itself."""
    jobs: dict[str, Callable[[], Job]] = {
        "hooked": lambda: mlp(model=Hooked),
        "hooked module": lambda: mlp(model=lambda: Hooked(module=True)),
        "models differ": lambda: mlp(model=lambda: MLP(width=12 + world.rank, layers=3, inputs=8, classes=4)),
        "data differ": lambda: mlp(data=TensorDataset(numbers(53 - world.rank, 8), classes(53 - world.rank))),
        "stream ends": lambda: mlp(data=Numbers(lambda: 37 if world.rank else 21), epochs=None, steps=5),
        "stream dealt out": lambda: mlp(data=Numbers(lambda: 200, world.rank, world.size), epochs=None, steps=2),
        "same stream": lambda: mlp(data=Numbers(lambda: 200), epochs=None, steps=2),
        "evaluation dealt out": lambda: mlp(eval_data=Numbers(lambda: 40, world.rank, world.size)),
        "factory fails": lambda: mlp(model=lambda: MLP(width=12, layers=3, inputs=8) if world.rank else 1 / 0),
        "nan": lambda: mlp(loss=lambda output, batch: F.cross_entropy(output, batch[-1]) / 0 * 0),
        "few": lambda: mlp(data=TensorDataset(numbers(17, 8), classes(17)), batch_size=16),
        "fewer than ranks": lambda: mlp(data=TensorDataset(numbers(1, 8), classes(1)), batch_size=16),
        "not scalar": lambda: mlp(loss=lambda output, batch: F.cross_entropy(output, batch[-1], reduction="none")),
        "detached": lambda: mlp(loss=lambda output, batch: F.cross_entropy(output.detach(), batch[-1])),
        "held elsewhere": lambda: mlp(model=HeldElsewhere),
        "one held elsewhere": lambda: mlp(model=lambda: HeldElsewhere(first=True)),
        "no items": lambda: mlp(loss=lambda output, batch: (output.sum() * 0, 0)),
    }
    run = None
    try:
        job = jobs[name]()
        run = Run(job, complete(from_text(plan), job), world)
        for batch in run.batches():
            run.step(batch)
        if job.eval_data is not None:
            run.evaluate()
    except (EchelonError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if run is not None:
            run.close()
    return "no error"


def failure_of_stages(world: World, name: str, stages: tuple[int, ...]) -> str:
    """What is said of these stages of a job."""
    try:
        Run(JOBS[name](), from_text(f"pp={len(stages) + 1}").replace(stages=stages), world).close()
    except EchelonError as error:
        return str(error)
    return "no error"


def failure_of_evaluation(world: World, name: str, plan: str) -> str:
    """What is said of a job that is to be evaluated on its own data."""
    job = JOBS[name]()
    job = replace(job, eval_data=job.data)
    try:
        Run(job, complete(from_text(plan), job), world).close()
    except EchelonError as error:
        return str(error)
    return "no error"


def saved(world: World, name: str, plan: str, folder: str, steps: int) -> list[float]:
    """Train some steps and save."""
    run = live(world, name, plan)
    losses = [float(run.step(batch).loss) for batch in run.batches(steps)]
    run.save(Path(folder))
    run.close()
    return losses


def resumed(world: World, name: str, plan: str, folder: str) -> dict[str, Any]:
    """Go on from a checkpoint to the end."""
    run = live(world, name, plan)
    run.load(Path(folder))
    first = run.gather_full_state()
    begin = run.step_number
    losses = [float(run.step(batch).loss) for batch in run.batches()]
    last = run.gather_full_state()
    run.close()
    return {"begin": begin, "losses": losses, "first": first, "last": last}


def rates(world: World, name: str, plan: str, folder: str | None = None) -> list[dict[str, float]]:
    """Each parameter's learning rate on this rank before every step and after the last; from a checkpoint on, where one is given."""
    run = live(world, name, plan)
    if folder is not None:
        run.load(Path(folder))

    def now() -> dict[str, float]:
        known = {id(value): key for key, value in run.model.named_parameters()}
        found = [group for optimizer in run.optimizers for group in optimizer.param_groups]
        return {known[id(value)]: group["lr"] for group in found for value in group["params"]}

    noted = [now()]
    for batch in run.batches():
        run.step(batch)
        noted.append(now())
    run.close()
    return noted


def evaluated(world: World, name: str, plan: str, metrics: bool = True) -> dict[str, float]:
    """Loss and a metric over a job's own data, after two steps."""
    job = JOBS[name]()
    job = replace(job, eval_data=job.data, metrics={"half": lambda output, batch: (output.sum() * 0 + 3.0, 6)})
    run = Run(job, complete(from_text(plan), job), world, dtype=torch.float64)
    for batch in run.batches(2):
        run.step(batch)
    found = run.evaluate()
    run.close()
    return found


def load_failure(world: World, name: str, plan: str, folder: str) -> str:
    """The message with which loading fails on this rank."""
    run = live(world, name, plan)
    try:
        run.load(Path(folder))
    except EchelonError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.close()
    return "no error"


def copied(world: World) -> str:
    """What is said when a cut model is copied."""
    with live(world, "mlp", "tp=2") as run:
        try:
            copy.deepcopy(run.model)
        except EchelonError as error:
            return str(error)
    return "no error"
