"""A job under a plan, live on this rank: batches in, optimizer steps out.

    run = Run(job, plan, world)
    for batch in run.batches():
        step = run.step(batch)

Every rank makes the same calls in the same order; what `step` returns is the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from echelon.data.loader import StepBatch
from echelon.engine import full_state
from echelon.engine.backends.allreduce import AllReduceBackend
from echelon.engine.backends.launch_servers import ExternalServers
from echelon.engine.backends.parameter_server import ParameterServerBackend
from echelon.engine.checkpoint import save_load
from echelon.engine.checkpoint.read_history import ReadHistory
from echelon.engine.checkpoint.run_attributes import RunAttributes
from echelon.engine.checkpoint.schedule_state import takes_metric
from echelon.engine.checkpoint.state_check import require_storable
from echelon.engine.evaluate import Evaluator
from echelon.engine.full_state import FullState
from echelon.engine.parallel.fsdp import clear_sharding_caches
from echelon.engine.precision import set_fp32_precision
from echelon.engine.run_state import RunState
from echelon.engine.step_result import StepResult
from echelon.engine.train_step import TrainStep
from echelon.errors import PlanError
from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.world import World, usable_cores


class Run(RunState):
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
        external_servers: ExternalServers | None = None,
        monitor_divergence: bool = True,
    ) -> None:
        """`dtype` casts the model and its floating inputs in place, for proofs in float64. `external_servers`: parameter servers that run already.
        `monitor_divergence`: compare ranks while they train."""
        if external_servers is not None and not plan.uses_servers:
            problem = f'servers={external_servers.address}: the plan "{plan}" uses no servers'
            raise PlanError(f"{problem}; add exchange=server to it, or leave servers out")
        super().__init__(job, plan, world, device=device, dtype=dtype, workers=workers, warn=warn)
        try:
            uses_servers = plan.uses_servers
            self.backend = ParameterServerBackend(self, external_servers) if uses_servers else AllReduceBackend(self)
            checks_state = require_storable(self)
            #: Counters and flags of modules, functions and optimizers, for checkpoints.
            self.attributes = RunAttributes(self)
            self._restore_process_settings = self._apply_process_settings()
            self.train_step = TrainStep(self, self.attributes, checks_state=checks_state, monitors=monitor_divergence)
            self.read_history = ReadHistory(self, self.train_step.is_batch_unchanged)
            self.evaluator = Evaluator(self, self.attributes)
        except BaseException:
            self.ranks.close()  # a group that still runs when Python ends may abort the process
            raise
        self.close_callbacks: list[Callable[[], None]] = []

    def _apply_process_settings(self) -> Callable[[], None]:
        """Set what belongs to the whole process; returns what restores it."""
        restore_precision = set_fp32_precision(self.precision)
        threads = torch.get_num_threads()
        if self.device.type == "cpu":
            # Not left to OMP_NUM_THREADS: torchrun sets that to 1 where the user set nothing.
            torch.set_num_threads(self.plan.threads or max(usable_cores() // self.world.local_size, 1))

        def restore() -> None:
            restore_precision()
            torch.set_num_threads(threads)

        return restore

    def batches(self, stop: int | None = None) -> Iterator[StepBatch]:
        """This rank's batches from the current step to `stop` (default: the end of the training)."""
        steps = self.loader.steps(self.step_number, self.total_steps if stop is None else stop)
        return self.backend.look_ahead(steps)

    def step(self, batch: StepBatch) -> StepResult:
        """One optimizer step: every micro-batch, one averaged gradient, one update."""
        return self.finish_step(self.backward(batch), batch)

    def backward(self, batch: StepBatch) -> Tensor:
        """Leave the gradient of the global batch's loss in `.grad`; returns that loss."""
        self.read_history.record(batch)
        return self.train_step.backward(batch)

    def finish_step(self, loss: Tensor, batch: StepBatch) -> StepResult:
        """The rest of a step after `backward`."""
        self.train_step.check_loss(loss)
        self.train_step.last_step = self.update(loss, batch.samples)
        return self.train_step.last_step

    def update(self, loss: Tensor, sample_count: int) -> StepResult:
        """Clip, step the optimizers and schedules, drop the gradients."""
        return self.train_step.update(loss, sample_count)

    def check_last_step(self) -> None:
        """Check the last step's results before they are built upon, saved or reported."""
        self.train_step.check_last()

    def synchronize(self) -> None:
        """Complete all updates in flight, so that every rank holds the same; every rank must call it, after the same step."""
        self.backend.synchronize()
        for index, full_tensor_optimizer in self.full_tensor_optimizers.items():
            full_tensor_optimizer.sync_settings(self.optimizers[index])

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Loss and metrics over the job's evaluation set, or `data`. The former's loss steps ReduceLROnPlateau."""
        self.synchronize()
        self.seed_random(self.step_number, "evaluate", self.data_parallel.rank)
        results = self.evaluator.evaluate(data)
        for schedule in self.schedules if data is None else ():
            if takes_metric(schedule):
                self.step_schedule(schedule, results["loss"])
        self.train_step.sync_max_norm_weights()
        return results

    def gather_full_state(self) -> FullState | None:
        """The whole state on rank 0, None elsewhere."""
        return full_state.gather_full_state(self)

    def save(self, folder: str | Path) -> int:
        """Write a checkpoint; returns its bytes. What ranks must hold alike is compared before."""
        self.check_last_step()
        self.train_step.divergence_monitor.compare_replicas(self.step_number)
        self.synchronize()
        tracker = self.train_step.step_metrics.buffer_tracker
        return save_load.save(self, self.attributes, self.read_history, tracker, Path(folder))

    def load(self, folder: str | Path) -> None:
        """Resume from a checkpoint, whatever plan wrote it."""
        is_new_run, tracker = self.step_number == 0, self.train_step.step_metrics.buffer_tracker
        stored_reads = save_load.load(self, self.attributes, tracker, Path(folder))
        if is_new_run:
            self.read_history.restore(stored_reads)
        else:
            self.read_history.rewind(self.step_number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove hooks from the model, and leave the process group if it was joined here."""
        self.backend.close()
        self.train_step.close()
        if self.rank_model.close():
            del self.model, self.optimizers, self.schedules, self.schedule_read_check, self.full_tensor_optimizers
            clear_sharding_caches()
        self._restore_process_settings()
        self._restore_process_settings = lambda: None  # by now somebody else may have set them
        self.ranks.close()
        while self.close_callbacks:
            self.close_callbacks.pop()()
