"""The units of a job's model in the order of their calls, and what passes from one to the next: where a pipeline can be cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from echelon.job import Job, call_loss, call_model
from echelon.plan.profile import Amount
from echelon.plan.profile import Visit as Planned
from echelon.profiler.fake_model import Ghost, Returned
from echelon.profiler.module_calls import Value, Visit, crossing, unit_paths
from echelon.profiler.repeated_blocks import Run, shortened, stretch_visits
from echelon.tree import tree_leaves
from echelon.trials.example_batch import Example
from echelon.trials.random_extremes import ENDS, draws_at
from echelon.trials.shape_model import built

#: Samples of the two batches that tell a fixed part from a part per sample.
_SIZES = (2, 4)


def chain(job: Job, example: Example | None = None, run: Run | None = None) -> tuple[Planned, ...]:
    """Nothing is computed. Empty: the model cannot be cut into stages. Whatever its code says to tensors without numbers is raised.
    `run`: blocks that are known to be treated alike."""
    example = example or Example(job)

    def loss(model: nn.Module, batch: Any) -> Any:
        return call_loss(job, call_model(job, model, batch), batch, model)

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = built(job).train()
    if run is not None:
        with shortened(model, run):
            few = _visited(model, example, loss)
        found = stretch_visits(few, run) if few else ()
        if found is not None:
            return found
    return _visited(model, example, loss)


def _visited(model: nn.Module, example: Example, loss: Callable[[nn.Module, Any], Any]) -> tuple[Planned, ...]:
    ghost = Ghost(model, torch.device("cpu"))
    visits = ghost.visits(loss, example.batch(_SIZES[0]))
    paths = list(dict.fromkeys(visit.path for visit in visits if visit.path))
    small, large = (ghost.returned(loss, example.batch(size), paths, training=True, visits=visits) for size in _SIZES)
    if not len(visits) == len(small) == len(large):
        return ()  # which units are called depends on the batch
    if not _steady(ghost, example, loss, [visit.path for visit in visits if visit.path]):
        return ()
    return tuple(
        Planned(
            path=visit.path,
            work=_work(model, visit),
            crossing=_passing(crossing(visits, place), small, large),
            changes=visit.changes,
        )
        for place, visit in enumerate(visits[:-1])
    )


def _steady(ghost: Ghost, example: Example, loss: Callable[[nn.Module, Any], Any], expected: Sequence[str]) -> bool:
    """Whether forward calls the same units whatever random numbers it draws, and for other samples where batches hold more than tensors."""
    units = [path for path in unit_paths(ghost.model) if not any(_around(each, path) for each in expected)]
    paths = list(dict.fromkeys([*expected, *units]))
    others = [leaf for leaf in tree_leaves(example.batch(1)) if not isinstance(leaf, Tensor | None)]
    batch = example.batch(_SIZES[0])
    try:
        for end in ENDS:
            with draws_at(end):
                if ghost.calls(loss, batch, paths) != expected:
                    return False
        starts = range(_SIZES[0], len(example.samples), _SIZES[0]) if others else ()
        return all(ghost.calls(loss, example.batch(_SIZES[0], first=start), paths) == expected for start in starts)
    except Exception:  # whatever a user's forward does with such numbers
        return False


def _around(inner: str, outer: str) -> bool:
    return f"{inner}.".startswith(f"{outer}.") or f"{outer}.".startswith(f"{inner}.")


def _work(model: nn.Module, visit: Visit) -> float:
    """About what a unit costs: its products, and a little for each parameter where there are none."""
    return visit.flops + 2.0 * sum(value.numel() for value in model.get_submodule(visit.path).parameters())


def _passing(values: Sequence[Value], small: Sequence[Returned], large: Sequence[Returned]) -> Amount:
    few, many = (sum(_bytes(found[visit], place) for visit, place in values) for found in (small, large))
    slope = (many - few) / (_SIZES[1] - _SIZES[0])
    return Amount(few - slope * _SIZES[0], slope)


def _bytes(found: Returned, place: int) -> float:
    value = found.leaves[found.tensors[place]]
    assert isinstance(value, Tensor)
    try:
        return float(value.numel() * value.element_size())
    except Exception:  # its size follows from values (nonzero), which are not there
        return 0.0
