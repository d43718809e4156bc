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

from echelon.data.column_gather import INTEGERS
from echelon.data.packed import block_layout
from echelon.data.packed.from_images import decoded
from echelon.data.packed.manifest import RESTORE, Column, Manifest, Shard
from echelon.data.packed.mmap_region import HUGE, Region, even_gaps
from echelon.data.packed.shard import stored
from echelon.errors import DamagedError, DataError
from echelon.world import usable_memory

#: Files of a data set that are mapped once for each column: the kernel keeps 65,530 mappings of a process.
_MAPPED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A shard and where it lies: its path, the rows under one checksum, and the number of its first sample."""

    path: Path
    shard: Shard
    block: int
    first: int

    def named(self, start: int, stop: int, block: int | None = None) -> str:
        """A part of it, for messages."""
        inside = "" if block is None else f", block {block}"
        return f"{self.path}{inside} (samples {self.first + start:,} to {self.first + stop - 1:,})"


def files_of(folders: Sequence[Path], manifests: Sequence[Manifest]) -> list[File]:
    """All files of data sets that lie one behind the other."""
    files, first = [], 0
    for folder, manifest in zip(folders, manifests, strict=True):
        for shard in manifest.shards:
            files.append(File(path=folder / shard.file, shard=shard, block=manifest.block, first=first))
            first += shard.samples
    if not first:
        raise DataError(f"{folders[0]} holds no samples")
    return files


class Rows(ABC):
    """Rows of all files, by number."""

    @abstractmethod
    def take(self, ids: np.ndarray, *, pin: bool = False) -> list[Any]:
        """For each column the rows `ids`: one tensor, or a list of tensors, texts or bytes where rows differ in length."""

    @abstractmethod
    def lengths(self, column: int) -> np.ndarray:
        """The number of items in each row of a ragged column. Reads the offsets of all such columns, and nothing else."""

    def padded(self, ids: np.ndarray, value: float, *, pin: bool = False) -> list[Any]:
        """Like `take`, but numbers that differ in length are one tensor, filled up with `value`."""
        found = self.take(ids, pin=pin)
        for place, rows in enumerate(found):
            if isinstance(rows, list) and isinstance(rows[0], Tensor):
                made = pad_sequence(rows, batch_first=True, padding_value=value)
                found[place] = made.pin_memory() if pin else made
        return found

    def column(self, place: int, ids: np.ndarray) -> Any:
        """The rows `ids` of one column."""
        return self.take(ids)[place]

    def expect(self, ids: np.ndarray) -> None:
        """These rows are needed soon: where they have to come from afar, let them come."""
        return  # here they are


class LocalRows(Rows):
    """Files on this machine, mapped side by side."""

    def __init__(self, files: Sequence[File], columns: Sequence[Column], *, check: bool = True) -> None:
        self._files, self._columns = list(files), list(columns)
        for file in files:
            problem = wrong(file)
            if problem:
                raise DataError(f"{problem}, or leave such files out with Packed(..., damaged='skip')")
        counts = np.array([file.shard.samples for file in files])
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self._block = np.array([file.block for file in files])
        per_file = -(-counts // self._block)
        self._first_block = np.cumsum(per_file) - per_file
        self._unchecked = int(per_file.sum()) if check else 0
        self._checked = np.zeros(self._unchecked, bool)
        self._checking, self._process = threading.Lock(), os.getpid()
        self._maps: list[_Map] = []
        self._page = _page([file.shard.bytes for file in files])
        try:
            self._gathers = [self._gather(place) for place in range(len(columns))]
        except OSError as error:
            raise DataError(
                f"{files[0].path.parent}: the packed files cannot be mapped: {error}{_fewer(error)}"
            ) from None

    def take(self, ids: np.ndarray, *, pin: bool = False) -> list[Any]:
        shard = self._looked_at(ids)
        return [gather.take(ids, shard, pin) for gather in self._gathers]

    def padded(self, ids: np.ndarray, value: float, *, pin: bool = False) -> list[Any]:
        shard = self._looked_at(ids)
        return [gather.padded(ids, shard, value, pin) for gather in self._gathers]

    def column(self, place: int, ids: np.ndarray) -> Any:
        return self._gathers[place].take(ids, self._looked_at(ids), False)

    def _looked_at(self, ids: np.ndarray) -> np.ndarray | None:
        """The file of each row, None where there is one; their blocks are checked."""
        shard = self._ends.searchsorted(ids, "right") if len(self._files) > 1 else None
        if self._unchecked:
            self._check(ids, shard)
        return shard

    def lengths(self, column: int) -> np.ndarray:
        found = []
        for number, file in enumerate(self._files):
            content = self._maps[column].file(number, file.shard.bytes)
            parts = [content[start:stop] for start, stop in block_layout.offset_spans(self._columns, file.shard)]
            counted = (
                lengths_of(parts, self._columns, column, file)
                if len(self._checked)
                else _steps(parts, self._columns, column)
            )
            if counted is None:
                self._check_file(number)  # names the block
                raise DataError(f"{file.named(0, file.shard.samples)} is damaged: its offsets are; {RESTORE}")
            found.append(counted)
        return np.concatenate(found)

    def _check_file(self, number: int) -> None:
        """Every block of a file that was not touched yet."""
        each = np.arange(self._starts[number], self._ends[number], self._block[number])
        self._check(each, np.full(len(each), number))

    def _check(self, ids: np.ndarray, shard: np.ndarray | None) -> None:
        if shard is None:
            touched = ids // self._block[0]
        else:
            touched = self._first_block[shard] + (ids - self._starts[shard]) // self._block[shard]
        fresh = ~self._checked[touched]
        if not fresh.any():
            return
        if self._process != os.getpid():  # a forked process may have got the lock while another thread held it
            self._checking, self._process = threading.Lock(), os.getpid()
        with self._checking:  # the count of what is left must be right: two threads may read the same data
            for block in sorted(
                set(touched[fresh].tolist())
            ):  # np.unique imports numpy.ma, which takes longer than many blocks
                if not self._checked[block]:
                    self._check_block(block)

    def _check_block(self, block: int) -> None:
        number = int(self._first_block.searchsorted(block, "right")) - 1
        file = self._files[number]
        # Through the maps that rows are gathered from: what is read here needs no second page fault there.
        content = [each.file(number, file.shard.bytes) for each in self._maps]
        problem = damage(content, self._columns, file, block - int(self._first_block[number]))
        if problem:
            raise DamagedError(f"{problem}; {RESTORE}, or leave such blocks out with Packed(..., damaged='skip')")
        self._checked[block] = True
        self._unchecked -= 1

    def _gather(self, place: int) -> _Gather:
        column = self._columns[place]
        buffers = np.array([file.shard.buffers[place] for file in self._files], np.int64)
        gather = None if column.ragged else self._even(column, buffers[:, 0])
        if gather is not None:
            return gather
        region = self._plain()
        # Where row 0 of all files would lie if it were in this file: the address of a row is then one multiplication away.
        if column.ragged:
            offsets, values = region.starts + buffers[:, 0] - 8 * self._starts, region.starts + buffers[:, 1]
            return _Ragged(column, region.bytes, offsets, values)
        return _Scattered(column, region.bytes, region.starts + buffers[:, 0] - column.item * self._starts)

    def _plain(self) -> _Map:
        """The files without gaps, mapped once for all columns that need none."""
        known = next((each for each in self._maps if each.plain), None)
        self._maps.append(known or self._mapped(None))
        return self._maps[-1]

    def _mapped(self, gaps: Sequence[int] | None) -> _Map:
        return _Map([(file.path, file.shard.bytes) for file in self._files], gaps, self._page)

    def _even(self, column: Column, offsets: np.ndarray) -> _Gather | None:
        """A column of equal rows as one array over all files, which are mapped once more so that their rows are in step."""
        sizes = [file.shard.bytes for file in self._files]
        gaps = None
        if column.item and len(sizes) < _MAPPED:
            gaps = even_gaps(sizes, offsets.tolist(), column.item, self._page)
        if gaps is None:
            return None
        if any(gaps):
            self._maps.append(self._mapped(gaps))
        region = self._maps[-1] if any(gaps) else self._plain()
        places = region.starts + offsets
        last = int(places[-1]) + self._files[-1].shard.samples * column.item
        rows = region.bytes[int(places[0]) : last].view(stored(column)).reshape(-1, *column.shape)
        return _Even(column, rows, (places - places[0]) // column.item - self._starts)


def _fewer(error: OSError) -> str:
    """What to do where the kernel gives no more addresses or mappings."""
    if error.errno != errno.ENOMEM:
        return ""
    return (
        "; each file is mapped, for some columns once more, and a process has 65,530 mappings (vm.max_map_count) of as much as "
        "`ulimit -v` allows: pack the data into fewer files (--shards)"
    )


def lengths_of(parts: Sequence[np.ndarray], columns: Sequence[Column], place: int, file: File) -> np.ndarray | None:
    """The lengths of a ragged column, from the offsets of all such columns of a file; None where they are not as they were written."""
    found = _steps(parts, columns, place)
    return found if block_layout.offsets_sum(parts) == file.shard.offsets and not (found < 0).any() else None


def _steps(parts: Sequence[np.ndarray], columns: Sequence[Column], place: int) -> np.ndarray:
    return np.diff(parts[sum(column.ragged for column in columns[:place])].view("<i8"))


class _Map:
    """All files side by side in memory, as one column's rows are read. `plain`: without gaps between them."""

    def __init__(self, files: Sequence[tuple[Path, int]], gaps: Sequence[int] | None, page: int) -> None:
        region = Region(files, gaps, page=page)
        self.bytes, self.starts, self.plain = region.bytes, region.starts, gaps is None
        self._places = region.starts.tolist()

    def file(self, number: int, size: int) -> np.ndarray:
        """The bytes of one file."""
        return self.bytes[self._places[number] : self._places[number] + size]


