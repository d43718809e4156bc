"""Build the job's model with the values that one process would give it, equal on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.engine.parallel.module_tensors import named_tensors
from echelon.engine.process_groups import WorldCommunicator
from echelon.errors import JobError, PlanError, WorldError
from echelon.job import Job, cast_model, disable_sparse_gradients, require_trainable
from echelon.plan import profile
from echelon.plan.parameter_server import ServedTable
from echelon.plan.plan import Plan
from echelon.tree import tree_leaves
from echelon.trials.determinism import seed_model_build
from echelon.trials.lazy_modules import initialise_lazy, is_uninitialised
from echelon.trials.shape_model import call_factory
from echelon.trials.snapshot import Snapshot
from echelon.trials.torch_patches import TorchPatches

_BUCKET_BYTES = 25 * 2**20


def allows_sparse_gradients(plan: Plan) -> bool:
    """Whether gradients may be sparse: only one process steps on them as they are."""
    return plan.ranks == 1 and not plan.uses_servers


def initialize_model(
    job: Job, plan: Plan, ranks: WorldCommunicator, *, is_sharded: bool, dtype: torch.dtype | None
) -> nn.Module:
    """The model in this rank's host memory, without tables that servers initialize. If it will be sharded, only rank 0 holds real values, so that a
    model larger than N hosts' memory over N can start."""
    server_tables = [table for table in plan.server.tables if table.initialized_by == "server"]

    def construct(on_meta: bool) -> tuple[nn.Module, str]:
        seed_model_build(job.seed)
        with ranks.raise_on_all_ranks():
            with skip_table_init(server_tables):
                model = _construct(job, on_meta)
            initialise_lazy(model, job)
            require_trainable(model)
            if not allows_sparse_gradients(plan):
                disable_sparse_gradients(model)
            if not on_meta:
                _materialize_meta_modules(model, job, {table.path for table in server_tables})
            fingerprint = model_fingerprint(model)
            if dtype is not None:
                cast_model(model, dtype)
        return model, fingerprint

    model, fingerprint = construct(is_sharded and ranks.world.rank > 0)
    if is_sharded and len(set(ranks.all_gather_object(_shape_digest(model)))) > 1:
        # A constructor may do something else on the meta device (an orthogonal parametrization).
        model, fingerprint = construct(False)
    with ranks.raise_on_all_ranks():
        if plan.model not in (None, fingerprint):
            names = f"it names the fingerprint {plan.model}, this job's model has {fingerprint}"
            raise PlanError(f"the plan is for another model: {names}; plan again, or leave `model` out of the plan")
    _require_same_model(model, ranks)
    return model


def _named_shapes(model: nn.Module) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, tuple(value.shape), str(value.dtype)) for name, value in named_tensors(model)]


def _shape_digest(model: nn.Module) -> str:
    return hashlib.sha256(repr(_named_shapes(model)).encode()).hexdigest()


def _construct(job: Job, on_meta: bool) -> nn.Module:
    if isinstance(job.model, nn.Module):
        return job.model
    if on_meta:
        snapshot, patches = Snapshot({"model": job.model}), TorchPatches()
        try:
            with torch.device("meta"):
                model = _call_factory(job)
            # Tensors outside parameters and buffers must be real everywhere.
            needs_values = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in attribute_leaves(model))
            if not needs_values and not is_uninitialised(model):
                return model
        except JobError:
            raise
        except Exception:  # it computes with numbers (an orthogonal parametrization), or fails with them too
            pass
        snapshot.restore()
        patches.restore()
        seed_model_build(job.seed)
    return _call_factory(job)


def _call_factory(job: Job) -> nn.Module:
    model = call_factory(job.model)
    if not isinstance(model, nn.Module):
        raise JobError(f"model= gives {type(model).__name__}, not an nn.Module")
    return model


def attribute_leaves(model: nn.Module) -> Iterator[Any]:
    """What the modules hold in attributes and containers, besides parameters, buffers and modules."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from tree_leaves(value)


@contextmanager
def skip_table_init(tables: Sequence[ServedTable]) -> Iterator[None]:
    """Construct tables of these sizes without values: no host could hold them."""
    sizes = {(table.rows, table.dim) for table in tables}

    def wrap_init(original_init: Any) -> Any:
        def init(module: Any, num_embeddings: int, embedding_dim: int, *args: Any, **kwargs: Any) -> None:
            with torch.device("meta") if (num_embeddings, embedding_dim) in sizes else nullcontext():
                original_init(module, num_embeddings, embedding_dim, *args, **kwargs)

        return init

    with ExitStack() as stack:
        embedding_classes: tuple[Any, ...] = (nn.Embedding, nn.EmbeddingBag) if sizes else ()
        for embedding_class in embedding_classes:
            original_init = embedding_class.__init__
            stack.callback(setattr, embedding_class, "__init__", original_init)
            embedding_class.__init__ = wrap_init(original_init)
        yield


def _materialize_meta_modules(model: nn.Module, job: Job, skipped_paths: Set[str]) -> None:
    for path, module in model.named_modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if path in skipped_paths or not any(tensor.is_meta for tensor in tensors):
            continue
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is None and job.weights is None:
            problem = f"{path or 'model'} ({type(module).__name__}) is on the meta device and has no reset_parameters()"
            raise JobError(f"{problem} to give it values; add one, build it on the CPU, or give weights=")
        module.to_empty(device="cpu", recurse=False)
        if reset is not None:
            reset()


def model_fingerprint(model: nn.Module) -> str:
    """Hash of the parameters' names, shapes and dtypes, as in profiles."""
    named = model.named_parameters()
    return profile.model_fingerprint((name, p.shape, str(p.dtype).removeprefix("torch.")) for name, p in named)


def _require_same_model(model: nn.Module, ranks: WorldCommunicator) -> None:
    digests = ranks.all_gather_object(_shape_digest(model))
    if len(set(digests)) == 1:
        return
    rank_shapes = ranks.all_gather_object(_named_shapes(model))  # only now: of a large model it is megabytes
    other_rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, other = ({name: shape for name, shape, _ in rank_shapes[rank]} for rank in (0, other_rank))
    name = next((name for name in [*first, *other] if first.get(name) != other.get(name)), "a dtype")
    difference = f"{name} is {first.get(name, 'absent')} on rank 0 and {other.get(name, 'absent')} on rank {other_rank}"
    remedy = "build it from the job alone, not from the rank or the host"
    raise WorldError(f"model= returns different models per rank: {difference}; {remedy}")


@torch.no_grad()
def broadcast_model(model: nn.Module, ranks: WorldCommunicator) -> None:
    """Give every rank rank 0's values."""
    broadcast_tensors((value for _, value in named_tensors(model)), ranks)


def broadcast_tensors(targets: Iterable[Tensor], ranks: WorldCommunicator) -> None:
    """Overwrite tensors with rank 0's values, many of them per message."""
    tensors = list(targets)
    if ranks.world.size > 1 and tensors:
        group = dist.distributed_c10d._get_default_group()
        dist._broadcast_coalesced(group, tensors, _BUCKET_BYTES, 0)  # no public names
