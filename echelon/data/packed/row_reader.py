"""Rows of packed files by number: one gather per column, whatever file they are in, each block checked when it is first touched."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from echelon.data.column_gather import INTEGER_DTYPES
from echelon.data.packed import block_layout
from echelon.data.packed.from_images import decode_image
from echelon.data.packed.manifest import RESTORE_SHARD, Column, Manifest, Shard
from echelon.data.packed.mmap_region import HUGE_PAGE_BYTES, MappedRegion, find_aligned_gaps
from echelon.data.packed.shard import storage_dtype
from echelon.errors import CorruptDataError, DataError
from echelon.world import usable_memory

#: Files of a data set that are mapped once for each column: the kernel keeps 65,530 mappings of a process.
_MAX_SEPARATE_MAPS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A shard and where it lies: its path, the rows under one checksum, and the number of its first sample."""

    path: Path
    shard: Shard
    block: int
    first_sample: int

    def describe(self, start: int, stop: int, block: int | None = None) -> str:
        """A part of it, for messages."""
        block_text = "" if block is None else f", block {block}"
        return f"{self.path}{block_text} (samples {self.first_sample + start:,} to {self.first_sample + stop - 1:,})"


def list_shard_files(folders: Sequence[Path], manifests: Sequence[Manifest]) -> list[ShardFile]:
    """All files of data sets that lie one behind the other."""
    files, first_sample = [], 0
    for folder, manifest in zip(folders, manifests, strict=True):
        for shard in manifest.shards:
            files.append(
                ShardFile(path=folder / shard.file, shard=shard, block=manifest.block, first_sample=first_sample)
            )
            first_sample += shard.samples
    if not first_sample:
        raise DataError(f"{folders[0]} holds no samples")
    return files


class RowReader(ABC):
    """Rows of all files, by number."""

    @abstractmethod
    def take(self, ids: np.ndarray, *, pin: bool = False) -> list[Any]:
        """For each column the rows `ids`: one tensor, or a list of tensors, texts or bytes where rows differ in length."""

    @abstractmethod
    def lengths(self, column: int) -> np.ndarray:
        """The number of items in each row of a ragged column. Reads the offsets of all such columns, and nothing else."""

    def take_padded(self, ids: np.ndarray, value: float, *, pin: bool = False) -> list[Any]:
        """Like `take`, but numbers that differ in length are one tensor, filled up with `value`."""
        columns = self.take(ids, pin=pin)
        for column_index, rows in enumerate(columns):
            if isinstance(rows, list) and isinstance(rows[0], Tensor):
                padded = pad_sequence(rows, batch_first=True, padding_value=value)
                columns[column_index] = padded.pin_memory() if pin else padded
        return columns

    def take_column(self, column_index: int, ids: np.ndarray) -> Any:
        """The rows `ids` of one column."""
        return self.take(ids)[column_index]

    def prefetch(self, ids: np.ndarray) -> None:
        """These rows are needed soon: where they have to come from afar, let them come."""
        return  # here they are