class _Gather(ABC):
    """Gathers rows of one column. `shard`: the file of each row, None where there is one."""

    @abstractmethod
    def take(self, ids: np.ndarray, shard: np.ndarray | None, pin: bool) -> Any: ...

    def padded(self, ids: np.ndarray, shard: np.ndarray | None, value: float, pin: bool) -> Any:
        """As one tensor, filled up with `value` where rows are numbers that differ in length."""
        return self.take(ids, shard, pin)


class _Even(_Gather):
    """Rows of equal size, all in one array: `rows[id + shifts[file]]`, with no shift in the first."""

    def __init__(self, column: Column, rows: np.ndarray, shifts: np.ndarray) -> None:
        self._dtype, self._stored, self._shape = torch_dtype(column), stored(column), column.shape
        self._rows, self._shifts = rows, shifts

    def take(self, ids: np.ndarray, shard: np.ndarray | None, pin: bool) -> Tensor:
        places = ids if shard is None else ids + self._shifts[shard]
        if pin:
            found = torch.empty((len(ids), *self._shape), dtype=self._dtype, pin_memory=True)
            whole = found.view(INTEGERS[found.itemsize]).numpy().view(self._stored)
            np.take(self._rows, places, axis=0, out=whole, mode="clip")  # the mode "raise" would go through a buffer
            return found
        tensor = torch.from_numpy(self._rows.take(places, axis=0))
        return tensor if tensor.dtype is self._dtype else tensor.view(self._dtype)


