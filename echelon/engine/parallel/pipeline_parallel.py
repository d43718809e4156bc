"""Pipeline parallelism: this rank's stages of the model, on torch's own stages and schedules.

    units       embed  block0  block1 │ block2  block3 │ block4  head  loss        the model's calls, in order (profiler/module_calls.py)
    stages      ─────── 0 ─────────── │ ────── 1 ───── │ ──────── 2 ────────       cut at `plan.pipeline.stages`; rank = stage % pp
    forward     micro-batch ──send──>   ──send──>        loss                      every rank reads the whole batch itself
    backward                <──send──        <──send──   loss.backward()

pipeline_stage.py runs one stage. Parameters that several stages use (tied weights, weights used between units) are held by all of these, and
their gradients are summed (`sum_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from echelon.engine.parallel.module_tensors import named_tensors, replace_tensors
from echelon.engine.parallel.pipeline_stage import SeedFunction, Stage, list_called_units
from echelon.engine.parallel.placeholder_tensor import make_placeholder
from echelon.engine.process_groups import Communicator
from echelon.errors import PlanError
from echelon.plan.plan import Plan
from echelon.plan.stages import NO_STAGES_REASON
from echelon.profiler.fake_model import ContextFactory, FakeModel, ForwardFunction, compute_shape_key
from echelon.profiler.module_calls import UnitCall

#: (output, index of the micro-batch) -> loss.
LossFunction = Callable[[Any, int], Tensor]
_SCHEDULES: dict[str, Any] = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
}
#: Before this version torch's stages required a gradient for every value that they received.
_NO_GRAD_INPUTS_SINCE = "2.13"
#: A schedule has receive buffers for micro-batches of one shape; the oldest is dropped.
_MAX_CACHED_SCHEDULES = 8
_ALTERNATIVE = "use pp=1 (dp with zero=3 also shares the memory)"


class Pipeline:
    """The stages of this rank."""

    def __init__(
        self,
        model: nn.Module,
        forward: ForwardFunction,
        example: Any,
        plan: Plan,
        pp: Communicator,
        shape_inference_context: ContextFactory = nullcontext,
    ) -> None:
        """`forward(model, batch)` computes the loss of a batch such as `example`; to infer shapes it is called in `shape_inference_context`."""
        self._model, self._forward, self._plan, self._pp = model, forward, plan, pp
        self.rank = pp.rank
        #: gloo sends no GPU memory: values then pass between stages through the host.
        self._transfer_device = torch.device("cpu") if pp.via_host else pp.device
        self._fake_model = FakeModel(model, pp.device, shape_inference_context)
        self._unit_calls = unit_calls = self._fake_model.trace_calls(forward, example)
        stage_bounds = _find_stage_bounds(plan, unit_calls, pp.size)
        self._stage_count = len(stage_bounds) - 1
        #: Tensor, by each of its names -> the pipeline ranks that hold it: all of them where no unit does.
        self.holding_ranks = _find_holding_ranks(model, unit_calls, stage_bounds, pp.size)
        self._glue_weights = set[str]().union(*(call.glue_parameters for call in unit_calls))
        stages = [Stage(model, self._fake_model, unit_calls, *bounds) for bounds in pairwise(stage_bounds)]
        self._stages = {index: stages[index] for index in range(pp.rank, self._stage_count, pp.size)}
        #: The units that this rank computes.
        self.unit_paths = list(dict.fromkeys(chain(*(stage.unit_paths for stage in self._stages.values()))))
        self.computes_loss = any(stage.is_last for stage in self._stages.values())
        self._micro_batches: Sequence[Any] = ()
        self._loss_function: LossFunction | None = None
        self._seed: SeedFunction | None = None
        self._schedules: dict[Any, Any] = {}

    def require_evaluable(self, forward: ForwardFunction, example: Any) -> None:
        """Refuse, before training starts, a model that calls other units in evaluation."""
        calls = self._unit_calls
        paths = list_called_units(calls)
        try:
            outputs = self._fake_model.compute_outputs(forward, example, paths, training=False, unit_calls=calls)
        except Exception:  # a metric reads values, which fake tensors lack: the first evaluation will show
            return
        if len(outputs) != len(calls):
            raise PlanError(
                f"pp={self._pp.size}: the model calls {len(calls) - 1} units in training and {len(outputs) - 1} in evaluation, so its stages cannot "
                f"evaluate it; drop eval_data= and evaluate the result of `echelon export`, or {_ALTERNATIVE}"
            )

    def drop_other_stages(self) -> None:
        """Free tensors that only other ranks' stages use; placeholders keep their names and shapes."""

        def drop(name: str, tensor: Tensor) -> Tensor | None:
            return None if self.rank in self.holding_ranks[name] else make_placeholder(tensor)

        replace_tensors(self._model, drop)

    def shared_parameters(self) -> list[str]:
        """Parameters, by first name, that do not belong to a single unit: tied over stages, or used between units."""
        names = [name for name, _ in self._model.named_parameters()]
        return [name for name in names if len(self.holding_ranks[name]) > 1 or name in self._glue_weights]

    def run(
        self, batches: Sequence[Any], loss: LossFunction, seed: SeedFunction, replicas: Communicator | None
    ) -> None:
        """Forward and backward of every micro-batch. On the last stage backward starts from `loss(output, index)`; `seed(index, *place)` seeds
        the random numbers of a place in forward. `replicas` exchange parameters meanwhile, and so must split their micro-batches alike."""
        shapes = list(map(compute_shape_key, batches))
        shape_changes = torch.tensor([after != before for before, after in pairwise(shapes)], dtype=torch.int32)
        if replicas is not None:
            replicas.all_reduce(shape_changes)
        changed = [index + 1 for index, has_changed in enumerate(shape_changes.tolist()) if has_changed]
        # torch's stages receive into preallocated buffers: consecutive micro-batches of one shape run together.
        for first, last in pairwise([0, *changed, len(batches)]):
            self._micro_batches = batches[first:last]
            self._loss_function = lambda output, index, first=first: loss(output, first + index)
            self._seed = lambda index, *place, first=first: seed(first + index, *place)
            self._run_same_shape()
        self._micro_batches, self._loss_function, self._seed = (), None, None

    def _run_same_shape(self) -> None:
        count = len(self._micro_batches)
        indices = torch.arange(count)
        stage_inputs = (torch.zeros(count, device=self._transfer_device),) if 0 in self._stages else ()
        loss_arguments = {"target": indices, "losses": []} if self.computes_loss else {}
        try:
            self._get_schedule(count).step(*stage_inputs, index=indices, **loss_arguments, return_outputs=False)
        except RuntimeError as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            if cause is error or "failed to run" not in str(error):
                raise
            raise cause from None  # the model's own error, which torch's stages wrap

    def forward(self, batch: Any, forward: ForwardFunction, seed: SeedFunction) -> tuple[Tensor, ...]:
        """The output of `forward(model, batch)` on the rank of the last stage, () on the others. Without gradients."""
        output: tuple[Tensor, ...] = ()
        group, size = self._pp.process_group, self._pp.size
        for index, stage in self._stages.items():
            incoming, _ = stage.boundary_meta_tensors(batch, forward)
            received = [torch.empty(meta.shape, dtype=meta.dtype, device=self._transfer_device) for meta in incoming]
            for tensor in received:
                dist.recv(tensor, group_src=(index - 1) % size, group=group)
            inputs = [tensor.to(self._pp.device) for tensor in received]
            outputs = stage.run(*inputs, batch=batch, forward=forward, seed=seed)
            if stage.is_last:
                output = outputs
                continue
            for tensor in outputs:
                dist.send(tensor.contiguous().to(self._transfer_device), group_dst=(index + 1) % size, group=group)
        return output

    def _get_schedule(self, micro_batch_count: int) -> Any:
        """The schedule for this many micro-batches of the present shape."""
        key = micro_batch_count, compute_shape_key(self._micro_batches[0])
        if key not in self._schedules:
            if len(self._schedules) == _MAX_CACHED_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
            schedule_class = _SCHEDULES[self._plan.pipeline.schedule]
            is_multi_stage = issubclass(schedule_class, PipelineScheduleMulti)
            if micro_batch_count < self._stage_count or (is_multi_stage and micro_batch_count % self._pp.size):
                # Too few to fill the pipeline in that order (the end of an epoch): all forwards, then all backwards.
                schedule_class = torch_schedules.ScheduleLoopedBFS if is_multi_stage else torch_schedules.ScheduleGPipe
            stages = [self._make_torch_stage(index, stage) for index, stage in self._stages.items()]
            stage_argument = stages if is_multi_stage else stages[0]
            options = {"loss_fn": self._compute_loss, "scale_grads": False}
            self._schedules[key] = schedule_class(stage_argument, micro_batch_count, **options)
        return self._schedules[key]

    def _make_torch_stage(self, index: int, stage: Stage) -> PipelineStage:
        incoming, outgoing = stage.boundary_meta_tensors(self._micro_batches[0], self._forward)
        if torch.__version__ < _NO_GRAD_INPUTS_SINCE and not all(meta.requires_grad for meta in incoming):
            raise PlanError(
                f"pp={self._pp.size}: values without a gradient pass between stages (integers, a mask), which torch {torch.__version__} does not "
                f"support; use torch {_NO_GRAD_INPUTS_SINCE}, or {_ALTERNATIVE.removeprefix('use ')}"
            )
        return PipelineStage(
            _IndexedStage(stage, self),
            index,
            self._stage_count,
            self._transfer_device,
            input_args=tuple(incoming) if index else (torch.zeros(1, device="meta"),),
            output_args=tuple(outgoing),
            group=self._pp.device_mesh().get_group(),
        )

    def _compute_loss(self, output: Any, index: Tensor) -> Tensor:
        assert self._loss_function is not None
        return self._loss_function(output, int(index))


