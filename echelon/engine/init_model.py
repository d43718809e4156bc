"""The job's model with the values that one process would give it, equal on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.engine.parallel.placeholder_tensor import absent
from echelon.engine.parallel.shard_layout import Piece
from echelon.engine.process_groups import Ranks
from echelon.errors import JobError, PlanError, WorldError
from echelon.job import Job, lift, make_dense, require_trainable
from echelon.plan import profile
from echelon.plan.parameter_server import Served
from echelon.tree import tree_leaves
from echelon.trials.determinism import seed_build
from echelon.trials.lazy_modules import initialise_lazy, is_uninitialised
from echelon.trials.shape_model import call_factory
from echelon.trials.snapshot import Snapshot
from echelon.trials.torch_patches import Patches


def build(
    job: Job,
    ranks: Ranks,
    *,
    sharded: bool,
    dtype: torch.dtype | None = None,
    expected: str | None = None,
    tables: Sequence[Served] = (),
    dense: bool = True,
) -> nn.Module:
    """The model on this rank's host memory.

    When it will be sharded only rank 0 holds real values (`realise` deals them out); the others build on the meta device,
    so that a model larger than N hosts' memory over N can start. `expected`: the fingerprint that a plan was made for.
    `tables`: of them those that begin on servers are left without values. `dense`: no module gives sparse gradients.
    """
    beyond = [table for table in tables if table.start == "server"]

    def made(empty: bool) -> tuple[nn.Module, str]:
        seed_build(job.seed)
        with ranks.together():
            with unmade(beyond):
                model = _made(job, empty)
            initialise_lazy(model, job)
            require_trainable(model)
            if dense:
                make_dense(model)
            if not empty:
                materialise(model, job, {table.path for table in beyond})
            found = fingerprint(model)
            if dtype is not None:
                lift(model, dtype)
        return model, found

    model, found = made(sharded and ranks.world.rank > 0)
    if sharded and len(set(ranks.gather(_digest(model)))) > 1:
        # A constructor may do something else on the meta device (an orthogonal parametrization).
        model, found = made(False)
    with ranks.together():
        _require_expected(found, expected)
    _require_same(model, ranks)
    return model


def _shapes(model: nn.Module) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, tuple(value.shape), str(value.dtype)) for name, value in tensors(model)]


def _digest(model: nn.Module) -> str:
    return hashlib.sha256(repr(_shapes(model)).encode()).hexdigest()


def _made(job: Job, empty: bool) -> nn.Module:
    if isinstance(job.model, nn.Module):
        return job.model
    if empty:
        before, patches = Snapshot({"model": job.model}), Patches()
        model = _made_empty(job)
        if model is not None and not _stray_tensors(model) and not is_uninitialised(model):
            return model
        before.put_back()
        patches.put_back()
        seed_build(job.seed)  # it keeps tensors outside parameters and buffers: they must be real everywhere
    return _called(job)


def _made_empty(job: Job) -> nn.Module | None:
    """On the meta device; None where its constructor computes with numbers (an orthogonal parametrization)."""
    try:
        with torch.device("meta"):
            return _called(job)
    except JobError:
        raise
    except Exception:  # if it fails with numbers too, that is the error
        return None


def _called(job: Job) -> nn.Module:
    model = call_factory(job.model)
    if not isinstance(model, nn.Module):
        raise JobError(f"model= gives {type(model).__name__}, not an nn.Module")
    return model


def _stray_tensors(model: nn.Module) -> bool:
    """Whether a module holds a tensor beside its parameters and buffers, by itself or in a container."""
    known = ("_parameters", "_buffers", "_modules")
    return any(
        isinstance(leaf, Tensor) and leaf.is_meta
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in known
        for leaf in tree_leaves(value)
    )


@contextmanager
def unmade(tables: Sequence[Served]) -> Iterator[None]:
    """Tables of these sizes are made without values: no host could hold them."""
    sizes = {(table.rows, table.dim) for table in tables}

    def around(usual: Any) -> Any:
        def init(module: Any, num_embeddings: int, embedding_dim: int, *args: Any, **kwargs: Any) -> None:
            if (num_embeddings, embedding_dim) in sizes:
                with torch.device("meta"):
                    usual(module, num_embeddings, embedding_dim, *args, **kwargs)
            else:
                usual(module, num_embeddings, embedding_dim, *args, **kwargs)

        return init

    kinds: tuple[Any, ...] = (nn.Embedding, nn.EmbeddingBag) if sizes else ()
    before = [kind.__init__ for kind in kinds]
    for kind, usual in zip(kinds, before, strict=True):
        kind.__init__ = around(usual)
    try:
        yield
    finally:
        for kind, usual in zip(kinds, before, strict=True):
            kind.__init__ = usual


def materialise(model: nn.Module, job: Job, served: Set[str] = frozenset()) -> None:
    """Give real, initial values to what the user's factory left on the meta device, but for tables that begin on servers."""
    for path, module in model.named_modules():
        if path in served:
            continue
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is None and job.weights is None:
            raise JobError(
                f"{path or 'model'} ({type(module).__name__}) is on the meta device and has no reset_parameters() to give it "
                "values; add one, build it on the CPU, or give weights="
            )
        module.to_empty(device="cpu", recurse=False)
        if reset is not None:
            reset()


def tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Every parameter and buffer by name, each once."""
    return chain(model.named_parameters(), model.named_buffers())


def fingerprint(model: nn.Module) -> str:
    """Hash of the parameters' names, shapes and dtypes, as profiles have it."""
    named = model.named_parameters()
    return profile.fingerprint((name, value.shape, str(value.dtype).removeprefix("torch.")) for name, value in named)


def _require_expected(found: str, expected: str | None) -> None:
    if expected not in (None, found):
        raise PlanError(
            f"the plan is for another model: it names the fingerprint {expected}, this job's model has {found} (names, shapes and "
            "dtypes of its parameters); plan again, or leave `model` out of the plan"
        )


def _require_same(model: nn.Module, ranks: Ranks) -> None:
    if ranks.world.size == 1:
        return
    digests = ranks.gather(_digest(model))
    if len(set(digests)) == 1:
        return
    lists = ranks.gather(_shapes(model))  # only now: the whole list of a large model is megabytes
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    here, there = {n: s for n, s, _ in lists[0]}, {n: s for n, s, _ in lists[other]}
    name = next((n for n in [*here, *there] if here.get(n) != there.get(n)), "a dtype")
    raise WorldError(
        f"model= returns different models per rank: {name} is {here.get(name, 'absent')} on rank 0 and "
        f"{there.get(name, 'absent')} on rank {other}; build it from the job alone, not from the rank or the host"
    )


@torch.no_grad()
def to_device(model: nn.Module, device: torch.device) -> None:
    """Move what has numbers; tensors of other stages stay without."""
    for module in model.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for slots in held:
            for name, value in slots.items():
                if value is None or value.is_meta:
                    continue
                if isinstance(value, nn.Parameter):
                    value.data = value.data.to(device)  # the same object: it may be shared
                else:
                    slots[name] = value.to(device)


@torch.no_grad()
def realise(
    model: nn.Module,
    path: str,
    ranks: Ranks,
    done: dict[int, Tensor],
    pieces: Mapping[str, Piece],
    foreign: Set[str] = frozenset(),
) -> None:
    """Put the parameters and buffers of the module at `path` on the device with rank 0's values. Shared tensors stay shared
    (`done`), of those that the tensor axis cuts only this rank's piece stays, and of `foreign` ones nothing but the shape."""
    for inner, module in model.get_submodule(path).named_modules(prefix=path):
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for slots in held:
            for key, old in slots.items():
                name = f"{inner}.{key}" if inner else key
                if old is None or isinstance(old, DTensor):
                    continue
                if name in pieces and old.shape == pieces[name].shape:
                    continue  # a buffer that was cut with the unit that it belongs to
                if id(old) not in done:
                    value = torch.empty_like(old, device=ranks.device) if old.is_meta else old.detach().to(ranks.device)
                    value = value.contiguous()  # all that fully_shard takes
                    dist.broadcast(torch.view_as_real(value) if value.is_complex() else value, 0)
                    if name in pieces:
                        value = pieces[name].take(value)
                    new = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
                    done[id(old)] = absent(new) if name in foreign else new
                slots[key] = done[id(old)]


@torch.no_grad()
def equalise(model: nn.Module, ranks: Ranks, megabytes: int = 25) -> None:
    """Rank 0's values on every rank."""
    broadcast([value for _, value in tensors(model)], ranks, megabytes)


def broadcast(given: Iterable[Tensor], ranks: Ranks, megabytes: int = 25) -> None:
    """Have tensors hold rank 0's values, many of them to a message."""
    if ranks.world.size == 1:
        return
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for value in given:
        kinds.setdefault(value.dtype, []).append(value)
    for values in kinds.values():
        group: list[Tensor] = []
        for value in values:
            group.append(value)
            if sum(each.numel() * each.element_size() for each in group) >= megabytes * 2**20:
                _broadcast(group)
                group = []
        if group:
            _broadcast(group)


def _broadcast(group: list[Tensor]) -> None:
    flat = torch.cat([value.reshape(-1) for value in group])
    dist.broadcast(flat, 0)
    for value, part in zip(group, flat.split([value.numel() for value in group]), strict=True):
        value.copy_(part.view_as(value))