class _Scattered(_Gather):
    """Rows of equal size that lie in no common step, by their addresses."""

    def __init__(self, column: Column, content: np.ndarray, bases: np.ndarray) -> None:
        self._dtype, self._stored, self._shape = torch_dtype(column), stored(column), column.shape
        self._item, self._bases = column.item, bases
        self._windows = windows(content, column.item)

    def take(self, ids: np.ndarray, shard: np.ndarray | None, pin: bool) -> Tensor:
        places = ids * self._item + self._bases[0 if shard is None else shard]
        rows = self._windows[places].view(self._stored).reshape(len(ids), *self._shape)
        tensor = torch.from_numpy(rows).view(self._dtype)
        return tensor.pin_memory() if pin else tensor


class _Ragged(_Gather):
    """Rows of any length."""

    def __init__(self, column: Column, content: np.ndarray, offsets: np.ndarray, values: np.ndarray) -> None:
        self._column, self._dtype, self._stored = column, torch_dtype(column), stored(column)
        self._content, self._offsets, self._values = content, offsets, values
        self._pairs = windows(content, 16)

    def _spans(self, ids: np.ndarray, shard: np.ndarray | None) -> np.ndarray:
        """Where the bytes of each row begin and end."""
        which = 0 if shard is None else shard
        pairs = self._pairs[ids * 8 + self._offsets[which]].view(np.int64).reshape(-1, 2)
        if self._column.item > 1:
            pairs = pairs * self._column.item
        return pairs + np.asarray(self._values[which]).reshape(-1, 1)

    def padded(self, ids: np.ndarray, shard: np.ndarray | None, value: float, pin: bool) -> Any:
        if self._column.kind != "array":
            return self.take(ids, shard, pin)
        spans = self._spans(ids, shard)
        longest = int((spans[:, 1] - spans[:, 0]).max()) // self._column.item
        shape = len(ids), longest, *self._column.shape
        found = torch.full(shape, value, dtype=self._dtype, pin_memory=pin)
        if longest:
            # Each row's bytes are copied once, to where they belong.
            content = self._content
            for row, (start, stop) in zip(
                found.view(len(ids), -1).view(torch.uint8).numpy(), spans.tolist(), strict=True
            ):
                row[: stop - start] = content[start:stop]
        return found

    def take(self, ids: np.ndarray, shard: np.ndarray | None, pin: bool) -> list[Any]:
        content = self._content
        rows = [content[start:stop] for start, stop in self._spans(ids, shard).tolist()]
        kind = self._column.kind
        if kind == "text":
            return [_text(row, number) for row, number in zip(rows, ids, strict=True)]
        if kind == "bytes":
            return [row.tobytes() for row in rows]
        if kind == "image":
            return [
                torch.from_numpy(decoded(row.tobytes(), f"sample {number}"))
                for row, number in zip(rows, ids, strict=True)
            ]
        shape = (-1, *self._column.shape)
        found = [torch.from_numpy(row.copy().view(self._stored).reshape(shape)) for row in rows]
        return found if self._stored.name == self._column.dtype else [row.view(self._dtype) for row in found]


