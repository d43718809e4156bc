"""Rows of packed files by number: one gather per column over all files. Each block is checked when it is first read."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from echelon.data.packed.manifest import RESTORE_SHARD, Column
from echelon.data.packed.mmap_region import HUGE_PAGE_BYTES, MappedRegion, find_aligned_gaps
from echelon.data.packed.row_gathers import AddressGather, ContiguousGather, RaggedGather, RowGather
from echelon.data.packed.shard import storage_dtype
from echelon.data.packed.shard_file import ShardFile
from echelon.errors import CorruptDataError, DataError
from echelon.world import usable_memory

#: Data sets of more files are mapped only once, not once per column: the kernel limits a process to 65,530 mappings.
_MAX_SEPARATE_MAPS = 4096


class RowReader(ABC):
    @abstractmethod
    def take(self, ids: np.ndarray, *, pin: bool = False) -> list[Any]:
        """Read the rows `ids`: for each column a tensor, or a list of tensors, texts or bytes where rows differ in length."""

    @abstractmethod
    def lengths(self, column: int) -> np.ndarray:
        """The number of items in each row of a ragged column. Reads only the offsets of such columns."""

    def take_padded(self, ids: np.ndarray, value: float, *, pin: bool = False) -> list[Any]:
        """Like `take`, but numbers that differ in length become one tensor, padded with `value`."""
        columns = self.take(ids, pin=pin)
        for column_index, rows in enumerate(columns):
            if isinstance(rows, list) and isinstance(rows[0], Tensor):
                padded = pad_sequence(rows, batch_first=True, padding_value=value)
                columns[column_index] = padded.pin_memory() if pin else padded
        return columns

    def take_column(self, column_index: int, ids: np.ndarray) -> Any:
        return self.take(ids)[column_index]

    def prefetch(self, ids: np.ndarray) -> None:
        return


class LocalRowReader(RowReader):
    """Files on this machine, mapped into one range of addresses."""

    def __init__(self, files: Sequence[ShardFile], *, check: bool = True) -> None:
        self._files, self._columns = list(files), list(files[0].columns)
        for problem in (file.find_problem() for file in files):
            if problem:
                raise DataError(f"{problem}, or leave such files out with Packed(..., damaged='skip')")
        counts = np.array([file.shard.samples for file in files])
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self._rows_per_block = np.array([file.block for file in files])
        blocks_per_file = -(-counts // self._rows_per_block)
        self._first_block = np.cumsum(blocks_per_file) - blocks_per_file
        self._unchecked_blocks = int(blocks_per_file.sum()) if check else 0
        self._checked_blocks = np.zeros(self._unchecked_blocks, bool)
        self._check_lock, self._owner_pid = threading.Lock(), os.getpid()
        self._maps: list[MappedRegion] = []  # one per column
        # Huge pages if all files fit into memory: of larger sets, they would be read for a few rows each and soon be evicted. Small
        # files do not fill one.
        total_bytes = sum(file.shard.bytes for file in files)
        is_huge = len(files) * HUGE_PAGE_BYTES <= total_bytes <= usable_memory() // 2 and mmap.PAGESIZE == 4096
        self._page_bytes = HUGE_PAGE_BYTES if is_huge else mmap.PAGESIZE
        try:
            self._gathers = [self._make_gather(column_index) for column_index in range(len(self._columns))]
        except OSError as error:
            remedy = _OUT_OF_MAPPINGS if error.errno == errno.ENOMEM else ""
            raise DataError(f"{files[0].path.parent}: the packed files cannot be mapped: {error}{remedy}") from None

    def take(self, ids: np.ndarray, *, pin: bool = False) -> list[Any]:
        file_indices = self._locate_checked(ids)
        return [gather.take(ids, file_indices, pin) for gather in self._gathers]

    def take_padded(self, ids: np.ndarray, value: float, *, pin: bool = False) -> list[Any]:
        file_indices = self._locate_checked(ids)
        return [gather.take_padded(ids, file_indices, value, pin) for gather in self._gathers]

    def take_column(self, column_index: int, ids: np.ndarray) -> Any:
        return self._gathers[column_index].take(ids, self._locate_checked(ids), False)

    def lengths(self, column: int) -> np.ndarray:
        lengths_by_file = []
        for file_index, file in enumerate(self._files):
            content = self._maps[column].file_bytes(file_index)
            parts = [content[start:stop] for start, stop in file.offset_spans()]
            file_lengths = file.parse_lengths(parts, column, check=len(self._checked_blocks) > 0)
            if file_lengths is None:
                # Names the damaged block, unless the damage is in what no block covers.
                block_starts = np.arange(self._starts[file_index], self._ends[file_index], file.block)
                self._check(block_starts, np.full(len(block_starts), file_index))
                raise DataError(f"{file.describe()} is damaged in its offsets; {RESTORE_SHARD}")
            lengths_by_file.append(file_lengths)
        return np.concatenate(lengths_by_file)

    def _locate_checked(self, ids: np.ndarray) -> np.ndarray | None:
        """The file of each row (None: there is only one), after checking the rows' blocks."""
        file_indices = self._ends.searchsorted(ids, "right") if len(self._files) > 1 else None
        if self._unchecked_blocks:
            self._check(ids, file_indices)
        return file_indices

    def _check(self, ids: np.ndarray, file_indices: np.ndarray | None) -> None:
        files = 0 if file_indices is None else file_indices
        touched = self._first_block[files] + (ids - self._starts[files]) // self._rows_per_block[files]
        is_unchecked = ~self._checked_blocks[touched]
        if not is_unchecked.any():
            return
        if self._owner_pid != os.getpid():  # another thread may have held the lock when this process was forked
            self._check_lock, self._owner_pid = threading.Lock(), os.getpid()
        with self._check_lock:  # two threads may read the same data: each block is counted once
            # np.unique would import numpy.ma, which takes longer than many blocks.
            for block in sorted(set(touched[is_unchecked].tolist())):
                if not self._checked_blocks[block]:
                    self._check_block(block)

    def _check_block(self, block: int) -> None:
        file_index = int(self._first_block.searchsorted(block, "right")) - 1
        file = self._files[file_index]
        # Through the maps that rows are gathered from: the gather then needs no second page fault.
        contents = [region.file_bytes(file_index) for region in self._maps]
        problem = file.find_block_damage(contents, block - int(self._first_block[file_index]))
        if problem:
            raise CorruptDataError(f"{problem}; {RESTORE_SHARD}, or skip such blocks with Packed(..., damaged='skip')")
        self._checked_blocks[block] = True
        self._unchecked_blocks -= 1

    def _make_gather(self, column_index: int) -> RowGather:
        column = self._columns[column_index]
        buffers = np.array([file.shard.buffers[column_index] for file in self._files], np.int64)
        gather = None if column.ragged else self._try_contiguous(column, buffers[:, 0])
        if gather is not None:
            return gather
        region = self._map_files()
        # Where row 0 of all files would be if it were in this file: a row's address is then one multiplication away.
        if column.ragged:
            offsets, values = region.starts + buffers[:, 0] - 8 * self._starts, region.starts + buffers[:, 1]
            return RaggedGather(column, region.bytes, offsets, values)
        return AddressGather(column, region.bytes, region.starts + buffers[:, 0] - column.item_bytes * self._starts)

    def _try_contiguous(self, column: Column, offsets: np.ndarray) -> RowGather | None:
        """Map the files with gaps that make the rows of all files one array; None where no gaps do."""
        if not column.item_bytes or len(self._files) >= _MAX_SEPARATE_MAPS:
            return None
        sizes = [file.shard.bytes for file in self._files]
        gaps = find_aligned_gaps(sizes, offsets.tolist(), column.item_bytes, self._page_bytes)
        if gaps is None:
            return None
        region = self._map_files(gaps)
        column_starts = region.starts + offsets
        column_end = int(column_starts[-1]) + self._files[-1].shard.samples * column.item_bytes
        rows = region.bytes[int(column_starts[0]) : column_end].view(storage_dtype(column)).reshape(-1, *column.shape)
        return ContiguousGather(column, rows, (column_starts - column_starts[0]) // column.item_bytes - self._starts)

    def _map_files(self, gaps: Sequence[int] = ()) -> MappedRegion:
        """Map the files once more; without gaps, once for all columns that need none."""
        region = None if any(gaps) else next((region for region in self._maps if not region.has_gaps), None)
        if region is None:
            files = [(file.path, file.shard.bytes) for file in self._files]
            region = MappedRegion(files, gaps, self._page_bytes)
        self._maps.append(region)
        return region


_OUT_OF_MAPPINGS = (
    "; each file is mapped, for some columns separately, and a process has 65,530 mappings (vm.max_map_count) of as many bytes as "
    "`ulimit -v` allows: pack the data into fewer files (--shards)"
)


class RowSubset(RowReader):
    """The rows that are left when damaged ones are excluded."""

    def __init__(self, rows: RowReader, total: int, excluded: Sequence[tuple[int, int]]) -> None:
        """`excluded`: spans of the `total` rows, in order."""
        bounds = [0, *(bound for span in excluded for bound in span), total]
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        self._rows, self._spans = rows, [(start, stop) for start, stop in pairs if start < stop]
        sizes = np.array([stop - start for start, stop in self._spans])
        self._ends = np.cumsum(sizes)
        self._shifts = np.array([start for start, _ in self._spans]) - (self._ends - sizes)

    def take(self, ids: np.ndarray, *, pin: bool = False) -> list[Any]:
        return self._rows.take(self._map_ids(ids), pin=pin)

    def take_padded(self, ids: np.ndarray, value: float, *, pin: bool = False) -> list[Any]:
        return self._rows.take_padded(self._map_ids(ids), value, pin=pin)

    def lengths(self, column: int) -> np.ndarray:
        all_lengths = self._rows.lengths(column)
        return np.concatenate([all_lengths[start:stop] for start, stop in self._spans])

    def _map_ids(self, ids: np.ndarray) -> np.ndarray:
        shifted: np.ndarray = ids + self._shifts[self._ends.searchsorted(ids, "right")]
        return shifted
