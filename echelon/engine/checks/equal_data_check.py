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
        if source.supports_gather:
            block_digests = [digest(source.read_batch(block, 0)) for block in blocks]
        else:
            block_digests = [digest(list(map(source.read_sample, block.tolist()))) for block in blocks]
    for block, *digests in zip(blocks, *ranks.all_gather_object(block_digests), strict=True):
        if len(set(digests)) == 1:
            continue
        sample_digests = [digest(source.read_sample(index)) for index in block.tolist()]
        for index, *rank_digests in zip(block.tolist(), *ranks.all_gather_object(sample_digests), strict=True):
            if (other_rank := _first_difference(rank_digests)) is not None:
                raise _different_data_error(index, other_rank, 0)


def _different_data_error(sample_index: int, rank: int, other_rank: int) -> DataError:
    return DataError(
        f"the ranks have different data: sample {sample_index} differs on rank {rank} from rank {other_rank}'s; create it the same way "
        "everywhere (torch.manual_seed(0) before random data, files in sorted order, one seed for its own generators)"
    )


def _require_equal_sample(source: Source, index: int, ranks: WorldCommunicator, data_parallel: Communicator) -> None:
    """Random data that each rank makes for itself has the same length everywhere: only its content differs."""
    data_ranks = ranks.all_gather_object(data_parallel.rank)
    # A data set with a generator of its own returns another sample each time.
    rank_reads: list[list[str]] = ranks.all_gather_object(_digest_reads(source, index, 2))
    is_deterministic = all(len(set(reads)) < 2 for reads in rank_reads)
    if is_deterministic and any(reads[:1] != rank_reads[0][:1] for reads in rank_reads):
        # Two reads may agree by chance: a coin falls on the same side twice.
        many_reads = _digest_reads(source, index, _REPEATED_READS)
        is_deterministic = not any(ranks.all_gather_object(len(set(many_reads)) > 1))
    for rank, (data_rank, reads) in enumerate(zip(data_ranks, rank_reads, strict=True)):
        # What changes from read to read need not be the same where other samples are read.
        reference_rank = 0 if is_deterministic else data_ranks.index(data_rank)
        reference = rank_reads[reference_rank]
        if reads and reference and reads[0] != reference[0]:
            raise _different_data_error(index, rank, reference_rank)


def _digest_reads(source: Source, sample_index: int, count: int) -> list[str]:
    """The digests of several reads of a sample; none where it cannot be read, which is an error when it is its turn."""
    try:
        return [digest(source.read_sample(sample_index)) for _ in range(1 if source.supports_gather else count)]
    except Exception:
        return []