class _IndexedStage(nn.Module):
    """A stage that takes its micro-batch by index: every rank reads the batch itself."""

    def __init__(self, stage: Stage, pipeline: Pipeline) -> None:
        super().__init__()
        # Without the model as a submodule: whenever a rank makes a schedule for another shape, torch would free its gathered parameters.
        self._stage, self._pipeline = stage, pipeline

    def forward(self, *received: Tensor, index: Tensor) -> Any:
        stage, pipeline = self._stage, self._pipeline
        stage_inputs = [tensor.to(pipeline._pp.device) for tensor in received] if stage.first_call else []
        assert pipeline._seed is not None
        batch, seed = pipeline._micro_batches[int(index)], partial(pipeline._seed, int(index))
        out = stage.run(*stage_inputs, batch=batch, forward=pipeline._forward, seed=seed)
        return out if stage.is_last else tuple(tensor.to(pipeline._transfer_device) for tensor in out)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those that a split backward computes gradients for."""
        return (parameter for parameter in self._stage.model.parameters(recurse) if not parameter.is_meta)


def _find_stage_bounds(plan: Plan, unit_calls: Sequence[UnitCall], pp_size: int) -> list[int]:
    """The first call of every stage, and the end."""
    if not unit_calls:
        raise PlanError(f"pp={pp_size}: {NO_STAGES_REASON}; {_ALTERNATIVE}")
    stages, unit_count = plan.pipeline.stages, len(unit_calls) - 1
    bounds = [0, *stages, len(unit_calls)]
    if not stages or (len(bounds) - 1) % pp_size:
        raise PlanError(
            f"pp={pp_size}: the plan has {len(bounds) - 1} stages; complete it (echelon plan FILE), or name {pp_size - 1} of its {unit_count} units at "
            "which a stage begins (stages=)"
        )
    if sorted(set(bounds)) != bounds or unit_count <= bounds[-2]:
        raise PlanError(f"stages={list(stages)}: must be increasing, and give each stage one of the {unit_count} units")
    stage_of_call = [stage for stage, (first, last) in enumerate(pairwise(bounds)) for _ in range(first, last)]
    for path in {call.path for call in unit_calls if call.changes_buffers}:
        path_stages = sorted({s for s, call in zip(stage_of_call, unit_calls, strict=True) if call.path == path})
        if len(path_stages) > 1:
            raise PlanError(
                f"stages={list(stages)}: {path} keeps statistics of its calls and is called on stages {path_stages[0]} and {path_stages[1]}, each of "
                "which would count only its own; complete the plan (echelon plan FILE), or use pp=1"
            )
    return bounds


def _find_holding_ranks(
    model: nn.Module, unit_calls: Sequence[UnitCall], stage_bounds: Sequence[int], pp_size: int
) -> Mapping[str, frozenset[int]]:
    tensors = dict(named_tensors(model, remove_duplicate=False))
    ranks_by_id: dict[int, set[int]] = {}
    for stage, (first, last) in enumerate(pairwise(stage_bounds)):
        for path in list_called_units(unit_calls[first:last]):
            for _, tensor in named_tensors(model.get_submodule(path)):
                ranks_by_id.setdefault(id(tensor), set()).add(stage % pp_size)
    # Between units all stages up to this point compute, also with weights of units.
    for call_index, call in enumerate(unit_calls):
        reached = {stage % pp_size for stage, last in enumerate(stage_bounds[1:]) if last > call_index}
        for name in call.glue_parameters:
            ranks_by_id.setdefault(id(tensors[name]), set()).update(reached)
    return {name: frozenset(ranks_by_id.get(id(tensor), range(pp_size))) for name, tensor in tensors.items()}
