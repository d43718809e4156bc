"""Which samples are in the global batch of each step. Pure: the seed decides, never the number of ranks.

The samples are dealt into `lanes`, consecutive parts of equal size. Each lane is shuffled by itself and gives the same part of
every batch: ranks whose number divides the lanes read from their own lanes only, and the order is the same for all of them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from math import gcd

import numpy as np

from echelon.data.shuffle import FORMULA, Keyed, shuffled
from echelon.errors import DataError

#: Up to this many samples an epoch's order is a table (32 MB); above, a formula.
_TABLE = 2**22
#: Numbers that are worked out at once, where they are not in a table.
_AHEAD = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order in which a training visits `samples` samples, `batch` at a time; steps count from 0 over all epochs."""

    samples: int
    batch: int
    seed: int = 0
    shuffle: bool = True
    #: Leave out the last batch of an epoch where it is short, instead of training on it as it is.
    drop_last: bool = False
    #: Parts of the data that ranks may own; the batch is dealt over as many of them as divide it.
    lanes: int = 1
    #: Shuffle so many files of a lane at a time, of `files` in all, instead of the whole lane (None): fewer are needed at once.
    window: int | None = None
    files: int = 1
    # What was worked out last. Two of each: one epoch may be fetched ahead while another is trained on.
    _tables: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)
    _chunks: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("samples", "batch", "lanes", "files"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise DataError(f"{name}={value!r}: an order needs a whole number of at least 1")
        if self.window is not None and (type(self.window) is not int or self.window < 1 or self.files % self.lanes):
            raise DataError(
                f"window={self.window!r} of files={self.files} in lanes={self.lanes}: shuffle at least one file at a time, "
                "and as many in each lane"
            )
        if self.drop_last and self.samples < self.batch:
            raise DataError(
                f"{self.samples} sample{'s do' if self.samples > 1 else ' does'} not fill one batch of {self.batch}, and drop_last leaves out what does not: "
                f"no batch remains; use a batch of at most {self.samples}, or keep the short batch"
            )

    @property
    def rule(self) -> str:
        """How samples are ordered, in words: for the same samples, batch and seed, an equal rule is an equal order."""
        return ", ".join(self._rules())

    def _rules(self) -> list[str]:
        rules = ["without short batches"] * self.drop_last
        if not self.shuffle:
            return ["in their own order", *rules]
        if self.window is None:
            lanes, most = gcd(self.lanes, self.batch), 0
            rules.insert(0, "shuffled whole" if lanes == 1 else f"shuffled in lanes={lanes}")
        else:
            most = self.window * -(-self.samples // self.files)
            rules.insert(0, f"shuffled in lanes={self.lanes}, window={self.window} of files={self.files}")
        return rules + [f"by formula {FORMULA}"] * self._formula(most)

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in one pass over the data."""
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    def epoch_of(self, step: int) -> int:
        """The pass over the data that `step` belongs to."""
        return step // self.steps_per_epoch

    def size(self, step: int) -> int:
        """Samples in the global batch of `step`; the last of an epoch may be short."""
        return min(self.batch, self.samples - step % self.steps_per_epoch * self.batch)

    def ids(self, step: int, start: int, stop: int) -> np.ndarray:
        """The samples at positions `start` to `stop` (exclusive) of the global batch of `step`."""
        if not (step >= 0 and 0 <= start <= stop <= self.size(step)):
            raise ValueError(f"positions {start} to {stop} of step {step} are outside its batch of {self.size(step)}")
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.batch
        if not self.shuffle:
            return np.arange(first + start, first + stop, dtype=np.int64)
        lanes = gcd(self.lanes, self.batch)
        if lanes == 1 and self.window is None and self.samples <= _TABLE:
            return self._table(epoch, self.samples)[first + start : first + stop]
        if start == stop:
            return np.empty(0, np.int64)
        if place == self.samples // self.batch:
            return self._rest(epoch, start, stop, lanes)
        together = max(1, _AHEAD // (stop - start))
        chunk = place // together
        key = epoch, chunk, start, stop
        known = self._chunks.get(key)
        if known is None:
            known = self._together(epoch, chunk * together, (chunk + 1) * together, start, stop, lanes)
            _remember(self._chunks, key, known, 2)
        return known[place - chunk * together]

    def _together(self, epoch: int, first: int, last: int, start: int, stop: int, lanes: int) -> np.ndarray:
        """Positions `start` to `stop` of the whole batches from `first` to `last` of an epoch, one batch per row."""
        last = min(last, self.samples // self.batch)
        each = self.batch // lanes
        found = np.empty((last - first, stop - start), np.int64)
        for lane in range(start // each, (stop - 1) // each + 1):
            low, high = max(start, lane * each), min(stop, (lane + 1) * each)
            # Those of this share alone: the others of a batch may be many times as many.
            places = np.arange(first, last)[:, None] * each + np.arange(low - lane * each, high - lane * each)
            ids = self._lane(epoch, lane, lanes, places.reshape(-1))
            found[:, low - start : high - start] = ids.reshape(last - first, high - low)
        found.flags.writeable = False
        return found

    def _rest(self, epoch: int, start: int, stop: int, lanes: int) -> np.ndarray:
        """Positions of the short batch: what whole batches left in each lane, lane after lane."""
        used = self.samples // self.batch * (self.batch // lanes)
        parts = []
        for lane in range(lanes):
            begin, end = _bound(lane, self.samples, lanes), _bound(lane + 1, self.samples, lanes)
            before = begin - lane * used  # samples that the lanes before this one have left
            low, high = max(start, before), min(stop, before + end - begin - used)
            if low < high:
                parts.append(self._lane(epoch, lane, lanes, np.arange(used + low - before, used + high - before)))
        return np.concatenate(parts)

    def _lane(self, epoch: int, lane: int, lanes: int, places: np.ndarray) -> np.ndarray:
        """The samples at `places`, which ascend, of a lane's own order."""
        first, end = _bound(lane, self.samples, lanes), _bound(lane + 1, self.samples, lanes)
        if self.window is None:
            return first + self._some((epoch, lane) if lanes > 1 else (epoch,), end - first, places)
        files = self.files // lanes
        turns = self._table(epoch, lane, -1, files)
        parts, before = [], 0
        for group in range(-(-files // self.window)):
            chosen = lane * files + turns[group * self.window : (group + 1) * self.window]
            starts = np.array([_bound(int(file), self.samples, self.files) for file in chosen])
            sizes = np.array([_bound(int(file) + 1, self.samples, self.files) for file in chosen]) - starts
            total = int(sizes.sum())
            low, high = np.searchsorted(places, (before, before + total))
            if low < high:
                drawn = self._some((epoch, lane, group), total, places[low:high] - before)
                ends = np.cumsum(sizes)
                file = np.searchsorted(ends, drawn, "right")
                parts.append(drawn + (starts - (ends - sizes))[file])
            before += total
        return np.concatenate(parts)

    def _some(self, key: tuple[int, ...], samples: int, places: np.ndarray) -> np.ndarray:
        """What stands at `places` of `samples` numbers in the random order of `key`."""
        if not self._formula(samples):
            return self._table(*key, samples)[places]
        return Keyed(samples, self.seed, *key).at(places)

    def _formula(self, samples: int) -> bool:
        """Whether parts of `samples`, one of each lane, are too much for tables."""
        return (self.samples if self.window is None else samples * self.lanes) > _TABLE

    def _table(self, *key: int) -> np.ndarray:
        known = self._tables.get(key)
        if known is None:
            known = shuffled(key[-1], self.seed, *key[:-1])
            # Each lane has its own; of a window also the order of its files.
            _remember(self._tables, key, known, 2 * self.lanes * (1 if self.window is None else 2))
        return known


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketed(Order):
    """An order whose batches hold samples of similar length, so that little is padded.

    Of each `pool` consecutive batches the samples are sorted by length, cut into batches again, and these are visited in random
    order. Each sample stays in its epoch and its pool; the short batch at the end stays as it is.
    """

    lengths: np.ndarray = field(repr=False, compare=False)
    pool: int = 32
    _pools: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Order.__post_init__(self)
        if len(self.lengths) != self.samples or self.pool < 1:
            raise DataError(
                f"{len(self.lengths):,} lengths for {self.samples:,} samples in pools of {self.pool}: give one for each"
            )

    def _rules(self) -> list[str]:
        # Another column of the same samples has other lengths: an order of its own.
        lengths = hashlib.blake2b(np.ascontiguousarray(self.lengths, np.int64).data, digest_size=8).hexdigest()
        return [*Order._rules(self), f"alike in length ({lengths}) in pools of {self.pool} batches"]

    def ids(self, step: int, start: int, stop: int) -> np.ndarray:
        """The samples at positions `start` to `stop` (exclusive) of the global batch of `step`."""
        epoch, place = divmod(step, self.steps_per_epoch)
        whole = self.samples // self.batch
        if place == whole or not 0 <= start <= stop <= self.batch or step < 0:
            return Order.ids(self, step, start, stop)
        first = place // self.pool * self.pool
        known = self._pools.get((epoch, first))
        if known is None:
            steps = range(first, min(first + self.pool, whole))
            before = epoch * self.steps_per_epoch
            found = np.concatenate([Order.ids(self, before + each, 0, self.batch) for each in steps])
            ranked = found[np.argsort(self.lengths[found], kind="stable")].reshape(len(steps), self.batch)
            known = ranked[shuffled(len(steps), self.seed, epoch, first, 1)]
            known.flags.writeable = False
            _remember(self._pools, (epoch, first), known, 2)
        return known[place - first, start:stop]


def _bound(part: int, samples: int, parts: int) -> int:
    """Where a part begins. Rounded down, so that parts of parts begin where whole parts do."""
    return part * samples // parts


def _remember(known: dict[tuple[int, ...], np.ndarray], key: tuple[int, ...], value: np.ndarray, most: int) -> None:
    while len(known) >= most:
        known.pop(next(iter(known)), None)
    known[key] = value
