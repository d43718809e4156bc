"""What goes into the steps of a run: batches of the same data set on every rank, on the device, and repeatable random numbers."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from echelon.data.loader import Loader
from echelon.data.open_data import is_stream, open_source
from echelon.data.stream import Stream, StreamLoader
from echelon.data.warmup import StepLoader, WarmupLoader
from echelon.engine.checks.equal_data_check import require_equal_data
from echelon.engine.init_model import attribute_leaves
from echelon.engine.process_groups import Communicator, WorldCommunicator
from echelon.errors import JobError
from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.tree import to_device
from echelon.trials.dataset_state import preserve_datasets
from echelon.trials.random_state import seed_all


@dataclass(frozen=True, slots=True)
class RunData:
    """This rank's batches and how many there are."""

    loader: StepLoader
    total_steps: int
    #: Both 0 for a stream, whose length is not known.
    steps_per_epoch: int = 0
    sample_count: int = 0
    #: The rule by which samples are ordered, and what the data holds, each as a short text (None: not known).
    order_rule: str | None = None
    fingerprint: str | None = None
    #: Of all steps the first, on a small part of the data.
    warmup_steps: int = 0


#: A fraction's samples are drawn by another seed than the first epoch, which would begin with the same ones.
_WARMUP_SEED_MASK = 0x5EED
#: Tensors from this size on are copied on a stream of their own; of smaller ones the two streams' synchronization costs more.
_ASYNC_COPY_BYTES = 2**22


def open_run_data(job: Job, plan: Plan, ranks: WorldCommunicator, data: Communicator, *, workers: int) -> RunData:
    """The job's data for the ranks of `data`, after its warm-up; refused where ranks have different data."""
    options: dict[str, Any] = {"dp_rank": data.rank, "dp_size": data.size, "pin": ranks.device.type == "cuda"}
    options |= {"workers": workers, "micro_batch_size": plan.micro, "shares": plan.data.batch_shares}
    open_data = partial(_open_data, ranks=ranks, data_parallel=data, options=options)
    run_data = open_data(job)
    if job.warmup_data is None:
        return run_data
    if is_stream(job.warmup_data):
        raise JobError("warmup_data= is a stream of unknown length: give a data set with a length to begin with")
    warmup_job, warmup_steps = dataclasses.replace(job, warmup_data=None, epochs=1, steps=None), 0
    if isinstance(job.warmup_data, Real):
        if not run_data.steps_per_epoch:
            problem = "data= is a stream, which has no fraction; give a data set to begin with"
            raise JobError(f"warmup_data={job.warmup_data}: {problem}")
        warmup_steps = math.ceil(float(job.warmup_data) * run_data.steps_per_epoch)
        warmup_job = dataclasses.replace(warmup_job, seed=job.seed ^ _WARMUP_SEED_MASK)
    else:
        warmup_job = dataclasses.replace(warmup_job, data=job.warmup_data)
    warmup_data = open_data(warmup_job)
    warmup_steps = warmup_steps or warmup_data.total_steps
    fingerprint = run_data.fingerprint
    if warmup_data.fingerprint != fingerprint:
        fingerprint = f"{warmup_data.fingerprint} {fingerprint}"
    warmup_rule = f"{warmup_steps} steps of a part of {warmup_data.sample_count} samples ({warmup_data.order_rule})"
    return dataclasses.replace(
        run_data,
        loader=WarmupLoader(warmup_data.loader, warmup_steps, run_data.loader),
        total_steps=warmup_steps + run_data.total_steps,
        order_rule=f"{run_data.order_rule or 'a stream'}, after {warmup_rule}",
        fingerprint=fingerprint,
        warmup_steps=warmup_steps,
    )


def _open_data(job: Job, *, ranks: WorldCommunicator, data_parallel: Communicator, options: dict[str, Any]) -> RunData:
    if is_stream(job.data):
        if job.steps is None:
            raise JobError("data= is a stream of unknown length: give the job steps= instead of epochs=")
        stream = Stream(job.data, collate=job.collate, seed=job.seed)
        return RunData(StreamLoader(
            stream, batch=job.batch_size, all_gather=ranks.all_gather_object, model_parallel_size=ranks.size // data_parallel.size,
            drop_last=job.drop_last, **options,
        ), job.steps)  # fmt: skip
    with ranks.raise_on_all_ranks():
        source = open_source(job.data, collate=job.collate, seed=job.seed)
        order = source.make_order(batch=job.batch_size, seed=job.seed, drop_last=job.drop_last)
    with preserve_datasets(job.data):
        runs_code = type(job.data) not in (list, tuple)
        require_equal_data(source, ranks, data_parallel, options["workers"], runs_code=runs_code)
    loader, per_epoch = Loader(source, order, **options), order.steps_per_epoch
    total_steps = job.steps if job.steps is not None else (job.epochs or 0) * per_epoch
    return RunData(loader, total_steps, per_epoch, order.samples, order.rule, source.identity)


class BatchMover:
    """Moves batches to the device, floating tensors to `dtype` if one is given. Containers keep their type."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self._device, self._dtype = device, dtype
        self._copy_stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        """The host does not wait for the copy."""
        return to_device(batch, self._device, self._move_tensor)

    def _move_tensor(self, tensor: Tensor) -> Tensor:
        dtype = self._dtype if tensor.is_floating_point() else None
        is_large = self._copy_stream is not None and tensor.nbytes >= _ASYNC_COPY_BYTES
        if not is_large or dtype not in (None, tensor.dtype) or not tensor.is_pinned():
            return tensor.to(self._device, dtype, non_blocking=True)
        # At once, on a stream of its own, while the device still computes what the host launched before.
        compute_stream = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._copy_stream):
            copy = tensor.to(self._device, non_blocking=True)
        compute_stream.wait_stream(self._copy_stream)
        copy.record_stream(compute_stream)  # its memory belongs to the copy stream, which must not reuse it too soon
        return copy


def seed_step(device: torch.device, *seed_key: int | str, generators: Sequence[torch.Generator] = ()) -> None:
    """Seed all random numbers, and the model's `generators`, from `seed_key` (seed, step, rank, ...): a resumed run draws the same."""

    def derive_seed(*key: int | str) -> int:
        digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    seed = derive_seed(*seed_key)
    for index, generator in enumerate(generators):
        generator.manual_seed(derive_seed(index, *seed_key))
    seed_all(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def find_generators(model: nn.Module) -> list[torch.Generator]:
    """The torch generators that a model's modules hold, in the modules' order, each once."""
    generators = (leaf for leaf in attribute_leaves(model) if isinstance(leaf, torch.Generator))
    return list({id(generator): generator for generator in generators}.values())
