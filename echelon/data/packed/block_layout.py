"""Where the rows of a block lie in a shard's file, and their checksum. Writer, reader and `verify` share it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from echelon.data.packed.manifest import Column, Shard

#: Words in a row of the table whose sums are a checksum: a prime number.
_WORDS_PER_ROW = 509


def block_checksum(
    files: Iterable[np.ndarray], columns: Sequence[Column], shard: Shard, start: int, stop: int
) -> int | None:
    """Of rows `start` to `stop`, over the columns in turn; None where offsets point outside of their rows: no checksum is like it.

    `files`: the shard's bytes, once for each column, which may be mapped apart.
    """
    crc = 0
    for file, column, buffers in zip(files, columns, shard.buffers, strict=True):
        if not column.ragged:
            values_start = buffers[0]
            crc = fold_crc(
                file[values_start + start * column.item_bytes : values_start + stop * column.item_bytes], crc
            )
            continue
        offsets_start, values_start, values_bytes = buffers
        offsets = file[offsets_start + 8 * start : offsets_start + 8 * (stop + 1)]
        row_offsets = offsets.view("<i8")
        begin, end = int(row_offsets[0]), int(row_offsets[-1])
        if (
            not 0 <= begin * column.item_bytes <= end * column.item_bytes <= values_bytes
            or (row_offsets[1:] < row_offsets[:-1]).any()
        ):
            return None
        crc = _update_crc(offsets, crc)
        crc = fold_crc(file[values_start + begin * column.item_bytes : values_start + end * column.item_bytes], crc)
    return crc


def fold_crc(content: np.ndarray, crc: int) -> int:
    """CRC-32 of a table's sums: as words of 8 bytes, 509 in a row, first the sum of each row, then of each column, modulo 2^64; what
    fills no row goes in as it is.

    A CRC of every byte would take longer than reading. Up to three changed words always show in a row's
    or a column's sum. No page, sector or power of two is a whole number of rows: pieces that change places come into other columns.
    """
    folded_bytes = len(content) // (8 * _WORDS_PER_ROW) * (8 * _WORDS_PER_ROW)
    if folded_bytes:
        words = content[:folded_bytes].view("<u8").reshape(-1, _WORDS_PER_ROW)
        crc = _update_crc(np.add.reduce(words, axis=0), _update_crc(np.add.reduce(words, axis=1), crc))
    return _update_crc(content[folded_bytes:], crc)


def frame_checksum(file: np.ndarray, columns: Sequence[Column], shard: Shard) -> int:
    """CRC-32 of what belongs to no column: Arrow's own words about the file."""
    crc = position = 0
    for start, stop in sorted(_column_spans(columns, shard)):
        crc = _update_crc(file[position:start], crc)
        position = max(position, stop)
    return _update_crc(file[position : shard.bytes], crc)


def file_offsets_checksum(file: np.ndarray, columns: Sequence[Column], shard: Shard) -> int:
    """CRC-32 of the offsets of all ragged columns in turn."""
    return offsets_checksum(file[start:stop] for start, stop in offset_spans(columns, shard))


def offset_spans(columns: Sequence[Column], shard: Shard) -> list[tuple[int, int]]:
    """Where in the file the offsets of ragged columns lie, column after column."""
    return [
        (buffers[0], buffers[0] + 8 * (shard.samples + 1))
        for column, buffers in zip(columns, shard.buffers, strict=True)
        if column.ragged
    ]


def offsets_checksum(parts: Iterable[np.ndarray]) -> int:
    """The checksum of offsets that were read."""
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
    """Rows under one checksum: a power of two, 256 to 512 KB. Less would make a long manifest, more a slow first touch that no core's
    own cache holds."""
    rows = max(1, int(2**19 / max(row_bytes, 1)))
    return 1 << (rows.bit_length() - 1)
