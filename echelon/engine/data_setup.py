"""What goes into the steps of a run: the same data set on every rank, batches on the device, and random numbers that can be repeated."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.data.loader import Loader
from echelon.data.open_data import is_stream, open_source
from echelon.data.sample_digest import digest
from echelon.data.source import Source
from echelon.data.stream import Stream, StreamLoader
from echelon.data.warmup import StepLoader, WarmupLoader
from echelon.engine.process_groups import Communicator, WorldCommunicator
from echelon.errors import DataError, JobError
from echelon.job import Job
from echelon.tree import to_device, tree_tensors
from echelon.trials.dataset_state import preserve_datasets


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


def open_run_data(
    job: Job,
    ranks: WorldCommunicator,
    data_parallel: Communicator,
    *,
    micro_batch_size: int | None,
    workers: int,
    shares: Sequence[int] = (),
) -> RunData:
    """The job's data for the ranks of `data_parallel`, after what it warms up with; refused where they have not the same. `shares`: of the batch,
    where they are unequal."""
    run_data = _open_run_data(
        job, ranks, data_parallel, micro_batch_size=micro_batch_size, workers=workers, shares=shares
    )
    if job.warmup_data is None:
        return run_data
    if is_stream(job.warmup_data):
        raise JobError("warmup_data= is a stream of unknown length: give a data set with a length to begin with")
    if isinstance(job.warmup_data, Real):
        if not run_data.steps_per_epoch:
            raise JobError(
                f"warmup_data={job.warmup_data}: data= is a stream, which has no fraction; give a data set to begin with"
            )
        warmup_steps = math.ceil(float(job.warmup_data) * run_data.steps_per_epoch)
        warmup_job = dataclasses.replace(job, warmup_data=None, seed=job.seed ^ _WARMUP_SEED_MASK, epochs=1, steps=None)
    else:
        warmup_steps = 0
        warmup_job = dataclasses.replace(job, data=job.warmup_data, warmup_data=None, epochs=1, steps=None)
    warmup_data = _open_run_data(
        warmup_job, ranks, data_parallel, micro_batch_size=micro_batch_size, workers=workers, shares=shares
    )
    warmup_steps = warmup_steps or warmup_data.total_steps
    return dataclasses.replace(
        run_data,
        loader=WarmupLoader(warmup_data.loader, warmup_steps, run_data.loader),
        total_steps=warmup_steps + run_data.total_steps,
        order_rule=f"{run_data.order_rule or 'a stream'}, after {warmup_steps} steps of a part of {warmup_data.sample_count} samples ({warmup_data.order_rule})",
        fingerprint=run_data.fingerprint
        if warmup_data.fingerprint == run_data.fingerprint
        else f"{warmup_data.fingerprint} {run_data.fingerprint}",
        warmup_steps=warmup_steps,
    )


#: The part that a fraction stands for is drawn by another seed than the first epoch, which would begin with the very same samples.
_WARMUP_SEED_MASK = 0x5EED


def _open_run_data(
    job: Job,
    ranks: WorldCommunicator,
    data_parallel: Communicator,
    *,
    micro_batch_size: int | None,
    workers: int,
    shares: Sequence[int] = (),
) -> RunData:
    pin_memory = ranks.device.type == "cuda"
    if is_stream(job.data):
        if job.steps is None:
            raise JobError("data= is a stream of unknown length: give the job steps= instead of epochs=")
        stream = Stream(job.data, collate=job.collate, seed=job.seed)
        loader = StreamLoader(
            stream, batch=job.batch_size, dp_rank=data_parallel.rank, dp_size=data_parallel.size, micro_batch_size=micro_batch_size, all_gather=ranks.all_gather_object, pin=pin_memory,
            workers=workers, model_parallel_size=ranks.size // data_parallel.size, drop_last=job.drop_last, shares=shares,
        )  # fmt: skip
        return RunData(loader, job.steps)
    with ranks.raise_on_all_ranks():
        source = open_source(job.data, collate=job.collate, seed=job.seed)
        order = source.make_order(batch=job.batch_size, seed=job.seed, drop_last=job.drop_last)
    with preserve_datasets(job.data):
        _require_equal_data(source, ranks, data_parallel, workers, runs_code=type(job.data) not in (list, tuple))
    total_steps = job.steps if job.steps is not None else (job.epochs or 0) * order.steps_per_epoch
    return RunData(
        Loader(
            source,
            order,
            dp_rank=data_parallel.rank,
            dp_size=data_parallel.size,
            micro_batch_size=micro_batch_size,
            pin=pin_memory,
            workers=workers,
            shares=shares,
        ),
        total_steps,
        order.steps_per_epoch,
        order.samples,
        order.rule,
        source.identity,
    )


def _require_equal_data(
    source: Source, ranks: WorldCommunicator, data_parallel: Communicator, workers: int, *, runs_code: bool
) -> None:
    """`runs_code`: reading a sample may run code of the data set."""
    lengths = ranks.all_gather_object(len(source))
    if len(set(lengths)) > 1:
        other_rank = next(rank for rank, length in enumerate(lengths) if length != lengths[0])
        raise DataError(
            f"data= has {lengths[0]:,} samples on rank 0 and {lengths[other_rank]:,} on rank {other_rank}: every rank must see the same "
            "data set (it reads only its own part of it)"
        )
    if source.identity is not None:
        identities = ranks.all_gather_object(source.identity)
        differing_rank = next((rank for rank, identity in enumerate(identities) if identity != identities[0]), None)
        if differing_rank is not None:
            raise DataError(
                f"the ranks have different data: the packed data set on rank {differing_rank} is not rank 0's; give every rank the same files, "
                "or repair what one rank skips"
            )
        return
    # A data set with workers may not like to be opened before they are forked.
    if ranks.size > 1 and (source.supports_gather or not workers):
        for sample_index in sorted({0, len(source) - 1}):
            _require_equal_sample(source, sample_index, ranks, data_parallel)
        if source.supports_gather or not runs_code:
            _require_equal_rows(source, ranks)


def _require_equal_rows(source: Source, ranks: WorldCommunicator) -> None:
    """Of data in memory every row is compared, of much data blocks that take `_COMPARED_BYTES` bytes."""
    compared_rows = max(
        _COMPARED_BYTES // max(sum(tensor.nbytes for tensor in tree_tensors(source.read_sample(0))), 1), 1
    )
    compared_rows = compared_rows if source.supports_gather else min(compared_rows, _COMPARED_SAMPLES)
    block_count = min(len(source), compared_rows, _COMPARED_BLOCKS)
    blocks = [
        block[: compared_rows // block_count] for block in numpy.array_split(numpy.arange(len(source)), block_count)
    ]
    with ranks.raise_on_all_ranks():
        block_digests = [
            digest(
                source.read_batch(block, 0)
                if source.supports_gather
                else [source.read_sample(int(sample_index)) for sample_index in block]
            )
            for block in blocks
        ]
    rank_digests = ranks.all_gather_object(block_digests)
    for block, *digests in zip(blocks, *rank_digests, strict=True):
        if len(set(digests)) > 1:
            sample_digests = ranks.all_gather_object(
                [digest(source.read_sample(int(sample_index))) for sample_index in block]
            )
            for sample_index, *digests_of_sample in zip(block, *sample_digests, strict=True):
                if len(set(digests_of_sample)) > 1:
                    raise _different_data_error(
                        int(sample_index),
                        next(
                            rank
                            for rank, sample_digest in enumerate(digests_of_sample)
                            if sample_digest != digests_of_sample[0]
                        ),
                        0,
                    )


def _different_data_error(sample_index: int, rank: int, other_rank: int) -> DataError:
    return DataError(
        f"the ranks have different data: sample {sample_index} differs on rank {rank} from rank {other_rank}'s; make it the same way "
        "everywhere (torch.manual_seed(0) before random data is made, files in sorted order, one seed for generators of its own)"
    )


def _require_equal_sample(
    source: Source, sample_index: int, ranks: WorldCommunicator, data_parallel: Communicator
) -> None:
    """Random data that each rank makes for itself has the same length everywhere: only its content tells."""
    rank_reads = ranks.all_gather_object((data_parallel.rank, *_digest_twice(source, sample_index)))
    is_deterministic = all(first_digest == second_digest for _, first_digest, second_digest in rank_reads)
    if (
        is_deterministic and len({sample_digest for _, sample_digest, _ in rank_reads}) > 1
    ):  # by chance, perhaps: a coin falls on the same side twice
        is_deterministic = not any(ranks.all_gather_object(_changes_between_reads(source, sample_index)))
    for rank, (data_rank, sample_digest, _) in enumerate(rank_reads):
        # What changes from one reading to the next need not be the same where other samples are read.
        reference_rank = next(
            (
                other_rank
                for other_rank, (other_data_rank, _, _) in enumerate(rank_reads)
                if is_deterministic or other_data_rank == data_rank
            ),
            0,
        )
        if (
            None not in (sample_digest, rank_reads[reference_rank][1])
            and sample_digest != rank_reads[reference_rank][1]
        ):
            raise _different_data_error(sample_index, rank, reference_rank)


def _digest_twice(source: Source, sample_index: int) -> tuple[str | None, str | None]:
    """Of a sample, read twice: a data set with a generator of its own gives another each time. None: it cannot be read, which is told
    of when it is its turn."""
    try:
        first_digest = digest(source.read_sample(sample_index))
        return first_digest, first_digest if source.supports_gather else digest(source.read_sample(sample_index))
    except Exception:
        return None, None


def _changes_between_reads(source: Source, sample_index: int) -> bool:
    """Whether a sample is another in one of many readings."""
    try:
        return (
            not source.supports_gather
            and len({digest(source.read_sample(sample_index)) for _ in range(_REPEATED_READS)}) > 1
        )
    except Exception:  # told of when it is its turn
        return False


#: Bytes of data in memory that ranks compare at the start, in how many blocks, and samples of lists.
_COMPARED_BYTES, _COMPARED_BLOCKS, _COMPARED_SAMPLES = 2**26, 64, 2**13
#: Readings of a sample that tell whether it changes.
_REPEATED_READS = 20
#: Tensors from so many bytes on are copied on a stream of their own; smaller ones take less time than the two streams' talk.
_ASYNC_COPY_BYTES = 2**22


class BatchMover:
    """Brings batches to the device, floating tensors in `dtype` if one is given. Containers keep their kind."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self._device, self._dtype = device, dtype
        self._copy_stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        """`batch`, there. The host does not wait for the copy."""
        return to_device(batch, self._device, self._move_tensor)

    def _move_tensor(self, tensor: Tensor) -> Tensor:
        dtype = self._dtype if tensor.is_floating_point() else None
        is_large = self._copy_stream is not None and tensor.nbytes >= _ASYNC_COPY_BYTES
        if is_large and dtype in (None, tensor.dtype) and tensor.is_pinned():
            return self._copy_async(tensor)
        return tensor.to(self._device, dtype, non_blocking=True)

    def _copy_async(self, tensor: Tensor) -> Tensor:
        """By a stream of its own, at once, while the device still computes what the host has asked for before."""
        compute_stream = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._copy_stream):
            copy = tensor.to(self._device, non_blocking=True)
        compute_stream.wait_stream(self._copy_stream)
        copy.record_stream(
            compute_stream
        )  # its memory belongs to the other stream, which must not use it again too soon
        return copy


def seed_step(device: torch.device, *seed_key: int | str, generators: Sequence[torch.Generator] = ()) -> None:
    """Randomness follows from the `seed_key` (seed, step, rank, ...): a resumed run needs no stored state to draw the same.

    `generators`: the model's own, to be seeded as well, each from the place and its position.
    """
    seed = _derive_seed(*seed_key)
    for index, generator in enumerate(generators):
        generator.manual_seed(_derive_seed(index, *seed_key))
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


def _derive_seed(*seed_key: int | str) -> int:
    text = " ".join(map(str, seed_key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def find_generators(model: nn.Module) -> list[torch.Generator]:
    """The torch generators that a model's modules hold, in the modules' order, each once."""
    generators = {
        id(leaf): leaf
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Generator)
    }
    return list(generators.values())
