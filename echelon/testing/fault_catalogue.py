"""The catalogue of faults: mistakes in the mathematics that parallel training systems have shipped, put into a live run.

    with injected("clip by local norm"):
        certificate = verify(job, plan)

Nothing crashes and the loss goes down: only a comparison with one device tells. Every rank of a world has to inject the same fault,
before its `Run` is made. The engine knows nothing of this: its parts are replaced from outside, for as long as the context lasts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.engine import build_model, grad_clip, run_state, step_metrics, train_step
from echelon.engine.backends.parameter_server import ParameterServerBackend
from echelon.engine.data_setup import RunData, open_run_data
from echelon.engine.full_state import optimizer_tensors, tp_shard_of
from echelon.engine.loss_weighing import LossWeighing
from echelon.engine.parallel import tp_collectives, tp_forwards
from echelon.engine.parallel.pipeline_parallel import Pipeline
from echelon.engine.parallel.shard_layout import to_local
from echelon.engine.process_groups import Communicator, WorldCommunicator
from echelon.engine.run import Run
from echelon.errors import EchelonError
from echelon.job import Job
from echelon.plan.batch_split import count_micro_batches
from echelon.testing.inject import (
    Fault,
    FaultPatches,
    norm_parameters,
    patch_loss,
    patch_model,
    scale_loss,
    skip_gradient_reduction,
)

#: By name.
FAULTS: dict[str, Fault] = {}


@contextlib.contextmanager
def inject_fault(name: str) -> Iterator[None]:
    """Runs that are made inside have this fault."""
    if name not in FAULTS:
        raise EchelonError(f"{name!r}: no such fault; the catalogue has {', '.join(FAULTS)}")
    with contextlib.ExitStack() as stack:
        for context in FAULTS[name].patches():
            stack.enter_context(context)
        yield


def _register_fault(name: str, description: str, *, needs: str) -> Callable[[FaultPatches], FaultPatches]:
    def register(patches: FaultPatches) -> FaultPatches:
        FAULTS[name] = Fault(name=name, description=description, needs=needs, patches=patches)
        return patches

    return register


# Factors


@_register_fault(
    "loss times tp", "every rank of the tensor axis brings the whole loss, and they are added up", needs="tp > 1"
)
def _loss_times_tp() -> Sequence[AbstractContextManager[object]]:
    return [patch_loss(lambda weighing, loss: scale_loss(loss, weighing.run.axes["tp"].size))]


@_register_fault("loss times dp", "a sum over the data ranks where a mean was due", needs="dp > 1")
def _loss_times_dp() -> Sequence[AbstractContextManager[object]]:
    return [patch_loss(lambda weighing, loss: scale_loss(loss, weighing.run.data_parallel.size))]


@_register_fault("gradients times micro-batches", "accumulated and never divided", needs="several micro-batches")
def _multiply_by_micro_batches() -> Sequence[AbstractContextManager[object]]:
    weigh = LossWeighing.weigh

    def undivided(self: LossWeighing, loss: Any, micro_batch: Any, batch: Any) -> Tensor:
        return weigh(self, loss, micro_batch, batch) * len(batch.micro_batches)

    return [patch.object(LossWeighing, "weigh", undivided)]


# Weights of samples


@_register_fault(
    "mean of micro-batch means",
    "the loss is averaged inside each micro-batch, whatever the number of its tokens",
    needs="a loss that is (sum, count), and dp > 1 or several micro-batches",
)
def _average_micro_batch_means() -> Sequence[AbstractContextManager[object]]:
    def averaged(weighing: LossWeighing, loss: Any) -> Any:
        weighing.is_split = False  # the watch would read the count from the graph, weigh by it, and so be right
        return loss[0] / loss[1] if isinstance(loss, tuple) else loss

    return [patch_loss(averaged)]


@_register_fault(
    "micro-batches weigh alike",
    "one with fewer samples counts as much as the others",
    needs="a loss that is a mean, a batch that micro-batches do not divide",
)
def _weigh_micro_batches_equally() -> Sequence[AbstractContextManager[object]]:
    weigh = LossWeighing.weigh

    def weigh_equally(self: LossWeighing, loss: Any, micro_batch: Any, batch: Any) -> Tensor:
        mean_samples = batch.samples / len(batch.micro_batches) / self.run.data_parallel.size
        return weigh(self, loss, micro_batch, batch) * (mean_samples / micro_batch.samples)

    return [patch.object(LossWeighing, "weigh", weigh_equally)]


@_register_fault(
    "micro-batch dropped by a stage",
    "the last micro-batch never goes through the pipeline",
    needs="pp > 1, several micro-batches",
)
def _drop_last_micro_batch() -> Sequence[AbstractContextManager[object]]:
    original_run = Pipeline.run

    def run_without_last(self: Pipeline, batches: Sequence[Any], *rest: Any) -> None:
        original_run(self, batches[:-1] if len(batches) > 1 else batches, *rest)

    return [patch.object(Pipeline, "run", run_without_last)]


@_register_fault(
    "data order seeded per rank", "each rank shuffles by itself: samples come twice or never", needs="dp > 1"
)
def _shuffle_per_rank() -> Sequence[AbstractContextManager[object]]:
    def open_shuffled(job: Job, ranks: WorldCommunicator, data: Communicator, **options: Any) -> RunData:
        return open_run_data(dataclasses.replace(job, seed=job.seed + data.rank), ranks, data, **options)

    return [patch.object(run_state, "open_run_data", open_shuffled)]


# Reductions that are left out


@_register_fault("one parameter not reduced", "one matrix is left out of the exchange", needs="dp > 1, zero=0")
def _skip_one_parameter() -> Sequence[AbstractContextManager[object]]:
    def middle_matrix(model: nn.Module) -> list[nn.Parameter]:
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1 and parameter.requires_grad]
        return [matrices[len(matrices) // 2]]

    return skip_gradient_reduction(middle_matrix)


@_register_fault("biases not reduced", "biases of linear layers and convolutions are left out", needs="dp > 1, zero=0")
def _skip_biases() -> Sequence[AbstractContextManager[object]]:
    module_types = (nn.Linear, nn.modules.conv._ConvNd)
    return skip_gradient_reduction(
        lambda model: [
            module.bias for module in model.modules() if isinstance(module, module_types) and module.bias is not None
        ]
    )


@_register_fault(
    "norm layers not reduced", "parameters of norm layers are left out of the exchange", needs="dp > 1, zero=0"
)
def _skip_norms() -> Sequence[AbstractContextManager[object]]:
    return skip_gradient_reduction(norm_parameters)


@_register_fault(
    "norm layers not reduced over tp",
    "parameters of norm layers keep the gradient of one rank's part of the sequence",
    needs="tp > 1, sequence",
)
def _keep_local_norm_gradients() -> Sequence[AbstractContextManager[object]]:
    norm_tensors: dict[int, Tensor] = {}  # held, as a proof has two runs at once
    sum_gradients = train_step.sum_gradients

    def record_norms(model: nn.Module) -> None:
        norm_tensors.update({id(parameter): parameter for parameter in norm_parameters(model)})

    def sum_other_gradients(parameters: Sequence[nn.Parameter], ranks: Any) -> None:
        sum_gradients([parameter for parameter in parameters if id(parameter) not in norm_tensors], ranks)

    return [patch_model(record_norms), patch.object(train_step, "sum_gradients", sum_other_gradients)]


@_register_fault(
    "no sum over tp in backward", "a column-cut layer hands on its own share of the gradient", needs="tp > 1"
)
def _skip_backward_sum() -> Sequence[AbstractContextManager[object]]:
    return [patch.dict(tp_collectives._OPERATIONS, copy=(tp_collectives._copy, "copy"))]


@_register_fault(
    "bias added by every rank", "a row-cut layer adds its bias before the ranks are added up", needs="tp > 1"
)
def _add_bias_on_all_ranks() -> Sequence[AbstractContextManager[object]]:
    def row_forward(module: Any, tp: tp_collectives.TPCommunicator) -> Callable[..., Tensor]:
        product = tp_forwards.local_product(module)
        return lambda x: tp.reduce_from_region(product(x, module.bias))

    return [patch.dict(tp_forwards.FORWARD_BUILDERS, {"row": row_forward})]


@_register_fault(
    "reported loss of one rank", "gradients are right, the loss that is told is one rank's share", needs="dp > 1"
)
def _report_local_loss() -> Sequence[AbstractContextManager[object]]:
    send, receive = step_metrics.StepMetrics.send, step_metrics.StepMetrics.receive
    local_loss: list[Tensor] = []

    def send_and_keep(self: step_metrics.StepMetrics, *shares: Tensor, extra: Tensor) -> None:
        local_loss[:] = [shares[0].detach().double()]
        send(self, *shares, extra=extra)

    def receive_local(self: step_metrics.StepMetrics) -> tuple[tuple[Tensor, ...], Tensor]:
        values, rest = receive(self)
        return (local_loss[0], *values[1:]), rest

    return [
        patch.object(step_metrics.StepMetrics, "send", send_and_keep),
        patch.object(step_metrics.StepMetrics, "receive", receive_local),
    ]


# Norm and clipping


@_register_fault(
    "clip by local norm", "each rank clips by the norm of what it holds", needs="clip, and tp, pp or zero > 0"
)
def _clip_by_local_norm() -> Sequence[AbstractContextManager[object]]:
    def local_norm(grads: list[Tensor], copies: list[int], ranks: Any, **_: Any) -> Tensor:
        return grad_clip._local_norm([to_local(grad) for grad in grads], ranks)

    return [patch.object(grad_clip, "total_norm", local_norm)]


@_register_fault(
    "norm counts every copy", "what several ranks hold is in the norm several times", needs="clip, and dp or tp"
)
def _count_every_copy() -> Sequence[AbstractContextManager[object]]:
    total_norm = grad_clip.total_norm

    def inflated_norm(grads: list[Tensor], copies: list[int], ranks: Any, **options: Any) -> Tensor:
        return total_norm(grads, [1] * len(grads), ranks, **options)

    return [patch.object(grad_clip, "total_norm", inflated_norm)]


# Weights that are one


@_register_fault(
    "tied weight untied", "what two modules share becomes two parameters when it is cut", needs="tied, pp = 1, zero=0"
)
def _untie_weights() -> Sequence[AbstractContextManager[object]]:
    def untie(model: nn.Module) -> None:
        seen: set[int] = set()
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in seen:
                    module._parameters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                seen.add(id(parameter))

    return [patch_model(untie)]


@_register_fault(
    "tied weight untied over stages", "each stage trains its own copy of a shared weight", needs="tied, pp > 1"
)
def _untie_stage_weights() -> Sequence[AbstractContextManager[object]]:
    return [patch.object(train_step, "sum_gradients", lambda parameters, ranks: None)]


@_register_fault("weights seeded per rank", "each rank starts from its own random weights", needs="zero=0")
def _seed_weights_per_rank() -> Sequence[AbstractContextManager[object]]:
    original_build = build_model.initialize_model

    def build_seeded(job: Any, ranks: Any, **options: Any) -> nn.Module:
        return original_build(dataclasses.replace(job, seed=job.seed + ranks.world.rank), ranks, **options)

    return [
        patch.object(build_model, "initialize_model", build_seeded),
        patch.object(build_model, "broadcast_model", lambda model, ranks: None),
    ]


# Random numbers


@_register_fault(
    "dropout masks that differ over tp",
    "each rank drops other elements of what is whole everywhere",
    needs="tp > 1, dropout or noise",
)
def _seed_dropout_per_rank() -> Sequence[AbstractContextManager[object]]:
    seed_step = run_state.seed_step

    def seed_per_rank(device: torch.device, *position: int | str, **options: Any) -> None:
        seed_step(device, *position, dist.get_rank() if dist.is_initialized() else 0, **options)

    return [patch.object(run_state, "seed_step", seed_per_rank)]


# Buffers


@_register_fault("stale batch-norm buffers", "running statistics stay as they were", needs="batch norm")
def _freeze_batch_norm_buffers() -> Sequence[AbstractContextManager[object]]:
    backward = Run.backward

    def backward_and_restore(self: Run, batch: Any) -> Tensor:
        batch_norms = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
        saved_buffers = [
            (buffer, buffer.clone())
            for batch_norm in batch_norms
            for buffer in batch_norm.buffers()
            if not buffer.is_meta
        ]
        loss = backward(self, batch)
        for buffer, saved in saved_buffers:
            buffer.copy_(saved)
        return loss

    return [patch.object(Run, "backward", backward_and_restore)]


@_register_fault(
    "batch-norm buffers of one rank", "running statistics are each data rank's own", needs="batch norm, dp > 1"
)
def _keep_local_statistics() -> Sequence[AbstractContextManager[object]]:
    return [patch.object(step_metrics._RunningStatistics, "unpack", lambda self, sums: None)]


# The update


@_register_fault(
    "last shard not updated",
    "the last rank's smaller shard is left out",
    needs="zero > 0, rows that dp does not divide",
)
def _skip_last_shard() -> Sequence[AbstractContextManager[object]]:
    update = Run.update

    def update_and_restore(self: Run, *args: Any) -> Any:
        uneven_shards = [
            to_local(shard)
            for shard in self.rank_model.parameters
            if isinstance(shard, DTensor) and shard.shape[0] % self.data_parallel.size
        ]
        saved_shards = [shard.detach().clone() for shard in uneven_shards]
        step = update(self, *args)
        if self.data_parallel.rank == self.data_parallel.size - 1:
            with torch.no_grad():
                for shard, saved in zip(uneven_shards, saved_shards, strict=True):
                    shard.copy_(saved)
        return step

    return [patch.object(Run, "update", update_and_restore)]


@_register_fault(
    "optimizer state in the wrong order", "shards of the state are with the wrong ranks", needs="zero > 0 or tp > 1"
)
def _rotate_optimizer_state() -> Sequence[AbstractContextManager[object]]:
    update = Run.update

    def update_and_rotate(self: Run, *args: Any) -> Any:
        step = update(self, *args)
        for name, value in optimizer_tensors(self).items():
            if isinstance(value, DTensor) or tp_shard_of(self, name, value) is not None:
                group, local_value = (
                    self.data_parallel if isinstance(value, DTensor) else self.axes["tp"],
                    to_local(value),
                )
                shards = group.all_gather_object(local_value.clone())
                if all(shard.shape == local_value.shape for shard in shards):
                    local_value.copy_(shards[(group.rank + 1) % group.size])
        return step

    return [patch.object(Run, "update", update_and_rotate)]


@_register_fault(
    "learning rate per micro-batch",
    "the schedule moves once for each micro-batch",
    needs="a schedule, several micro-batches",
)
def _step_schedule_per_micro_batch() -> Sequence[AbstractContextManager[object]]:
    update = Run.update

    def update_and_step_schedules(self: Run, loss: Tensor, samples: int) -> Any:
        step = update(self, loss, samples)
        for _ in range(
            count_micro_batches(samples, self.data_parallel.size, self.plan.micro, self.plan.data.batch_shares) - 1
        ):
            for schedule in self.schedules:
                schedule.step()
        return step

    return [patch.object(Run, "update", update_and_step_schedules)]


# A parameter server


@_register_fault(
    "push lost",
    "what one rank pushes of its rows at one step never reaches the server, which goes on without it",
    needs="exchange=server, dp > 1",
)
def _lose_push() -> Sequence[AbstractContextManager[object]]:
    update = ParameterServerBackend.update

    def update_or_lose(self: ParameterServerBackend, **options: Any) -> None:
        if self._update_count == 0 and self._run.data_parallel.rank == 1:
            self._row_gradients = {}
        update(self, **options)

    return [patch.object(ParameterServerBackend, "update", update_or_lose)]


@_register_fault(
    "rows of each rank weigh alike",
    "each rank pushes the mean over its own samples, and the server adds them up",
    needs="exchange=server, dp > 1",
)
def _skip_row_weighting() -> Sequence[AbstractContextManager[object]]:
    finish_backward = ParameterServerBackend.finish_backward

    def collect_unweighted(self: ParameterServerBackend) -> None:
        finish_backward(self)
        self.scale_gradients(self._run.data_parallel.size)

    return [patch.object(ParameterServerBackend, "finish_backward", collect_unweighted)]


@_register_fault("gradients not cleared", "a step's gradient still holds that of the step before", needs="two steps")
def _keep_old_gradients() -> Sequence[AbstractContextManager[object]]:
    backward, update = Run.backward, Run.update
    old_gradients: weakref.WeakKeyDictionary[Run, list[Tensor | None]] = weakref.WeakKeyDictionary()

    def backward_and_add(self: Run, batch: Any) -> Tensor:
        loss = backward(self, batch)
        for parameter, old_gradient in zip(self.rank_model.parameters, old_gradients.get(self, []), strict=False):
            if parameter.grad is not None and old_gradient is not None:
                to_local(parameter.grad).add_(old_gradient)
        return loss

    def update_and_keep(self: Run, *args: Any) -> Any:
        grads = [parameter.grad for parameter in self.rank_model.parameters]
        step = update(self, *args)
        old_gradients[self] = [None if grad is None else to_local(grad).clone() for grad in grads]
        return step

    return [patch.object(Run, "backward", backward_and_add), patch.object(Run, "update", update_and_keep)]
