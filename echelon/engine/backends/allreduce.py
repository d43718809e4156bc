"""exchange=allreduce: data ranks sum their gradients (zero=0) or reduce-scatter them (zero=1 to 3), and step on what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from echelon.engine import grad_clip
from echelon.engine.backends.backend import Backend
from echelon.engine.parallel.data_parallel import sum_gradients
from echelon.engine.parallel.gradient_allreduce import GradientAllReduce
from echelon.engine.run_state import RunState


class AllReduceBackend(Backend):
    """Collectives among the data ranks, overlapped with backward."""

    def __init__(self, run: RunState) -> None:
        self._run, self._sharding, ranks = run, run.rank_model.sharding, run.data_parallel
        self.step_ranks = ranks
        allreduced = run.rank_model.parameters if self._sharding is None else self._sharding.unsharded_parameters
        self._gradient_allreduce: GradientAllReduce | None = None
        if ranks.size > 1 and allreduced and run.plan.server.dense == "allreduce":
            megabytes = run.plan.data.bucket_megabytes
            self._gradient_allreduce = GradientAllReduce(allreduced, megabytes, ranks.process_group)

    def begin_micro_batch(self, batch: Any, *, is_last: bool) -> None:
        if self._sharding is not None:
            self._sharding.prepare_micro_batch(is_last=is_last)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        if is_last and self._gradient_allreduce is not None:
            self._gradient_allreduce.sync_next_backward()
        if self._sharding is None:
            loss.backward()
        else:
            self._sharding.backward(loss)

    def finish_backward(self) -> None:
        run, sharding = self._run, self._sharding
        is_pipeline = run.rank_model.pipeline is not None  # which has run every backward itself
        if sharding is not None and is_pipeline:
            sharding.reduce_kept_gradients()
        if self._gradient_allreduce is not None:
            if is_pipeline:
                self._gradient_allreduce.sync_next_backward()
            self._gradient_allreduce.wait()
        if sharding is not None:
            sharding.finish_backward()
        if run.data_parallel.size > 1:
            sum_gradients(list(run.loss_parameters.values()), run.data_parallel)

    def gradient_norm(self, gradients: Sequence[Tensor], replica_counts: Sequence[int]) -> Tensor:
        same_parameters = self._run.rank_model.pipeline is None
        return grad_clip.total_norm(gradients, replica_counts, self._run.ranks, same_parameters=same_parameters)

    def close(self) -> None:
        self._sharding = None
        if self._gradient_allreduce is not None:
            self._gradient_allreduce.close()
