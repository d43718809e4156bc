"""A dense parameter in memory: blocks of values, copied on write so that readers keep theirs, and optimizer state."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.hashing import block_shards
from echelon.server.protocol.specs import DTYPE_BYTES, Dense, StoreError
from echelon.server.store import row_layout


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
        return (length + row_layout.state_layout(self.spec.rule, length)[0]) * DTYPE_BYTES[self.spec.dtype]

    @property
    def bytes(self) -> int:
        last_block = self.spec.blocks - 1  # the only one of another size
        last_bytes = self.block_bytes(last_block) if last_block in self.blocks else 0
        return last_bytes + (len(self.blocks) - (last_block in self.blocks)) * self.block_bytes(0)

    def bytes_needed(self, blocks: np.ndarray) -> int:
        """Bytes that blocks would take that are not here yet."""
        return sum(self.block_bytes(block) for block in set(blocks.tolist()) - set(self.blocks))

    def shards_of(self, blocks: np.ndarray) -> np.ndarray:
        for block in blocks.tolist():
            self.spec.block_length(block)
        return self.shard_of_block[blocks]

    def blocks_of_shard(self, shard: int) -> list[int]:
        """The blocks of a shard that are here, in order."""
        return sorted(block for block in self.blocks if self.shard_of_block[block] == shard)

    def written_since(self, shards: np.ndarray, since_lsns: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Per shard, blocks and log numbers of those that were written after a log number."""
        for shard, after_lsn in zip(shards.tolist(), since_lsns.tolist(), strict=True):
            blocks = [block for block in self.blocks_of_shard(shard) if self.blocks[block].lsn > after_lsn]
            yield np.array(blocks, np.int64), np.array([self.blocks[block].lsn for block in blocks], np.int64)

    def as_values(self, blocks: np.ndarray, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """One array of the parameter's dtype for each block; StoreError if they do not fit."""
        spec, arrays = self.spec, []
        if len(values) != len(blocks):
            raise StoreError(f"{spec.name}: {len(values)} arrays for {len(blocks)} blocks; expected one each")
        for block, value in zip(blocks.tolist(), values, strict=True):
            array, length = row_layout.as_kernel_array(value, self._dtype).reshape(-1), spec.block_length(block)
            if len(array) != length:
                raise StoreError(f"{spec.name}: {len(array)} values for block {block}, which has {length}")
            arrays.append(array)
        return arrays

    def sum_gradients(self, blocks: np.ndarray, grads: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
        """The gradient of each block, after summing those of the same block."""
        sums: dict[int, np.ndarray] = {}
        for block, value in zip(blocks.tolist(), self.as_values(blocks, grads), strict=True):
            sums[block] = sums[block] + value if block in sums else value
        return sums

    def _initial_values(self, block: int) -> np.ndarray:
        return row_layout.initial_values(self.spec, np.array([block]), self.spec.block_length(block), self.spec.dtype)[
            0
        ]

    def read(self, block: int) -> np.ndarray:
        """The values of a block, read-only; they do not change while a reader holds them."""
        stored = self.blocks.get(block)
        view = self._initial_values(block) if stored is None else stored.values.view()
        view.flags.writeable = False
        return view

    def set_block(self, block: int, values: np.ndarray, lsn: int) -> None:
        """Set first values, with fresh state."""
        state_size, count_index = row_layout.state_layout(self.spec.rule, self.spec.block_length(block))
        state = np.full(state_size, row_layout.encode_rule_params(self.spec.rule, None, 1)[k.STATE_INIT], self._dtype)
        if count_index >= 0:
            state[count_index] = 0
        self.blocks[block] = DenseBlock(values.copy(), state, lsn)

    def check_push(self, blocks: list[int], step: int | None) -> None:
        """StoreError if a push to these blocks cannot be applied."""
        spec = self.spec
        row_layout.encode_rule_options(spec.rule, -1, is_sparse=False, step=step, name=spec.name)
        if spec.in_one_shard and sorted(blocks) != list(range(spec.blocks)):
            pushed = f"{len(blocks)} of its {spec.blocks} blocks pushed"
            raise StoreError(f"{spec.name}: {pushed}; LAMB's norm needs all of them at once")

    def apply(self, grads: Mapping[int, np.ndarray], *, lr: float | None, lsn: np.ndarray, step: int | None) -> None:
        """Update blocks by their gradients."""
        params = row_layout.encode_rule_params(self.spec.rule, lr, self.spec.size)
        rule_args = (params.astype(self._dtype), params)
        for block in grads:
            if block not in self.blocks:
                self.set_block(block, self._initial_values(block), 0)
            stored = self.blocks[block]
            stored.lsn = int(lsn[self.shard_of_block[block]])
            # One reference is the block's own, one the argument's: any more is a reader's.
            if sys.getrefcount(stored.values) > 2:
                stored.values = stored.values.copy()
        if self.spec.rule.kind == "lamb":
            self._apply_lamb(grads, rule_args, step)
            return
        for block, grad in grads.items():
            stored, options = self.blocks[block], self._encode_rule_options(block, step)
            k.update_block(*rule_args, options, stored.values, grad, stored.state, self._scratch)

    def _apply_lamb(self, grads: Mapping[int, np.ndarray], rule_args: tuple[np.ndarray, ...], step: int | None) -> None:
        directions = {block: np.empty_like(grads[block]) for block in sorted(grads)}
        weight_square_sum = direction_square_sum = 0.0
        for block, direction in directions.items():
            stored, options = self.blocks[block], self._encode_rule_options(block, step)
            block_args = (stored.values, grads[block], stored.state, direction, self._scratch)
            weight_square, direction_square = k.lamb_block_direction(*rule_args, options, *block_args)
            weight_square_sum += weight_square
            direction_square_sum += direction_square
        rate = rule_args[1][k.LR]
        if weight_square_sum > 0 and direction_square_sum > 0:
            rate *= math.sqrt(weight_square_sum) / math.sqrt(direction_square_sum)
        for block, direction in directions.items():
            direction *= self._dtype.type(rate)
            self.blocks[block].values -= direction

    def _encode_rule_options(self, block: int, step: int | None) -> np.ndarray:
        count_index = row_layout.state_layout(self.spec.rule, self.spec.block_length(block))[1]
        return row_layout.encode_rule_options(
            self.spec.rule, count_index, is_sparse=False, step=step, name=self.spec.name
        )
