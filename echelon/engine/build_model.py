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

from echelon.engine.activation_checkpoint import recompute
from echelon.engine.backends.parameter_server import take
from echelon.engine.checkpoint.function_state import unchanged
from echelon.engine.data_setup import Mover
from echelon.engine.hook_checks import require_hooks
from echelon.engine.init_model import build, equalise, fingerprint, to_device
from echelon.engine.parallel.fsdp import Sharding, unit_modules
from echelon.engine.parallel.gradient_allreduce import Exchange
from echelon.engine.parallel.max_norm_sync import shortened
from echelon.engine.parallel.pipeline_parallel import Pipeline
from echelon.engine.parallel.shard_layout import Piece
from echelon.engine.parallel.tensor_parallel import Axis, cut, install, pieces
from echelon.engine.process_groups import Group, Ranks
from echelon.engine.weights import load_weights
from echelon.errors import PlanError
from echelon.job import Job
from echelon.nn.batchnorm import synchronise
from echelon.plan.plan import Plan
from echelon.profiler.sample_coupling import first_line
from echelon.trials.example_batch import Example


def takes_sparse(plan: Plan) -> bool:
    """Whether gradients may be sparse: one process steps on them as they are."""
    return plan.ranks == 1 and not plan.served


class Assembly:
    """The model on this rank, and how its parameters are joined with those of other ranks."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        ranks: Ranks,
        axes: Mapping[str, Group],
        *,
        dtype: torch.dtype | None,
        loss: Callable[[nn.Module, Any], Any],
        measure: Callable[[nn.Module, Any], Any],
        warn: Callable[[str], None],
    ) -> None:
        """`loss` and `measure` are what stages have to compute, in training and in evaluation."""
        self._job, self._plan, self._ranks, self._axes = job, plan, ranks, axes
        self._data = axes["dp"]
        self._dtype, self._loss, self._measure = dtype, loss, measure
        self.pipeline: Pipeline | None = None
        self.sharding: Sharding | None = None
        self.exchange: Exchange | None = None
        #: Of the servers' tables what rows begin with; rank 0's until they are handed over.
        self.first: dict[str, Tensor] = {}
        served = {table.name for table in plan.tables}
        self.model = self._build(warn)
        #: Those that this rank trains: all but what other stages hold.
        named = [
            (n, p) for n, p in self.model.named_parameters() if p.requires_grad and not p.is_meta and n not in served
        ]
        self.parameters = [value for _, value in named]
        self.copies = [self.held_by(name, value) for name, value in named]
        #: Held by several stages, with the ranks that hold them: their gradients add up over those.
        self.tied = self._find_tied(named)
        #: Whole here, but used on a part of the columns or of each sequence: their gradients add up over the tensor axis.
        partial = {name for placement in plan.placements for name in placement.partial}
        partial |= {name for segment in plan.segments for name in segment.partial} - self.pieces.keys()
        self.partial = [value for name, value in named if name in partial]
        #: Changed by forward itself, on the ranks whose samples use them.
        self.shortened = [value for value in shortened(self.model) if not value.is_meta]
        whole = self.parameters if self.sharding is None else self.sharding.loose
        if self._data.size > 1 and whole and plan.dense == "allreduce":
            self.exchange = Exchange(whole, plan.bucket, self._data.group)

    def owners(self, name: str) -> frozenset[int]:
        """The ranks of the pipeline axis that hold a parameter."""
        return frozenset({0}) if self.pipeline is None else self.pipeline.owners[name]

    def held_by(self, name: str, value: Tensor) -> int:
        """How many ranks hold what this one has of a parameter."""
        data = 1 if isinstance(value, DTensor) else self._data.size
        return data * (1 if name in self.pieces else self._axes["tp"].size) * len(self.owners(name))

    @contextmanager
    def words_for(self, optimizer: Optimizer) -> Iterator[None]:
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
        if self.exchange is not None:
            self.exchange.close()
        self._forget_recompute()
        if self.sharding is None:
            return False
        self.sharding.close()
        self.sharding = None
        del self.model
        self.parameters.clear()
        self.partial.clear()
        return True

    def _build(self, warn: Callable[[str], None]) -> nn.Module:
        plan, ranks = self._plan, self._ranks
        sharded = plan.zero > 0 and self._data.size > 1
        model = build(
            self._job,
            ranks,
            sharded=sharded,
            dtype=self._dtype,
            expected=plan.model,
            tables=plan.tables,
            dense=not takes_sparse(plan),
        )
        self.fingerprint = fingerprint(model)
        self.shapes = {name: list(value.shape) for name, value in model.named_parameters()}
        if plan.tables:
            self._take_tables(model, warn)
        if self._axes["pp"].size > 1:  # before anything talks to other ranks: shapes are found without them
            example = Mover(ranks.device, self._dtype)(Example(self._job).batch(2))
            around = partial(unchanged, self._job, model)  # a loss that counts its calls must not count these
            self.pipeline = Pipeline(model.train(), self._loss, example, plan, self._axes["pp"], around)
            if self._job.evaluation is not None:
                self.pipeline.require_evaluation(self._measure, example)
        if plan.batchnorm == "sync" and self._data.size > 1:
            model = synchronise(model, self._data.group)
        self.pieces = self._pieces(model)
        with ranks.together():
            require_hooks(model, plan, self.pieces, warn)
        self._forget_recompute = recompute(unit_modules(model), plan.recompute)
        if sharded:
            self._compile(model, unit_modules(model))
            self.sharding = Sharding(model, plan, ranks, self._data, self.pieces, self.pipeline)
        else:
            if self.pipeline is None:
                model.to(ranks.device)
            equalise(model, ranks)
            if self.pipeline is not None:
                self.pipeline.drop()
                to_device(model, ranks.device)
            cut(model, self.pieces)
            self._compile(model, [model] if self._data.size == 1 else unit_modules(model) or [model])
        if self._job.weights is not None and not plan.tables:
            load_weights(model, self._job.weights, pieces=self.pieces, warn=warn)
        return model.train()

    def _take_tables(self, model: nn.Module, warn: Callable[[str], None]) -> None:
        """Leave the servers' tables to them. Weights from a file are read before, while the model is whole."""
        if self._job.weights is not None:
            beyond = next((table.path for table in self._plan.tables if table.start == "server"), None)
            if beyond is not None:
                raise PlanError(
                    f"weights=: {beyond} begins on the servers, because no host holds it whole, and weights are read by hosts; leave weights= "
                    "out, or resume a run whose checkpoint has the servers' tables"
                )
            load_weights(model, self._job.weights, pieces={}, warn=warn)
        with self._ranks.together():
            self.first = take(model, self._plan.tables, keep=self._ranks.world.main)

    def _pieces(self, model: nn.Module) -> dict[str, Piece]:
        """What this rank keeps of parameters that the tensor axis cuts; the modules that hold them compute with it."""
        tensor, plan = self._axes["tp"], self._plan
        if tensor.size == 1:
            return {}
        if not plan.placements:
            raise PlanError(
                f"tp={tensor.size}: the plan does not say how modules are cut; have it completed: echelon plan FILE"
            )
        axis = Axis(tensor)
        found = pieces(model, plan.placements, axis)
        install(model, plan.placements, axis, plan.segments)
        return found

    def _find_tied(self, named: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[Group, list[nn.Parameter]]]:
        if self.pipeline is None:
            return []
        held: dict[frozenset[int], list[nn.Parameter]] = {}
        for name, value in named:
            held.setdefault(self.owners(name), []).append(value)
        places = {self.owners(name) for name, value in self.model.named_parameters() if value.requires_grad}
        groups = [(each, self._sharing(each)) for each in sorted(places, key=sorted) if len(each) > 1]
        return [(group, held[each]) for each, group in groups if group is not None and each in held]

    def _sharing(self, places: Collection[int]) -> Group | None:
        """This rank's group of its pipeline's ranks at some places; None where it is at another one. Every rank must call it."""
        pipeline = self._axes["pp"]
        if len(places) == pipeline.size:
            return pipeline

        def key(rank: int) -> tuple[tuple[str, int], ...] | None:
            place = self._plan.mesh.coordinate(rank)
            return tuple(each for each in place.items() if each[0] != "pp") if place["pp"] in places else None

        return self._ranks.group_by(key)

    def _compile(self, model: nn.Module, parts: list[nn.Module]) -> None:
        # Unit by unit where gradients are exchanged: one graph would hold them all back until backward ends.
        if self._plan.compile:
            for part in parts or [model]:
                part.compile()
