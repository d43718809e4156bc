"""Random numbers under tensor parallelism: equal on all ranks for replicated activations, independent for shards.

All ranks of the group start a step with one seed. Between a column-parallel module and its row-parallel one, and on parts of a sequence, each
rank continues with its own, derived from the shared generator: nothing has to be saved to resume a run or to recompute a block.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


class RNGTracker:
    """Switches this rank between the shared generator and its own."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._rank_seed: int | None = None
        self._shared_state: Tensor | None = None

    def use_rank_rng(self, device: torch.device) -> None:
        """Draw independently from here on."""
        generator = _default_generator(device)
        if generator.initial_seed() == self._rank_seed:
            return
        shared_number = int(torch.empty((), dtype=torch.int64).random_())  # on the host: no device synchronization
        self._shared_state = generator.get_state()
        seed_text = f"{shared_number} {self._rank}".encode()
        self._rank_seed = int.from_bytes(hashlib.blake2b(seed_text, digest_size=8).digest(), "big") >> 1
        generator.manual_seed(self._rank_seed)

    def use_shared_rng(self, device: torch.device) -> None:
        """Draw the same on all ranks from here on."""
        generator = _default_generator(device)
        # Ask the generator: a recomputation in backward may stop halfway, and torch then restores the generator.
        if generator.initial_seed() == self._rank_seed:
            assert self._shared_state is not None
            generator.set_state(self._shared_state)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