def _page(sizes: Sequence[int]) -> int:
    """In what steps files are mapped: huge where all of them fit into memory. Of more, huge pages would each be read for a few rows and
    soon be given up again; and small files fill none."""
    fits = sum(sizes) <= usable_memory() // 2 and sum(sizes) >= len(sizes) * HUGE
    return HUGE if fits and mmap.PAGESIZE == 4096 else mmap.PAGESIZE


def _text(row: np.ndarray, number: int) -> str:
    try:
        return row.tobytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"sample {number} has a text that is not UTF-8: {error}") from None


def windows(content: np.ndarray, size: int) -> np.ndarray:
    """The `size` bytes that begin at each byte, as one array: an index is an address. It takes no memory, it only overlaps."""
    return np.ndarray(len(content) - size + 1, f"V{size}", content.data, strides=1)


def torch_dtype(column: Column) -> torch.dtype:
    """The dtype of a column's tensors."""
    found: torch.dtype = getattr(torch, column.dtype)
    return found


def wrong(file: File) -> str | None:
    """Why a file cannot hold its shard: it is not there, or has another size."""
    whole = file.named(0, file.shard.samples)
    try:
        size = file.path.stat().st_size
    except OSError as error:
        return f"{whole} cannot be read: {error.strerror or error}; {RESTORE}"
    if size == file.shard.bytes:
        return None
    what = "is cut off" if size < file.shard.bytes else "is too long"
    return f"{whole} {what}: it has {size:,} bytes of {file.shard.bytes:,}; {RESTORE}"


def damage(content: np.ndarray | Sequence[np.ndarray], columns: Sequence[Column], file: File, block: int) -> str | None:
    """What is wrong with a block, if anything. `content`: the file's bytes, or once for each column, where it is mapped so."""
    each = [content] * len(columns) if isinstance(content, np.ndarray) else content
    start = block * file.block
    stop = min(start + file.block, file.shard.samples)
    found, promised = block_layout.checksum(each, columns, file.shard, start, stop), file.shard.checksums[block]
    if found == promised:
        return None
    told = (
        "its offsets point outside of the file" if found is None else f"its checksum is {found:08x}, not {promised:08x}"
    )
    return f"{file.named(start, stop, block)} is damaged: {told}"


class Kept(Rows):
    """Only some of the rows: what is left when damaged blocks are passed over, or a part that was asked for."""

    def __init__(self, rows: Rows, spans: Sequence[tuple[int, int]]) -> None:
        """`spans`: the rows that are kept, from and to, in order."""
        sizes = np.array([stop - start for start, stop in spans])
        self._rows, self._spans = rows, list(spans)
        self._ends = np.cumsum(sizes)
        self._shift = np.array([start for start, _ in spans]) - (self._ends - sizes)

    def take(self, ids: np.ndarray, *, pin: bool = False) -> list[Any]:
        return self._rows.take(self._inner(ids), pin=pin)

    def padded(self, ids: np.ndarray, value: float, *, pin: bool = False) -> list[Any]:
        return self._rows.padded(self._inner(ids), value, pin=pin)

    def _inner(self, ids: np.ndarray) -> np.ndarray:
        shifted: np.ndarray = ids + self._shift[self._ends.searchsorted(ids, "right")]
        return shifted

    def lengths(self, column: int) -> np.ndarray:
        found = self._rows.lengths(column)
        return np.concatenate([found[start:stop] for start, stop in self._spans])

    @classmethod
    def without(cls, rows: Rows, total: int, dropped: Sequence[tuple[int, int]]) -> Self:
        """All but these spans."""
        bounds = [0, *(bound for span in dropped for bound in span), total]
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        return cls(rows, [(start, stop) for start, stop in pairs if start < stop])