class LocalRowReader(RowReader):
    """Files on this machine, mapped side by side."""

    def __init__(self, files: Sequence[ShardFile], columns: Sequence[Column], *, check: bool = True) -> None:
        self._files, self._columns = list(files), list(columns)
        for file in files:
            problem = find_file_problem(file)
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
        self._maps: list[_FileMap] = []
        self._page_bytes = _choose_page_bytes([file.shard.bytes for file in files])
        try:
            self._gathers = [self._make_gather(column_index) for column_index in range(len(columns))]
        except OSError as error:
            raise DataError(
                f"{files[0].path.parent}: the packed files cannot be mapped: {error}{_mapping_remedy(error)}"
            ) from None

    def take(self, ids: np.ndarray, *, pin: bool = False) -> list[Any]:
        file_indices = self._locate_checked(ids)
        return [gather.take(ids, file_indices, pin) for gather in self._gathers]

    def take_padded(self, ids: np.ndarray, value: float, *, pin: bool = False) -> list[Any]:
        file_indices = self._locate_checked(ids)
        return [gather.take_padded(ids, file_indices, value, pin) for gather in self._gathers]

    def take_column(self, column_index: int, ids: np.ndarray) -> Any:
        return self._gathers[column_index].take(ids, self._locate_checked(ids), False)

    def _locate_checked(self, ids: np.ndarray) -> np.ndarray | None:
        """The file of each row, None where there is one; their blocks are checked."""
        file_indices = self._ends.searchsorted(ids, "right") if len(self._files) > 1 else None
        if self._unchecked_blocks:
            self._check(ids, file_indices)
        return file_indices

    def lengths(self, column: int) -> np.ndarray:
        lengths_by_file = []
        for file_index, file in enumerate(self._files):
            content = self._maps[column].file_bytes(file_index, file.shard.bytes)
            parts = [content[start:stop] for start, stop in block_layout.offset_spans(self._columns, file.shard)]
            file_lengths = (
                parse_lengths(parts, self._columns, column, file)
                if len(self._checked_blocks)
                else _diff_offsets(parts, self._columns, column)
            )
            if file_lengths is None:
                self._check_file(file_index)  # names the block
                raise DataError(f"{file.describe(0, file.shard.samples)} is damaged: its offsets are; {RESTORE_SHARD}")
            lengths_by_file.append(file_lengths)
        return np.concatenate(lengths_by_file)

    def _check_file(self, file_index: int) -> None:
        """Every block of a file that was not touched yet."""
        block_starts = np.arange(self._starts[file_index], self._ends[file_index], self._rows_per_block[file_index])
        self._check(block_starts, np.full(len(block_starts), file_index))

    def _check(self, ids: np.ndarray, file_indices: np.ndarray | None) -> None:
        if file_indices is None:
            touched = ids // self._rows_per_block[0]
        else:
            touched = (
                self._first_block[file_indices]
                + (ids - self._starts[file_indices]) // self._rows_per_block[file_indices]
            )
        is_unchecked = ~self._checked_blocks[touched]
        if not is_unchecked.any():
            return
        if self._owner_pid != os.getpid():  # a forked process may have got the lock while another thread held it
            self._check_lock, self._owner_pid = threading.Lock(), os.getpid()
        with self._check_lock:  # the count of what is left must be right: two threads may read the same data
            for block in sorted(
                set(touched[is_unchecked].tolist())
            ):  # np.unique imports numpy.ma, which takes longer than many blocks
                if not self._checked_blocks[block]:
                    self._check_block(block)

    def _check_block(self, block: int) -> None:
        file_index = int(self._first_block.searchsorted(block, "right")) - 1
        file = self._files[file_index]
        # Through the maps that rows are gathered from: what is read here needs no second page fault there.
        content = [file_map.file_bytes(file_index, file.shard.bytes) for file_map in self._maps]
        problem = find_block_damage(content, self._columns, file, block - int(self._first_block[file_index]))
        if problem:
            raise CorruptDataError(
                f"{problem}; {RESTORE_SHARD}, or leave such blocks out with Packed(..., damaged='skip')"
            )
        self._checked_blocks[block] = True
        self._unchecked_blocks -= 1

    def _make_gather(self, column_index: int) -> _ColumnGather:
        column = self._columns[column_index]
        buffers = np.array([file.shard.buffers[column_index] for file in self._files], np.int64)
        gather = None if column.ragged else self._try_contiguous(column, buffers[:, 0])
        if gather is not None:
            return gather
        region = self._map_without_gaps()
        # Where row 0 of all files would lie if it were in this file: the address of a row is then one multiplication away.
        if column.ragged:
            offsets, values = region.starts + buffers[:, 0] - 8 * self._starts, region.starts + buffers[:, 1]
            return _RaggedGather(column, region.bytes, offsets, values)
        return _AddressGather(column, region.bytes, region.starts + buffers[:, 0] - column.item_bytes * self._starts)

    def _map_without_gaps(self) -> _FileMap:
        """The files without gaps, mapped once for all columns that need none."""
        existing = next((file_map for file_map in self._maps if file_map.has_no_gaps), None)
        self._maps.append(existing or self._map_files(None))
        return self._maps[-1]

    def _map_files(self, gaps: Sequence[int] | None) -> _FileMap:
        return _FileMap([(file.path, file.shard.bytes) for file in self._files], gaps, self._page_bytes)

    def _try_contiguous(self, column: Column, offsets: np.ndarray) -> _ColumnGather | None:
        """A column of equal rows as one array over all files, which are mapped once more so that their rows are in step."""
        sizes = [file.shard.bytes for file in self._files]
        gaps = None
        if column.item_bytes and len(sizes) < _MAX_SEPARATE_MAPS:
            gaps = find_aligned_gaps(sizes, offsets.tolist(), column.item_bytes, self._page_bytes)
        if gaps is None:
            return None
        if any(gaps):
            self._maps.append(self._map_files(gaps))
        region = self._maps[-1] if any(gaps) else self._map_without_gaps()
        column_starts = region.starts + offsets
        column_end = int(column_starts[-1]) + self._files[-1].shard.samples * column.item_bytes
        rows = region.bytes[int(column_starts[0]) : column_end].view(storage_dtype(column)).reshape(-1, *column.shape)
        return _ContiguousGather(column, rows, (column_starts - column_starts[0]) // column.item_bytes - self._starts)


def _mapping_remedy(error: OSError) -> str:
    """What to do where the kernel gives no more addresses or mappings."""
    if error.errno != errno.ENOMEM:
        return ""
    return (
        "; each file is mapped, for some columns once more, and a process has 65,530 mappings (vm.max_map_count) of as much as "
        "`ulimit -v` allows: pack the data into fewer files (--shards)"
    )


def parse_lengths(
    parts: Sequence[np.ndarray], columns: Sequence[Column], column_index: int, file: ShardFile
) -> np.ndarray | None:
    """The lengths of a ragged column, from the offsets of all such columns of a file; None where they are not as they were written."""
    row_lengths = _diff_offsets(parts, columns, column_index)
    return (
        row_lengths
        if block_layout.offsets_checksum(parts) == file.shard.offsets and not (row_lengths < 0).any()
        else None
    )


def _diff_offsets(parts: Sequence[np.ndarray], columns: Sequence[Column], column_index: int) -> np.ndarray:
    return np.diff(parts[sum(column.ragged for column in columns[:column_index])].view("<i8"))


class _FileMap:
    """All files side by side in memory, as one column's rows are read. `has_no_gaps`: without gaps between them."""

    def __init__(self, files: Sequence[tuple[Path, int]], gaps: Sequence[int] | None, page_bytes: int) -> None:
        region = MappedRegion(files, gaps, page_bytes=page_bytes)
        self.bytes, self.starts, self.has_no_gaps = region.bytes, region.starts, gaps is None
        self._file_starts = region.starts.tolist()

    def file_bytes(self, file_index: int, size: int) -> np.ndarray:
        """The bytes of one file."""
        return self.bytes[self._file_starts[file_index] : self._file_starts[file_index] + size]


class _ColumnGather(ABC):
    """Gathers rows of one column. `shard`: the file of each row, None where there is one."""

    @abstractmethod
    def take(self, ids: np.ndarray, file_indices: np.ndarray | None, pin: bool) -> Any: ...

    def take_padded(self, ids: np.ndarray, file_indices: np.ndarray | None, value: float, pin: bool) -> Any:
        """As one tensor, filled up with `value` where rows are numbers that differ in length."""
        return self.take(ids, file_indices, pin)


class _ContiguousGather(_ColumnGather):
    """Rows of equal size, all in one array: `rows[id + shifts[file]]`, with no shift in the first."""

    def __init__(self, column: Column, rows: np.ndarray, shifts: np.ndarray) -> None:
        self._dtype, self._storage_dtype, self._row_shape = torch_dtype(column), storage_dtype(column), column.shape
        self._rows, self._shifts = rows, shifts

    def take(self, ids: np.ndarray, file_indices: np.ndarray | None, pin: bool) -> Tensor:
        rows = ids if file_indices is None else ids + self._shifts[file_indices]
        if pin:
            pinned = torch.empty((len(ids), *self._row_shape), dtype=self._dtype, pin_memory=True)
            pinned_view = pinned.view(INTEGER_DTYPES[pinned.itemsize]).numpy().view(self._storage_dtype)
            np.take(
                self._rows, rows, axis=0, out=pinned_view, mode="clip"
            )  # the mode "raise" would go through a buffer
            return pinned
        tensor = torch.from_numpy(self._rows.take(rows, axis=0))
        return tensor if tensor.dtype is self._dtype else tensor.view(self._dtype)


class _AddressGather(_ColumnGather):
    """Rows of equal size that lie in no common step, by their addresses."""

    def __init__(self, column: Column, content: np.ndarray, bases: np.ndarray) -> None:
        self._dtype, self._storage_dtype, self._row_shape = torch_dtype(column), storage_dtype(column), column.shape
        self._item_bytes, self._bases = column.item_bytes, bases
        self._windows = byte_windows(content, column.item_bytes)

    def take(self, ids: np.ndarray, file_indices: np.ndarray | None, pin: bool) -> Tensor:
        addresses = ids * self._item_bytes + self._bases[0 if file_indices is None else file_indices]
        rows = self._windows[addresses].view(self._storage_dtype).reshape(len(ids), *self._row_shape)
        tensor = torch.from_numpy(rows).view(self._dtype)
        return tensor.pin_memory() if pin else tensor


class _RaggedGather(_ColumnGather):
    """Rows of any length."""

    def __init__(self, column: Column, content: np.ndarray, offsets: np.ndarray, values: np.ndarray) -> None:
        self._column, self._dtype, self._storage_dtype = column, torch_dtype(column), storage_dtype(column)
        self._content, self._offsets, self._values = content, offsets, values
        self._offset_pairs = byte_windows(content, 16)

    def _byte_spans(self, ids: np.ndarray, file_indices: np.ndarray | None) -> np.ndarray:
        """Where the bytes of each row begin and end."""
        file_selector = 0 if file_indices is None else file_indices
        pairs = self._offset_pairs[ids * 8 + self._offsets[file_selector]].view(np.int64).reshape(-1, 2)
        if self._column.item_bytes > 1:
            pairs = pairs * self._column.item_bytes
        return pairs + np.asarray(self._values[file_selector]).reshape(-1, 1)

    def take_padded(self, ids: np.ndarray, file_indices: np.ndarray | None, value: float, pin: bool) -> Any:
        if self._column.kind != "array":
            return self.take(ids, file_indices, pin)
        spans = self._byte_spans(ids, file_indices)
        longest = int((spans[:, 1] - spans[:, 0]).max()) // self._column.item_bytes
        shape = len(ids), longest, *self._column.shape
        padded = torch.full(shape, value, dtype=self._dtype, pin_memory=pin)
        if longest:
            # Each row's bytes are copied once, to where they belong.
            content = self._content
            for row, (start, stop) in zip(
                padded.view(len(ids), -1).view(torch.uint8).numpy(), spans.tolist(), strict=True
            ):
                row[: stop - start] = content[start:stop]
        return padded

    def take(self, ids: np.ndarray, file_indices: np.ndarray | None, pin: bool) -> list[Any]:
        content = self._content
        rows = [content[start:stop] for start, stop in self._byte_spans(ids, file_indices).tolist()]
        kind = self._column.kind
        if kind == "text":
            return [_decode_text(row, sample_id) for row, sample_id in zip(rows, ids, strict=True)]
        if kind == "bytes":
            return [row.tobytes() for row in rows]
        if kind == "image":
            return [
                torch.from_numpy(decode_image(row.tobytes(), f"sample {sample_id}"))
                for row, sample_id in zip(rows, ids, strict=True)
            ]
        shape = (-1, *self._column.shape)
        tensors = [torch.from_numpy(row.copy().view(self._storage_dtype).reshape(shape)) for row in rows]
        return tensors if self._storage_dtype.name == self._column.dtype else [row.view(self._dtype) for row in tensors]


def _choose_page_bytes(sizes: Sequence[int]) -> int:
    """In what steps files are mapped: huge where all of them fit into memory. Of more, huge pages would each be read for a few rows and
    soon be given up again; and small files fill none."""
    fits = sum(sizes) <= usable_memory() // 2 and sum(sizes) >= len(sizes) * HUGE_PAGE_BYTES
    return HUGE_PAGE_BYTES if fits and mmap.PAGESIZE == 4096 else mmap.PAGESIZE


def _decode_text(row: np.ndarray, sample_id: int) -> str:
    try:
        return row.tobytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"sample {sample_id} has a text that is not UTF-8: {error}") from None


