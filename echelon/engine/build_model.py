"""What a rank holds of a job's model under a plan: built, staged, cut and sharded, and what joins it with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from echelon.engine.parallel.gradient_allreduce import GradientAllReduce
from echelon.engine.parallel.module_tensors import move_model
from echelon.engine.parallel.pipeline_parallel import Pipeline
from echelon.engine.parallel.shard_layout import TPShard
from echelon.engine.parallel.tensor_parallel import find_tp_shards, install_tensor_parallel, shard_parameters
from echelon.engine.parallel.tp_collectives import TPCommunicator
from echelon.engine.process_groups import Communicator, WorldCommunicator
from echelon.engine.weights import load_weights
from echelon.errors import PlanError
from echelon.job import Job
from echelon.nn.batchnorm import synchronise
from echelon.plan.plan import Plan
from echelon.profiler.sample_coupling import first_line
from echelon.trials.example_batch import ExampleBatches


def allows_sparse_gradients(plan: Plan) -> bool:
    """Whether gradients may be sparse: one process steps on them as they are."""
    return plan.ranks == 1 and not plan.uses_servers


class RankModel:
    """The model on this rank, and how its parameters are joined with those of other ranks."""

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
        """`training_loss` and `evaluation_loss` are what stages have to compute, in training and in evaluation."""
        self._job, self._plan, self._ranks, self._axes = job, plan, ranks, axes
        self._data_parallel = axes["dp"]
        self._dtype, self._training_loss, self._evaluation_loss = dtype, training_loss, evaluation_loss
        self.pipeline: Pipeline | None = None
        self.sharding: ZeroSharding | None = None
        self.gradient_allreduce: GradientAllReduce | None = None
        #: Of the servers' tables what rows begin with; rank 0's until they are handed over.
        self.initial_tables: dict[str, Tensor] = {}
        served_names = {table.parameter_name for table in plan.server.tables}
        self.model = self._build(warn)
        #: Those that this rank trains: all but what other stages hold.
        trained = [
            (n, p)
            for n, p in self.model.named_parameters()
            if p.requires_grad and not p.is_meta and n not in served_names
        ]
        self.parameters = [parameter for _, parameter in trained]
        self.replica_counts = [self.count_replicas(name, parameter) for name, parameter in trained]
        #: Held by several stages, with the ranks that hold them: their gradients add up over those.
        self.tied_parameters = self._find_tied(trained)
        #: Whole here, but used on a part of the columns or of each sequence: their gradients add up over the tensor axis.
        partial_names = {name for placement in plan.tensor.placements for name in placement.partial_gradients}
        partial_names |= {
            name for segment in plan.tensor.segments for name in segment.partial_gradients
        } - self.tp_shards.keys()
        self.tp_partial = [parameter for name, parameter in trained if name in partial_names]
        #: Changed by forward itself, on the ranks whose samples use them.
        self.max_norm_weights = [parameter for parameter in max_norm_weights(self.model) if not parameter.is_meta]
        allreduced = self.parameters if self.sharding is None else self.sharding.unsharded_parameters
        if self._data_parallel.size > 1 and allreduced and plan.server.dense == "allreduce":
            self.gradient_allreduce = GradientAllReduce(
                allreduced, plan.data.bucket_megabytes, self._data_parallel.process_group
            )

    def pipeline_ranks_of(self, name: str) -> frozenset[int]:
        """The ranks of the pipeline axis that hold a parameter."""
        return frozenset({0}) if self.pipeline is None else self.pipeline.holding_ranks[name]

    def count_replicas(self, name: str, parameter: Tensor) -> int:
        """How many ranks hold what this one has of a parameter."""
        data_replicas = 1 if isinstance(parameter, DTensor) else self._data_parallel.size
        return (
            data_replicas * (1 if name in self.tp_shards else self._axes["tp"].size) * len(self.pipeline_ranks_of(name))
        )

    def reshard(self) -> None:
        """Free the parameters that a forward without backward has gathered."""
        if self.sharding is not None:
            self.sharding.reshard()

    @contextmanager
    def explain_step_errors(self, optimizer: Optimizer) -> Iterator[None]:
        """Torch's optimizers are not all able to step on sharded parameters: then say so, and what to use."""
        try:
            yield
        except (RuntimeError, NotImplementedError) as error:
            if self.sharding is None or not any(word in str(error) for word in ("aten.", "DTensor")):
                raise
            raise PlanError(
                f"zero={self._plan.zero}: {type(optimizer).__name__} cannot step on sharded parameters ({first_line(error)}); use zero=0, or an "
                "optimizer that treats each number by itself (AdamW)"
            ) from error

    def close(self) -> bool:
        """Take hooks off the parameters; whether the model is of no use any more.

        Sharded parameters keep the process group and its threads alive; one that still runs when Python ends aborts the process.
        Without the group they could not be used any more anyway.
        """
        if self.gradient_allreduce is not None:
            self.gradient_allreduce.close()
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
        plan, ranks = self._plan, self._ranks
        is_sharded = plan.zero > 0 and self._data_parallel.size > 1
        model = initialize_model(
            self._job,
            ranks,
            is_sharded=is_sharded,
            dtype=self._dtype,
            expected_fingerprint=plan.model,
            tables=plan.server.tables,
            dense_gradients=not allows_sparse_gradients(plan),
        )
        self.fingerprint = model_fingerprint(model)
        self.full_shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        if plan.server.tables:
            self._remove_served_tables(model, warn)
        if self._axes["pp"].size > 1:  # before anything talks to other ranks: shapes are found without them
            example = BatchMover(ranks.device, self._dtype)(ExampleBatches(self._job).batch(2))
            unchanged_state = partial(
                preserve_function_state, self._job, model
            )  # a loss that counts its calls must not count these
            self.pipeline = Pipeline(
                model.train(), self._training_loss, example, plan, self._axes["pp"], unchanged_state
            )
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
        """Leave the servers' tables to them. Weights from a file are read before, while the model is whole."""
        if self._job.weights is not None:
            server_initialized = next(
                (table.path for table in self._plan.server.tables if table.initialized_by == "server"), None
            )
            if server_initialized is not None:
                raise PlanError(
                    f"weights=: {server_initialized} begins on the servers, because no host holds it whole, and weights are read by hosts; leave weights= "
                    "out, or resume a run whose checkpoint has the servers' tables"
                )
            load_weights(model, self._job.weights, tp_shards={}, warn=warn)
        with self._ranks.raise_on_all_ranks():
            self.initial_tables = remove_tables(model, self._plan.server.tables, keep_values=self._ranks.world.is_main)

    def _install_tp(self, model: nn.Module) -> dict[str, TPShard]:
        """What this rank keeps of parameters that the tensor axis cuts; the modules that hold them compute with it."""
        tensor_parallel, plan = self._axes["tp"], self._plan
        if tensor_parallel.size == 1:
            return {}
        if not plan.tensor.placements:
            raise PlanError(
                f"tp={tensor_parallel.size}: the plan does not say how modules are cut; have it completed: echelon plan FILE"
            )
        tp = TPCommunicator(tensor_parallel)
        tp_shards = find_tp_shards(model, plan.tensor.placements, tp)
        install_tensor_parallel(model, plan.tensor.placements, tp, plan.tensor.segments)
        return tp_shards

    def _find_tied(self, trained: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[Communicator, list[nn.Parameter]]]:
        if self.pipeline is None:
            return []
        trained_by_holders: dict[frozenset[int], list[nn.Parameter]] = {}
        for name, parameter in trained:
            trained_by_holders.setdefault(self.pipeline_ranks_of(name), []).append(parameter)
        holder_sets = {
            self.pipeline_ranks_of(name) for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }
        communicators = [
            (holders, self._communicator_of(holders)) for holders in sorted(holder_sets, key=sorted) if len(holders) > 1
        ]
        return [
            (communicator, trained_by_holders[holders])
            for holders, communicator in communicators
            if communicator is not None and holders in trained_by_holders
        ]

    def _communicator_of(self, pipeline_ranks: Collection[int]) -> Communicator | None:
        """This rank's group of its pipeline's ranks at some places; None where it is at another one. Every rank must call it."""
        pipeline = self._axes["pp"]
        if len(pipeline_ranks) == pipeline.size:
            return pipeline

        def key(rank: int) -> tuple[tuple[str, int], ...] | None:
            coordinate = self._plan.mesh.coordinate(rank)
            return (
                tuple(axis_coordinate for axis_coordinate in coordinate.items() if axis_coordinate[0] != "pp")
                if coordinate["pp"] in pipeline_ranks
                else None
            )

        return self._ranks.split_by(key)

    def _compile(self, model: nn.Module, units: list[nn.Module]) -> None:
        # Unit by unit where gradients are exchanged: one graph would hold them all back until backward ends.
        if self._plan.compile:
            for unit in units or [model]:
                unit.compile()
