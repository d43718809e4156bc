"""A dense parameter in memory: blocks of values, copied on write so that readers keep theirs, and optimizer state."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.hashing import block_shards
from echelon.server.protocol.specs import DTYPE_BYTES, Dense, StoreError
from echelon.server.store.row_layout import encode_rule_options, encode_rule_params, initial_values, state_layout


@dataclass(slots=True)
class DenseBlock:
    """Values of one block, its state, and the log number of its last write."""

    values: np.ndarray
    state: np.ndarray
    lsn: int


class DenseParameter:
    """The blocks of one dense parameter that are here."""

    def __init__(self, spec: Dense, *, num_shards: int) -> None:
        self.spec = spec
        self.shard_of_block = block_shards(spec, num_shards)
        self.blocks: dict[int, DenseBlock] = {}
        self._dtype = np.dtype(spec.dtype)
        self._scratch = np.zeros(2, self._dtype)

    def block_bytes(self, block: int) -> int:
        length = self.spec.block_length(block)
        return (length + state_layout(self.spec.rule, length)[0]) * DTYPE_BYTES[self.spec.dtype]

    @property
    def bytes(self) -> int:
        last_block = self.spec.blocks - 1  # the only one of another size
        last_bytes = self.block_bytes(last_block) if last_block in self.blocks else 0
        full_blocks = len(self.blocks) - (last_block in self.blocks)
        return last_bytes + (full_blocks * self.block_bytes(0) if full_blocks else 0)

    def blocks_of_shard(self, shard: int) -> list[int]:
        """The blocks of a shard that are here, in order."""
        return sorted(block for block in self.blocks if self.shard_of_block[block] == shard)

    def bytes_needed(self, blocks: np.ndarray) -> int:
        """Bytes that blocks would take that are not here yet."""
        return sum(self.block_bytes(int(block)) for block in set(blocks.tolist()) - set(self.blocks))

    def _initial_values(self, block: int) -> np.ndarray:
        return initial_values(self.spec, np.array([block]), self.spec.block_length(block), self.spec.dtype)[0]

    def read(self, block: int) -> np.ndarray:
        """The values of a block, read-only; they do not change while a reader holds them."""
        stored = self.blocks.get(block)
        view = self._initial_values(block) if stored is None else stored.values.view()
        view.flags.writeable = False
        return view

    def set_block(self, block: int, values: np.ndarray, lsn: int) -> None:
        """Set first values, with fresh state."""
        self.blocks[block] = DenseBlock(values.copy(), self._initial_state(block), lsn)

    def check_push(self, blocks: list[int], step: int | None) -> None:
        """StoreError if a push to these blocks cannot be applied."""
        encode_rule_options(self.spec.rule, -1, is_sparse=False, step=step, name=self.spec.name)
        if self.spec.in_one_shard and sorted(blocks) != list(range(self.spec.blocks)):
            raise StoreError(
                f"{self.spec.name}: {len(blocks)} of its {self.spec.blocks} blocks pushed; LAMB's norm needs all of them at once"
            )

    def apply(
        self, blocks: list[int], grads: list[np.ndarray], *, lr: float | None, lsn: np.ndarray, step: int | None
    ) -> None:
        params = encode_rule_params(self.spec.rule, lr, self.spec.size)
        rule_args = (params.astype(self._dtype), params)
        for block in blocks:
            if block not in self.blocks:
                self.set_block(block, self._initial_values(block), 0)
            stored = self.blocks[block]
            stored.lsn = int(lsn[self.shard_of_block[block]])
            # One reference is the block's own, one the argument's: any more is a reader's.
            if sys.getrefcount(stored.values) > 2:
                stored.values = stored.values.copy()
        if self.spec.rule.kind == "lamb":
            self._apply_lamb(blocks, grads, rule_args, step)
            return
        for block, grad in zip(blocks, grads, strict=True):
            stored, options = self.blocks[block], self._encode_rule_options(block, step)
            k.update_block(*rule_args, options, stored.values, grad, stored.state, self._scratch)

    def _apply_lamb(
        self, blocks: list[int], grads: list[np.ndarray], rule_args: tuple[np.ndarray, np.ndarray], step: int | None
    ) -> None:
        order = sorted(range(len(blocks)), key=blocks.__getitem__)
        directions = [np.empty_like(grads[index]) for index in order]
        weight_square_sum = direction_square_sum = 0.0
        for index, direction in zip(order, directions, strict=True):
            stored, options = self.blocks[blocks[index]], self._encode_rule_options(blocks[index], step)
            block_args = (stored.values, grads[index], stored.state, direction, self._scratch)
            weight_square, direction_square = k.lamb_block_direction(*rule_args, options, *block_args)
            weight_square_sum += weight_square
            direction_square_sum += direction_square
        rate = rule_args[1][k.LR]
        if weight_square_sum > 0 and direction_square_sum > 0:
            rate *= math.sqrt(weight_square_sum) / math.sqrt(direction_square_sum)
        for index, direction in zip(order, directions, strict=True):
            direction *= self._dtype.type(rate)
            self.blocks[blocks[index]].values -= direction

    def _encode_rule_options(self, block: int, step: int | None) -> np.ndarray:
        count_index = state_layout(self.spec.rule, self.spec.block_length(block))[1]
        return encode_rule_options(self.spec.rule, count_index, is_sparse=False, step=step, name=self.spec.name)

    def _initial_state(self, block: int) -> np.ndarray:
        state_size, count_index = state_layout(self.spec.rule, self.spec.block_length(block))
        state = np.full(state_size, encode_rule_params(self.spec.rule, None, 1)[k.STATE_INIT], self._dtype)
        if count_index >= 0:
            state[count_index] = 0
        return state
