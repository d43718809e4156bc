"""Where the rows of a block are in a shard's file, and their checksums. Shared by writing, reading and `verify`."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from echelon.data.packed.manifest import Column, Shard

#: Words in a row of the table whose sums make a checksum: a prime number.
_WORDS_PER_ROW = 509


def block_checksum(
    files: Sequence[np.ndarray], columns: Sequence[Column], shard: Shard, start: int, stop: int
) -> int | None:
    """Compute the checksum of rows `start` to `stop` over the columns in turn; None where offsets point outside of the values.

    `files`: the shard's bytes, once per column, which may be mapped separately.
    """
    crc = 0
    for file, column, buffers in zip(files, columns, shard.buffers, strict=True):
        if not column.ragged:
            begin, end, values_start = start, stop, buffers[0]
        else:
            offsets_start, values_start, values_bytes = buffers
            offsets = file[offsets_start + 8 * start : offsets_start + 8 * (stop + 1)]
            row_offsets = offsets.view("<i8")
            begin, end = int(row_offsets[0]), int(row_offsets[-1])
            is_ordered = not (row_offsets[1:] < row_offsets[:-1]).any()
            if not is_ordered or not 0 <= begin * column.item_bytes <= end * column.item_bytes <= values_bytes:
                return None
            crc = _update_crc(offsets, crc)
        crc = fold_crc(file[values_start + begin * column.item_bytes : values_start + end * column.item_bytes], crc)
    return crc


def fold_crc(content: np.ndarray, crc: int) -> int:
    """Update a CRC-32 with sums of a table of 8-byte words, 509 per row: the sum of each row, then of each column, modulo 2^64; then
    with the bytes that do not fill a row.

    A CRC of every byte would take longer than reading. Up to three changed words always change the sum of a row or a column. No page or
    sector is a whole number of rows: swapped ones get into other columns.
    """
    folded_bytes = len(content) // (8 * _WORDS_PER_ROW) * (8 * _WORDS_PER_ROW)
    if folded_bytes:
        words = content[:folded_bytes].view("<u8").reshape(-1, _WORDS_PER_ROW)
        crc = _update_crc(np.add.reduce(words, axis=0), _update_crc(np.add.reduce(words, axis=1), crc))
    return _update_crc(content[folded_bytes:], crc)


def frame_checksum(file: np.ndarray, columns: Sequence[Column], shard: Shard) -> int:
    """CRC-32 of the bytes that belong to no column: Arrow's metadata."""
    crc = position = 0
    for start, stop in sorted(_column_spans(columns, shard)):
        crc = _update_crc(file[position:start], crc)
        position = max(position, stop)
    return _update_crc(file[position : shard.bytes], crc)


def offset_spans(columns: Sequence[Column], shard: Shard) -> list[tuple[int, int]]:
    """Where the offsets of ragged columns are in the file, column after column."""
    starts = [buffers[0] for column, buffers in zip(columns, shard.buffers, strict=True) if column.ragged]
    return [(start, start + 8 * (shard.samples + 1)) for start in starts]


def offsets_checksum(parts: Iterable[np.ndarray]) -> int:
    """CRC-32 of the offsets of all ragged columns in turn."""
    crc = 0
    for part in parts:
        crc = _update_crc(part, crc)
    return crc


def _update_crc(content: np.ndarray, crc: int) -> int:
    return zlib.crc32(content.data, crc)


def _column_spans(columns: Sequence[Column], shard: Shard) -> Iterator[tuple[int, int]]:
    for column, buffers in zip(columns, shard.buffers, strict=True):
        if column.ragged:
            offsets_start, values_start, values_bytes = buffers
            yield offsets_start, offsets_start + 8 * (shard.samples + 1)
            yield values_start, values_start + values_bytes
        else:
            yield buffers[0], buffers[0] + shard.samples * column.item_bytes


def rows_per_block(row_bytes: float) -> int:
    """Choose the rows per checksum: a power of two, 256 to 512 KB. Smaller blocks would make the manifest long, larger ones the first
    read slow, because they exceed the cache of a core."""
    rows = max(1, int(2**19 / max(row_bytes, 1)))
    return 1 << (rows.bit_length() - 1)
