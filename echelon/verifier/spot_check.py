"""Spot checks: at random later steps the step is computed again on one device and compared.

The gate proves the first steps. What begins later (a gate that opens, a loss that starts to couple samples, rare labels) shows here:

    1  before the step    parameters, buffers and attributes that forward changed go to rank 0
    2  the step           forward and backward as always; if random numbers were drawn, once more with them held still
    3  on rank 0          a plain float64 loop computes loss and gradients of the same samples from the same state
    4  compare            beyond what rounding explains the run stops, before the optimizer has stepped

Where one device would take too long for all samples of a step, a pass over a few of them, on every rank, is compared instead.
Checks fall on one random step of each doubling of the step number, so what begins at step N is seen before step 4 N, on other steps at
every launch, and they stay within a small share of the training's time. The checked step trains the same numbers as an unchecked one.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from echelon.data.loader import StepBatch
from echelon.engine.checkpoint.held_state import Changes
from echelon.engine.checkpoint.model_extra_state import has_extra_state
from echelon.engine.checkpoint.run_attributes import ModelState, model_snapshot, set_trainable, trainable
from echelon.engine.data_setup import own_generators
from echelon.engine.parallel.shard_layout import local
from echelon.engine.precision import autocast
from echelon.engine.run import Run
from echelon.engine.run_state import whole
from echelon.engine.step_result import Step
from echelon.errors import DivergenceError, JobError
from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.profiler.sample_coupling import first_line
from echelon.tree import copy_tensors
from echelon.trials.dataset_state import unread
from echelon.trials.determinism import Stillness, silenced
from echelon.trials.isolation import Isolated
from echelon.trials.snapshot import Snapshot
from echelon.trials.torch_patches import Patches
from echelon.verifier import tolerances
from echelon.verifier.batch_collation import as_ranks_collate
from echelon.verifier.compare import BROKEN, Bounds, Difference, compare, wide
from echelon.verifier.precision_drift import ALLOWED
from echelon.verifier.reduced_job import rate
from echelon.verifier.reference import Reference
from echelon.verifier.reference_data import Feed, ReadOnce, open_feed
from echelon.verifier.spot_check_batch import collect_parts, fewer, joined_parts, misreading_rank, reads_the_same

#: The gate has looked at the steps before this one.
FIRST = 3
#: Checks may take this share of the time since training began, at least this many seconds; one of them may keep one device busy this long.
SHARE, LEAST, EACH = 0.01, 10.0, 2.0
#: A step's part of the rate of a product, and bytes of float64 that one device needs for each parameter.
_EFFICIENCY, _BYTES = 0.4, 24
#: How many times one device's own rounding a difference may be.
_ROUNDINGS = 16
#: Where one device reads the samples, and the plan by which it splits them where batch statistics ask for that.
_Read = tuple[Feed | None, Plan]


class SpotChecks:
    """The checks of one run. Every rank makes the same calls."""

    def __init__(
        self,
        job: Job,
        run: Run,
        pristine: nn.Module | None,
        profile: Profile | None,
        *,
        entropy: int | None = None,
    ) -> None:
        """`pristine`: a copy of the job's module from before the run took it, on rank 0; None: the job has a factory. `entropy`: what the
        steps are drawn from; None: rank 0 draws it, from no generator that training has."""
        self._run, self._profile = run, profile
        self._job, self._pristine = dataclasses.replace(job, warmup_data=None), pristine
        self._began, self.seconds, self.count = time.perf_counter(), 0.0, 0
        launch = run.ranks.gather(secrets.randbits(64))[0] if entropy is None else entropy
        self._steps = _chosen(launch, run.total_steps)
        #: Whether rank 0 reads samples once more, and from where; else it gets those that the ranks have.
        self._reads_again = True
        self._feed: Feed | None = None
        #: The last step (from 1) that was compared and agreed, on rank 0. The gate compared those before FIRST.
        self.agreed = FIRST - 1
        #: Why there are no more checks; empty: there are.
        self.left_out = ""
        #: Of a step's samples what one device can compute in time; None: not known yet.
        self._share: float | None = None
        #: Doubtful steps so far, and whether one that was not compared was reported.
        self._doubts, self._warned_of_doubts = 0, False
        #: Whether a step was reported that draws although random numbers are held still.
        self._warned_of_draws = False
        self._device = torch.device("cpu")

    def due(self, step: int) -> bool:
        """Whether step `step` (from 0) is checked; if it is by its number, rank 0's clock decides."""
        return step in self._steps and self._can_check()

    def _is_worth_it(self, step: int) -> bool:
        """Whether a doubtful step is checked: the 1st, 2nd, 4th, 8th ..., as other checks need time too."""
        self._doubts += 1
        if self._doubts.bit_count() == 1 and self._can_check():
            return True
        if not self._warned_of_doubts and self._run.world.main:
            self._run.warn(
                f"step {step + 1}: how many items the loss of a part of the batch counts does not show; of such steps only the 1st, 2nd, 4th, 8th ... are "
                "compared with one device; return (sum, count) from the loss, with the count as it is (0 for none)"
            )
        self._warned_of_doubts = True
        return False

    def _can_check(self) -> bool:
        if self._run.hub is not None or self._run.loss_scale is not None:
            return False
        each = self.seconds / self.count if self.count else 0.0
        room = max(LEAST, SHARE * (time.perf_counter() - self._began))
        return bool(self._run.ranks.gather(not self.left_out and self.seconds + each <= room)[0])

    def step(self, batch: StepBatch) -> Step:
        """The step, checked where it is due, and where it does something that was never compared."""
        if self.due(batch.step):
            return self.checked(batch)
        run = self._run
        loss = run.backward(batch)
        if (
            run.doubtful
            and batch.step + 1 >= FIRST
            and self._is_worth_it(batch.step)
            and all(run.ranks.gather(run.is_unedited(batch)))
        ):
            begin = time.perf_counter()
            self._check_some(batch, self._affordable_share())
            self.seconds += time.perf_counter() - begin
            self.count += 1
        return run.finish(loss, batch)

    def checked(self, batch: StepBatch) -> Step:
        """The step, checked; raises DivergenceError where one device computes something else."""
        run, begin = self._run, time.perf_counter()
        share = self._affordable_share()
        if share < 1:
            self._check_some(batch, share)
            loss = run.backward(batch)
        else:
            loss = self._check_all(batch)
        self.seconds += time.perf_counter() - begin
        self.count += 1
        return run.finish(loss, batch)

    def _affordable_share(self) -> float:
        if self._share is None:
            ranks = self._run.ranks
            self._share, self._device = ranks.gather(self._affordable() if self._run.world.main else None)[0]
        return self._share

    def _affordable(self) -> tuple[float, torch.device]:
        """Of a step's samples what one device computes in EACH seconds, and which device: the GPU, if it has the room."""
        run, profile = self._run, self._profile
        device = run.device
        if profile is None:
            return 1.0, torch.device("cpu")
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < _BYTES * profile.elements + 4 * profile.kept(
            2
        ):
            device = torch.device("cpu")
        return EACH * _EFFICIENCY * rate(device) / max(profile.flops(self._job.batch), 1.0), device

    def _check_all(self, batch: StepBatch) -> Tensor:
        """Forward and backward of the step itself, compared; gives its loss."""
        run = self._run
        before, start, as_read = self._state(), self._start(), _copied(batch)
        drawn, loss = self._backward(batch)
        if drawn:
            mine, found, held = self._silent(_copied(as_read), start)
        else:
            mine, found, held = loss, self._gradients(), True
        with unread(self._job.data, self._job.collate):
            feed = self._read(as_read)
            compare = partial(self._compare, batch.step, before, mine, found, held=held, still=drawn)
            error = compare((feed, run.plan))
            if self._reads_again and run.ranks.gather(error is not None)[0]:
                error = self._with_own_samples(as_read, compare, error)
        with run.ranks.together():
            if error is not None:
                raise error
        return loss

    def _with_own_samples(
        self, batch: StepBatch, compare: Callable[[_Read], DivergenceError | None], error: DivergenceError | None
    ) -> DivergenceError | None:
        """Compare once more, with what the ranks have read: the difference may be in the samples. Every rank must call it."""
        run, step, agreed = self._run, batch.step + 1, self.agreed
        with run.ranks.together():
            feed = open_feed(self._job)
        parts = collect_parts(run, batch, feed)
        own = joined_parts(run, batch, parts)
        with run.ranks.together():
            if own is not None and (error := compare((own, run.plan))) is None:
                assert self._feed is not None
                rank = misreading_rank(batch.step, parts, self._feed)
                if rank is not None:
                    return DivergenceError(
                        f"step {step}: for its part of the batch data rank {rank} read other samples than rank 0 reads there, and the first steps "
                        "agreed: the data set depends on the rank or the process that reads it; nothing was updated by this step. Give every rank "
                        "the same data set: echelon splits each batch between them",
                        cause="samples that depend on the rank",
                        agreed=agreed,
                    )
                self._keep_own_samples(step)
        return error

    def _keep_own_samples(self, step: int) -> None:
        """From now on, compare with the samples that the ranks have. On rank 0."""
        self._run.warn(
            f"step {step}: the data gave other samples when they were read again, as it draws random numbers of its own or has changed; "
            "spot checks compare with one device on the samples that the ranks have read"
        )
        self._reads_again = False

    def _check_some(self, whole_batch: StepBatch, share: float) -> None:
        """A pass over a few samples, or all, compared; nothing of it stays."""
        run = self._run
        some = fewer(run, whole_batch, share) if share < 1 else (whole_batch, run.plan)
        if some is None:
            return
        batch, plan = some
        before = self._state()
        mine, found, held = self._silent(_copied(batch), self._start())
        error = self._compare(batch.step, before, mine, found, (self._gather(batch), plan), held=held, still=True)
        with run.ranks.together():
            if error is not None:
                raise error

    # The run's side

    def _read(self, batch: StepBatch) -> Feed | None:
        """The step's samples for one device, read once more or, where that gives others, as the ranks have them."""
        run = self._run
        with run.ranks.together():
            if run.world.main and self._reads_again:
                self._feed = self._feed or as_ranks_collate(open_feed(self._job), run.plan)
                if not reads_the_same(run, batch, self._feed):
                    self._keep_own_samples(batch.step + 1)
        self._reads_again = run.ranks.gather(self._reads_again)[0]
        return self._feed if self._reads_again else self._gather(batch)

    def _gather(self, batch: StepBatch) -> Feed | None:
        return joined_parts(self._run, batch, collect_parts(self._run, batch))

    def _backward(self, batch: StepBatch) -> tuple[bool, Tensor]:
        """Forward and backward as always; whether a rank drew random numbers in it."""
        run = self._run
        draws = _Draws(run.device, own_generators(run.model))
        run.around_seed = draws.seeding  # a pipeline seeds before every micro-batch
        try:
            loss = run.backward(batch)
        finally:
            run.around_seed = None
        return any(run.ranks.gather(draws.any())), loss

    def _start(self) -> _Start:
        """What a pass changes on this rank, to begin another one from."""
        run = self._run
        return _Start(
            tensors=_copies(run.model),
            held=model_snapshot(run.model),
            trainable=trainable(run.model),
            functions=Isolated(run.job, keep=run.model),
        )

    def _silent(self, batch: StepBatch, start: _Start) -> tuple[Tensor, dict[str, Tensor], bool]:
        """Loss and gradients without random numbers, and whether none were drawn. What the real pass left is put back."""
        run = self._run
        trained = [*run.model.parameters(), *run.loss_parameters.values()]
        kept = [(value, value.grad, value.grad.clone()) for value in trained if value.grad is not None]
        after = _copies(run.model)
        held, flags = model_snapshot(run.model), trainable(run.model)
        start.held.put_back()
        _put(_tensors(run.model), start.tensors)
        set_trainable(run.model, start.trainable)
        for value in trained:
            value.grad = None
        generators = [(each, each.get_state()) for each in own_generators(run.model)]
        own, run.job = run.job, start.functions.job  # a loss that counts its calls must not count this one
        try:
            with start.functions.active(), silenced(run.model), Stillness(random=True)():
                drawn, loss = self._backward(batch)
        finally:
            run.job = own
            for generator, drawn_to in generators:
                generator.set_state(drawn_to)
        found = self._gradients()
        for value in trained:
            value.grad = None
        for value, grad, copied in kept:
            grad.copy_(copied)  # in its place: the exchange keeps gradients in buckets of its own
            value.grad = grad
        held.put_back()
        _put(_tensors(run.model), after)
        set_trainable(run.model, flags)
        return loss, found, not drawn

    def _gradients(self) -> dict[str, Tensor]:
        named = self._run.model.named_parameters()
        return whole(self._run, {name: value.grad for name, value in named if value.grad is not None})

    def _state(self) -> _State:
        """What the step starts from, whole on rank 0."""
        run = self._run
        self._fetch_function_state()
        attributes, lost = run.attributes.of_model()
        flags = {name: flag for theirs in run.ranks.gather(run.attributes.switched()) for name, flag in theirs.items()}
        return _State(
            parameters=whole(run, dict(run.model.named_parameters())),
            moved=_further_names(run.model),
            buffers=whole(run, dict(run.model.named_buffers())),
            attributes=attributes,
            lost=lost,
            trainable=flags,
            functions=Isolated(self._job, keep=run.model) if run.world.main else None,
            # A checkpoint brings it back before the first look at attributes.
            extra={path: copy.deepcopy(module.get_extra_state()) for path, module in _with_extra_state(run.model)},
        )

    def _fetch_function_state(self) -> None:
        """In a pipeline the last stage calls the loss: give rank 0, whose own loss is never called, what it keeps there."""
        run = self._run
        if run.assembly.pipeline is None:
            return
        functions = run.attributes.functions
        mine = functions.values(list(functions.fingerprints())) if run.tells and run.data.rank == 0 else {}
        for values in run.ranks.gather(mine):
            if values and run.world.main and not functions.adopt(values, run.device) and not self.left_out:
                self.left_out = "the loss keeps objects that were made while it trained"
                run.warn(
                    f"steps from here on are not compared with one device: {self.left_out}, on a pipeline's last stage"
                )

    # One device's side, on rank 0

    def _compare(
        self,
        step: int,
        state: _State,
        loss: Tensor,
        found: Mapping[str, Tensor],
        read: _Read,
        *,
        held: bool,
        still: bool,
    ) -> DivergenceError | None:
        """How one device's loss and gradients differ; None: they do not, or they cannot be compared, or this is another rank. `held`: whether
        what was computed on the ranks had no random numbers."""
        if not self._run.world.main or read[0] is None or self.left_out:
            return None
        if not held:
            if not self._warned_of_draws:
                self._run.warn(
                    f"step {step + 1} was not compared with one device: random numbers are drawn in a way that cannot be held still"
                )
            self._warned_of_draws = True
            return None
        # Both computations of one device get the same samples: data that draws by itself is no rounding.
        read = ReadOnce(read[0]), read[1]
        try:
            truth, gradients = self._reference(state, step, read, torch.float64, still=still)
        except Exception as error:  # one device cannot be given this state: nothing is known, and nothing is wrong
            self.left_out = f"{type(error).__name__}: {first_line(error)}"
            self._run.warn(
                f"step {step + 1} could not be computed again on one device, so later steps are not checked; the proof of the first steps "
                f"stands ({self.left_out})"
            )
            return None
        differences = _differences(loss, found, truth, gradients, step)
        bounds = Bounds(least=ALLOWED[self._run.precision])
        zero = set(tolerances.zeros(gradients))
        beyond = [each for each in differences if not bounds.hold(each) and each.name not in zero]
        if not beyond:
            self.agreed = step + 1
            return None
        # One device in the run's own precision tells what rounding does to this model at this step.
        rough, theirs = self._reference(state, step, read, None, still=still)
        own = {each.name: each.value for each in _differences(rough, theirs, truth, gradients, step)}
        beyond = [each for each in beyond if each.value > _ROUNDINGS * own.get(each.name, 0.0)]
        if beyond and state.lost:
            self.left_out = f"a copy of the model lacks {state.lost[0]}"
            self._run.warn(
                f"step {step + 1} could not be computed again on one device, so later steps are not checked ({self.left_out})"
            )
            return None
        if beyond:
            worst = max(beyond, key=lambda each: each.value)
            pair = (loss, truth) if worst.kind == "loss" else (found.get(worst.name), gradients.get(worst.name))
            return DivergenceError(
                f"step {step + 1}: {_described(worst, self._run.plan, *pair)} from the same state "
                f"and samples ({len(beyond)} of {len(differences)} values differ), and the first steps agreed: something that begins "
                f"later, or is rare, depends on how the batch or the model is cut; nothing was updated by this step. The last step that "
                f"was checked and found equal is {self.agreed}: resume from a checkpoint at or before it, because later ones may contain the error",
                tensor=worst.name,
                cause="behaviour that begins after the first steps",
                agreed=self.agreed,
            )
        self.agreed = step + 1
        return None

    def _reference(
        self, state: _State, step: int, read: _Read, dtype: torch.dtype | None, *, still: bool
    ) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Loss and gradients of one device in `dtype`; None: in the precision of the run."""
        feed, plan = read
        assert feed is not None
        exact = dtype == torch.float64
        held = Stillness(random=still, narrow=exact)  # some models run in float64 only so
        rough = contextlib.nullcontext() if exact else autocast(self._run.precision, self._device)
        functions = state.functions
        assert functions is not None
        with _isolated(), functions.active():
            # Making the schedule would reset what it shares with the loss.
            job, patches = dataclasses.replace(functions.job, schedule=None), Patches()
            made = Reference(job, plan, feed, device=self._device, still=held, pristine=self._pristine, dtype=dtype)
            patches.put_back()
            state.load(made.model, dtype)
            with rough, silenced(made.model) if still else contextlib.nullcontext():
                loss = made.backward(step)
        return loss, made.gradients()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What a step starts from: tensors by unsharded name, and what modules keep otherwise."""

    parameters: dict[str, Tensor]
    moved: dict[str, str]  #: further names of parameters on rank 0, with their first
    buffers: dict[str, Tensor]
    attributes: Changes  #: what modules keep otherwise and changed since the start
    lost: list[str]  #: and what of that cannot be copied
    trainable: dict[str, bool]  #: parameters that were frozen or unfrozen since the start
    extra: dict[str, Any]  #: what modules return from get_extra_state()
    #: The job's functions with what they held before the step; None on other ranks.
    functions: Isolated | None

    @torch.no_grad()
    def load(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Give it to a fresh model, of `dtype` if that is given."""
        for name, value in model.named_parameters():
            if name not in self.parameters:
                now = self.moved.get(name)
                raise JobError(
                    f"{name} is the same parameter as {now} since forward replaced it, and was one of its own at the start"
                    if now
                    else f"{name} was a parameter at the start, and is none any more since forward replaced it"
                )
            value.copy_(self.parameters[name])
        wide = partial(
            _cast, dtype=dtype, device=next((each.device for each in model.parameters()), torch.device("cpu"))
        )
        _put(_buffers(model), self.buffers)
        _remake(model, {name: wide(value) for name, value in self.buffers.items()})
        for path, module in _with_extra_state(model):
            module.set_extra_state(copy.deepcopy(self.extra[path]))
        ModelState(model).restore(self.attributes, wide)
        set_trainable(model, self.trainable)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What a pass may change on one rank: buffers, parameters (a teacher's) and whether they require gradients, attributes of modules, and what
    the job's functions hold."""

    tensors: dict[str, Tensor]
    held: Snapshot
    trainable: dict[str, bool]
    functions: Isolated


def _chosen(entropy: int, total: int) -> frozenset[int]:
    """One random step of each doubling from FIRST on, and the last: the same on every rank."""
    draw, steps, start = random.Random(entropy), set(), FIRST
    while start < total:
        steps.add(draw.randrange(start, min(2 * start, total)))
        start *= 2
    return frozenset(steps | ({total - 1} if total > FIRST else set()))


def _differences(
    loss: Tensor, found: Mapping[str, Tensor | None], truth: Tensor, gradients: Mapping[str, Tensor | None], step: int
) -> list[Difference]:
    made = compare("loss", {"loss": loss}, {"loss": truth}, step=step)
    return made + compare("gradient", {name: found.get(name) for name in gradients}, gradients, step=step)


def _described(worst: Difference, plan: Plan, mine: Tensor | None, true: Tensor | None) -> str:
    """How far a tensor is off; as two numbers where one device's is zero or a number is not finite."""
    what = "the loss" if worst.kind == "loss" else f"the gradient of {worst.name}"
    if worst.value < BROKEN:
        return f'{what} under "{plan}" is {worst.value:.2g} off what one device computes'
    if mine is not None and true is not None and mine.shape != true.shape:
        return f'{what} under "{plan}" has the shape {tuple(mine.shape)}, and {tuple(true.shape)} is what one device computes'
    if worst.kind == "loss":
        return f'{what} under "{plan}" is {_number(mine)}, and {_number(true)} is what one device computes'
    return f'the largest element of {what} under "{plan}" is {_number(mine)}, and {_number(true)} is what one device computes'


def _number(tensor: Tensor | None) -> str:
    """A loss, or a gradient's largest element; one that nothing reached is zero."""
    if tensor is None or not tensor.numel():
        return "0"
    values = wide(tensor)
    return f"{float(values.abs().max()) if values.dim() or values.is_complex() else float(values):.4g}"


def _copied(batch: StepBatch) -> StepBatch:
    """The batch with tensors of its own: forward may change those that it is given."""
    micros = tuple(dataclasses.replace(each, batch=copy_tensors(each.batch)) for each in batch.micros)
    return dataclasses.replace(batch, micros=micros)


class _Draws:
    """Whether random numbers are drawn from any generator between seedings. `own`: the model's."""

    def __init__(self, device: torch.device, own: Sequence[torch.Generator]) -> None:
        self._device, self._own = device, own
        self._drawn, self._seeded = False, list[bytes]()

    def any(self) -> bool:
        """Whether there were any since the first seeding."""
        self._drawn = self._drawn or (bool(self._seeded) and self._seeded != _generators(self._device, self._own))
        return self._drawn

    @contextlib.contextmanager
    def seeding(self) -> Iterator[None]:
        """Around a seeding."""
        self.any()
        yield
        self._seeded = _generators(self._device, self._own)


def _generators(device: torch.device, own: Sequence[torch.Generator] = ()) -> list[bytes]:
    """Where the random generators are; `own`: those of the model."""
    state = [each.get_state().numpy().tobytes() for each in own]
    state += [torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode()]
    state.append(repr(numpy.random.get_state(legacy=True)).encode())
    if device.type == "cuda":
        state.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return state


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Leave the random generators as they were: the optimizer's own seeding comes after."""
    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    numpy.random.set_state(arrays)


def _cast(value: Tensor, *, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    return value.to(device, dtype if value.is_floating_point() else None, copy=True)


def _further_names(model: nn.Module) -> dict[str, str]:
    """Names of parameters that have several, but for the first, with the first."""
    first = {id(value): name for name, value in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(value)] for name, value in every if first[id(value)] != name}


def _with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path, each) for path, each in model.named_modules() if has_extra_state(each)]


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.named_buffers() if not value.is_meta}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """What this rank holds of parameters and buffers."""
    parameters = {name: local(value.detach()) for name, value in model.named_parameters()}
    return {name: value for name, value in parameters.items() if not value.is_meta} | _buffers(model)


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.to("cpu", copy=True) for name, value in _tensors(model).items()}


def _remake(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Give the model the buffers that forward has made, or made of another shape, since the start."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for key, value in module._buffers.items():
            now = buffers.get(f"{path}.{key}" if path else key)
            if now is not None and (value is None or value.shape != now.shape):
                module._buffers[key] = now.clone()


@torch.no_grad()
def _put(held: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Give tensors these values; those that have them already stay untouched."""
    for name, value in held.items():
        if name in values and values[name].shape == value.shape and not torch.equal(value, values[name].to(value)):
            value.copy_(values[name])
