"""A job under a plan, live on this rank: batches in, optimizer steps out.

    run = Run(job, plan, world)
    for batch in run.batches():
        step = run.step(batch)

Every rank executes the same calls in the same order; what `step` returns is the same on all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from echelon.data.loader import Micro, StepBatch
from echelon.engine import grad_clip, run_state
from echelon.engine.backends.launch_servers import Elsewhere
from echelon.engine.backends.parameter_server import Hub
from echelon.engine.buffer_rollback import Rollback
from echelon.engine.buffer_rule_check import StateRules
from echelon.engine.build_model import Assembly, takes_sparse
from echelon.engine.checkpoint import save_load
from echelon.engine.checkpoint.function_state import loss_parameters, unchanged
from echelon.engine.checkpoint.read_history import ReadHistory
from echelon.engine.checkpoint.run_attributes import Attributes
from echelon.engine.checkpoint.schedule_state import takes_metric
from echelon.engine.checkpoint.state_check import require_storable, require_storable_state
from echelon.engine.coordinated_stop import Agreement
from echelon.engine.data_setup import Mover, open_intake, own_generators, seed_step
from echelon.engine.evaluate import evaluate
from echelon.engine.evaluated_loss import measured, recounted
from echelon.engine.init_model import broadcast
from echelon.engine.loss_weights import Averages, divisor, doubts, nothing, weighed
from echelon.engine.metrics import Kind
from echelon.engine.optimizers import (
    adopt,
    begin_late,
    loss_parameters_of,
    make_optimizers,
    make_schedules,
    settings_alone,
    stepped_sparse,
)
from echelon.engine.parallel.fsdp import forget_meshes
from echelon.engine.parallel.max_norm_sync import agree
from echelon.engine.parallel.pipeline_parallel import Pipeline, add_up
from echelon.engine.parallel.whole_tensor_optimizer import whole_optimizers
from echelon.engine.precision import LossScale, autocast, switch
from echelon.engine.process_groups import Group, Ranks
from echelon.engine.replaced_parameters import Replacements
from echelon.engine.run_state import State
from echelon.engine.schedule_reads import ScheduleReads
from echelon.engine.shared_state_check import SharedState
from echelon.engine.step_metrics import StepStatistics
from echelon.engine.step_result import Later, Step
from echelon.engine.watch import Watch
from echelon.errors import DivergenceError, PlanError, TrainingError
from echelon.job import Job, call_loss, call_model, make_dense
from echelon.loss_counts import given_again
from echelon.plan.plan import Plan
from echelon.tree import tensors
from echelon.trials.random_state import random_states
from echelon.trials.trial_context import one_process
from echelon.world import World, usable_cores


@dataclasses.dataclass(slots=True)
class _Sums:
    """What a step's micro-batches add up to on this rank; None: nothing was computed here."""

    total: Tensor | None = None
    items: Tensor | None = None


