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

from echelon.engine import build_model, grad_clip, step_metrics
from echelon.engine import run as engine
from echelon.engine.backends.parameter_server import Hub
from echelon.engine.data_setup import Intake, open_intake
from echelon.engine.parallel import tensor_parallel
from echelon.engine.parallel import tp_collectives as tensor_axis
from echelon.engine.parallel.pipeline_parallel import Pipeline
from echelon.engine.parallel.shard_layout import local
from echelon.engine.process_groups import Group, Ranks
from echelon.engine.run import Run
from echelon.engine.run_state import optimizer_tensors, piece_of
from echelon.errors import EchelonError
from echelon.job import Job
from echelon.plan.batch_split import rounds
from echelon.testing.inject import Changes, Fault, changed_loss, changed_model, left_out, norms_of, times

#: By name.
CATALOGUE: dict[str, Fault] = {}


@contextlib.contextmanager
def injected(name: str) -> Iterator[None]:
    """Runs that are made inside have this fault."""
    if name not in CATALOGUE:
        raise EchelonError(f"{name!r}: no such fault; the catalogue has {', '.join(CATALOGUE)}")
    with contextlib.ExitStack() as stack:
        for change in CATALOGUE[name].changes():
            stack.enter_context(change)
        yield


def _fault(name: str, what: str, *, needs: str) -> Callable[[Changes], Changes]:
    def enter(changes: Changes) -> Changes:
        CATALOGUE[name] = Fault(name=name, what=what, needs=needs, changes=changes)
        return changes

    return enter


# Factors


@_fault("loss times tp", "every rank of the tensor axis brings the whole loss, and they are added up", needs="tp > 1")
def _loss_times_tp() -> Sequence[AbstractContextManager[object]]:
    return [changed_loss(lambda run, value: times(value, run.axes["tp"].size))]


@_fault("loss times dp", "a sum over the data ranks where a mean was due", needs="dp > 1")
def _loss_times_dp() -> Sequence[AbstractContextManager[object]]:
    return [changed_loss(lambda run, value: times(value, run.data.size))]


@_fault("gradients times micro-batches", "accumulated and never divided", needs="several micro-batches")
def _times_micro_batches() -> Sequence[AbstractContextManager[object]]:
    weighed = Run._weighed

    def undivided(self: Run, value: Any, micro: Any, batch: Any, sums: Any) -> Tensor:
        return weighed(self, value, micro, batch, sums) * len(batch.micros)

    return [patch.object(Run, "_weighed", undivided)]


# Weights of samples


@_fault(
    "mean of micro-batch means",
    "the loss is averaged inside each micro-batch, whatever the number of its tokens",
    needs="a loss that is (sum, count), and dp > 1 or several micro-batches",
)
def _mean_of_means() -> Sequence[AbstractContextManager[object]]:
    def averaged(run: Run, value: Any) -> Any:
        run._watched = False  # the watch would read the count from the graph, weigh by it, and so be right
        return value[0] / value[1] if isinstance(value, tuple) else value

    return [changed_loss(averaged)]


@_fault(
    "micro-batches weigh alike",
    "one with fewer samples counts as much as the others",
    needs="a loss that is a mean, a batch that micro-batches do not divide",
)
def _alike() -> Sequence[AbstractContextManager[object]]:
    weighed = Run._weighed

    def even(self: Run, value: Any, micro: Any, batch: Any, sums: Any) -> Tensor:
        share = batch.samples / len(batch.micros) / self.data.size
        return weighed(self, value, micro, batch, sums) * (share / micro.samples)

    return [patch.object(Run, "_weighed", even)]


@_fault(
    "micro-batch dropped by a stage",
    "the last micro-batch never goes through the pipeline",
    needs="pp > 1, several micro-batches",
)
def _dropped() -> Sequence[AbstractContextManager[object]]:
    run = Pipeline.run

    def short(self: Pipeline, batches: Sequence[Any], *others: Any) -> None:
        run(self, batches[:-1] if len(batches) > 1 else batches, *others)

    return [patch.object(Pipeline, "run", short)]


@_fault("data order seeded per rank", "each rank shuffles by itself: samples come twice or never", needs="dp > 1")
def _own_order() -> Sequence[AbstractContextManager[object]]:
    def shuffled(job: Job, ranks: Ranks, data: Group, **how: Any) -> Intake:
        return open_intake(dataclasses.replace(job, seed=job.seed + data.rank), ranks, data, **how)

    return [patch.object(engine, "open_intake", shuffled)]


# Reductions that are left out


