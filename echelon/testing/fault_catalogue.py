"""The catalogue of faults: mistakes in the mathematics that parallel training systems have shipped, put into a live run.

    with inject_fault("clip by local norm"):
        certificate = verify(job, plan)

Nothing crashes and the loss goes down: only a comparison with one device shows it. Every rank of a world has to inject the same fault
before its `Run` is made. The engine does not know of these faults. A fault's docstring is its description in docs/verify.md.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.engine import build_model, grad_clip, run_state, train_step
from echelon.engine.backends.parameter_server import ParameterServerBackend
from echelon.engine.data_setup import RunData
from echelon.engine.full_state import optimizer_tensors, tp_shard_of
from echelon.engine.loss_weighing import LossWeighing
from echelon.engine.parallel import tp_collectives, tp_forwards
from echelon.engine.parallel.pipeline_parallel import Pipeline
from echelon.engine.parallel.shard_layout import to_local
from echelon.engine.process_groups import Communicator
from echelon.engine.run import Run
from echelon.engine.step_metrics import StepMetrics, _RunningStatistics
from echelon.job import Job
from echelon.plan.batch_split import count_micro_batches
from echelon.testing.inject import (
    FAULTS,
    Patches,
    inject_fault,
    norm_parameters,
    patch_model,
    register_fault,
    register_wrapper,
    scale_loss,
    skip_gradient_reduction,
    wrap,
)

__all__ = ["FAULTS", "inject_fault"]


@register_wrapper("loss times tp", LossWeighing, "weigh", "tp > 1")
def _loss_times_tp(weigh: Any, self: LossWeighing, loss: Any, *rest: Any) -> Tensor:
    """every tp rank contributes the whole loss, and the ranks are summed"""
    return weigh(self, scale_loss(loss, self.run.axes["tp"].size), *rest)


@register_wrapper("loss times dp", LossWeighing, "weigh", "dp > 1")
def _loss_times_dp(weigh: Any, self: LossWeighing, loss: Any, *rest: Any) -> Tensor:
    """a sum over the data ranks where a mean was due"""
    return weigh(self, scale_loss(loss, self.run.data_parallel.size), *rest)


@register_wrapper("gradients times micro-batches", LossWeighing, "weigh", "several micro-batches")
def _multiply_by_micro_batches(weigh: Any, self: LossWeighing, loss: Any, micro_batch: Any, batch: Any) -> Tensor:
    """accumulated and never divided"""
    return weigh(self, loss, micro_batch, batch) * len(batch.micro_batches)


@register_wrapper(
    "mean of micro-batch means",
    LossWeighing,
    "weigh",
    "a loss that is (sum, count), and dp > 1 or several micro-batches",
)
def _average_micro_batch_means(weigh: Any, self: LossWeighing, loss: Any, *rest: Any) -> Tensor:
    """the loss is averaged inside each micro-batch, whatever the number of its tokens"""
    self.is_split = False  # the engine would read the count from the graph, weigh by it, and so be right
    return weigh(self, loss[0] / loss[1] if isinstance(loss, tuple) else loss, *rest)


@register_wrapper(
    "micro-batches weigh alike",
    LossWeighing,
    "weigh",
    "a loss that is a mean, a batch that micro-batches do not divide",
)
def _weigh_micro_batches_equally(weigh: Any, self: LossWeighing, loss: Any, micro_batch: Any, batch: Any) -> Tensor:
    """one with fewer samples counts as much as the others"""
    mean_samples = batch.samples / len(batch.micro_batches) / self.run.data_parallel.size
    return weigh(self, loss, micro_batch, batch) * (mean_samples / micro_batch.samples)


@register_wrapper("micro-batch dropped by a stage", Pipeline, "run", "pp > 1, several micro-batches")
def _drop_last_micro_batch(run: Any, self: Pipeline, batches: Sequence[Any], *rest: Any) -> None:
    """the last micro-batch never goes through the pipeline"""
    run(self, batches[:-1] if len(batches) > 1 else batches, *rest)


@register_wrapper("data order seeded per rank", run_state, "open_run_data", "dp > 1")
def _shuffle_per_rank(open_data: Any, job: Job, plan: Any, ranks: Any, data: Communicator, **options: Any) -> RunData:
    """each rank shuffles by itself: samples come twice or never"""
    return open_data(dataclasses.replace(job, seed=job.seed + data.rank), plan, ranks, data, **options)


@register_fault("one parameter not reduced", "dp > 1, zero=0")
def _skip_one_parameter() -> Patches:
    """one matrix is left out of the all-reduce"""

    def middle_matrix(model: nn.Module) -> list[nn.Parameter]:
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1 and parameter.requires_grad]
        return [matrices[len(matrices) // 2]]

    return skip_gradient_reduction(middle_matrix)


@register_fault("biases not reduced", "dp > 1, zero=0")
def _skip_biases() -> Patches:
    """biases of linear layers and convolutions are left out"""
    layer_types = (nn.Linear, nn.modules.conv._ConvNd)
    return skip_gradient_reduction(
        lambda model: [m.bias for m in model.modules() if isinstance(m, layer_types) and m.bias is not None]
    )


@register_fault("norm layers not reduced", "dp > 1, zero=0")
def _skip_norms() -> Patches:
    """parameters of norm layers are left out of the all-reduce"""
    return skip_gradient_reduction(norm_parameters)


@register_fault("norm layers not reduced over tp", "tp > 1, sequence")
def _keep_local_norm_gradients() -> Patches:
    """parameters of norm layers keep the gradient of one rank's part of the sequence"""
    norm_tensors: dict[int, Tensor] = {}  # of all runs: a proof has two at once

    def record_norms(model: nn.Module) -> None:
        norm_tensors.update({id(parameter): parameter for parameter in norm_parameters(model)})

    def sum_others(sum_gradients: Any, parameters: Sequence[nn.Parameter], ranks: Any) -> None:
        sum_gradients([parameter for parameter in parameters if id(parameter) not in norm_tensors], ranks)

    return [patch_model(record_norms), wrap(train_step, "sum_gradients", sum_others)]