def byte_windows(content: np.ndarray, size: int) -> np.ndarray:
    """The `size` bytes that begin at each byte, as one array: an index is an address. It takes no memory, it only overlaps."""
    return np.ndarray(len(content) - size + 1, f"V{size}", content.data, strides=1)


def torch_dtype(column: Column) -> torch.dtype:
    """The dtype of a column's tensors."""
    dtype: torch.dtype = getattr(torch, column.dtype)
    return dtype


def find_file_problem(file: ShardFile) -> str | None:
    """Why a file cannot hold its shard: it is not there, or has another size."""
    description = file.describe(0, file.shard.samples)
    try:
        size = file.path.stat().st_size
    except OSError as error:
        return f"{description} cannot be read: {error.strerror or error}; {RESTORE_SHARD}"
    if size == file.shard.bytes:
        return None
    problem = "is cut off" if size < file.shard.bytes else "is too long"
    return f"{description} {problem}: it has {size:,} bytes of {file.shard.bytes:,}; {RESTORE_SHARD}"


def find_block_damage(
    content: np.ndarray | Sequence[np.ndarray], columns: Sequence[Column], file: ShardFile, block: int
) -> str | None:
    """What is wrong with a block, if anything. `content`: the file's bytes, or once for each column, where it is mapped so."""
    column_contents = [content] * len(columns) if isinstance(content, np.ndarray) else content
    start = block * file.block
    stop = min(start + file.block, file.shard.samples)
    actual, expected = (
        block_layout.block_checksum(column_contents, columns, file.shard, start, stop),
        file.shard.checksums[block],
    )
    if actual == expected:
        return None
    reason = (
        "its offsets point outside of the file"
        if actual is None
        else f"its checksum is {actual:08x}, not {expected:08x}"
    )
    return f"{file.describe(start, stop, block)} is damaged: {reason}"


