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
from echelon.data.sample_digest import digest
from echelon.data.source import Source, is_stream, open_source
from echelon.data.stream import Stream, StreamLoader
from echelon.data.warmup import Batches, Warmed
from echelon.engine.process_groups import Group, Ranks
from echelon.errors import DataError, JobError
from echelon.job import Job
from echelon.tree import tensors, to_device
from echelon.trials.dataset_state import unread


@dataclass(frozen=True, slots=True)
class Intake:
    """This rank's batches and how many there are."""

    loader: Batches
    total_steps: int
    #: Both 0 for a stream, whose length is not known.
    steps_per_epoch: int = 0
    samples: int = 0
    #: The rule by which samples are ordered, and what the data holds, each as a short text (None: not known).
    order: str | None = None
    content: str | None = None
    #: Of all steps the first, on a small part of the data.
    warmup: int = 0


def open_intake(
    job: Job, ranks: Ranks, data: Group, *, micro: int | None, workers: int, shares: Sequence[int] = ()
) -> Intake:
    """The job's data for the ranks of `data`, after what it warms up with; refused where they have not the same. `shares`: of the batch,
    where they are unequal."""
    intake = _open(job, ranks, data, micro=micro, workers=workers, shares=shares)
    if job.warmup_data is None:
        return intake
    if is_stream(job.warmup_data):
        raise JobError("warmup_data= is a stream of unknown length: give a data set with a length to begin with")
    if isinstance(job.warmup_data, Real):
        if not intake.steps_per_epoch:
            raise JobError(
                f"warmup_data={job.warmup_data}: data= is a stream, which has no fraction; give a data set to begin with"
            )
        count = math.ceil(float(job.warmup_data) * intake.steps_per_epoch)
        part = dataclasses.replace(job, warmup_data=None, seed=job.seed ^ _PART, epochs=1, steps=None)
    else:
        count = 0
        part = dataclasses.replace(job, data=job.warmup_data, warmup_data=None, epochs=1, steps=None)
    first = _open(part, ranks, data, micro=micro, workers=workers, shares=shares)
    count = count or first.total_steps
    return dataclasses.replace(
        intake,
        loader=Warmed(first.loader, count, intake.loader),
        total_steps=count + intake.total_steps,
        order=f"{intake.order or 'a stream'}, after {count} steps of a part of {first.samples} samples ({first.order})",
        content=intake.content if first.content == intake.content else f"{first.content} {intake.content}",
        warmup=count,
    )


#: The part that a fraction stands for is drawn by another seed than the first epoch, which would begin with the very same samples.
_PART = 0x5EED


def _open(
    job: Job, ranks: Ranks, data: Group, *, micro: int | None, workers: int, shares: Sequence[int] = ()
) -> Intake:
    pin = ranks.device.type == "cuda"
    if is_stream(job.data):
        if job.steps is None:
            raise JobError("data= is a stream of unknown length: give the job steps= instead of epochs=")
        stream = Stream(job.data, collate=job.collate, seed=job.seed)
        loader = StreamLoader(
            stream, batch=job.batch, rank=data.rank, ranks=data.size, micro=micro, agree=ranks.gather, pin=pin,
            workers=workers, alike=ranks.size // data.size, drop_last=job.drop_last, shares=shares,
        )  # fmt: skip
        return Intake(loader, job.steps)
    with ranks.together():
        source = open_source(job.data, collate=job.collate, seed=job.seed)
        order = source.order(batch=job.batch, seed=job.seed, drop_last=job.drop_last)
    with unread(job.data):
        _require_equal_data(source, ranks, data, workers, by_code=type(job.data) not in (list, tuple))
    total = job.steps if job.steps is not None else (job.epochs or 0) * order.steps_per_epoch
    return Intake(
        Loader(source, order, rank=data.rank, ranks=data.size, micro=micro, pin=pin, workers=workers, shares=shares),
        total,
        order.steps_per_epoch,
        order.samples,
        order.rule,
        source.identity,
    )


def _require_equal_data(source: Source, ranks: Ranks, data: Group, workers: int, *, by_code: bool) -> None:
    """`by_code`: reading a sample may run code of the data set."""
    lengths = ranks.gather(len(source))
    if len(set(lengths)) > 1:
        other = next(rank for rank, length in enumerate(lengths) if length != lengths[0])
        raise DataError(
            f"data= has {lengths[0]:,} samples on rank 0 and {lengths[other]:,} on rank {other}: every rank must see the same "
            "data set (it reads only its own part of it)"
        )
    if source.identity is not None:
        found = ranks.gather(source.identity)
        differing = next((rank for rank, each in enumerate(found) if each != found[0]), None)
        if differing is not None:
            raise DataError(
                f"the ranks have different data: the packed data set on rank {differing} is not rank 0's; give every rank the same files, "
                "or repair what one rank skips"
            )
        return
    # A data set with workers may not like to be opened before they are forked.
    if ranks.size > 1 and (source.gathers or not workers):
        for number in sorted({0, len(source) - 1}):
            _require_equal_sample(source, number, ranks, data)
        if source.gathers or not by_code:
            _require_equal_rows(source, ranks)


