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

from echelon.engine.parallel.module_tensors import named_tensors, replace_tensors
from echelon.engine.parallel.pipeline_stage import SeedFunction, Stage
from echelon.engine.parallel.placeholder_tensor import make_placeholder
from echelon.engine.parallel.shard_layout import to_local
from echelon.engine.process_groups import Communicator
from echelon.errors import PlanError
from echelon.plan.plan import Plan
from echelon.plan.stages import NO_STAGES_REASON
from echelon.profiler.fake_model import ContextFactory, FakeModel, ForwardFunction, compute_shape_key
from echelon.profiler.module_calls import UnitCall

_SCHEDULES: dict[str, Any] = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
}


#: Before this version torch's stages want a gradient for everything that they receive.
_NO_GRAD_INPUTS_SINCE = "2.13"


#: So many schedules are kept, each for micro-batches of one shape, for which it has buffers.
_MAX_CACHED_SCHEDULES = 8


class Pipeline:
    """This rank's stages among all of them."""

    def __init__(
        self,
        model: nn.Module,
        forward: ForwardFunction,
        example: Any,
        plan: Plan,
        pp: Communicator,
        shape_inference_context: ContextFactory = nullcontext,
    ) -> None:
        """`forward(model, batch)` computes the loss; `example` is a batch of it. `shape_inference_context`: within it shapes are found."""
        self._model, self._forward, self._plan, self._pp = model, forward, plan, pp
        #: Where values lie that pass between stages: gloo sends none from a GPU's memory.
        self._transfer_device = torch.device("cpu") if pp.via_host else pp.device
        self._fake_model = FakeModel(model, pp.device, shape_inference_context)
        self._unit_calls = unit_calls = self._fake_model.trace_calls(forward, example)
        stage_bounds = _find_stage_bounds(plan, unit_calls, pp.size)
        self._stage_count = len(stage_bounds) - 1
        self.rank = pp.rank
        #: Tensor, by each of its names -> the ranks of the axis that hold it; one that no unit holds is held by all.
        self.holding_ranks = _find_holding_ranks(model, unit_calls, stage_bounds, pp.size)
        self._glue_weights = set[str]().union(*(call.glue_parameters for call in unit_calls))
        self._stage_indices = range(pp.rank, self._stage_count, pp.size)
        self._stages = [
            Stage(model, self._fake_model, unit_calls, stage_bounds[stage_index], stage_bounds[stage_index + 1])
            for stage_index in self._stage_indices
        ]
        #: The units that this rank computes.
        self.unit_paths = list(
            dict.fromkeys(
                unit_call.path
                for local_stage in self._stages
                for unit_call in unit_calls[local_stage.first_call : local_stage.end_call]
                if unit_call.path
            )
        )
        #: Whether the loss is computed here.
        self.computes_loss = any(stage.is_last for stage in self._stages)
        self._micro_batches: Sequence[Any] = ()
        self._loss_function: Callable[[Any, int], Tensor] | None = None
        self._seed: SeedFunction | None = None
        self._schedules: dict[Any, Any] = {}

    def require_evaluable(self, forward: ForwardFunction, example: Any) -> None:
        """Refuse a model that calls other units in evaluation, before it has trained for hours."""
        paths = list(dict.fromkeys(call.path for call in self._unit_calls if call.path))
        try:
            evaluation_outputs = self._fake_model.compute_outputs(
                forward, example, paths, training=False, unit_calls=self._unit_calls
            )
        except Exception:  # a metric that looks at values, which are not there: told of when it is its turn
            return
        if len(evaluation_outputs) != len(self._unit_calls):
            raise PlanError(
                f"pp={self._pp.size}: the model calls {len(self._unit_calls) - 1} units in training and {len(evaluation_outputs) - 1} in evaluation, so that its "
                "stages cannot evaluate it; leave eval_data= out and evaluate what `echelon export` writes, or use pp=1 (dp with zero=3 also "
                "shares the memory)"
            )

    def drop_other_stages(self) -> None:
        """Free what only other ranks' stages need: placeholders keep its names and shapes."""

        def drop(name: str, tensor: Tensor) -> Tensor | None:
            return None if self.rank in self.holding_ranks[name] else make_placeholder(tensor)

        replace_tensors(self._model, drop)

    def shared_parameters(self) -> list[str]:
        """Parameters (by first name) that no unit has for itself: tied over stages, or used between units."""
        return [
            name
            for name, _ in self._model.named_parameters()
            if len(self.holding_ranks[name]) > 1 or name in self._glue_weights
        ]

    def run(
        self,
        micro_batches: Sequence[Any],
        loss: Callable[[Any, int], Tensor],
        seed: SeedFunction,
        data_parallel: Communicator | None = None,
    ) -> None:
        """Forward and backward of every micro-batch; `loss(output, index)` gives what backward starts from, on the last stage.
        `seed(index, *place)` is told where random numbers will be drawn.

        torch's stages receive into buffers that were made beforehand: micro-batches of one shape go through together. `data_parallel`: ranks
        with whom parameters are exchanged meanwhile, which must therefore go through in the same order.
        """
        batch_shapes = [compute_shape_key(micro_batch) for micro_batch in micro_batches]
        shape_changes = torch.tensor([after != before for before, after in pairwise(batch_shapes)], dtype=torch.int32)
        if data_parallel is not None:
            data_parallel.all_reduce(shape_changes)
        run_bounds = [
            0,
            *(index + 1 for index, has_changed in enumerate(shape_changes.tolist()) if has_changed),
            len(micro_batches),
        ]
        for first, last in pairwise(run_bounds):
            self._micro_batches = micro_batches[first:last]
            self._loss_function = lambda output, index, first=first: loss(output, first + index)
            self._seed = lambda index, *seed_key, first=first: seed(first + index, *seed_key)
            self._run_same_shape()
        self._micro_batches, self._loss_function, self._seed = (), None, None

    def _run_same_shape(self) -> None:
        micro_batch_count = len(self._micro_batches)
        schedule = self._get_schedule(micro_batch_count)
        indices = torch.arange(micro_batch_count)
        stage_inputs = (
            (torch.zeros(micro_batch_count, device=self._transfer_device),) if 0 in self._stage_indices else ()
        )
        loss_arguments = {"target": indices, "losses": []} if self.computes_loss else {}
        try:
            schedule.step(*stage_inputs, index=indices, **loss_arguments, return_outputs=False)
        except RuntimeError as error:
            cause = _root_cause(error)
            if cause is error or "failed to run" not in str(error):
                raise
            raise cause from None  # torch's stages put theirs around what the model's code said

    def forward(self, batch: Any, forward: ForwardFunction, seed: SeedFunction) -> tuple[Tensor, ...]:
        """What `forward(model, batch)` gives, on the rank of the last stage; nothing on the others. Without gradients."""
        output: tuple[Tensor, ...] = ()
        for stage_index, stage in zip(self._stage_indices, self._stages, strict=True):
            incoming, _ = stage.boundary_meta_tensors(batch, forward)
            received = [torch.empty(meta.shape, dtype=meta.dtype, device=self._transfer_device) for meta in incoming]
            for tensor in received:
                dist.recv(tensor, group_src=(stage_index - 1) % self._pp.size, group=self._pp.process_group)
            stage_inputs = (tensor.to(self._pp.device) for tensor in received)
            stage_outputs = stage(*stage_inputs, batch=batch, forward=forward, seed=seed)
            if stage.is_last:
                output = stage_outputs
                continue
            for tensor in stage_outputs:
                dist.send(
                    tensor.contiguous().to(self._transfer_device),
                    group_dst=(stage_index + 1) % self._pp.size,
                    group=self._pp.process_group,
                )
        return output

    def _get_schedule(self, micro_batch_count: int) -> Any:
        """The schedule for so many micro-batches of this shape."""
        key = micro_batch_count, compute_shape_key(self._micro_batches[0])
        if key not in self._schedules:
            if len(self._schedules) == _MAX_CACHED_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
            schedule_class = _SCHEDULES[self._plan.pipeline.schedule]
            is_multi_stage = issubclass(schedule_class, PipelineScheduleMulti)
            if micro_batch_count < self._stage_count or (is_multi_stage and micro_batch_count % self._pp.size):
                # Too few to fill the pipe in that order (the short end of an epoch): all forwards, then all backwards.
                schedule_class = torch_schedules.ScheduleLoopedBFS if is_multi_stage else torch_schedules.ScheduleGPipe
            torch_stages = [
                self._make_torch_stage(stage_index, stage)
                for stage_index, stage in zip(self._stage_indices, self._stages, strict=True)
            ]
            self._schedules[key] = schedule_class(
                torch_stages if is_multi_stage else torch_stages[0],
                micro_batch_count,
                loss_fn=self._compute_loss,
                scale_grads=False,
            )
        return self._schedules[key]

    def _make_torch_stage(self, stage_index: int, stage: Stage) -> PipelineStage:
        incoming, outgoing = stage.boundary_meta_tensors(self._micro_batches[0], self._forward)
        if torch.__version__ < _NO_GRAD_INPUTS_SINCE and not all(meta.requires_grad for meta in incoming):
            raise PlanError(
                f"pp={self._pp.size}: values without a gradient (whole numbers, a mask) pass between stages, which torch "
                f"{torch.__version__} cannot carry; use torch {_NO_GRAD_INPUTS_SINCE}, or pp=1 (dp with zero=3 also shares the memory)"
            )
        return PipelineStage(
            _IndexedStage(stage, self),
            stage_index,
            self._stage_count,
            self._transfer_device,
            input_args=incoming if stage_index else (torch.zeros(1, device="meta"),),
            output_args=outgoing,
            group=self._pp.device_mesh().get_group(),
        )

    def _compute_loss(self, output: Any, index: Tensor) -> Tensor:
        assert self._loss_function is not None
        return self._loss_function(output, int(index))


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


