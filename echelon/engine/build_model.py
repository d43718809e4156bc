"""Build this rank's part of a job's model under a plan: staged, cut and sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from echelon.engine.activation_checkpoint import checkpoint_activations
from echelon.engine.backends.remote_embedding import remove_tables
from echelon.engine.checkpoint.function_state import preserve_function_state
from echelon.engine.checks.hook_checks import require_supported_hooks
from echelon.engine.data_setup import BatchMover
from echelon.engine.init_model import broadcast_model, initialize_model, model_fingerprint
from echelon.engine.parallel.data_parallel import max_norm_weights
from echelon.engine.parallel.fsdp import ZeroSharding, unit_modules
from echelon.engine.parallel.module_tensors import move_model
from echelon.engine.parallel.pipeline_parallel import Pipeline
from echelon.engine.parallel.shard_layout import TPShard
from echelon.engine.parallel.tensor_parallel import find_tp_shards, install_tensor_parallel, shard_parameters
from echelon.engine.parallel.tp_collectives import TPCommunicator
from echelon.engine.process_groups import Communicator, WorldCommunicator
from echelon.engine.weights import load_weights
from echelon.errors import PlanError, first_line
from echelon.job import Job
from echelon.nn.batchnorm import synchronise
from echelon.plan.plan import Plan
from echelon.trials.example_batch import ExampleBatches


class RankModel:
    """The model on this rank, and which ranks hold which of its parameters."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        ranks: WorldCommunicator,
        axes: Mapping[str, Communicator],
        *,
        dtype: torch.dtype | None,
        training_loss: Callable[[nn.Module, Any], Any],
        evaluation_loss: Callable[[nn.Module, Any], Any],
        warn: Callable[[str], None],
    ) -> None:
        """`training_loss`, `evaluation_loss`: what pipeline stages compute."""
        self._job, self.plan, self.ranks, self.axes = job, plan, ranks, axes
        self._data_parallel = axes["dp"]
        self._dtype, self._training_loss, self._evaluation_loss = dtype, training_loss, evaluation_loss
        self.pipeline: Pipeline | None = None
        self.sharding: ZeroSharding | None = None
        #: Initial rows of the servers' tables, on rank 0 until the servers have them.
        self.initial_tables: dict[str, Tensor] = {}
        served_names = {table.parameter_name for table in plan.server.tables}
        self.model = self._build(warn)
        named = self.model.named_parameters()
        trained = [(n, p) for n, p in named if p.requires_grad and not p.is_meta and n not in served_names]
        self.parameters = [parameter for _, parameter in trained]
        self.replica_counts = [self.count_replicas(name, parameter) for name, parameter in trained]
        #: Parameters that several stages hold, with their communicator, over which their gradients are summed.
        self.tied_parameters = self._find_tied(trained)
        #: Parameters that are whole here, but used on a part of the columns or of each sequence: their gradients are summed over tp.
        partial_names = {name for placement in plan.tensor.placements for name in placement.partial_gradients}
        segment_names = {name for segment in plan.tensor.segments for name in segment.partial_gradients}
        partial_names |= segment_names - self.tp_shards.keys()
        self.tp_partial = [parameter for name, parameter in trained if name in partial_names]
        #: Weights that forward itself renormalizes, on the ranks whose samples use them.
        self.max_norm_weights = [parameter for parameter in max_norm_weights(self.model) if not parameter.is_meta]

    def pipeline_ranks_of(self, name: str) -> frozenset[int]:
        """The pipeline ranks that hold a parameter."""
        return frozenset({0}) if self.pipeline is None else self.pipeline.holding_ranks[name]

    def count_replicas(self, name: str, parameter: Tensor) -> int:
        """How many ranks hold the same part of a parameter as this one."""
        data_replicas = 1 if isinstance(parameter, DTensor) else self._data_parallel.size
        tp_replicas = 1 if name in self.tp_shards else self.axes["tp"].size
        return data_replicas * tp_replicas * len(self.pipeline_ranks_of(name))

    def reshard(self) -> None:
        """Free the parameters that a forward without backward has gathered."""
        if self.sharding is not None:
            self.sharding.reshard()

    @contextmanager
    def explain_step_errors(self, optimizer: Optimizer) -> Iterator[None]:
        """Explain the error of an optimizer that cannot step on sharded parameters."""
        try:
            yield
        except (RuntimeError, NotImplementedError) as error:
            if self.sharding is None or not any(word in str(error) for word in ("aten.", "DTensor")):
                raise
            problem = f"{type(optimizer).__name__} cannot step on sharded parameters ({first_line(error)})"
            remedy = "use zero=0, or an optimizer that treats each number by itself (AdamW)"
            raise PlanError(f"zero={self.plan.zero}: {problem}; {remedy}") from error

    def close(self) -> bool:
        """Remove hooks; returns whether the model is unusable: sharded parameters are without their process group."""
        self._undo_checkpointing()
        if self.sharding is None:
            return False
        self.sharding.close()
        self.sharding = None
        del self.model
        self.parameters.clear()
        self.tp_partial.clear()
        return True

    def _build(self, warn: Callable[[str], None]) -> nn.Module:
        plan, ranks = self.plan, self.ranks
        is_sharded = plan.zero > 0 and self._data_parallel.size > 1
        model = initialize_model(self._job, plan, ranks, is_sharded=is_sharded, dtype=self._dtype)
        self.fingerprint = model_fingerprint(model)
        self.full_shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        if plan.server.tables:
            self._remove_served_tables(model, warn)
        if self.axes["pp"].size > 1:  # before any communication: shapes are found without it
            example = BatchMover(ranks.device, self._dtype)(ExampleBatches(self._job).batch(2))
            # A loss that counts its calls must not count these.
            preserve = partial(preserve_function_state, self._job, model)
            self.pipeline = Pipeline(model.train(), self._training_loss, example, plan, self.axes["pp"], preserve)
            if self._job.eval_data is not None:
                self.pipeline.require_evaluable(self._evaluation_loss, example)
        if plan.batchnorm == "sync" and self._data_parallel.size > 1:
            model = synchronise(model, self._data_parallel.process_group)
        self.tp_shards = self._install_tp(model)
        with ranks.raise_on_all_ranks():
            require_supported_hooks(model, plan, self.tp_shards, warn)
        self._undo_checkpointing = checkpoint_activations(unit_modules(model), plan.recompute)
        if is_sharded:
            self._compile(model, unit_modules(model))
            self.sharding = ZeroSharding(model, plan, ranks, self._data_parallel, self.tp_shards, self.pipeline)
        else:
            if self.pipeline is None:
                model.to(ranks.device)
            broadcast_model(model, ranks)
            if self.pipeline is not None:
                self.pipeline.drop_other_stages()
                move_model(model, ranks.device)
            shard_parameters(model, self.tp_shards)
            self._compile(model, [model] if self._data_parallel.size == 1 else unit_modules(model) or [model])
        if self._job.weights is not None and not plan.server.tables:
            load_weights(model, self._job.weights, tp_shards=self.tp_shards, warn=warn)
        return model.train()

    def _remove_served_tables(self, model: nn.Module, warn: Callable[[str], None]) -> None:
        """Leave the tables to the servers. Weights from a file are loaded before, while the model is whole."""
        tables = self.plan.server.tables
        if self._job.weights is not None:
            for path in (table.path for table in tables if table.initialized_by == "server"):
                problem = f"{path} is initialized on the servers: no host holds it whole, and hosts read weights"
                raise PlanError(f"weights=: {problem}; leave weights= out, or resume a run that has the tables")
            load_weights(model, self._job.weights, tp_shards={}, warn=warn)
        with self.ranks.raise_on_all_ranks():
            self.initial_tables = remove_tables(model, tables, keep_values=self.ranks.world.is_main)

    def _install_tp(self, model: nn.Module) -> dict[str, TPShard]:
        """What this rank keeps of parameters that the tensor axis cuts; the modules that hold them compute with it."""
        tensor_parallel, plan = self.axes["tp"], self.plan
        if tensor_parallel.size == 1:
            return {}
        if not plan.tensor.placements:
            problem = f"tp={tensor_parallel.size}: the plan does not say how modules are cut"
            raise PlanError(f"{problem}; have it completed: echelon plan FILE")
        tp = TPCommunicator(tensor_parallel)
        tp_shards = find_tp_shards(model, plan.tensor.placements, tp)
        install_tensor_parallel(model, plan.tensor.placements, tp, plan.tensor.segments)
        return tp_shards

    def _find_tied(self, trained: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[Communicator, list[nn.Parameter]]]:
        if self.pipeline is None:
            return []

        def key(holders: frozenset[int], rank: int) -> tuple[tuple[str, int], ...] | None:
            coordinate = self.plan.mesh.coordinate(rank)
            others = tuple(item for item in coordinate.items() if item[0] != "pp")
            return others if coordinate["pp"] in holders else None

        # Over all parameters, also of other stages: every rank must make every group.
        all_holders = {self.pipeline_ranks_of(n) for n, p in self.model.named_parameters() if p.requires_grad}
        tied_parameters, stages = [], self.axes["pp"]
        for holders in (holders for holders in sorted(all_holders, key=sorted) if len(holders) > 1):
            communicator = stages if len(holders) == stages.size else self.ranks.split_by(partial(key, holders))
            tied = [parameter for name, parameter in trained if self.pipeline_ranks_of(name) == holders]
            if communicator is not None and tied:
                tied_parameters.append((communicator, tied))
        return tied_parameters

    def _compile(self, model: nn.Module, units: list[nn.Module]) -> None:
        # Unit by unit where gradients are exchanged: one graph would hold them all back until backward ends.
        for unit in (units or [model]) if self.plan.compile else ():
            unit.compile()
