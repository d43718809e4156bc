"""Which samples are in the global batch of each step. Pure: the seed decides, never the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from echelon.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order in which a training visits `samples` samples, `batch` at a time; steps count from 0 over all epochs."""

    samples: int
    batch: int
    seed: int = 0
    shuffle: bool = True
    #: Leave out the last batch of an epoch where it is short, instead of training on it as it is.
    drop_last: bool = False
    # The permutations of the epochs in use: two, because one epoch may be fetched ahead while another is trained on.
    _permutations: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("samples", "batch"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise DataError(f"{name}={value!r}: an order needs a whole number of at least 1")
        if self.drop_last and self.samples < self.batch:
            raise DataError(
                f"{self.samples} sample{'s do' if self.samples > 1 else ' does'} not fill one batch of {self.batch}, and drop_last leaves out what does not: "
                f"no batch remains; use a batch of at most {self.samples}, or keep the short batch"
            )

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
        return self._permutation(epoch)[first + start : first + stop]

    def _permutation(self, epoch: int) -> np.ndarray:
        known = self._permutations.get(epoch)
        if known is None:
            known = _shuffled(self.samples, self.seed, epoch)
            while len(self._permutations) > 1:
                self._permutations.pop(next(iter(self._permutations)), None)
            self._permutations[epoch] = known
        return known


def _shuffled(samples: int, seed: int, epoch: int) -> np.ndarray:
    """0 to `samples` in random order.

    Each sample's number goes below random bits and the whole is sorted. NumPy promises the raw bits of PCG64 for ever but not
    what `permutation` makes of them: a checkpoint must find the same order under another NumPy. Equal bits, which leave two
    neighbours in the order of their numbers, are rare below 10^8 samples.
    """
    width = np.uint64((samples - 1).bit_length())
    keys = np.random.PCG64([seed % 2**64, epoch]).random_raw(samples)
    keys <<= width
    keys |= np.arange(samples, dtype=np.uint64)
    keys.sort()
    keys &= (np.uint64(1) << width) - np.uint64(1)
    order = keys.view(np.int64)
    order.flags.writeable = False  # slices of it are handed out
    return order
