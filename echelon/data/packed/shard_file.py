"""A shard on disk: where its rows are in the file and in the data set, and whether its bytes are as they were written."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echelon.data.packed.manifest import RESTORE_SHARD, Column, Manifest, Shard
from echelon.errors import DataError

#: Words in a row of the table whose sums make a checksum: a prime number.
_WORDS_PER_ROW = 509


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A shard and its path. `block`: rows per checksum; `first_sample`: the index of its first sample in the data set.

    The methods take `contents`, the file's bytes once per column: columns may be mapped separately.
    """

    path: Path
    shard: Shard
    columns: Sequence[Column]
    block: int
    first_sample: int = 0

    @property
    def end_sample(self) -> int:
        return self.first_sample + self.shard.samples

    def block_checksum(self, contents: Sequence[np.ndarray], block: int) -> int | None:
        """The checksum of a block over the columns in turn; None where offsets point outside of the values."""
        start = block * self.block
        stop = min(start + self.block, self.shard.samples)
        crc = 0
        for content, column, buffers in zip(contents, self.columns, self.shard.buffers, strict=True):
            begin, end, values_start = start, stop, buffers[0]
            if column.ragged:
                offsets_start, values_start, values_bytes = buffers
                offsets = content[offsets_start + 8 * start : offsets_start + 8 * (stop + 1)]
                row_offsets = offsets.view("<i8")
                begin, end = int(row_offsets[0]), int(row_offsets[-1])
                is_ordered = not (row_offsets[1:] < row_offsets[:-1]).any()
                if not is_ordered or not 0 <= begin * column.item_bytes <= end * column.item_bytes <= values_bytes:
                    return None
                crc = zlib.crc32(offsets.data, crc)
            first, last = (values_start + index * column.item_bytes for index in (begin, end))
            crc = fold_crc(content[first:last], crc)
        return crc

    def frame_checksum(self, content: np.ndarray) -> int:
        """CRC-32 of the bytes that belong to no column: Arrow's metadata."""
        spans = self.offset_spans()
        for column, buffers in zip(self.columns, self.shard.buffers, strict=True):
            start, size = buffers[1:] if column.ragged else (buffers[0], self.shard.samples * column.item_bytes)
            spans.append((start, start + size))
        crc = position = 0
        for start, stop in sorted(spans):
            crc = zlib.crc32(content[position:start].data, crc)
            position = max(position, stop)
        return zlib.crc32(content[position : self.shard.bytes].data, crc)

    def offset_spans(self) -> list[tuple[int, int]]:
        """Where the offsets of ragged columns are in the file, column after column."""
        starts = [buffers[0] for column, buffers in zip(self.columns, self.shard.buffers, strict=True) if column.ragged]
        return [(start, start + 8 * (self.shard.samples + 1)) for start in starts]

    def parse_lengths(self, parts: Sequence[np.ndarray], column: int, *, check: bool = True) -> np.ndarray | None:
        """The row lengths of a ragged column, given the bytes of all `offset_spans`; None where these are damaged."""
        lengths: np.ndarray = np.diff(parts[sum(c.ragged for c in self.columns[:column])].view("<i8"))
        is_damaged = check and (offsets_checksum(parts) != self.shard.offsets or (lengths < 0).any())
        return None if is_damaged else lengths

    def describe(self, start: int = 0, stop: int | None = None, block: int | None = None) -> str:
        """Name rows `start` to `stop` of the file in messages."""
        block_text = "" if block is None else f", block {block}"
        last = (self.end_sample if stop is None else self.first_sample + stop) - 1
        return f"{self.path}{block_text} (samples {self.first_sample + start:,} to {last:,})"

    def find_problem(self) -> str | None:
        """Why the file cannot hold its shard: it is missing, or has another size."""
        try:
            size = self.path.stat().st_size
        except OSError as error:
            return f"{self.describe()} cannot be read: {error.strerror or error}; {RESTORE_SHARD}"
        if size == self.shard.bytes:
            return None
        problem = "is truncated" if size < self.shard.bytes else "is too long"
        return f"{self.describe()} {problem}: it has {size:,} bytes of {self.shard.bytes:,}; {RESTORE_SHARD}"

    def find_block_damage(self, contents: Sequence[np.ndarray], block: int) -> str | None:
        actual, expected = self.block_checksum(contents, block), self.shard.checksums[block]
        if actual == expected:
            return None
        reason = "its offsets point outside of the file"
        if actual is not None:
            reason = f"its checksum is {actual:08x}, not {expected:08x}"
        start = block * self.block
        return f"{self.describe(start, min(start + self.block, self.shard.samples), block)} is damaged: {reason}"

    def find_damage(self) -> Iterator[tuple[int, int, str]]:
        """Read everything; yield the first sample and the end of each damaged part, and what is wrong with it."""
        problem = self.find_problem()
        if problem:
            yield self.first_sample, self.end_sample, problem
            return
        contents = [self._map()] * len(self.columns)
        for block in range(len(self.shard.checksums)):
            problem = self.find_block_damage(contents, block)
            if problem:
                start = self.first_sample + block * self.block
                yield start, min(start + self.block, self.end_sample), problem

    def verify(self) -> Iterator[str]:
        """Read everything; yield each problem, also of Arrow's metadata, which reading samples does not need."""
        for _, _, problem in self.find_damage():
            yield problem
        if not self.find_problem() and self.frame_checksum(self._map()) != self.shard.frame:
            yield f"{self.path}: its Arrow metadata is damaged (its samples are not): other programs may fail to read it"

    def _map(self) -> np.ndarray:
        return np.memmap(self.path, np.uint8, "r")


def list_shard_files(folders: Sequence[Path], manifests: Sequence[Manifest]) -> list[ShardFile]:
    files: list[ShardFile] = []
    for folder, manifest in zip(folders, manifests, strict=True):
        for shard in manifest.shards:
            first, path = files[-1].end_sample if files else 0, folder / shard.file
            columns, block = manifest.columns, manifest.block
            files.append(ShardFile(path=path, shard=shard, columns=columns, block=block, first_sample=first))
    if not files[-1].end_sample:
        raise DataError(f"{folders[0]} holds no samples")
    return files


def fold_crc(content: np.ndarray, crc: int) -> int:
    """Update a CRC-32 with sums of a table of 8-byte words, 509 per row: the sum of each row, then of each column, modulo 2^64; then
    with the bytes that do not fill a row.

    A CRC of every byte would take longer than reading. Up to three changed words always change the sum of a row or a column. No page or
    sector is a multiple of a row: swapped ones get into other columns.
    """
    folded_bytes = len(content) // (8 * _WORDS_PER_ROW) * (8 * _WORDS_PER_ROW)
    if folded_bytes:
        words = content[:folded_bytes].view("<u8").reshape(-1, _WORDS_PER_ROW)
        for axis in (1, 0):
            crc = zlib.crc32(np.add.reduce(words, axis=axis).data, crc)
    return zlib.crc32(content[folded_bytes:].data, crc)


def offsets_checksum(parts: Iterable[np.ndarray]) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part.data, crc)
    return crc


def rows_per_block(row_bytes: float) -> int:
    """Choose the rows per checksum: a power of two, 256 to 512 KB. Smaller blocks would make the manifest long, larger ones the first
    read slow, because they exceed the cache of a core."""
    return 1 << (max(1, int(2**19 / max(row_bytes, 1))).bit_length() - 1)