@register_fault("no sum over tp in backward", "tp > 1")
def _skip_backward_sum() -> Patches:
    """a column-parallel layer passes on its own share of the gradient"""
    return [patch.dict(tp_collectives._OPERATIONS, copy=(tp_collectives._copy, "copy"))]


@register_fault("bias added by every rank", "tp > 1")
def _add_bias_on_all_ranks() -> Patches:
    """a row-parallel layer adds its bias before the ranks are summed"""

    def row_forward(module: Any, tp: tp_collectives.TPCommunicator) -> Callable[..., Tensor]:
        product = tp_forwards.local_product(module)
        return lambda x: tp.reduce_from_region(product(x, module.bias))

    return [patch.dict(tp_forwards.FORWARD_BUILDERS, {"row": row_forward})]


@register_fault("reported loss of one rank", "dp > 1")
def _report_local_loss() -> Patches:
    """gradients are right, the reported loss is one rank's share"""
    local_loss: list[Tensor] = []

    def send_and_keep(send: Any, self: StepMetrics, *shares: Tensor, extra: Tensor) -> None:
        local_loss[:] = [shares[0].detach().double()]
        send(self, *shares, extra=extra)

    def receive_local(receive: Any, self: StepMetrics) -> tuple[tuple[Tensor, ...], Tensor]:
        values, rest = receive(self)
        return (local_loss[0], *values[1:]), rest

    return [wrap(StepMetrics, "send", send_and_keep), wrap(StepMetrics, "receive", receive_local)]


@register_wrapper("clip by local norm", grad_clip, "total_norm", "clip, and tp, pp or zero > 0")
def _clip_by_local_norm(_: Any, grads: list[Tensor], copies: list[int], ranks: Any, **options: Any) -> Tensor:
    """each rank clips by the norm of what it holds"""
    return grad_clip._local_norm([to_local(grad) for grad in grads], ranks)


@register_wrapper("norm counts every copy", grad_clip, "total_norm", "clip, and dp or tp")
def _count_every_copy(norm: Any, grads: list[Tensor], copies: list[int], ranks: Any, **options: Any) -> Tensor:
    """replicated gradients count once per rank in the norm"""
    return norm(grads, [1] * len(grads), ranks, **options)


@register_fault("tied weight untied", "tied, pp = 1, zero=0")
def _untie_weights() -> Patches:
    """a weight that two modules share becomes two parameters"""

    def untie(model: nn.Module) -> None:
        seen: set[int] = set()
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in seen:
                    module._parameters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                seen.add(id(parameter))

    return [patch_model(untie)]


@register_wrapper("tied weight untied over stages", train_step, "sum_gradients", "tied, pp > 1")
def _untie_stage_weights(*_: Any) -> None:
    """each stage trains its own copy of a shared weight"""


@register_fault("weights seeded per rank", "zero=0")
def _seed_weights_per_rank() -> Patches:
    """each rank starts from its own random weights"""

    def build_seeded(initialize: Any, job: Any, plan: Any, ranks: Any, **options: Any) -> nn.Module:
        return initialize(dataclasses.replace(job, seed=job.seed + ranks.world.rank), plan, ranks, **options)

    no_broadcast = patch.object(build_model, "broadcast_model", lambda model, ranks: None)
    return [wrap(build_model, "initialize_model", build_seeded), no_broadcast]


