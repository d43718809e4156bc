"""The pipeline axis: this rank's stages of a model, and micro-batches through all of them, on torch's own stages and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from echelon.engine.parallel.pipeline_stage import Seed, Stage
from echelon.engine.parallel.placeholder_tensor import absent
from echelon.engine.parallel.shard_layout import local
from echelon.engine.process_groups import Group
from echelon.errors import PlanError
from echelon.plan.plan import Plan
from echelon.plan.stages import UNCUT
from echelon.profiler.fake_model import Around, Forward, Ghost, shape_key
from echelon.profiler.module_calls import Visit

_SCHEDULES: dict[str, Any] = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
}


#: Before this version torch's stages want a gradient for everything that they receive.
_CARRIES_ANY = "2.13"


#: So many schedules are kept, each for micro-batches of one shape, for which it has buffers.
_SHAPES = 8


class Pipeline:
    """This rank's stages among all of them."""

    def __init__(
        self, model: nn.Module, forward: Forward, example: Any, plan: Plan, ranks: Group, around: Around = nullcontext
    ) -> None:
        """`forward(model, batch)` computes the loss; `example` is a batch of it. `around`: within it shapes are found."""
        self._model, self._forward, self._plan, self._ranks = model, forward, plan, ranks
        #: Where values lie that pass between stages: gloo sends none from a GPU's memory.
        self._post = torch.device("cpu") if ranks.staged else ranks.device
        self._ghost = Ghost(model, ranks.device, around)
        self._visits = visits = self._ghost.visits(forward, example)
        bounds = _bounds(plan, visits, ranks.size)
        self._total = len(bounds) - 1
        self.rank = ranks.rank
        #: Tensor, by each of its names -> the ranks of the axis that hold it; one that no unit holds is held by all.
        self.owners = _owners(model, visits, bounds, ranks.size)
        self._between = set[str]().union(*(visit.weights for visit in visits))
        self._numbers = range(ranks.rank, self._total, ranks.size)
        self._stages = [Stage(model, self._ghost, visits, bounds[n], bounds[n + 1]) for n in self._numbers]
        #: The units that this rank computes.
        self.units = list(dict.fromkeys(v.path for s in self._stages for v in visits[s.first : s.last] if v.path))
        #: Whether the loss is computed here.
        self.final = any(stage.final for stage in self._stages)
        self._batches: Sequence[Any] = ()
        self._loss: Callable[[Any, int], Tensor] | None = None
        self._seed: Seed | None = None
        self._made: dict[Any, Any] = {}

    def require_evaluation(self, forward: Forward, example: Any) -> None:
        """Refuse a model that calls other units in evaluation, before it has trained for hours."""
        paths = list(dict.fromkeys(visit.path for visit in self._visits if visit.path))
        try:
            found = self._ghost.returned(forward, example, paths, training=False, visits=self._visits)
        except Exception:  # a metric that looks at values, which are not there: told of when it is its turn
            return
        if len(found) != len(self._visits):
            raise PlanError(
                f"pp={self._ranks.size}: the model calls {len(self._visits) - 1} units in training and {len(found) - 1} in evaluation, so that its "
                "stages cannot evaluate it; leave evaluation= out and evaluate what `echelon export` writes, or use pp=1 (dp with zero=3 also "
                "shares the memory)"
            )

    @torch.no_grad()
    def drop(self) -> None:
        """Let go of what only other ranks' stages need: it stays by name and shape, without numbers."""
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        foreign = {id(value) for name, value in named if self._ranks.rank not in self.owners[name]}
        done: dict[int, Any] = {}
        for module in self._model.modules():
            for slots in (module._parameters, module._buffers):
                for name, value in slots.items():
                    if value is not None and id(value) in foreign:
                        slots[name] = done.setdefault(id(value), absent(value))

    def whole(self) -> list[str]:
        """Parameters (by first name) that no unit has for itself: tied over stages, or used between units."""
        return [
            name for name, _ in self._model.named_parameters() if len(self.owners[name]) > 1 or name in self._between
        ]

    def run(
        self, batches: Sequence[Any], loss: Callable[[Any, int], Tensor], seed: Seed, others: Group | None = None
    ) -> None:
        """Forward and backward of every micro-batch; `loss(output, index)` gives what backward starts from, on the last stage.
        `seed(index, *place)` is told where random numbers will be drawn.

        torch's stages receive into buffers that were made beforehand: micro-batches of one shape go through together. `others`: ranks
        with whom parameters are exchanged meanwhile, which must therefore go through in the same order.
        """
        keys = [shape_key(batch) for batch in batches]
        turns = torch.tensor([after != before for before, after in pairwise(keys)], dtype=torch.int32)
        if others is not None:
            others.sum(turns)
        bounds = [0, *(index + 1 for index, turn in enumerate(turns.tolist()) if turn), len(batches)]
        for first, last in pairwise(bounds):
            self._batches = batches[first:last]
            self._loss = lambda output, index, first=first: loss(output, first + index)
            self._seed = lambda index, *place, first=first: seed(first + index, *place)
            self._run()
        self._batches, self._loss, self._seed = (), None, None

    def _run(self) -> None:
        count = len(self._batches)
        schedule = self._ready(count)
        numbers = torch.arange(count)
        given = (torch.zeros(count, device=self._post),) if 0 in self._numbers else ()
        target = {"target": numbers, "losses": []} if self.final else {}
        try:
            schedule.step(*given, index=numbers, **target, return_outputs=False)
        except RuntimeError as error:
            cause = _first_cause(error)
            if cause is error or "failed to run" not in str(error):
                raise
            raise cause from None  # torch's stages put theirs around what the model's code said

    def forward(self, batch: Any, forward: Forward, seed: Seed) -> tuple[Tensor, ...]:
        """What `forward(model, batch)` gives, on the rank of the last stage; nothing on the others. Without gradients."""
        found: tuple[Tensor, ...] = ()
        for number, stage in zip(self._numbers, self._stages, strict=True):
            incoming, _ = stage.shapes(batch, forward)
            received = [torch.empty(each.shape, dtype=each.dtype, device=self._post) for each in incoming]
            for value in received:
                dist.recv(value, group_src=(number - 1) % self._ranks.size, group=self._ranks.group)
            given = (value.to(self._ranks.device) for value in received)
            sent = stage(*given, batch=batch, forward=forward, seed=seed)
            if stage.final:
                found = sent
                continue
            for value in sent:
                dist.send(
                    value.contiguous().to(self._post),
                    group_dst=(number + 1) % self._ranks.size,
                    group=self._ranks.group,
                )
        return found

    def _ready(self, count: int) -> Any:
        """The schedule for so many micro-batches of this shape."""
        key = count, shape_key(self._batches[0])
        if key not in self._made:
            if len(self._made) == _SHAPES:
                del self._made[next(iter(self._made))]
            kind = _SCHEDULES[self._plan.schedule]
            several = issubclass(kind, PipelineScheduleMulti)
            if count < self._total or (several and count % self._ranks.size):
                # Too few to fill the pipe in that order (the short end of an epoch): all forwards, then all backwards.
                kind = torch_schedules.ScheduleLoopedBFS if several else torch_schedules.ScheduleGPipe
            parts = [self._part(number, stage) for number, stage in zip(self._numbers, self._stages, strict=True)]
            self._made[key] = kind(parts if several else parts[0], count, loss_fn=self._loss_of, scale_grads=False)
        return self._made[key]

    def _part(self, number: int, stage: Stage) -> PipelineStage:
        incoming, outgoing = stage.shapes(self._batches[0], self._forward)
        if torch.__version__ < _CARRIES_ANY and not all(each.requires_grad for each in incoming):
            raise PlanError(
                f"pp={self._ranks.size}: values without a gradient (whole numbers, a mask) pass between stages, which torch "
                f"{torch.__version__} cannot carry; use torch {_CARRIES_ANY}, or pp=1 (dp with zero=3 also shares the memory)"
            )
        return PipelineStage(
            _Fed(stage, self),
            number,
            self._total,
            self._post,
            input_args=incoming if number else (torch.zeros(1, device="meta"),),
            output_args=outgoing,
            group=self._ranks.mesh().get_group(),
        )

    def _loss_of(self, output: Any, index: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(output, int(index))


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


class _Fed(nn.Module):
    """A stage that takes its micro-batch by number: every rank reads the batch itself."""

    def __init__(self, stage: Stage, pipeline: Pipeline) -> None:
        super().__init__()
        # Not as a submodule: torch would give up its gathered parameters whenever a schedule for another shape is made, on the
        # ranks that happen to make one.
        self._held = (stage, pipeline)

    def forward(self, *received: Tensor, index: Tensor) -> Any:
        stage, pipeline = self._held
        here, post = pipeline._ranks.device, pipeline._post
        given = [value.to(here) for value in received] if stage.first else []
        number = int(index)
        assert pipeline._seed is not None
        seed = partial(pipeline._seed, number)
        out = stage(*given, batch=pipeline._batches[number], forward=pipeline._forward, seed=seed)
        return out if stage.final else tuple(value.to(post) for value in out)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """What a split backward computes gradients for."""
        return (value for value in self._held[0].parameters(recurse) if not value.is_meta)


def _bounds(plan: Plan, visits: Sequence[Visit], ways: int) -> list[int]:
    """Where stages begin, and the end."""
    if not visits:
        raise PlanError(f"pp={ways}: {UNCUT}; use pp=1 (dp with zero=3 also shares the memory)")
    bounds = [0, *plan.stages, len(visits)]
    if not plan.stages or (len(bounds) - 1) % ways:
        raise PlanError(
            f"pp={ways}: the plan has {len(bounds) - 1} stages; have it completed: echelon plan FILE, or give {ways - 1} places where a stage "
            f"begins (stages=), of {len(visits) - 1} units"
        )
    if sorted(set(bounds)) != bounds or len(visits) - 1 <= bounds[-2]:
        raise PlanError(
            f"stages={list(plan.stages)}: places among {len(visits) - 1} units, in order, at least one unit each"
        )
    stages = [stage for stage, (first, last) in enumerate(pairwise(bounds)) for _ in range(first, last)]
    for path in {visit.path for visit in visits if visit.changes}:
        found = sorted({stage for stage, visit in zip(stages, visits, strict=True) if visit.path == path})
        if len(found) > 1:
            raise PlanError(
                f"stages={list(plan.stages)}: {path} keeps statistics of its calls and is called on stages {found[0]} and {found[1]}, which would "
                "each count their own; have the plan completed (echelon plan FILE), or use pp=1"
            )
    return bounds


def _owners(
    model: nn.Module, visits: Sequence[Visit], bounds: Sequence[int], ways: int
) -> Mapping[str, frozenset[int]]:
    found: dict[int, set[int]] = {}
    for stage, (first, last) in enumerate(pairwise(bounds)):
        for path in {visit.path for visit in visits[first:last] if visit.path}:
            module = model.get_submodule(path)
            for value in (*module.parameters(), *module.buffers()):
                found.setdefault(id(value), set()).add(stage % ways)
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    values = dict(named)
    for number, visit in enumerate(visits):
        for name in visit.weights:  # of units that are called as well: each stage that comes so far computes with them
            found.setdefault(id(values[name]), set()).update(
                stage % ways for stage, last in enumerate(bounds[1:]) if last > number
            )
    return {name: frozenset(found.get(id(value), range(ways))) for name, value in named}


@torch.no_grad()
def add_up(parameters: Sequence[nn.Parameter], ranks: Group) -> None:
    """Sum the gradients of parameters of which each rank has a share; one that no rank used keeps none."""
    for _, same in groupby(sorted(parameters, key=lambda each: str(each.dtype)), key=lambda each: each.dtype):
        held = list(same)
        unused = [place for place, each in enumerate(held) if each.grad is None]
        used = torch.ones(len(held))
        for place in unused:
            used[place], held[place].grad = 0.0, torch.zeros_like(held[place])
        grads = [local(each.grad) for each in held]  # type: ignore[arg-type]
        flat = ranks.sum(torch.cat([*(grad.reshape(-1) for grad in grads), used.to(grads[0])]))
        *parts, users = flat.split([*(grad.numel() for grad in grads), len(held)])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))
        if unused:  # else there is nothing to learn, and an accelerator need not be waited for
            counts = users.tolist()
            for place in unused:
                held[place].grad = held[place].grad if counts[place] else None