class _IndexedStage(nn.Module):
    """A stage that takes its micro-batch by number: every rank reads the batch itself."""

    def __init__(self, stage: Stage, pipeline: Pipeline) -> None:
        super().__init__()
        # Not as a submodule: torch would give up its gathered parameters whenever a schedule for another shape is made, on the
        # ranks that happen to make one.
        self._stage_and_pipeline = (stage, pipeline)

    def forward(self, *received: Tensor, index: Tensor) -> Any:
        stage, pipeline = self._stage_and_pipeline
        device, transfer_device = pipeline._pp.device, pipeline._transfer_device
        stage_inputs = [tensor.to(device) for tensor in received] if stage.first_call else []
        micro_batch_index = int(index)
        assert pipeline._seed is not None
        seed = partial(pipeline._seed, micro_batch_index)
        out = stage(
            *stage_inputs, batch=pipeline._micro_batches[micro_batch_index], forward=pipeline._forward, seed=seed
        )
        return out if stage.is_last else tuple(tensor.to(transfer_device) for tensor in out)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """What a split backward computes gradients for."""
        return (parameter for parameter in self._stage_and_pipeline[0].parameters(recurse) if not parameter.is_meta)


def _find_stage_bounds(plan: Plan, unit_calls: Sequence[UnitCall], pp_size: int) -> list[int]:
    """Where stages begin, and the end."""
    if not unit_calls:
        raise PlanError(f"pp={pp_size}: {NO_STAGES_REASON}; use pp=1 (dp with zero=3 also shares the memory)")
    bounds = [0, *plan.pipeline.stages, len(unit_calls)]
    if not plan.pipeline.stages or (len(bounds) - 1) % pp_size:
        raise PlanError(
            f"pp={pp_size}: the plan has {len(bounds) - 1} stages; have it completed: echelon plan FILE, or give {pp_size - 1} places where a stage "
            f"begins (stages=), of {len(unit_calls) - 1} units"
        )
    if sorted(set(bounds)) != bounds or len(unit_calls) - 1 <= bounds[-2]:
        raise PlanError(
            f"stages={list(plan.pipeline.stages)}: places among {len(unit_calls) - 1} units, in order, at least one unit each"
        )
    stage_of_call = [stage for stage, (first, last) in enumerate(pairwise(bounds)) for _ in range(first, last)]
    for path in {call.path for call in unit_calls if call.changes_buffers}:
        path_stages = sorted(
            {stage for stage, call in zip(stage_of_call, unit_calls, strict=True) if call.path == path}
        )
        if len(path_stages) > 1:
            raise PlanError(
                f"stages={list(plan.pipeline.stages)}: {path} keeps statistics of its calls and is called on stages {path_stages[0]} and {path_stages[1]}, which would "
                "each count their own; have the plan completed (echelon plan FILE), or use pp=1"
            )
    return bounds


