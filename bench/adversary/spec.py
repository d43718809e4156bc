"""What a hostile job consists of, and the registry that `jobs/` fills. Imports nothing of echelon."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: Fields that `echelon.Job` takes; the others are for the judge.
_JOB_FIELDS = (
    "model", "optimizer", "data", "batch_size", "loss", "epochs", "steps", "inputs", "collate", "lr_schedule", "clip_norm",
    "eval_data", "metrics", "precision", "seed", "drop_last",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A training in plain PyTorch terms. The fields that `echelon.Job` also has mean the same here."""

    model: Any
    optimizer: Callable[[Iterable[Any]], Any]
    data: Any
    batch_size: int = 8
    loss: Callable[[Any, Any], Any] | None = None
    epochs: int | None = None
    steps: int | None = None
    inputs: Callable[[Any], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    lr_schedule: Callable[..., Any] | None = None
    clip_norm: float | None = None
    eval_data: Any = None
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    precision: str = "fp32"
    seed: int = 0
    drop_last: bool = False
    #: `(model, batch) -> loss` of the whole batch for the judge, where `loss` alone does not define it (`loss=None`).
    objective: Callable[[Any, Any], Any] | None = None
    #: `(model, evaluation samples) -> metrics` over the whole evaluation set, where per-batch means do not define them.
    whole_metrics: Callable[[Any, Any], Mapping[str, float]] | None = None
    #: same: weights, losses and metrics equal the judge's. consistent: the reported metrics are those of the saved weights, which any
    #: correct run satisfies whatever random numbers it drew.
    check: Literal["same", "consistent"] = "same"
    #: Largest relative difference of a tensor that counts as equal.
    tolerance: float = 1e-8
    #: The model normalises over micro-batches (batch norm): the judge splits the batch as the plan does, as DDP would.
    splits: bool = False
    #: What ends with a process, as globals do: the judge calls it where a resumed run began another.
    restart: Callable[[], Any] | None = None
    #: The optimizer is given `(name, parameter)` pairs.
    named: bool = False
    #: `echelon train --every`.
    every: int | None = None

    def job_fields(self) -> dict[str, Any]:
        """Keyword arguments for `echelon.Job`."""
        fields = {name: getattr(self, name) for name in _JOB_FIELDS}
        if self.epochs is None and self.steps is None:
            fields["steps"] = self.total
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def total(self) -> int | None:
        """Optimizer steps; None where `epochs` decides."""
        return self.steps if self.steps is not None else 10 if self.epochs is None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A job of the catalogue."""

    name: str
    make: Callable[[], Spec]
    attacks: str
    #: Words of a plan (dp, micro, zero, tp, pp, shares) under which neither DDP nor FSDP2 trains the job as one process does: refusing is right.
    refusable: frozenset[str]
    #: The part of echelon that probably owns a failure.
    owner: str
    #: Plans for this job instead of all of them.
    plans: tuple[str, ...]
    #: Packages that it imports.
    needs: tuple[str, ...]

    @property
    def available(self) -> bool:
        """Whether its packages are installed."""
        return all(importlib.util.find_spec(each) for each in self.needs)


CATALOGUE: dict[str, Entry] = {}


def job(
    attacks: str, *, refusable: str = "", owner: str = "watch", plans: Iterable[str] = (), needs: Iterable[str] = ()
) -> Callable[[Callable[[], Spec]], Callable[[], Spec]]:
    """Register the decorated function as a job named `file.function`."""

    def register(make: Callable[[], Spec]) -> Callable[[], Spec]:
        name = f"{make.__module__.rpartition('.')[2]}.{make.__name__}"
        CATALOGUE[name] = Entry(
            name=name,
            make=make,
            attacks=attacks,
            refusable=frozenset(refusable.split()),
            owner=owner,
            plans=tuple(plans),
            needs=tuple(needs),
        )
        return make

    return register


def catalogue() -> dict[str, Entry]:
    """Every job by name."""
    from bench.adversary import jobs

    for found in pkgutil.iter_modules(jobs.__path__):
        importlib.import_module(f"{jobs.__name__}.{found.name}")
    return CATALOGUE


def load(name: str) -> Spec:
    """The job of that name, made now; only its own file is imported."""
    importlib.import_module(f"bench.adversary.jobs.{name.partition('.')[0]}")
    return CATALOGUE[name].make()
