"""A dense parameter in memory: blocks of values that readers keep unchanged (copy on write), and their state."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.hashing import block_shards
from echelon.server.protocol.specs import SIZES, Dense, StoreError
from echelon.server.store.sparse_table import init_of, scalars_of, seed_of, state_of, switches_of


@dataclass(slots=True)
class Block:
    """Values of one block, its state, and the log number of its last write."""

    values: np.ndarray
    state: np.ndarray
    lsn: int


class Blocks:
    """The blocks of one dense parameter that are here."""

    def __init__(self, spec: Dense, *, shards: int) -> None:
        self.spec = spec
        self.shard = block_shards(spec, shards)
        self.held: dict[int, Block] = {}
        self._float = np.dtype(spec.dtype)
        self._scratch = np.zeros(2, self._float)

    def cost(self, block: int) -> int:
        """Bytes of a block and its state."""
        length = self.spec.length(block)
        return (length + state_of(self.spec.rule, length)[0]) * SIZES[self.spec.dtype]

    @property
    def bytes(self) -> int:
        """Memory in use."""
        last = self.spec.blocks - 1
        full = len(self.held) - (last in self.held)
        return full * (self.cost(0) if full else 0) + (self.cost(last) if last in self.held else 0)

    def of(self, shard: int) -> list[int]:
        """The blocks of a shard that are here, in order."""
        return sorted(block for block in self.held if self.shard[block] == shard)

    def need(self, blocks: np.ndarray) -> int:
        """Bytes that blocks not yet here would take."""
        return sum(self.cost(int(block)) for block in set(blocks.tolist()) - set(self.held))

    def initial(self, block: int) -> np.ndarray:
        """The values of a block that nobody has set."""
        out = np.empty(self.spec.length(block), self._float)
        kind, scalars = init_of(self.spec.init)
        k.initial(kind, scalars[0], scalars[1], seed_of(self.spec.name, self.spec.init), block, out)
        return out

    def read(self, block: int) -> np.ndarray:
        """The values of a block, read-only; they stay as they are for as long as somebody holds them."""
        held = self.held.get(block)
        view = self.initial(block) if held is None else held.values.view()
        view.flags.writeable = False
        return view

    def set(self, block: int, values: np.ndarray, lsn: int) -> None:
        """First values; the state starts anew."""
        self.held[block] = Block(values.copy(), self._state(block), lsn)

    def check(self, blocks: list[int], step: int | None) -> None:
        """Whether a push to these blocks can be applied."""
        switches_of(self.spec.rule, -1, sparse=False, step=step, name=self.spec.name)
        if self.spec.whole and sorted(blocks) != list(range(self.spec.blocks)):
            raise StoreError(
                f"{self.spec.name}: {len(blocks)} of its {self.spec.blocks} blocks pushed; LAMB's norm needs all of them at once"
            )

    def apply(
        self, blocks: list[int], grads: list[np.ndarray], *, lr: float | None, lsn: np.ndarray, step: int | None
    ) -> None:
        """Updates blocks, each named once."""
        rule = self.spec.rule
        p = scalars_of(rule, lr, self.spec.size)
        c = p.astype(self._float)
        for block in blocks:
            if block not in self.held:
                self.held[block] = Block(self.initial(block), self._state(block), 0)
            held = self.held[block]
            held.lsn = int(lsn[self.shard[block]])
            # One reference is the block's own, one the argument's: any more is a reader's.
            if sys.getrefcount(held.values) > 2:
                held.values = held.values.copy()
        if rule.kind == "lamb":
            self._lamb(blocks, grads, c, p, step)
            return
        for block, grad in zip(blocks, grads, strict=True):
            held = self.held[block]
            k.dense_step(c, p, self._switches(block, step), held.values, grad, held.state, self._scratch)

    def _lamb(self, blocks: list[int], grads: list[np.ndarray], c: np.ndarray, p: np.ndarray, step: int | None) -> None:
        order = sorted(range(len(blocks)), key=blocks.__getitem__)
        ways = [np.empty_like(grads[i]) for i in order]
        weights = total = 0.0
        for i, way in zip(order, ways, strict=True):
            held = self.held[blocks[i]]
            a, b = k.dense_lamb(
                c, p, self._switches(blocks[i], step), held.values, grads[i], held.state, way, self._scratch
            )
            weights, total = weights + a, total + b
        rate = p[k.LR] * (math.sqrt(weights) / math.sqrt(total) if weights > 0 and total > 0 else 1.0)
        for i, way in zip(order, ways, strict=True):
            way *= self._float.type(rate)
            self.held[blocks[i]].values -= way

    def _switches(self, block: int, step: int | None) -> np.ndarray:
        count = state_of(self.spec.rule, self.spec.length(block))[1]
        return switches_of(self.spec.rule, count, sparse=False, step=step, name=self.spec.name)

    def _state(self, block: int) -> np.ndarray:
        states, count = state_of(self.spec.rule, self.spec.length(block))
        state = np.full(states, scalars_of(self.spec.rule, None, 1)[k.FIRST], self._float)
        if count >= 0:
            state[count] = 0
        return state
