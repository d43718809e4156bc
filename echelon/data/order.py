"""Which samples are in the global batch of each step. Pure: the seed decides, never the number of ranks.

The samples are split into `lanes`, consecutive parts of equal size. Each lane is shuffled separately and fills the same part of every
batch: ranks whose number divides the lanes read only from their own lanes, and the order is the same for any number of ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from math import gcd

import numpy as np

from echelon.data.shuffle import FORMULA_VERSION, FeistelPermutation, random_permutation
from echelon.errors import DataError

#: Up to this many samples an epoch's order is a table (32 MB); above, a formula.
_MAX_TABLE_SAMPLES = 2**22
#: Numbers that are computed at once where they are not in a table.
_IDS_PER_CHUNK = 2**16

_Key = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order in which a training visits its samples, `batch` at a time; steps count from 0 over all epochs."""

    samples: int
    batch: int
    seed: int = 0
    shuffle: bool = True
    #: Leave out the last batch of an epoch if it is short.
    drop_last: bool = False
    #: Parts of the data that ranks may own; the batch is split over as many of them as divide it.
    lanes: int = 1
    #: Shuffle this many files of a lane at a time, of `files` in total; None: the whole lane.
    window: int | None = None
    files: int = 1
    # What was computed last. Two of each: one epoch may be prefetched while another is trained on.
    _table_cache: dict[_Key, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)
    _chunk_cache: dict[_Key, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("samples", "batch", "lanes", "files"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise DataError(f"{name}={value!r}: expected an integer of at least 1")
        if self.window is not None and (type(self.window) is not int or self.window < 1 or self.files % self.lanes):
            problem = f"window={self.window!r} of files={self.files} in lanes={self.lanes}"
            raise DataError(f"{problem}: shuffle at least one file at a time, and as many in each lane")
        if self.drop_last and self.samples < self.batch:
            subject = f"{self.samples} samples do" if self.samples > 1 else "1 sample does"
            remedy = f"use a batch of at most {self.samples}, or keep the short batch"
            raise DataError(f"{subject} not fill one batch of {self.batch}, and drop_last leaves no other; {remedy}")

    @property
    def rule(self) -> str:
        """How samples are ordered: for the same samples, batch and seed, an equal rule means an equal order."""
        return ", ".join(self._rule_parts())

    def _rule_parts(self) -> list[str]:
        parts = ["without short batches"] * self.drop_last
        if not self.shuffle:
            return ["in their own order", *parts]
        if self.window is None:
            lanes, max_samples = gcd(self.lanes, self.batch), 0
            parts.insert(0, "shuffled whole" if lanes == 1 else f"shuffled in lanes={lanes}")
        else:
            max_samples = self.window * -(-self.samples // self.files)
            parts.insert(0, f"shuffled in lanes={self.lanes}, window={self.window} of files={self.files}")
        return parts + [f"by formula {FORMULA_VERSION}"] * self._uses_formula(max_samples)

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def batch_size(self, step: int) -> int:
        """Samples in the global batch of `step`; the last of an epoch may be short."""
        return min(self.batch, self.samples - step % self.steps_per_epoch * self.batch)

    def ids(self, step: int, start: int, stop: int) -> np.ndarray:
        """The samples at positions `start` to `stop` (exclusive) of the global batch of `step`."""
        if not (step >= 0 and 0 <= start <= stop <= self.batch_size(step)):
            size = self.batch_size(step)
            raise ValueError(f"positions {start} to {stop} of step {step} are outside its batch of {size}")
        epoch, batch_index = divmod(step, self.steps_per_epoch)
        first = batch_index * self.batch
        if not self.shuffle:
            return np.arange(first + start, first + stop, dtype=np.int64)
        lanes = gcd(self.lanes, self.batch)
        if lanes == 1 and self.window is None and self.samples <= _MAX_TABLE_SAMPLES:
            return self._get_table(epoch, self.samples)[first + start : first + stop]
        if start == stop:
            return np.empty(0, np.int64)
        if batch_index == self.samples // self.batch:
            return self._short_batch_ids(epoch, start, stop, lanes)
        chunk_size = max(1, _IDS_PER_CHUNK // (stop - start))
        chunk, row = divmod(batch_index, chunk_size)
        key = epoch, chunk, start, stop
        cached = self._chunk_cache.get(key)
        if cached is None:
            batches = range(chunk * chunk_size, min((chunk + 1) * chunk_size, self.samples // self.batch))
            cached = self._compute_chunk(epoch, batches, start, stop, lanes)
            _add_to_cache(self._chunk_cache, key, cached, 2)
        return cached[row]

    def _compute_chunk(self, epoch: int, batches: range, start: int, stop: int, lanes: int) -> np.ndarray:
        lane_batch = self.batch // lanes
        chunk_ids = np.empty((len(batches), stop - start), np.int64)
        for lane in range(start // lane_batch, (stop - 1) // lane_batch + 1):
            first = lane * lane_batch
            low, high = max(start, first), min(stop, first + lane_batch)
            # Only those of this share: a batch may have many times as many.
            positions = np.array(batches)[:, None] * lane_batch + np.arange(low - first, high - first)
            ids = self._lane_ids(epoch, lane, lanes, positions.reshape(-1))
            chunk_ids[:, low - start : high - start] = ids.reshape(len(batches), high - low)
        chunk_ids.flags.writeable = False
        return chunk_ids

    def _short_batch_ids(self, epoch: int, start: int, stop: int, lanes: int) -> np.ndarray:
        """Compute positions of the short batch: what full batches left in each lane, lane after lane."""
        consumed = self.samples // self.batch * (self.batch // lanes)
        parts = []
        for lane in range(lanes):
            lane_start, lane_end = _part_bounds(lane, self.samples, lanes)
            offset = lane_start - lane * consumed  # samples that the lanes before this one have left
            low, high = max(start, offset), min(stop, offset + lane_end - lane_start - consumed)
            if low < high:
                positions = consumed - offset + np.arange(low, high)
                parts.append(self._lane_ids(epoch, lane, lanes, positions))
        return np.concatenate(parts)

    def _lane_ids(self, epoch: int, lane: int, lanes: int, positions: np.ndarray) -> np.ndarray:
        """The samples at ascending `positions` of a lane's own order."""
        lane_start, lane_end = _part_bounds(lane, self.samples, lanes)
        if self.window is None:
            key = (epoch, lane) if lanes > 1 else (epoch,)
            return lane_start + self._permute(key, lane_end - lane_start, positions)
        lane_files = self.files // lanes
        file_order = self._get_table(epoch, lane, -1, lane_files)
        parts, offset = [], 0
        for window_index in range(-(-lane_files // self.window)):
            first = window_index * self.window
            window_files = (lane * lane_files + file_order[first : first + self.window]).tolist()
            bounds = np.array([_part_bounds(file, self.samples, self.files) for file in window_files])
            file_starts, file_sizes = bounds[:, 0], bounds[:, 1] - bounds[:, 0]
            window_samples = int(file_sizes.sum())
            low, high = np.searchsorted(positions, (offset, offset + window_samples))
            if low < high:
                window_ids = self._permute((epoch, lane, window_index), window_samples, positions[low:high] - offset)
                file_ends = np.cumsum(file_sizes)
                file_index = np.searchsorted(file_ends, window_ids, "right")
                parts.append(window_ids + (file_starts - (file_ends - file_sizes))[file_index])
            offset += window_samples
        return np.concatenate(parts)

    def _permute(self, key: tuple[int, ...], samples: int, positions: np.ndarray) -> np.ndarray:
        """The numbers at `positions` of the random order of `samples` numbers by `key`."""
        if not self._uses_formula(samples):
            return self._get_table(*key, samples)[positions]
        return FeistelPermutation(samples, self.seed, *key).at(positions)

    def _uses_formula(self, samples: int) -> bool:
        """Whether parts of `samples`, one per lane, are too many for tables."""
        return (self.samples if self.window is None else samples * self.lanes) > _MAX_TABLE_SAMPLES

    def _get_table(self, *key: int) -> np.ndarray:
        table = self._table_cache.get(key)
        if table is None:
            table = random_permutation(key[-1], self.seed, *key[:-1])
            # One per lane, and with windows one for the order of its files.
            _add_to_cache(self._table_cache, key, table, 2 * self.lanes * (1 if self.window is None else 2))
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketedOrder(Order):
    """An order whose batches hold samples of similar length, so that little is padded.

    The samples of each `pool_size` consecutive batches are sorted by length and cut into batches again, which are visited in random
    order. Each sample stays in its epoch and its pool; the short batch at the end does not change.
    """

    lengths: np.ndarray = field(repr=False, compare=False)
    pool_size: int = 32
    _pool_cache: dict[_Key, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Order.__post_init__(self)
        if len(self.lengths) != self.samples or self.pool_size < 1:
            counts = f"{len(self.lengths):,} lengths for {self.samples:,} samples"
            raise DataError(f"{counts} in pools of {self.pool_size}: give one length per sample")

    def _rule_parts(self) -> list[str]:
        # Another column of the same samples has other lengths, and so another order.
        lengths = hashlib.blake2b(np.ascontiguousarray(self.lengths, np.int64).data, digest_size=8).hexdigest()
        return [*Order._rule_parts(self), f"alike in length ({lengths}) in pools of {self.pool_size} batches"]

    def ids(self, step: int, start: int, stop: int) -> np.ndarray:
        """The samples at positions `start` to `stop` (exclusive) of the global batch of `step`."""
        epoch, batch_index = divmod(step, self.steps_per_epoch)
        full_batches = self.samples // self.batch
        if batch_index == full_batches or not 0 <= start <= stop <= self.batch or step < 0:
            return Order.ids(self, step, start, stop)
        first_batch = batch_index // self.pool_size * self.pool_size
        pool_ids = self._pool_cache.get((epoch, first_batch))
        if pool_ids is None:
            steps = range(first_batch, min(first_batch + self.pool_size, full_batches))
            epoch_start = epoch * self.steps_per_epoch
            pool_samples = np.concatenate([Order.ids(self, epoch_start + index, 0, self.batch) for index in steps])
            by_length = np.argsort(self.lengths[pool_samples], kind="stable")
            sorted_batches = pool_samples[by_length].reshape(len(steps), self.batch)
            pool_ids = sorted_batches[random_permutation(len(steps), self.seed, epoch, first_batch, 1)]
            pool_ids.flags.writeable = False
            _add_to_cache(self._pool_cache, (epoch, first_batch), pool_ids, 2)
        return pool_ids[batch_index - first_batch, start:stop]


def _part_bounds(part: int, samples: int, parts: int) -> tuple[int, int]:
    """The first sample of a part and its end, rounded down, so that parts of parts begin where whole parts do."""
    return part * samples // parts, (part + 1) * samples // parts


def _add_to_cache(cache: dict[_Key, np.ndarray], key: _Key, value: np.ndarray, max_entries: int) -> None:
    while len(cache) >= max_entries:
        cache.pop(next(iter(cache)), None)
    cache[key] = value
