"""Require that every rank opened the same data set: they divide its samples by number."""

from __future__ import annotations

import numpy as np

from echelon.data.sample_digest import digest
from echelon.data.source import Source
from echelon.engine.process_groups import Communicator, WorldCommunicator
from echelon.errors import DataError
from echelon.tree import tree_tensors

#: Bytes of data in memory that ranks compare at the start, in how many blocks, and samples of lists.
_COMPARED_BYTES, _COMPARED_BLOCKS, _COMPARED_SAMPLES = 2**26, 64, 2**13
#: Reads of a sample that show whether it changes.
_REPEATED_READS = 20


def require_equal_data(
    source: Source, ranks: WorldCommunicator, data_parallel: Communicator, workers: int, *, runs_code: bool
) -> None:
    """`runs_code`: reading a sample may run code of the data set."""
    lengths = ranks.all_gather_object(len(source))
    if (other_rank := _first_difference(lengths)) is not None:
        raise DataError(
            f"data= has {lengths[0]:,} samples on rank 0 and {lengths[other_rank]:,} on rank {other_rank}: every rank must see the same "
            "data set (it reads only its own part of it)"
        )
    if source.identity is not None:
        if (other_rank := _first_difference(ranks.all_gather_object(source.identity))) is not None:
            raise DataError(
                f"the ranks have different data: the packed data set on rank {other_rank} is not rank 0's; give every rank the same files, "
                "or repair what one rank skips"
            )
    # A data set with workers may not be opened before they are forked.
    elif ranks.size > 1 and (source.supports_gather or not workers):
        for sample_index in sorted({0, len(source) - 1}):
            _require_equal_sample(source, sample_index, ranks, data_parallel)
        if source.supports_gather or not runs_code:
            _require_equal_rows(source, ranks)


def _first_difference(values: list[object]) -> int | None:
    """The first rank whose value is not rank 0's."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def _require_equal_rows(source: Source, ranks: WorldCommunicator) -> None:
    """Compare every row of data in memory, of much data blocks of `_COMPARED_BYTES` bytes together."""
    row_bytes = sum(tensor.nbytes for tensor in tree_tensors(source.read_sample(0)))
    row_count = max(_COMPARED_BYTES // max(row_bytes, 1), 1)
    if not source.supports_gather:
        row_count = min(row_count, _COMPARED_SAMPLES)
    block_count = min(len(source), row_count, _COMPARED_BLOCKS)
    blocks = [block[: row_count // block_count] for block in np.array_split(np.arange(len(source)), block_count)]
    with ranks.raise_on_all_ranks():
        block_digests = [
            digest(
                source.read_batch(block, 0) if source.supports_gather else list(map(source.read_sample, block.tolist()))
            )
            for block in blocks
        ]
    for block, *digests in zip(blocks, *ranks.all_gather_object(block_digests), strict=True):
        if len(set(digests)) == 1:
            continue
        sample_digests = [digest(source.read_sample(index)) for index in block.tolist()]
        for index, *rank_digests in zip(block.tolist(), *ranks.all_gather_object(sample_digests), strict=True):
            if (other_rank := _first_difference(rank_digests)) is not None:
                raise _different_data_error(index, other_rank, 0)


def _different_data_error(sample_index: int, rank: int, other_rank: int) -> DataError:
    return DataError(
        f"the ranks have different data: sample {sample_index} differs on rank {rank} from rank {other_rank}'s; make it the same way "
        "everywhere (torch.manual_seed(0) before random data is made, files in sorted order, one seed for generators of its own)"
    )


def _require_equal_sample(
    source: Source, sample_index: int, ranks: WorldCommunicator, data_parallel: Communicator
) -> None:
    """Random data that each rank makes for itself has the same length everywhere: only its content differs."""
    rank_reads = ranks.all_gather_object((data_parallel.rank, *_digest_twice(source, sample_index)))
    is_deterministic = all(first == second for _, first, second in rank_reads)
    if is_deterministic and len({first for _, first, _ in rank_reads}) > 1:
        # Two reads may agree by chance: a coin falls on the same side twice.
        is_deterministic = not any(ranks.all_gather_object(_changes_between_reads(source, sample_index)))
    for rank, (data_rank, sample_digest, _) in enumerate(rank_reads):
        # What changes from read to read need not be the same where other samples are read.
        reference_rank, reference_digest = next(
            (other_rank, other_digest)
            for other_rank, (other_data_rank, other_digest, _) in enumerate(rank_reads)
            if is_deterministic or other_data_rank == data_rank
        )
        if None not in (sample_digest, reference_digest) and sample_digest != reference_digest:
            raise _different_data_error(sample_index, rank, reference_rank)


def _digest_twice(source: Source, sample_index: int) -> tuple[str | None, str | None]:
    """The digests of two reads: a data set with a generator of its own gives another sample each time. None: it cannot be read, which is an
    error when it is its turn."""
    try:
        first_digest = digest(source.read_sample(sample_index))
        return first_digest, first_digest if source.supports_gather else digest(source.read_sample(sample_index))
    except Exception:
        return None, None


def _changes_between_reads(source: Source, sample_index: int) -> bool:
    """Whether a sample is another in one of many reads."""
    if source.supports_gather:
        return False
    try:
        return len({digest(source.read_sample(sample_index)) for _ in range(_REPEATED_READS)}) > 1
    except Exception:  # an error when it is its turn
        return False