def _require_equal_rows(source: Source, ranks: Ranks) -> None:
    """Of data in memory every row is compared, of much data blocks that take `_COMPARED` bytes."""
    rows = max(_COMPARED // max(sum(part.nbytes for part in tensors(source.sample(0))), 1), 1)
    rows = rows if source.gathers else min(rows, _SAMPLES)
    count = min(len(source), rows, _BLOCKS)
    blocks = [block[: rows // count] for block in numpy.array_split(numpy.arange(len(source)), count)]
    with ranks.together():
        texts = [
            digest(source.take(block, 0) if source.gathers else [source.sample(int(number)) for number in block])
            for block in blocks
        ]
    found = ranks.gather(texts)
    for block, *each_rank in zip(blocks, *found, strict=True):
        if len(set(each_rank)) > 1:
            samples = ranks.gather([digest(source.sample(int(number))) for number in block])
            for number, *each in zip(block, *samples, strict=True):
                if len(set(each)) > 1:
                    raise _different(int(number), next(i for i, text in enumerate(each) if text != each[0]), 0)


def _different(number: int, rank: int, other: int) -> DataError:
    return DataError(
        f"the ranks have different data: sample {number} differs on rank {rank} from rank {other}'s; make it the same way "
        "everywhere (torch.manual_seed(0) before random data is made, files in sorted order, one seed for generators of its own)"
    )


def _require_equal_sample(source: Source, number: int, ranks: Ranks, data: Group) -> None:
    """Random data that each rank makes for itself has the same length everywhere: only its content tells."""
    found = ranks.gather((data.rank, *_digests(source, number)))
    steady = all(first == again for _, first, again in found)
    if steady and len({text for _, text, _ in found}) > 1:  # by chance, perhaps: a coin falls on the same side twice
        steady = not any(ranks.gather(_is_changing(source, number)))
    for rank, (part, text, _) in enumerate(found):
        # What changes from one reading to the next need not be the same where other samples are read.
        other = next((i for i, (same, _, _) in enumerate(found) if steady or same == part), 0)
        if None not in (text, found[other][1]) and text != found[other][1]:
            raise _different(number, rank, other)


def _digests(source: Source, number: int) -> tuple[str | None, str | None]:
    """Of a sample, read twice: a data set with a generator of its own gives another each time. None: it cannot be read, which is told
    of when it is its turn."""
    try:
        first = digest(source.sample(number))
        return first, first if source.gathers else digest(source.sample(number))
    except Exception:
        return None, None


def _is_changing(source: Source, number: int) -> bool:
    """Whether a sample is another in one of many readings."""
    try:
        return not source.gathers and len({digest(source.sample(number)) for _ in range(_READINGS)}) > 1
    except Exception:  # told of when it is its turn
        return False


#: Bytes of data in memory that ranks compare at the start, in how many blocks, and samples of lists.
_COMPARED, _BLOCKS, _SAMPLES = 2**26, 64, 2**13
#: Readings of a sample that tell whether it changes.
_READINGS = 20
#: Tensors from so many bytes on are copied on a stream of their own; smaller ones take less time than the two streams' talk.
_LARGE = 2**22


class Mover:
    """Brings batches to the device, floating tensors in `dtype` if one is given. Containers keep their kind."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self._device, self._dtype = device, dtype
        self._copies: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, value: Any) -> Any:
        """`value`, there. The host does not wait for the copy."""
        return to_device(value, self._device, self._tensor)

    def _tensor(self, value: Tensor) -> Tensor:
        dtype = self._dtype if value.is_floating_point() else None
        large = self._copies is not None and value.nbytes >= _LARGE
        if large and dtype in (None, value.dtype) and value.is_pinned():
            return self._sent(value)
        return value.to(self._device, dtype, non_blocking=True)

    def _sent(self, value: Tensor) -> Tensor:
        """By a stream of its own, at once, while the device still computes what the host has asked for before."""
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._copies):
            there = value.to(self._device, non_blocking=True)
        computing.wait_stream(self._copies)
        there.record_stream(computing)  # its memory belongs to the other stream, which must not use it again too soon
        return there


def seed_step(device: torch.device, *place: int | str, generators: Sequence[torch.Generator] = ()) -> None:
    """Randomness follows from the `place` (seed, step, rank, ...): a resumed run needs no stored state to draw the same.

    `generators`: the model's own, to be seeded as well, each from the place and its position.
    """
    number = _seed_of(*place)
    for index, generator in enumerate(generators):
        generator.manual_seed(_seed_of(index, *place))
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number & 0xFFFFFFFF)


def _seed_of(*place: int | str) -> int:
    text = " ".join(map(str, place)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def own_generators(model: nn.Module) -> list[torch.Generator]:
    """The torch generators that a model's modules hold, in the modules' order, each once."""
    found = {
        id(leaf): leaf
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Generator)
    }
    return list(found.values())