@register_wrapper("dropout masks that differ over tp", run_state, "seed_step", "tp > 1, dropout or noise")
def _seed_dropout_per_rank(seed: Any, device: torch.device, *position: int | str, **options: Any) -> None:
    """each rank drops other elements of replicated activations"""
    seed(device, *position, dist.get_rank() if dist.is_initialized() else 0, **options)


@register_wrapper("stale batch-norm buffers", Run, "backward", "batch norm")
def _freeze_batch_norm_buffers(backward: Any, self: Run, batch: Any) -> Tensor:
    """running statistics are never updated"""
    batch_norms = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
    buffers = [buffer for batch_norm in batch_norms for buffer in batch_norm.buffers() if not buffer.is_meta]
    saved_buffers = [buffer.clone() for buffer in buffers]
    loss = backward(self, batch)
    for buffer, saved in zip(buffers, saved_buffers, strict=True):
        buffer.copy_(saved)
    return loss


@register_wrapper("batch-norm buffers of one rank", _RunningStatistics, "unpack", "batch norm, dp > 1")
def _keep_local_statistics(*_: Any) -> None:
    """running statistics are each data rank's own"""


@register_wrapper("last shard not updated", Run, "update", "zero > 0, rows that dp does not divide")
def _skip_last_shard(update: Any, self: Run, *args: Any) -> Any:
    """the last rank's smaller shard is left out"""
    dp = self.data_parallel
    parameters = [p for p in self.rank_model.parameters if isinstance(p, DTensor) and p.shape[0] % dp.size]
    shards = [to_local(parameter) for parameter in parameters]
    saved_shards = [shard.detach().clone() for shard in shards]
    step = update(self, *args)
    if dp.rank == dp.size - 1:
        with torch.no_grad():
            for shard, saved in zip(shards, saved_shards, strict=True):
                shard.copy_(saved)
    return step


@register_wrapper("optimizer state in the wrong order", Run, "update", "zero > 0 or tp > 1")
def _rotate_optimizer_state(update: Any, self: Run, *args: Any) -> Any:
    """shards of the state are on the wrong ranks"""
    step = update(self, *args)
    for name, value in optimizer_tensors(self).items():
        is_fsdp_shard = isinstance(value, DTensor)
        if not is_fsdp_shard and tp_shard_of(self, name, value) is None:
            continue
        group, local_value = self.data_parallel if is_fsdp_shard else self.axes["tp"], to_local(value)
        shards = group.all_gather_object(local_value.clone())
        if all(shard.shape == local_value.shape for shard in shards):
            local_value.copy_(shards[(group.rank + 1) % group.size])
    return step


@register_wrapper("learning rate per micro-batch", Run, "update", "a schedule, several micro-batches")
def _step_schedule_per_micro_batch(update: Any, self: Run, loss: Tensor, samples: int) -> Any:
    """the schedule is stepped once per micro-batch"""
    step, plan = update(self, loss, samples), self.plan
    count = count_micro_batches(samples, self.data_parallel.size, plan.micro, plan.data.batch_shares)
    for _ in range(count - 1):
        for schedule in self.schedules:
            schedule.step()
    return step


@register_wrapper("push lost", ParameterServerBackend, "update", "exchange=server, dp > 1")
def _lose_push(update: Any, self: ParameterServerBackend, **options: Any) -> None:
    """one rank's push of its rows at one step never reaches the server, which continues without it"""
    if self._update_count == 0 and self._run.data_parallel.rank == 1:
        self._row_gradients = {}
    update(self, **options)


@register_wrapper("rows of each rank weigh alike", ParameterServerBackend, "finish_backward", "exchange=server, dp > 1")
def _skip_row_weighting(finish_backward: Any, self: ParameterServerBackend) -> None:
    """each rank pushes the mean over its own samples, and the server sums them"""
    finish_backward(self)
    self.scale_gradients(self._run.data_parallel.size)


@register_fault("gradients not cleared", "two steps")
def _keep_old_gradients() -> Patches:
    """a step's gradient still contains that of the step before"""
    old_gradients: weakref.WeakKeyDictionary[Run, list[Tensor | None]] = weakref.WeakKeyDictionary()

    def backward_and_add(backward: Any, self: Run, batch: Any) -> Tensor:
        loss = backward(self, batch)
        for parameter, old_gradient in zip(self.rank_model.parameters, old_gradients.get(self, []), strict=False):
            if parameter.grad is not None and old_gradient is not None:
                to_local(parameter.grad).add_(old_gradient)
        return loss

    def update_and_keep(update: Any, self: Run, *args: Any) -> Any:
        grads = [parameter.grad for parameter in self.rank_model.parameters]
        step = update(self, *args)
        old_gradients[self] = [None if grad is None else to_local(grad).clone() for grad in grads]
        return step

    return [wrap(Run, "backward", backward_and_add), wrap(Run, "update", update_and_keep)]
