"""Random numbers over the tensor axis: its ranks draw the same for what they all compute, and each its own for its part of something.

All ranks of the axis have one seed per step, so that a dropout on what is whole everywhere has one mask. Between a column and its row, and
on parts of a sequence, one mask for all parts would repeat itself over the ranks. There each rank goes on with a seed of its own, which
follows from the common numbers: nothing has to be saved for a run that is resumed, or for a block that is computed again.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


class RNGTracker:
    """Where this rank takes its random numbers from."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._rank_seed: int | None = None
        self._shared_state: Tensor | None = None

    def use_rank_rng(self, device: torch.device) -> None:
        """From here on this rank draws by itself."""
        generator = _default_generator(device)
        if generator.initial_seed() == self._rank_seed:
            return
        shared_number = int(torch.empty((), dtype=torch.int64).random_())  # the host's, which no device has to wait for
        self._shared_state = generator.get_state()
        seed_text = f"{shared_number} {self._rank}".encode()
        self._rank_seed = int.from_bytes(hashlib.blake2b(seed_text, digest_size=8).digest(), "big") >> 1
        generator.manual_seed(self._rank_seed)

    def use_shared_rng(self, device: torch.device) -> None:
        """From here on all ranks draw the same again."""
        generator = _default_generator(device)
        # Not by a note of our own: what is computed again in backward may stop half-way, and the generator is put back then.
        if generator.initial_seed() == self._rank_seed:
            assert self._shared_state is not None
            generator.set_state(self._shared_state)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