class Run:
    """A job under a plan on this rank."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        world: World,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        workers: int = 0,
        warn: Callable[[str], None] = lambda message: None,
        elsewhere: Elsewhere | None = None,
        watch: bool = True,
    ) -> None:
        """`dtype` recasts the model and its floating inputs, for proofs in float64, in place: `Isolated` copies the user's own module. `elsewhere`:
        parameter servers that run already. `watch`: compare ranks while they train (a proof compares them itself)."""
        if elsewhere is not None and not plan.served:
            raise PlanError(
                f'servers={elsewhere.address}: the plan "{plan}" uses no servers; add exchange=server to it, or leave servers out'
            )
        self.elsewhere = elsewhere
        self.job, self.plan, self.world = job, plan, world
        self.ranks = Ranks(world, device)
        try:
            self._begin(job, plan, world, dtype, workers, warn)
            self.watch = Watch(self, warn, off=not watch)
            self._replacements = Replacements(plan, self.model, self.pieces)
            self._shared_state = SharedState(self)
        except BaseException:
            self.ranks.close()  # a group that still runs when Python ends may abort the process
            raise

    def _begin(
        self,
        job: Job,
        plan: Plan,
        world: World,
        dtype: torch.dtype | None,
        workers: int,
        warn: Callable[[str], None],
    ) -> None:
        if plan.ranks != world.size:
            raise PlanError(
                f'plan "{plan}" is for {plan.ranks} ranks and there are {world.size}: start as many as it needs, or plan for {world.size}'
            )
        #: Whether a step is computed in parts, whose losses' counts are looked at.
        self._watched = False
        #: By axis, the ranks that this one works with on it; `data`: those that hold other samples.
        self.axes = self.ranks.axes(plan.mesh)
        self.data = self.axes["dp"]
        #: The ranks that compute the same samples together: tp x pp.
        self.core = self.ranks.core
        self.device, self._move = self.ranks.device, Mover(self.ranks.device, dtype)
        if self.ranks.staged:
            warn(
                "ranks share a GPU, which NCCL refuses: gradients go through the hosts' memory (gloo), which is far slower; start "
                "one rank per GPU"
            )
        if self.ranks.mixed_hashes:
            warn(
                "Python hashes strings differently on some ranks, so that sets have other orders there; export PYTHONHASHSEED=0 for every rank"
            )
        self.precision = "fp32" if dtype is not None else plan.precision or job.precision
        self.workers = workers
        intake = open_intake(job, self.ranks, self.data, micro=plan.micro, workers=workers, shares=plan.shares)
        self.loader, self.total_steps = intake.loader, intake.total_steps
        #: Both 0 for a stream, whose length is not known.
        self.steps_per_epoch, self.samples = intake.steps_per_epoch, intake.samples
        #: Steps before the first epoch, on a part of the data.
        self.warmup = intake.warmup
        #: How samples are ordered and what they hold, each as a short text where it is known: a checkpoint goes on with these only.
        self.order, self.content = intake.order, intake.content
        #: How each metric is added up (metrics.py), once the first evaluation has told.
        self.metric_kinds: dict[str, Kind] = {}
        #: Whether evaluations weigh the loss by samples, because no other weight joins its batches.
        self.loss_by_samples = False
        #: Whether evaluations must see to it that a second call of the loss leaves no trace.
        self.loss_keeps_state = True
        alone = settings_alone(job)
        self.assembly = Assembly(
            job, plan, self.ranks, self.axes, dtype=dtype, loss=self._loss_of, measure=self._measure, warn=warn
        )
        self.model, self.pieces = self.assembly.model, self.assembly.pieces
        #: The model's own generators, where ranks or stages would else draw the same, or out of step. One device keeps them as they are.
        self._generators = own_generators(self.model) if self.data.size > 1 or self.axes["pp"].size > 1 else []
        #: Of the whole model, whatever this rank keeps of it.
        self.fingerprint, self.shapes = self.assembly.fingerprint, self.assembly.shapes
        #: By place, the optimizers that step on whole tensors: they compute with more than the part that this rank holds.
        self.whole = whole_optimizers(
            job, plan, self.ranks, self.axes, model=self.model, pieces=self.pieces, shapes=self.shapes
        )
        held_by_loss = loss_parameters(job, self.model)
        self.optimizers = make_optimizers(
            job,
            self.model,
            self.ranks,
            shapes=self.shapes,
            fused=plan.fused,
            served={table.name for table in plan.tables},
            whole=self.whole,
            others=held_by_loss.values(),
            sparse=takes_sparse(plan),
            alone=alone,
        )
        if takes_sparse(plan):
            make_dense(self.model, keep=stepped_sparse(self.optimizers))
        #: Parameters that the loss holds and the optimizers train, by name: every rank has them whole.
        self.loss_parameters = loss_parameters_of(self.optimizers, held_by_loss, plan, gathered=bool(self.whole))
        broadcast([value.detach() for value in self.loss_parameters.values()], self.ranks)
        self.schedule_reads = ScheduleReads(plan, self.model, self.pieces, self.optimizers, self.whole)
        with self.ranks.together(), self.schedule_reads.watching():
            self.schedules = make_schedules(job, self.optimizers, self.total_steps)
        #: What this rank has to do with a parameter server, under plans that have one.
        self.hub = Hub(self, self.assembly.first) if plan.served else None
        if self.hub is not None and (tedious := self.hub.tedious(self.total_steps)):
            warn(tedious)
        self.assembly.first = {}
        #: Of ranks that do not wait for each other: how they stop at the same step all the same.
        self._agreement = Agreement(self.data, plan.staleness) if plan.free else None
        #: The ranks that a step adds numbers up over.
        self._together = Group(0, 1, self.device) if plan.free else self.data
        self._state_rules = StateRules(self)
        self.statistics = StepStatistics(
            self.model, self._together, split=self._state_rules.split, frozen=self.assembly.sharding is None, warn=warn
        )
        self._averages, self._rollback = Averages(self.device), Rollback(self.model)
        self._frozen = [(name, value) for name, value in self.model.named_parameters() if not value.requires_grad]
        #: Of an accelerator: what ranks saw of the step before, which the host looks at when it comes to the next one.
        self._seen: Later | None = None
        #: A zero that depends on the last output, for a loss that counts nothing of it.
        self._zero: Tensor | None = None
        #: Whether the last step should be compared with one device before its update (of an accelerator: the step before it).
        self.doubtful = False
        #: What the loss was called with last.
        self._called: tuple[Any, Any] = None, None
        self.loss_scale = LossScale() if self.precision == "fp16" else None
        #: About how many items a step's (sum, count) loss counts: a power of two that keeps half precision in range.
        self.nominal: float | None = None
        #: Whether parts of a batch are weighed by what their losses average over, instead of by their samples.
        self._weighing = False
        self.step_number = 0
        self.read_history = ReadHistory(self)
        #: What a checkpoint is to hold about the job (flow/run_settings.py), and what the one that was loaded holds; None: nothing.
        self.job_record: dict[str, Any] | None = None
        self.loaded_record: dict[str, Any] | None = None
        #: Whether schedules are overridden: a checkpoint may have more or fewer of them, and theirs are made again after loading.
        self.replaces_schedules = False
        #: Called once the run is closed.
        self.at_close: list[Callable[[], None]] = []
        self.warn = warn
        #: Of the batch that was evaluated last: its output, the counts of its loss's averages by the first of them, and what its sum was divided by
        #: where nothing was counted.
        self._output: Any = None
        self.ratios: tuple[float, ...] | None = None
        self.loss_floor = 0.0
        #: Entered around each seeding, by who wants to know what was drawn since the last one.
        self.around_seed: Callable[[], AbstractContextManager[None]] | None = None
        #: Batches that a pipeline has evaluated.
        self._measured = 0
        self._previous: Step | None = None
        #: Set it on any rank (a signal handler may): every rank then learns of it in the same step, by `Step.asked`.
        self.stop_asked = False
        self._one = torch.ones((), device=self.device)
        self._asked = self._one
        #: Whether optimizer state is yet to be looked at, which is made by the first step.
        self._unchecked_state = require_storable(self)
        #: Counters and flags of modules and optimizers, for checkpoints.
        self.attributes = Attributes(self)
        self._restore = self._set_up()

    # What it is made of

    def _set_up(self) -> Callable[[], None]:
        """Set what is the whole process's; returns what puts it back."""
        restore = switch(self.precision)
        threads = torch.get_num_threads()
        if self.device.type == "cpu":
            # Said by itself, not left to OMP_NUM_THREADS: torchrun sets that to 1 where the user set nothing.
            torch.set_num_threads(self.plan.threads or max(usable_cores() // self.world.local_size, 1))

        def put_back() -> None:
            restore()
            torch.set_num_threads(threads)

        return put_back

    def _loss_of(self, model: nn.Module, batch: Any) -> Any:
        """The loss of a batch: a mean, or (sum, count)."""
        with autocast(self.precision, self.device):
            output = call_model(self.job, model, batch)
            value = call_loss(self.job, output, batch, model)
            self._zero = nothing(output, value)
            self._called = (output, batch) if self._watched else (None, None)
        return (value[0], torch.as_tensor(value[1], device=self.device)) if isinstance(value, tuple) else value

    # The step

    def batches(self, stop: int | None = None) -> Iterator[StepBatch]:
        """This rank's batches from where the run stands to `stop` (default: the end of the training)."""
        steps = self.loader.steps(self.step_number, self.total_steps if stop is None else stop)
        return steps if self.hub is None else self.hub.ahead(steps)

    def step(self, batch: StepBatch) -> Step:
        """One optimizer step: every micro-batch, one averaged gradient, one update."""
        return self.finish(self.backward(batch), batch)

    def finish(self, loss: Tensor, batch: StepBatch) -> Step:
        """The rest of a step after `backward`: the loss is a number, then the update."""
        if self.device.type == "cpu":
            self._require_number(float(loss), self.step_number)
        else:
            self.settle()  # an accelerator is still at work on this one: the step before is looked at
        self._previous = self.update(loss, batch.samples)
        return self._previous

    def backward(self, batch: StepBatch) -> Tensor:
        """Leave the gradient of the global batch's loss in `.grad`; returns that loss."""
        self._watched = self.data.size > 1 or len(batch.micros) > 1
        again = self._watched and self.nominal is None and self.hub is None and self.device.type == "cpu"
        self._replacements.begin()
        self.read_history.note(batch)
        self.prepare(batch)
        self._shared_state.begin(parts=self._watched)
        versions = self._read_versions = _versions(batch)
        if again:
            self._rollback.keep()
        loss = self._accumulate(batch)
        if loss is None:
            assert again
            if self.attributes.functions.changed():
                raise DivergenceError(
                    f"step {batch.step + 1}: the loss averages over unequal counts for the first time and keeps values between calls, so that the step "
                    "cannot be computed again with the right weights; return (sum, count) from the loss",
                    cause="averages over unequal counts",
                )
            if _versions(batch) != versions:
                raise DivergenceError(
                    f"step {batch.step + 1}: the loss averages over unequal counts for the first time and forward changes its input in place, so "
                    "that the step cannot be computed again with the right weights; return (sum, count) from the loss, or copy the input",
                    cause="averages over unequal counts",
                )
            self._undo(batch.step)
            loss = self._accumulate(batch)
            self.doubtful = True  # parts were never weighed so before
        assert loss is not None
        self._state_rules.require_known(batch)
        self._replacements.require_none(batch.step)
        self._shared_state.require_unchanged(batch.step)
        return loss

    def is_unedited(self, batch: StepBatch) -> bool:
        """Whether the last step's forward left its samples as they were."""
        return _versions(batch) == self._read_versions

    def prepare(self, batch: StepBatch) -> None:
        """Before the first steps that are computed in parts: learn how calls change the model's state, by calling it. Every rank must call it;
        `backward` does so itself."""
        self._state_rules.prepare(batch)

    def _undo(self, step: int) -> None:
        """Forget the step, to compute it again."""
        if self.statistics.calls is not None:
            self.statistics.calls.begin_part()
        changed = self._rollback.undo()
        if changed is not None:
            raise DivergenceError(
                f"step {step + 1}: the loss averages over unequal counts for the first time and {changed} changes for the first time, so that "
                "the step cannot be computed again with the right weights; return (sum, count) from the loss",
                tensor=changed,
                cause="averages over unequal counts",
            )
        for parameter in self.assembly.parameters:
            parameter.grad = None

    def _accumulate(self, batch: StepBatch) -> Tensor | None:
        """Forward and backward of every part; None where the parts were not weighed as the loss counts, which it now does."""
        self._seed(batch.step, self.data.rank)
        for parameter in self.loss_parameters.values():
            parameter.grad = None  # the user's own: a profile or a trial may have left one
        self.statistics.begin()
        self.statistics.weigh(sum(micro.samples for micro in batch.micros) / batch.samples)
        self._averages.begin()
        self.watch.begin(batch)
        sums = _Sums()
        if self.hub is not None:
            self.hub.begin(batch)
        if self.assembly.pipeline is not None:
            try:
                self._flow(self.assembly.pipeline, batch, sums)
            except RuntimeError:  # torch's, where a stage sends what requires a gradient now and did not at the start
                self._adopt_thawed(batch.step)
                raise
        else:
            self._alternate(batch, sums)
        if self.assembly.exchange is not None:
            self.assembly.exchange.finish()
        if self.assembly.sharding is not None:
            self.assembly.sharding.finish()
        add_up(self.assembly.partial, self.axes["tp"])
        if self.data.size > 1:
            add_up(list(self.loss_parameters.values()), self.data)
        if self.hub is not None:
            self.hub.collect()
        self._agree_on_shortened()
        self._adopt_thawed(batch.step)
        loss, count, counted, seen = self._received(sums)
        if self._misweighed(seen, counted, batch.step):
            self._weighing = True
            return None
        if counted and self._watched:
            count = divisor(seen, count)
        return self._finish(loss, count, counted, self._fraction(batch))

    def _adopt_thawed(self, step: int) -> None:
        """Train parameters that were frozen at the start and that forward has let train since."""
        thawed = [(name, value) for name, value in self._frozen if value.requires_grad]
        if not thawed:
            return
        if not self.unfreeze([name for name, _ in thawed]):
            raise DivergenceError(
                f"step {step + 1}: {thawed[0][0]} requires a gradient from now on and was frozen at the start, when ranks agreed on what they exchange; "
                "unfreeze it before training, or train in one process (--plan dp=1), which follows",
                tensor=thawed[0][0],
                cause="a parameter that is unfrozen while it trains",
            )

    def unfreeze(self, names: Collection[str]) -> bool:
        """Train parameters that were frozen at the start; False where several ranks have agreed on what they exchange."""
        unfrozen = [value for name, value in self._frozen if name in names]
        if not unfrozen:
            return True
        if self.plan.ranks > 1 or self.whole:
            return False
        for value in unfrozen:
            value.requires_grad_(True)
        adopt(self.job, self.model, self.optimizers, set(map(id, unfrozen)))
        self.assembly.parameters += unfrozen
        self.assembly.copies += [1] * len(unfrozen)
        self._frozen = [each for each in self._frozen if not each[1].requires_grad]
        return True

    def _misweighed(self, seen: Tensor, counted: bool, step: int) -> bool:
        """Whether the step must be computed again, given what all ranks saw of it."""
        if not self._watched and self.core.size == 1:
            return False
        if self.device.type == "cpu":
            return self._judge(seen.tolist(), step) and not counted
        self._seen = Later([*seen])
        return False

    def _judge(self, seen: Sequence[float], step: int) -> bool:
        """Whether parts of the batch must be weighed by what their losses count; raises where ranks did not compute together."""
        size = self._averages.size
        if self.data.size > 1:
            self.watch.judge_data(seen[size : size + 2], step)
        if self.core.size > 1:
            self.watch.judge_core(seen[size + 2 :], step)
        self.doubtful = self._watched and doubts(seen)
        return self._watched and self._averages.unequal(seen[:size], step)

    @property
    def seeds_generators(self) -> bool:
        """Whether the model's own generators are seeded at every step, by data rank."""
        return bool(self._generators)

    def _seed(self, *place: int | str) -> None:
        """Make random numbers of every kind follow from the job's seed and this place."""
        with nullcontext() if self.around_seed is None else self.around_seed():
            seed_step(self.device, self.job.seed, *place, generators=self._generators)

    def _fraction(self, batch: StepBatch) -> float:
        """Of the batch what the numbers of a step were added up over: all of it, but where ranks do not wait for each other."""
        return sum(micro.samples for micro in batch.micros) / batch.samples if self.plan.free else 1.0

    def _agree_on_shortened(self) -> None:
        weights = self.assembly.shortened
        agree(weights, self._together)
        for holders, tied in self.assembly.tied if weights else ():
            agree([value for value in tied if any(value is each for each in weights)], holders)

    def _alternate(self, batch: StepBatch, sums: _Sums) -> None:
        """Forward and backward, micro-batch by micro-batch."""
        last = len(batch.micros) - 1
        for index, micro in enumerate(batch.micros):
            if self.assembly.sharding is not None:
                self.assembly.sharding.prepare(last=index == last)
            moved = self.move(micro.batch)
            if self.hub is not None:
                self.hub.look(moved)
            calls = self.statistics.calls
            if calls is not None:
                calls.begin_part()
            start = self._weighed(self._loss_of(self.model, moved), micro, batch, sums)
            if calls is not None:
                calls.end_part(micro.samples / batch.samples)
            if index == last:
                self._send(sums)
                if self.assembly.exchange is not None:
                    self.assembly.exchange.arm()
            if self.assembly.sharding is not None:
                self.assembly.sharding.backward(start)
            else:
                start.backward()

    def _flow(self, pipeline: Pipeline, batch: StepBatch, sums: _Sums) -> None:
        """All micro-batches through the stages, in the order of the schedule."""
        if self.assembly.sharding is not None:
            self.assembly.sharding.prepare(last=False)
        micros = batch.micros
        pipeline.run(
            [self.move(micro.batch) for micro in micros],
            lambda output, index: self._weighed(output, micros[index], batch, sums),
            partial(self._seed, batch.step, self.data.rank),
            self.data if self.data.size > 1 and (self.plan.zero > 1 or self.plan.batchnorm == "sync") else None,
        )
        if self.assembly.sharding is not None:
            self.assembly.sharding.flush()
        for holders, tied in self.assembly.tied:
            add_up(tied, holders)
        self._send(sums)
        if self.assembly.exchange is not None:
            self.assembly.exchange.arm()

    def _weighed(self, value: Any, micro: Micro, batch: StepBatch, sums: _Sums) -> Tensor:
        """What backward starts from: the micro-batch's share of the step's loss, scaled for the precision."""
        if self._watched and isinstance(value, tuple):
            total, count = value
            value = self._recounted(total, count, micro.samples)
        elif self._watched:
            terms = self._averages.add(value, micro.samples, partial(self._loss_again, Tensor, micro.samples))
            self._called = None, None  # logits are large
            # What an accelerator counts is not known to the host before backward: then every step is weighed by it.
            by_count = self._weighing or self.nominal is not None or self.hub is not None
            if terms and (by_count or isinstance(terms[0].count, Tensor)):
                value = weighed(value, terms[0])
        if isinstance(value, tuple):
            part, count = value
            if self._zero is not None and self.device.type == "cpu" and not count:
                part = self._zero
            sums.items = count if sums.items is None else sums.items + count
            factor = self._scale() / self._nominal(count * len(batch.micros))
        else:
            share = micro.samples / batch.samples
            part, factor = (value if share == 1 else value * share), self._scale()
        if not part.requires_grad:
            raise TrainingError(
                "the loss does not depend on any trainable parameter: was it detached, or made under no_grad?"
            )
        sums.total = part.detach() if sums.total is None else sums.total + part.detach()
        return part if factor == 1 else part.float() * factor if part.dtype.itemsize < 4 else part * factor

    def _recounted(self, total: Tensor, count: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        """A loss given as (sum, count) with what it really counts, where a minimum may hide that."""
        if self.device.type != "cpu":  # the host does not wait for an accelerator's count
            return total, count
        pairs, given = self._averages.pairs, float(count.detach())
        if not pairs.is_low(given, samples):
            return total, count
        found, _ = recounted(
            torch.stack([total.detach().double(), count.detach().double()]), partial(self._loss_again, tuple, samples)
        )
        if found is None or found[1].isnan():
            self._averages.doubt()
        elif not math.isclose(float(found[1]), given):
            self._averages.hide(given)
            pairs.hidden = max(pairs.hidden, given)
            count = found[1]
        return total, count

    def _loss_again(self, kind: type, samples: int, times: int) -> Any:
        """The loss of the last part, a tensor or a pair, with every sample given several times; None where it cannot be called so."""
        repeated = given_again(self._called, samples, times)
        try:
            with one_process(), unchanged(self.job, self.model), random_states(), autocast(self.precision, self.device):
                value = None if repeated is None else call_loss(self.job, repeated[0], repeated[1], self.model)
        except Exception:  # it takes other shapes only: the count is taken as it was read
            return None
        return value if isinstance(value, kind) else None

    def _send(self, sums: _Sums) -> None:
        total = self._one * 0 if sums.total is None else sums.total  # of a stage without a loss
        items = self._one if sums.items is None else sums.items
        self.statistics.send(
            total, items, self._one * self.stop_asked, rest=self._averages.share(self.watch.data_share())
        )

    def _received(self, sums: _Sums) -> tuple[Tensor, Tensor, bool, Tensor]:
        """The step's loss, what it counts, whether it is such a sum, and what is watched: the same on every rank."""
        (loss, count, self._asked), seen = self.statistics.receive()
        if self.core.size == 1:
            return loss, count, sums.items is not None, seen
        nominal = torch.full_like(loss, (self.nominal or 0.0) if sums.items is not None else 0.0)
        told = torch.cat([torch.stack([loss, count, nominal]), seen])
        mine = torch.tensor(self.watch.core_share(), dtype=torch.float64).to(self.device, non_blocking=True)
        told = torch.cat([self._asked.view(1), told if self.tells else torch.zeros_like(told), mine])
        self._asked, loss, count, nominal = self.core.sum(told)[:4]
        size = self._averages.size
        told[4 + size : 4 + len(seen)] = seen[size:]  # between this rank and its data ranks
        if self.assembly.pipeline is not None and nominal > 0:
            self.nominal = float(nominal)
        counted = bool(nominal > 0) if self.assembly.pipeline is not None else sums.items is not None
        return loss, count, counted, told[4:]

    def _finish(self, loss: Tensor, count: Tensor, counted: bool, fraction: float) -> Tensor:
        """Turn sums over items into the mean, and take the loss scale out again. `fraction`: of the batch's samples that were added up."""
        factor: float | Tensor = 1 / self._scale()
        if counted:
            if self.device.type == "cpu" and not count > 0:
                raise TrainingError(
                    "the loss counted no item in the whole batch: (sum, count) came back with count 0 on every rank"
                )
            assert self.nominal is not None
            factor = factor * self.nominal * fraction / count
            loss = loss / count
        else:
            loss = loss / fraction
        if isinstance(factor, Tensor) or factor != 1:
            self._scale_gradients(factor)
        return loss

    def _scale_gradients(self, factor: float | Tensor) -> None:
        grad_clip.scale(grad_clip.gradients(self.assembly.parameters), factor)
        for grad in grad_clip.gradients(self.loss_parameters.values()):  # they may be on another device
            grad.mul_(factor.to(grad.device) if isinstance(factor, Tensor) else factor)
        if self.hub is not None:
            self.hub.scale(factor)

    def update(self, loss: Tensor, samples: int) -> Step:
        """Clip, step the optimizers and schedules, forget the gradients."""
        size: Tensor | None = None
        skipped = False
        rates = self._rates()
        if self.job.clip is not None or self.loss_scale is not None:
            size = self.norm()
            skipped = self.loss_scale is not None and not self._are_finite(size)
            if self.job.clip is not None and not skipped:
                grad_clip.clip(grad_clip.gradients(self.assembly.parameters), size, self.job.clip)
                if self.hub is not None:
                    self.hub.scale(grad_clip.shortening(size, self.job.clip))
        if self.hub is not None:
            self.hub.push(skipped=skipped)
            for value in self.hub.dense.values():
                value.grad = None  # the servers have stepped on it
        self.watch.before_update(self.step_number)
        # Not from the data rank's stream: replicas must draw the same, and hold the same state after a skipped step too.
        seed_step(self.device, self.job.seed, self.step_number, "update")
        if not skipped:
            for place, optimizer in enumerate(self.optimizers):
                begin_late(optimizer)
                with self.assembly.words_for(optimizer):
                    if place in self.whole:
                        self.whole[place].step(optimizer)
                    else:
                        optimizer.step()
            for schedule in self.schedules:
                if not takes_metric(schedule):
                    self._step_schedule(schedule)
                elif self.job.evaluation is None:
                    self._step_schedule(schedule, float(loss))
            if self._unchecked_state:
                self._unchecked_state = False
                require_storable_state(self)
        if self.loss_scale is not None:
            self.loss_scale.update(overflow=skipped)
            self._require_hope(self.loss_scale)
        for parameter in (*self.assembly.parameters, *self.loss_parameters.values()):
            parameter.grad = None
        self.step_number += 1
        self.watch.after_update(self.step_number)
        if self._agreement is not None:
            self._asked = self._one * self._agreement.tell(self.step_number, self.stop_asked)
        return Step(loss, size, self._asked, samples, skipped, rates, self.statistics.news)

    def _step_schedule(self, schedule: Any, *metric: float) -> None:
        with self.schedule_reads.watching(schedule, self.step_number):
            schedule.step(*metric)

    def _are_finite(self, size: Tensor) -> bool:
        """Whether all gradients are; `size`: the norm of the model's."""
        rest = grad_clip.gradients(self.loss_parameters.values())
        return math.isfinite(size.item()) and all(bool(grad.isfinite().all()) for grad in rest)

    def norm(self) -> Tensor:
        """The norm of the whole model's gradient, the same on every rank. All must ask."""
        copies = [
            count
            for value, count in zip(self.assembly.parameters, self.assembly.copies, strict=True)
            if value.grad is not None
        ]
        dense = grad_clip.gradients(self.assembly.parameters)
        if self.hub is None:
            return grad_clip.total_norm(dense, copies, self.ranks, alike=self.assembly.pipeline is None)
        if self.hub.dense:  # each rank has its own part of these gradients
            dense = [self._together.sum(grad.clone()) for grad in dense]
        whole = grad_clip.total_norm(dense, copies, self.ranks)
        return (whole.double().square() + self.hub.square()).sqrt().to(whole.dtype)

    def _rates(self) -> list[float | Tensor]:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        # A schedule changes a rate that is a tensor in place.
        return [rate.clone() if isinstance(rate := group["lr"], Tensor) else rate for group in groups]

    def _scale(self) -> float:
        return self.loss_scale.scale if self.loss_scale is not None else 1.0

    def _nominal(self, count: Tensor) -> float:
        """The divisor of sums before backward. Asked of the ranks once; a power of two, so that it leaves no trace."""
        if self.nominal is None:
            items = max(float(self._together.sum(count.detach().double().clone())), 1.0)
            self.nominal = 2.0 ** round(math.log2(items))
        return self.nominal

    def settle(self) -> None:
        """Look at the last step's loss and news, before it is built upon, saved or reported."""
        if self._agreement is not None:
            self._agreement.settle()
        if self._previous is None:
            return
        self._require_number(self._previous.read()[0], self.step_number - 1)
        if self._seen is not None:
            (seen, self._seen), step = (self._seen.read(), None), self.step_number - 1
            if self._judge(seen, step) and self.nominal is None:
                raise DivergenceError(
                    f"step {step + 1}: the loss averages over unequal counts on different ranks or micro-batches, which an accelerator cannot weigh "
                    "afterwards; return (sum, count) from the loss",
                    cause="averages over unequal counts",
                )
        if self._previous.news():
            self.statistics.settle()

    def meet(self) -> None:
        """Have all ranks' pushes be with the servers, and ranks that do not wait for each other hold the same; every rank must call it, after
        the same step."""
        if self.hub is not None:
            self.hub.flush()
            self.ranks.barrier()
        if self.plan.free and self.hub is not None:
            self.hub.take_over()
        for place, whole in self.whole.items():
            whole.agree(self.optimizers[place])

    def _require_number(self, loss: float, step: int) -> None:
        if self.loss_scale is None and not math.isfinite(loss):
            empty = " Or the loss counted no item in the whole batch: then (sum, count) has count 0 on every rank."
            raise TrainingError(
                f"the loss is {loss} at step {step + 1}: training stopped, and no checkpoint holds that step; lower the learning rate, "
                f"clip gradients (clip=1.0), or look at its batch: {_batch_of(step)}.{empty if self.nominal else ''}"
            )

    def _require_hope(self, scale: LossScale) -> None:
        if scale.hopeless:
            raise TrainingError(
                f"gradients overflow fp16 at step {self.step_number + 1}, as in the {scale.stuck - 1} steps before, though the loss is not "
                "scaled any more: training stopped, the weights are those before these steps; use precision=bf16 or fp32, lower the "
                f"learning rate, or look at its batch: {_batch_of(self.step_number)}"
            )

    def move(self, value: Any) -> Any:
        """To the device, and to the proof's dtype where there is one. Containers keep their kind."""
        return self._move(value)

    # What it holds

    def rest(self) -> None:
        """Give back what a forward without backward gathered."""
        if self.assembly.sharding is not None:
            self.assembly.sharding.rest()

    def gather(self) -> State | None:
        """The whole state on rank 0, None elsewhere."""
        return run_state.gather(self)

    @property
    def changing(self) -> dict[str, tuple[int, ...]] | None:
        """The buffers, but those of batch norms, that steps were seen to change, with shapes; None: nobody has looked."""
        return self.statistics.changing

    def expect_changes(self, changing: Mapping[str, Sequence[int]] | None) -> None:
        """Go on with these buffers known to change, as the run that was saved did."""
        self.statistics.expect(changing)

    def held(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer state that this rank keeps."""
        return run_state.held(self)

    @property
    def tells(self) -> bool:
        """Of the ranks that computed the same samples, whether this one has the outcome and speaks for them."""
        return self.axes["tp"].rank == 0 and (self.assembly.pipeline is None or self.assembly.pipeline.final)

    def values(self, batch: Any) -> tuple[Tensor, Any] | None:
        """The loss of a batch, as evaluate.py has it, and the model's output; None on stages without a loss."""
        if self.assembly.pipeline is None:
            (loss,) = self._measure(self.model, batch)
        else:
            self._measured += 1
            seed = partial(self._seed, self.step_number, self.data.rank, -self._measured)
            found = self.assembly.pipeline.forward(batch, self._measure, seed)
            if not found:
                return None
            (loss,) = found
        output, self._output = self._output, None
        return loss, output

    def _measure(self, model: nn.Module, batch: Any) -> tuple[Tensor]:
        """The loss; the output is kept aside. Metrics are not computed here: stages also call it without values, to learn shapes."""
        with autocast(self.precision, self.device):
            loss, self._output, self.ratios, self.loss_floor = measured(
                self.job, model, batch, weigh=not self.loss_by_samples, stateful=self.loss_keeps_state
            )
        return (loss,)

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Loss and metrics over the job's evaluation set, or `data`. The former's loss steps ReduceLROnPlateau."""
        self.meet()
        self._seed(self.step_number, "evaluate", self.data.rank)
        found = evaluate(self, data)
        for schedule in self.schedules if data is None else ():
            if takes_metric(schedule):
                self._step_schedule(schedule, found["loss"])
        self._agree_on_shortened()
        return found

    def save(self, folder: str | Path) -> int:
        """Write a checkpoint; returns its bytes. What ranks must hold alike is compared before."""
        self.settle()
        self.watch.compare(self.step_number)
        return save_load.save(self, Path(folder))

    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint, whatever plan wrote it."""
        fresh = self.step_number == 0
        stored = save_load.load(self, Path(folder))
        if fresh:
            self.read_history.restore(stored)
        else:
            self.read_history.go_back(self.step_number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what the run holds: hooks on the parameters, the process group if it was joined here."""
        if self.hub is not None:
            self.hub.close()
        self.watch.close()
        self._replacements.close()
        if self.assembly.close():
            del self.model, self.optimizers, self.schedules, self.schedule_reads, self.whole
            self.statistics = StepStatistics(nn.Module(), self.data)
            forget_meshes()
        self._restore()
        self._restore = lambda: None  # by now somebody else may have set them
        self.ranks.close()
        while self.at_close:
            self.at_close.pop()()


def _versions(batch: StepBatch) -> list[int]:
    """How often each tensor of a batch was written to."""
    return [0 if value.is_inference() else value._version for micro in batch.micros for value in tensors(micro.batch)]


def _batch_of(step: int) -> str:
    """How to get the batch of a step (from 0), for one who has a job and no run."""
    return f'next(echelon.parallelize(job, "dp=1").loader.steps({step}, {step + 1}))'
