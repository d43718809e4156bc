"""What a run holds on this rank: the job's data, model, optimizers and schedules under the plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from echelon.data.loader import StepBatch
from echelon.engine import optimizers
from echelon.engine.backends.backend import Backend
from echelon.engine.build_model import RankModel
from echelon.engine.checkpoint.function_state import find_loss_parameters
from echelon.engine.checks.schedule_reads import ScheduleReadCheck
from echelon.engine.data_setup import BatchMover, find_generators, open_run_data, seed_step
from echelon.engine.init_model import allows_sparse_gradients, broadcast_tensors
from echelon.engine.losses import EvaluationLoss, TrainingLoss
from echelon.engine.parallel.full_tensor_optimizer import make_full_tensor_optimizers
from echelon.engine.precision import LossScale
from echelon.engine.process_groups import WorldCommunicator
from echelon.errors import PlanError
from echelon.job import Job, disable_sparse_gradients
from echelon.plan.plan import Plan
from echelon.world import World


class RunState:
    """The parts of a run, for everything that works on them: steps, checks, evaluations, checkpoints. `Run` adds the backend and the life cycle."""

    backend: Backend

    def __init__(
        self,
        job: Job,
        plan: Plan,
        world: World,
        *,
        device: torch.device | None,
        dtype: torch.dtype | None,
        workers: int,
        warn: Callable[[str], None],
    ) -> None:
        if plan.ranks != world.size:
            remedy = f"start as many as it needs, or plan for {world.size}"
            raise PlanError(f'plan "{plan}" is for {plan.ranks} ranks and there are {world.size}: {remedy}')
        self.job, self.plan, self.world, self.workers, self.warn = job, plan, world, workers, warn
        self.ranks = WorldCommunicator(world, device)
        self.device = self.ranks.device
        self.precision = "fp32" if dtype is not None else plan.precision or job.precision
        self.step_number = 0
        self.loss_scale = LossScale() if self.precision == "fp16" else None
        #: About how many items a step's (sum, count) loss counts: a power of two that keeps half precision in range.
        self.nominal_count: float | None = None
        #: What checkpoints record about the job (flow/run_settings.py), and what the loaded one has recorded.
        self.job_record: dict[str, Any] | None = None
        self.loaded_record: dict[str, Any] | None = None
        #: Whether schedules are overridden: they are rebuilt after loading, so that a checkpoint may have more or fewer of them.
        self.replaces_schedules = False
        #: Set it on any rank (a signal handler may): every rank reads it from the same `StepResult`.
        self.stop_requested = False
        #: Entered around each seeding, by a check that detects random draws.
        self.seed_context: Callable[[], AbstractContextManager[None]] | None = None
        try:
            self._build(dtype)
        except BaseException:
            self.ranks.close()  # a group that still runs when Python ends may abort the process
            raise

    @contextmanager
    def using_job(self, job: Job) -> Iterator[None]:
        """Compute training losses by another job, such as one whose loss is guarded."""
        own_job = self.job
        self.job = self.training_loss.job = job
        try:
            yield
        finally:
            self.job = self.training_loss.job = own_job

    def _build(self, dtype: torch.dtype | None) -> None:
        job, plan, ranks = self.job, self.plan, self.ranks
        #: This rank's communicator along each mesh axis; `model_parallel`: the ranks that compute the same samples together (tp x pp).
        self.axes, self.model_parallel = ranks.create_axes(plan.mesh)
        self.data_parallel = self.axes["dp"]
        self.move_batch = BatchMover(self.device, dtype)
        if ranks.via_host:
            problem = "ranks share a GPU, which NCCL refuses: gradients go through the hosts' memory (gloo), which is far slower"
            self.warn(f"{problem}; start one rank per GPU")
        if ranks.hash_seeds_differ:
            problem = "Python hashes strings differently on some ranks, so that sets have other orders there"
            self.warn(f"{problem}; export PYTHONHASHSEED=0 for every rank")
        data = open_run_data(job, plan, ranks, self.data_parallel, workers=self.workers)
        self.loader, self.total_steps, self.warmup_steps = data.loader, data.total_steps, data.warmup_steps
        #: Both 0 for a stream, whose length is unknown.
        self.steps_per_epoch, self.sample_count = data.steps_per_epoch, data.sample_count
        #: How samples are ordered and what they hold, where known: a checkpoint resumes with the same only.
        self.sample_order, self.data_fingerprint = data.order_rule, data.fingerprint
        reference_settings = optimizers.single_process_settings(job)
        self.training_loss = TrainingLoss(job, self.precision, self.device)
        self.evaluation_loss = EvaluationLoss(job, self.precision, self.device)
        self.rank_model = RankModel(
            job, plan, ranks, self.axes, dtype=dtype, training_loss=self.training_loss, evaluation_loss=self.evaluation_loss,
            warn=self.warn,
        )  # fmt: skip
        self.model, self.tp_shards = self.rank_model.model, self.rank_model.tp_shards
        #: Of the whole model, whichever part of it is on this rank.
        self.fingerprint, self.full_shapes = self.rank_model.fingerprint, self.rank_model.full_shapes
        #: The model's own generators, where ranks or stages would otherwise draw the same numbers, or drift apart. One device leaves them alone.
        needs_seeds = self.data_parallel.size > 1 or self.axes["pp"].size > 1
        self.seeded_generators = find_generators(self.model) if needs_seeds else []
        #: By index, the optimizers that step on whole tensors, because they compute with more than a rank's shard.
        full_optimizers = make_full_tensor_optimizers(job, self.rank_model)
        self.full_tensor_optimizers = full_optimizers
        held_by_loss = find_loss_parameters(job, self.model)
        self.optimizers = optimizers.make_optimizers(
            job, plan, self.model, ranks, shapes=self.full_shapes, full_optimizers=full_optimizers,
            loss_parameters=held_by_loss.values(), reference_settings=reference_settings,
        )  # fmt: skip
        if allows_sparse_gradients(plan):
            disable_sparse_gradients(self.model, kept_ids=optimizers.sparse_stepped_ids(self.optimizers))
        #: Parameters that the loss holds and the optimizers train, by name, whole on every rank.
        self.loss_parameters = optimizers.trained_loss_parameters(self.optimizers, held_by_loss, plan, full_optimizers)
        broadcast_tensors([parameter.detach() for parameter in self.loss_parameters.values()], ranks)
        self.schedule_read_check = ScheduleReadCheck(self.rank_model, self.optimizers, full_optimizers)
        with ranks.raise_on_all_ranks(), self.schedule_read_check.watch():
            self.schedules = optimizers.make_schedules(job, self.optimizers, self.total_steps)
        self._frozen = {name: p for name, p in self.model.named_parameters() if not p.requires_grad}

    @property
    def is_reporting(self) -> bool:
        """Whether this rank has the loss and reports it for the ranks that computed the same samples."""
        pipeline = self.rank_model.pipeline
        return self.axes["tp"].rank == 0 and (pipeline is None or pipeline.computes_loss)

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank is the first of those that hold the same stage: it saves what they hold alike."""
        return not self.data_parallel.rank and not self.axes["tp"].rank

    def is_split(self, batch: StepBatch) -> bool:
        """Whether a step is computed in parts, by ranks or in micro-batches."""
        return self.data_parallel.size > 1 or len(batch.micro_batches) > 1

    def seed_random(self, *seed_key: int | str) -> None:
        """Seed every generator from the job's seed and `seed_key`."""
        with nullcontext() if self.seed_context is None else self.seed_context():
            seed_step(self.device, self.job.seed, *seed_key, generators=self.seeded_generators)

    def step_schedule(self, schedule: Any, *metric: float) -> None:
        """Step one schedule, which may not read what a rank holds a part of."""
        with self.schedule_read_check.watch(schedule, self.step_number):
            schedule.step(*metric)

    def unfrozen_names(self) -> list[str]:
        """Parameters that were frozen at the start and train by now."""
        return [name for name, parameter in self._frozen.items() if parameter.requires_grad]

    def unfreeze(self, names: Collection[str]) -> bool:
        """Train parameters that were frozen at the start; False where several ranks have agreed on what they exchange."""
        unfrozen = [parameter for name, parameter in self._frozen.items() if name in names]
        if not unfrozen or self.plan.ranks > 1 or self.full_tensor_optimizers:
            return not unfrozen
        for parameter in unfrozen:
            parameter.requires_grad_(True)
        optimizers.add_late_parameters(self.job, self.model, self.optimizers, set(map(id, unfrozen)))
        self.rank_model.parameters += unfrozen
        self.rank_model.replica_counts += [1] * len(unfrozen)
        self._frozen = {name: p for name, p in self._frozen.items() if not p.requires_grad}
        return True
