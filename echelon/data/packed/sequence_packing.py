"""Samples that differ in length, laid side by side in rows of one length: nothing is padded but the last places of a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from echelon.errors import DataError

if TYPE_CHECKING:
    from echelon.data.packed.reader import Packed


class Filled:
    """A map-style data set of rows. A row is a dict of `tokens`, `segments` (1, 2, ... for the samples in it, 0 where it is empty) and
    `positions` (of a token in its sample). Which samples share a row follows from their lengths alone: each is in exactly one, and one
    that is longer than a row is cut into several pieces."""

    def __init__(self, data: Packed, column: str, length: int) -> None:
        if length < 1:
            raise DataError(f"length={length}: a row holds at least one token")
        self._data, self._column, self._row = data, column, length
        self._layout = layout(data.lengths(column), length)
        #: What it holds, as one short text: of other data, or in other rows, a training does not go on.
        self.packed_identity = f"{data.identity}, {column!r} in rows of {length}"

    def __len__(self) -> int:
        return len(self._layout.rows) - 1

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Rows by number; their samples are read together."""
        bounds = self._layout.rows
        spans = [slice(bounds[number], bounds[number + 1]) for number in numbers]
        ids = np.concatenate([self._layout.samples[span] for span in spans])
        found = iter(self._data.column(self._column, ids))
        return [self._filled(span, found) for span in spans]

    def _filled(self, span: slice, found: Iterator[torch.Tensor]) -> dict[str, torch.Tensor]:
        parts, place = [], 0
        pieces = zip(self._layout.starts[span].tolist(), self._layout.sizes[span].tolist(), strict=True)
        segments, positions = torch.zeros(self._row, dtype=torch.int64), torch.zeros(self._row, dtype=torch.int64)
        for segment, (start, size) in enumerate(pieces, 1):
            parts.append(next(found)[start : start + size])
            segments[place : place + size] = segment
            positions[place : place + size] = torch.arange(start, start + size)
            place += size
        tokens = torch.zeros(self._row, dtype=parts[0].dtype)
        tokens[:place] = torch.cat(parts)
        return {"tokens": tokens, "segments": segments, "positions": positions}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Pieces of samples, row after row: piece i is tokens `starts[i]` to `starts[i] + sizes[i]` of sample `samples[i]`; the pieces of row
    r are those from `rows[r]` to `rows[r + 1]`."""

    samples: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    rows: np.ndarray


def layout(lengths: np.ndarray, row: int) -> Layout:
    """Pieces of at most `row` tokens in rows. The longest first, each into the row that it fills best: known to need at most 22 % more
    rows than the best possible, and in practice about none.

    Pieces of equal size are placed together, into rows that have equally much room: it takes as many turns as there are sizes and rooms,
    however many pieces there are; each piece takes about 100 bytes while this works and 24 afterwards.
    """
    counts = -(-lengths // row)
    pieces = int(counts.sum())
    if not pieces:
        raise DataError("no sample holds a token: there is nothing to fill rows with")
    samples = np.repeat(np.arange(len(lengths)), counts)
    starts = (np.arange(pieces) - np.repeat(np.cumsum(counts) - counts, counts)) * row
    sizes = np.minimum(lengths[samples] - starts, row)
    row_of = np.empty(pieces, np.int64)
    by_size = np.argsort(-sizes, kind="stable")
    ends = np.flatnonzero(np.diff(sizes[by_size], append=0)) + 1
    free: dict[int, list[np.ndarray]] = {}  # rows by the places that they have left
    made = begin = 0
    for end in ends.tolist():
        size = int(sizes[by_size[begin]])
        while begin < end:
            # Smallest room first: a row takes as many as fit, as what is left of it is the smallest room again.
            room = min((room for room in free if room >= size), default=row)
            each = room // size
            some = -(-(end - begin) // each)
            if room in free:
                rows = free[room].pop()
                if len(rows) > some:
                    free[room].append(rows[some:])
                if not free[room]:
                    del free[room]
                rows = rows[:some]
            else:
                rows, made = np.arange(made, made + some), made + some
            taken = min(len(rows) * each, end - begin)
            row_of[by_size[begin : begin + taken]] = np.repeat(rows, each)[:taken]
            begin += taken
            last = each - (len(rows) * each - taken)  # pieces in the last of these rows
            _left(free, room - each * size, rows if last == each else rows[:-1])
            _left(free, room - last * size, rows[:0] if last == each else rows[-1:])
    order = np.argsort(row_of, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=made))])
    return Layout(samples=samples[order], starts=starts[order], sizes=sizes[order], rows=bounds)


def _left(free: dict[int, list[np.ndarray]], room: int, rows: np.ndarray) -> None:
    if room and len(rows):
        free.setdefault(room, []).append(rows)
