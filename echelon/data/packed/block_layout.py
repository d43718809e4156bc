"""Where the rows of a block lie in a shard's file, and their checksum. Writer, reader and `verify` share it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from echelon.data.packed.manifest import Column, Shard

#: Words in a row of the table whose sums are a checksum: a prime number.
_WORDS = 509


def checksum(files: Iterable[np.ndarray], columns: Sequence[Column], shard: Shard, start: int, stop: int) -> int | None:
    """Of rows `start` to `stop`, over the columns in turn; None where offsets point outside of their rows: no checksum is like it.

    `files`: the shard's bytes, once for each column, which may be mapped apart.
    """
    found = 0
    for file, column, buffers in zip(files, columns, shard.buffers, strict=True):
        if not column.ragged:
            first = buffers[0]
            found = folded(file[first + start * column.item : first + stop * column.item], found)
            continue
        at, first, size = buffers
        offsets = file[at + 8 * start : at + 8 * (stop + 1)]
        places = offsets.view("<i8")
        begin, end = int(places[0]), int(places[-1])
        if not 0 <= begin * column.item <= end * column.item <= size or (places[1:] < places[:-1]).any():
            return None
        found = _crc(offsets, found)
        found = folded(file[first + begin * column.item : first + end * column.item], found)
    return found


def folded(content: np.ndarray, found: int) -> int:
    """CRC-32 of a table's sums: as words of 8 bytes, 509 in a row, first the sum of each row, then of each column, modulo 2^64; what
    fills no row goes in as it is.

    A CRC of every byte would take longer than reading. Up to three changed words always show in a row's
    or a column's sum. No page, sector or power of two is a whole number of rows: pieces that change places come into other columns.
    """
    whole = len(content) // (8 * _WORDS) * (8 * _WORDS)
    if whole:
        words = content[:whole].view("<u8").reshape(-1, _WORDS)
        found = _crc(np.add.reduce(words, axis=0), _crc(np.add.reduce(words, axis=1), found))
    return _crc(content[whole:], found)


def frame(file: np.ndarray, columns: Sequence[Column], shard: Shard) -> int:
    """CRC-32 of what belongs to no column: Arrow's own words about the file."""
    found = place = 0
    for start, stop in sorted(_spans(columns, shard)):
        found = _crc(file[place:start], found)
        place = max(place, stop)
    return _crc(file[place : shard.bytes], found)


def offsets(file: np.ndarray, columns: Sequence[Column], shard: Shard) -> int:
    """CRC-32 of the offsets of all ragged columns in turn."""
    return offsets_sum(file[start:stop] for start, stop in offset_spans(columns, shard))


def offset_spans(columns: Sequence[Column], shard: Shard) -> list[tuple[int, int]]:
    """Where in the file the offsets of ragged columns lie, column after column."""
    return [(at[0], at[0] + 8 * (shard.samples + 1)) for c, at in zip(columns, shard.buffers, strict=True) if c.ragged]


def offsets_sum(parts: Iterable[np.ndarray]) -> int:
    """The checksum of offsets that were read."""
    found = 0
    for part in parts:
        found = _crc(part, found)
    return found


def _crc(content: np.ndarray, found: int) -> int:
    return zlib.crc32(content.data, found)


def _spans(columns: Sequence[Column], shard: Shard) -> Iterator[tuple[int, int]]:
    for column, buffers in zip(columns, shard.buffers, strict=True):
        if column.ragged:
            at, first, size = buffers
            yield at, at + 8 * (shard.samples + 1)
            yield first, first + size
        else:
            yield buffers[0], buffers[0] + shard.samples * column.item


def block_rows(row_bytes: float) -> int:
    """Rows under one checksum: a power of two, 256 to 512 KB. Less would make a long manifest, more a slow first touch that no core's
    own cache holds."""
    rows = max(1, int(2**19 / max(row_bytes, 1)))
    return 1 << (rows.bit_length() - 1)