@_fault("one parameter not reduced", "one matrix is left out of the exchange", needs="dp > 1, zero=0")
def _one_left_out() -> Sequence[AbstractContextManager[object]]:
    def middle(model: nn.Module) -> list[nn.Parameter]:
        matrices = [value for value in model.parameters() if value.ndim > 1 and value.requires_grad]
        return [matrices[len(matrices) // 2]]

    return left_out(middle)


@_fault("biases not reduced", "biases of linear layers and convolutions are left out", needs="dp > 1, zero=0")
def _biases_left_out() -> Sequence[AbstractContextManager[object]]:
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    return left_out(
        lambda model: [each.bias for each in model.modules() if isinstance(each, kinds) and each.bias is not None]
    )


@_fault("norm layers not reduced", "parameters of norm layers are left out of the exchange", needs="dp > 1, zero=0")
def _norms_left_out() -> Sequence[AbstractContextManager[object]]:
    return left_out(norms_of)


@_fault(
    "norm layers not reduced over tp",
    "parameters of norm layers keep the gradient of one rank's part of the sequence",
    needs="tp > 1, sequence",
)
def _norms_of_parts() -> Sequence[AbstractContextManager[object]]:
    chosen: dict[int, Tensor] = {}  # held, as a proof has two runs at once
    add_up = engine.add_up

    def note(model: nn.Module) -> None:
        chosen.update({id(each): each for each in norms_of(model)})

    def without(parameters: Sequence[nn.Parameter], ranks: Any) -> None:
        add_up([each for each in parameters if id(each) not in chosen], ranks)

    return [changed_model(note), patch.object(engine, "add_up", without)]


@_fault("no sum over tp in backward", "a column-cut layer hands on its own share of the gradient", needs="tp > 1")
def _no_sum_in_backward() -> Sequence[AbstractContextManager[object]]:
    return [patch.object(tensor_axis._Copy, "backward", staticmethod(lambda ctx, *grads: (grads[0], None)))]


@_fault("bias added by every rank", "a row-cut layer adds its bias before the ranks are added up", needs="tp > 1")
def _bias_by_all() -> Sequence[AbstractContextManager[object]]:
    def row(module: Any, axis: tensor_parallel.Axis) -> Callable[..., Tensor]:
        product = tensor_parallel._product(module)
        return lambda x: axis.summed(product(x, module.bias))

    return [patch.dict(tensor_parallel._FORWARDS, {"row": row})]


@_fault("reported loss of one rank", "gradients are right, the loss that is told is one rank's share", needs="dp > 1")
def _own_loss() -> Sequence[AbstractContextManager[object]]:
    send, receive = step_metrics.StepStatistics.send, step_metrics.StepStatistics.receive
    own: list[Tensor] = []

    def keep(self: step_metrics.StepStatistics, *shares: Tensor, rest: Tensor) -> None:
        own[:] = [shares[0].detach().double()]
        send(self, *shares, rest=rest)

    def told(self: step_metrics.StepStatistics) -> tuple[tuple[Tensor, ...], Tensor]:
        numbers, rest = receive(self)
        return (own[0], *numbers[1:]), rest

    return [
        patch.object(step_metrics.StepStatistics, "send", keep),
        patch.object(step_metrics.StepStatistics, "receive", told),
    ]


# Norm and clipping


@_fault("clip by local norm", "each rank clips by the norm of what it holds", needs="clip, and tp, pp or zero > 0")
def _local_norm() -> Sequence[AbstractContextManager[object]]:
    def mine(grads: list[Tensor], copies: list[int], ranks: Any, **_: Any) -> Tensor:
        return grad_clip._norm([local(grad) for grad in grads], ranks)

    return [patch.object(grad_clip, "total_norm", mine)]


@_fault("norm counts every copy", "what several ranks hold is in the norm several times", needs="clip, and dp or tp")
def _copies_counted() -> Sequence[AbstractContextManager[object]]:
    total = grad_clip.total_norm

    def inflated(grads: list[Tensor], copies: list[int], ranks: Any, **how: Any) -> Tensor:
        return total(grads, [1] * len(grads), ranks, **how)

    return [patch.object(grad_clip, "total_norm", inflated)]


# Weights that are one


@_fault(
    "tied weight untied", "what two modules share becomes two parameters when it is cut", needs="tied, pp = 1, zero=0"
)
def _untied() -> Sequence[AbstractContextManager[object]]:
    def untie(model: nn.Module) -> None:
        seen: set[int] = set()
        for module in model.modules():
            for key, value in module._parameters.items():
                if value is not None and id(value) in seen:
                    module._parameters[key] = nn.Parameter(value.detach().clone(), value.requires_grad)
                seen.add(id(value))

    return [changed_model(untie)]


@_fault("tied weight untied over stages", "each stage trains its own copy of a shared weight", needs="tied, pp > 1")
def _untied_stages() -> Sequence[AbstractContextManager[object]]:
    return [patch.object(engine, "add_up", lambda parameters, ranks: None)]


@_fault("weights seeded per rank", "each rank starts from its own random weights", needs="zero=0")
def _own_weights() -> Sequence[AbstractContextManager[object]]:
    build = build_model.build

    def seeded(job: Any, ranks: Any, **options: Any) -> nn.Module:
        return build(dataclasses.replace(job, seed=job.seed + ranks.world.rank), ranks, **options)

    return [
        patch.object(build_model, "build", seeded),
        patch.object(build_model, "equalise", lambda model, ranks: None),
    ]


# Random numbers


@_fault(
    "dropout masks that differ over tp",
    "each rank drops other elements of what is whole everywhere",
    needs="tp > 1, dropout or noise",
)
def _own_masks() -> Sequence[AbstractContextManager[object]]:
    seed = engine.seed_step

    def seeded(device: torch.device, *place: int | str, **options: Any) -> None:
        seed(device, *place, dist.get_rank() if dist.is_initialized() else 0, **options)

    return [patch.object(engine, "seed_step", seeded)]


# Buffers


@_fault("stale batch-norm buffers", "running statistics stay as they were", needs="batch norm")
def _stale() -> Sequence[AbstractContextManager[object]]:
    backward = Run.backward

    def forgetful(self: Run, batch: Any) -> Tensor:
        norms = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
        kept = [(buffer, buffer.clone()) for each in norms for buffer in each.buffers() if not buffer.is_meta]
        loss = backward(self, batch)
        for buffer, old in kept:
            buffer.copy_(old)
        return loss

    return [patch.object(Run, "backward", forgetful)]


@_fault("batch-norm buffers of one rank", "running statistics are each data rank's own", needs="batch norm, dp > 1")
def _own_statistics() -> Sequence[AbstractContextManager[object]]:
    return [patch.object(step_metrics._Running, "set", lambda self, sums: None)]


# The update


@_fault(
    "last shard not updated",
    "the last rank's smaller shard is left out",
    needs="zero > 0, rows that dp does not divide",
)
def _last_shard() -> Sequence[AbstractContextManager[object]]:
    update = Run.update

    def skipping(self: Run, *args: Any) -> Any:
        uneven = [
            local(each)
            for each in self.assembly.parameters
            if isinstance(each, DTensor) and each.shape[0] % self.data.size
        ]
        before = [each.detach().clone() for each in uneven]
        step = update(self, *args)
        if self.data.rank == self.data.size - 1:
            with torch.no_grad():
                for each, old in zip(uneven, before, strict=True):
                    each.copy_(old)
        return step

    return [patch.object(Run, "update", skipping)]


@_fault(
    "optimizer state in the wrong order", "shards of the state are with the wrong ranks", needs="zero > 0 or tp > 1"
)
def _wrong_order() -> Sequence[AbstractContextManager[object]]:
    update = Run.update

    def shifted(self: Run, *args: Any) -> Any:
        step = update(self, *args)
        for name, value in optimizer_tensors(self).items():
            if isinstance(value, DTensor) or piece_of(self, name, value) is not None:
                group, here = self.data if isinstance(value, DTensor) else self.axes["tp"], local(value)
                others = group.gather(here.clone())
                if all(each.shape == here.shape for each in others):
                    here.copy_(others[(group.rank + 1) % group.size])
        return step

    return [patch.object(Run, "update", shifted)]


@_fault(
    "learning rate per micro-batch",
    "the schedule moves once for each micro-batch",
    needs="a schedule, several micro-batches",
)
def _rate_per_micro_batch() -> Sequence[AbstractContextManager[object]]:
    update = Run.update

    def hurried(self: Run, loss: Tensor, samples: int) -> Any:
        step = update(self, loss, samples)
        for _ in range(rounds(samples, self.data.size, self.plan.micro, self.plan.shares) - 1):
            for schedule in self.schedules:
                schedule.step()
        return step

    return [patch.object(Run, "update", hurried)]


# A parameter server


@_fault(
    "push lost",
    "what one rank pushes of its rows at one step never reaches the server, which goes on without it",
    needs="exchange=server, dp > 1",
)
def _push_lost() -> Sequence[AbstractContextManager[object]]:
    push = Hub.push

    def losing(self: Hub, **how: Any) -> None:
        if self.updates == 0 and self.rank == 1:
            self.forget()
        push(self, **how)

    return [patch.object(Hub, "push", losing)]


@_fault(
    "rows of each rank weigh alike",
    "each rank pushes the mean over its own samples, and the server adds them up",
    needs="exchange=server, dp > 1",
)
def _rows_alike() -> Sequence[AbstractContextManager[object]]:
    collect = Hub.collect

    def unweighed(self: Hub) -> None:
        collect(self)
        self.scale(self.ranks)

    return [patch.object(Hub, "collect", unweighed)]


@_fault("gradients not cleared", "a step's gradient still holds that of the step before", needs="two steps")
def _not_cleared() -> Sequence[AbstractContextManager[object]]:
    backward, update = Run.backward, Run.update
    left: weakref.WeakKeyDictionary[Run, list[Tensor | None]] = weakref.WeakKeyDictionary()

    def added(self: Run, batch: Any) -> Tensor:
        loss = backward(self, batch)
        for each, old in zip(self.assembly.parameters, left.get(self, []), strict=False):
            if each.grad is not None and old is not None:
                local(each.grad).add_(old)
        return loss

    def keeping(self: Run, *args: Any) -> Any:
        grads = [each.grad for each in self.assembly.parameters]
        step = update(self, *args)
        left[self] = [None if grad is None else local(grad).clone() for grad in grads]
        return step

    return [patch.object(Run, "backward", added), patch.object(Run, "update", keeping)]