class RowSubset(RowReader):
    """Only some of the rows: what is left when damaged blocks are passed over, or a part that was asked for."""

    def __init__(self, rows: RowReader, spans: Sequence[tuple[int, int]]) -> None:
        """`spans`: the rows that are kept, from and to, in order."""
        sizes = np.array([stop - start for start, stop in spans])
        self._rows, self._spans = rows, list(spans)
        self._ends = np.cumsum(sizes)
        self._shifts = np.array([start for start, _ in spans]) - (self._ends - sizes)

    def take(self, ids: np.ndarray, *, pin: bool = False) -> list[Any]:
        return self._rows.take(self._map_ids(ids), pin=pin)

    def take_padded(self, ids: np.ndarray, value: float, *, pin: bool = False) -> list[Any]:
        return self._rows.take_padded(self._map_ids(ids), value, pin=pin)

    def _map_ids(self, ids: np.ndarray) -> np.ndarray:
        shifted: np.ndarray = ids + self._shifts[self._ends.searchsorted(ids, "right")]
        return shifted

    def lengths(self, column: int) -> np.ndarray:
        all_lengths = self._rows.lengths(column)
        return np.concatenate([all_lengths[start:stop] for start, stop in self._spans])

    @classmethod
    def excluding(cls, rows: RowReader, total: int, excluded: Sequence[tuple[int, int]]) -> Self:
        """All but these spans."""
        bounds = [0, *(bound for span in excluded for bound in span), total]
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        return cls(rows, [(start, stop) for start, stop in pairs if start < stop])