def _find_holding_ranks(
    model: nn.Module, unit_calls: Sequence[UnitCall], stage_bounds: Sequence[int], pp_size: int
) -> Mapping[str, frozenset[int]]:
    ranks_by_id: dict[int, set[int]] = {}
    for stage, (first, last) in enumerate(pairwise(stage_bounds)):
        for path in {call.path for call in unit_calls[first:last] if call.path}:
            module = model.get_submodule(path)
            for tensor in (*module.parameters(), *module.buffers()):
                ranks_by_id.setdefault(id(tensor), set()).add(stage % pp_size)
    tensors_by_name = dict(named_tensors(model, remove_duplicate=False))
    for call_index, call in enumerate(unit_calls):
        for (
            name
        ) in call.glue_parameters:  # of units that are called as well: each stage that comes so far computes with them
            ranks_by_id.setdefault(id(tensors_by_name[name]), set()).update(
                stage % pp_size for stage, last in enumerate(stage_bounds[1:]) if last > call_index
            )
    return {name: frozenset(ranks_by_id.get(id(tensor), range(pp_size))) for name, tensor in tensors_by_name.items()}


@torch.no_grad()
def sum_gradients(parameters: Sequence[nn.Parameter], communicator: Communicator) -> None:
    """Sum the gradients of parameters of which each rank has a share; one that no rank used keeps none."""
    for _, same_dtype in groupby(
        sorted(parameters, key=lambda parameter: str(parameter.dtype)), key=lambda parameter: parameter.dtype
    ):
        dtype_parameters = list(same_dtype)
        unused = [index for index, parameter in enumerate(dtype_parameters) if parameter.grad is None]
        is_used = torch.ones(len(dtype_parameters))
        for index in unused:
            is_used[index], dtype_parameters[index].grad = 0.0, torch.zeros_like(dtype_parameters[index])
        grads = [to_local(parameter.grad) for parameter in dtype_parameters]  # type: ignore[arg-type]
        flat = communicator.all_reduce(torch.cat([*(grad.reshape(-1) for grad in grads), is_used.to(grads[0])]))
        *summed_grads, use_counts = flat.split([*(grad.numel() for grad in grads), len(dtype_parameters)])
        for grad, summed_grad in zip(grads, summed_grads, strict=True):
            grad.copy_(summed_grad.view_as(grad))
        if unused:  # else there is nothing to learn, and an accelerator need not be waited for
            counts = use_counts.tolist()
            for index in unused:
                dtype_parameters[index].grad = dtype_parameters[index].grad if counts[index] else None
