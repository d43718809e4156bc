"""How a trial runs the user's code: as one process, without torch.compile, and without side effects.

A trial is a call that only one rank makes (a profile, the reference of a proof or of a spot check). Collectives in that code would meet
those that other ranks make for another purpose, so torch.distributed describes a world of one meanwhile. Trials run copies of the model in
other sizes, types and modes, each of which would be compiled again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from echelon.job import Job
from echelon.trials.dataset_state import preserve_datasets
from echelon.trials.snapshot import Snapshot
from echelon.trials.torch_patches import TorchPatches

#: Larger tensors are not copied: they are no counters.
_MAX_TENSOR_BYTES = 2**22
#: Fields of a job that may hold samples.
_DATASET_FIELDS = ("data", "eval_data", "warmup_data")

#: Process groups made in a world of one are numbered from here, as other ranks do not make them.
_GROUP_NUMBERS = itertools.count(1_000_000, 1_000)


@contextlib.contextmanager
def trial_context() -> Iterator[None]:
    """The code inside is called by this rank alone."""
    with single_process_world(), compile_disabled():
        yield


@contextlib.contextmanager
def preserve_job_state(job: Job) -> Iterator[None]:
    """Inside, trial calls, steps and builds change nothing that the job's functions or data sets keep, and nothing in torch. Modules are not
    restored."""
    model = [job.model] if isinstance(job.model, nn.Module) else []
    parts = [part for m in model for part in (m, *m.modules(), *m.parameters(), *m.buffers())]
    fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    roots = {name: item for name, item in fields.items() if name not in _DATASET_FIELDS or isinstance(item, Dataset)}
    snapshot = Snapshot(roots, excluded_ids=set(map(id, parts)), max_tensor_bytes=_MAX_TENSOR_BYTES)
    patches = TorchPatches()
    try:
        with preserve_datasets(job.data, job.eval_data, job.warmup_data):
            yield
    finally:
        snapshot.restore()
        patches.restore()


@contextlib.contextmanager
def compile_disabled() -> Iterator[None]:
    """Run compiled code as plain Python, and compile nothing."""
    stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    with contextlib.nullcontext() if stance is None else stance("force_eager"):
        yield


@contextlib.contextmanager
def single_process_world() -> Iterator[None]:
    """Have torch.distributed describe this process alone, where it describes several."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    from torch.distributed import distributed_c10d as c10d

    world, group_count, group_names = c10d._get_default_group(), c10d._world.group_count, dict(c10d._world.pg_names)
    c10d._world.group_count = next(_GROUP_NUMBERS)
    c10d._update_default_pg(_get_single_rank_group(world))
    try:
        yield
    finally:
        c10d._update_default_pg(world)
        c10d._world.group_count = group_count
        # torch names a group of some ranks by the number of groups: ranks without this trial would wait under another name.
        for group in c10d._world.pg_names.keys() - group_names.keys():
            del c10d._world.pg_names[group]


def _get_single_rank_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    from torch.distributed import distributed_c10d as c10d

    name = f"echelon-alone-{world.group_name}"
    for group in c10d._world.pg_map:
        if group.group_name == name:
            c10d._world.pg_names[group] = name  # type: ignore[assignment]
            return group
    backend = dist.get_backend_config(world)
    timeout = c10d._get_default_timeout(dist.get_backend(world))
    store: Any = dist.HashStore()
    single_rank_group, _ = c10d._new_process_group_helper(1, 0, [], backend, store, name, timeout=timeout)  # type: ignore[arg-type]
    c10d._world.pg_group_ranks[single_rank_group] = {0: 0}
    return single_rank_group
