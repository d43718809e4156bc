"""How a trial runs the user's code: as one process, without torch.compile, and without a trace.

A trial is a call that only one rank makes (a profile, the reference of a proof or of a spot check). If that code uses torch.distributed,
its collectives would meet those that other ranks make for another purpose, so torch.distributed describes a world of one meanwhile:
`get_world_size()` is 1, `all_reduce` leaves its tensor as it is, `all_gather` copies it. Names that were imported before see it too.

Trials run copies of the model in other sizes, types and modes, each of which would be compiled again.
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
from echelon.trials.dataset_state import unread
from echelon.trials.snapshot import Snapshot
from echelon.trials.torch_patches import Patches

#: Larger tensors are not copied: they are not what steps count by.
_LARGE = 2**22
#: Fields of a job that may hold the samples themselves.
_DATA = ("data", "evaluation", "warmup_data")

#: Groups made in a world of one are numbered from here: other ranks do not make them, and count on.
_NUMBERS = itertools.count(1_000_000, 1_000)


@contextlib.contextmanager
def trial_context() -> Iterator[None]:
    """The code inside is called by this rank alone."""
    with one_process(), uncompiled():
        yield


@contextlib.contextmanager
def without_trace(job: Job) -> Iterator[None]:
    """Calls, steps and builds that are only tried, inside, change nothing that the job's functions keep (closures, globals, attributes of
    classes), nothing that its data sets keep, and nothing in torch. Modules are left alone."""
    model = [job.model] if isinstance(job.model, nn.Module) else []
    own = {id(each) for one in model for each in (*one.modules(), *one.parameters(), *one.buffers())}
    given = {each.name: getattr(job, each.name) for each in dataclasses.fields(job)}
    roots = {name: each for name, each in given.items() if name not in _DATA or isinstance(each, Dataset)}
    held, patches = Snapshot(roots, without=own | set(map(id, model)), largest=_LARGE), Patches()
    try:
        with unread(job.data, job.evaluation, job.warmup_data):
            yield
    finally:
        held.put_back()
        patches.put_back()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run what torch.compile has compiled, or is to compile, as plain Python."""
    stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    with contextlib.nullcontext() if stance is None else stance("force_eager"):
        yield


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Have torch.distributed describe this process alone, where it describes several."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    from torch.distributed import distributed_c10d as c10d

    world, groups, names = c10d._get_default_group(), c10d._world.group_count, dict(c10d._world.pg_names)
    c10d._world.group_count = next(_NUMBERS)
    c10d._update_default_pg(_alone(world))
    try:
        yield
    finally:
        c10d._update_default_pg(world)
        c10d._world.group_count = groups
        # torch names a group of some ranks by how many groups the process has: ranks without this trial would wait under another name.
        for group in c10d._world.pg_names.keys() - names.keys():
            del c10d._world.pg_names[group]


def _alone(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group of this process only; it ends with `world`, as all groups do."""
    from torch.distributed import distributed_c10d as c10d

    name = f"echelon-alone-{world.group_name}"
    for group in c10d._world.pg_map:
        if group.group_name == name:
            c10d._world.pg_names[group] = name  # type: ignore[assignment]
            return group
    backend = dist.get_backend_config(world)
    timeout = c10d._get_default_timeout(dist.get_backend(world))
    store: Any = dist.HashStore()
    made, _ = c10d._new_process_group_helper(1, 0, [], backend, store, name, timeout=timeout)  # type: ignore[arg-type]
    c10d._world.pg_group_ranks[made] = {0: 0}
    return made
