"""How the kernels read a table: where things lie in a row, a rule as numbers, first values."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.hashing import hash_name
from echelon.server.protocol.specs import DTYPE_BYTES, INIT_KINDS, RULE_KINDS, Dense, Rule, StoreError, Table


class RowLayout(NamedTuple):
    """A row: id and lsn, weights, their scale if they are integers, state; last the update count of a lazy table.

    Offsets are in elements of the field's own size; `words` are of 8 bytes. `count_index`: the state that counts updates, or -1.
    """

    words: int
    stored_kind: int
    dim: int
    weights_offset: int
    scale_offset: int
    state_offset: int
    state_size: int
    count_index: int

    @property
    def stride(self) -> int:
        return 8 * self.words


def as_kernel_array(values: Any, dtype: Any) -> np.ndarray:
    """Contiguous and writable: kernels are compiled for such arrays only."""
    array = np.ascontiguousarray(values, dtype)
    return array if array.flags.writeable else array.copy()


def state_layout(rule: Rule, dim: int) -> tuple[int, int]:
    """How many elements of state `dim` weights have under a rule, and which of them counts updates (-1: none)."""
    count_size = 0 if rule.every else {"momentum": 1 if rule.dampening else 0, "adam": 1, "lamb": 1}.get(rule.kind, 0)
    state_size = {"sgd": 0, "rowwise_adagrad": 1, "momentum": dim, "adagrad": dim}.get(rule.kind, 2 * dim)
    return state_size + count_size, state_size if count_size else -1


def make_row_layout(spec: Table) -> RowLayout:
    dtype_bytes, stored_bytes = DTYPE_BYTES[spec.dtype], DTYPE_BYTES[spec.stored]
    state_size, count_index = state_layout(spec.rule, spec.dim)
    weights_end, scale_offset = 16 + spec.dim * stored_bytes, 0
    if spec.stored in ("i2", "i1"):
        scale_offset = -(-weights_end // 4)
        weights_end = scale_offset * 4 + 4
    state_offset = -(-weights_end // dtype_bytes)
    words = -(-(state_offset + state_size) * dtype_bytes // 8) + spec.rule.every
    narrow_kinds = {"f4": k.F4, "f2": k.F2, "i2": k.I2, "i1": k.I1}
    stored_kind = k.NATIVE if spec.stored == spec.dtype else narrow_kinds[spec.stored]
    weights_offset = 16 // stored_bytes
    return RowLayout(words, stored_kind, spec.dim, weights_offset, scale_offset, state_offset, state_size, count_index)


def extract_weights(spec: Table, rows: np.ndarray) -> list[np.ndarray]:
    """Copies of the weights of whole rows (n, words) as they are stored, and the scales of integers."""
    layout = make_row_layout(spec)
    row_bytes = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), layout.stride)
    values = np.ascontiguousarray(row_bytes[:, 16 : 16 + spec.dim * DTYPE_BYTES[spec.stored]]).view(spec.stored)
    if layout.stored_kind not in (k.I2, k.I1):
        return [values]
    scales = np.ascontiguousarray(row_bytes[:, layout.scale_offset * 4 : layout.scale_offset * 4 + 4]).view(np.float32)
    return [values, scales.reshape(-1)]


def encode_rule_params(rule: Rule, lr: float | None, width: int) -> np.ndarray:
    """A rule's numbers, float64, in the order of `kernels.constants`."""
    rate = rule.lr if lr is None else float(lr)
    decay = (0.0, 1.0 - rate * rule.weight_decay) if rule.decoupled else (rule.weight_decay, 1.0)
    betas = (rule.beta1, 1.0 - rule.beta1, rule.beta2, 1.0 - rule.beta2)
    initial = rule.initial if rule.kind in ("adagrad", "rowwise_adagrad") else 0.0
    momentum = (rule.momentum, 1.0 - rule.dampening)
    return np.array([rate, *decay, *momentum, *betas, rule.epsilon, initial, float(width)])


def required_step(rule: Rule, step: int | None, name: str) -> int:
    """The step by which a rule corrects bias; 0 where each row counts its own."""
    if rule.steps != "given" or rule.kind not in ("adam", "lamb"):
        return 0
    if step is None or step < 1:
        problem = f"step={step}: its rule corrects bias by the push's step"
        raise StoreError(f"{name}: {problem}; give a step of at least 1, or use steps='row'")
    return step


def encode_rule_options(rule: Rule, count_index: int, *, is_sparse: bool, step: int | None, name: str) -> np.ndarray:
    """A rule's switches, in the order of `kernels.constants`."""
    step = required_step(rule, step, name)
    return np.array([RULE_KINDS.index(rule.kind), rule.nesterov, is_sparse, count_index, step], np.int64)


def encode_init(spec: Table | Dense) -> tuple[int, np.ndarray, np.uint64]:
    """An initializer as the kernels read it: kind, numbers, seed."""
    init = spec.init
    numbers = np.array([0.0 if init.kind == "zeros" else init.value, init.scale])
    seed = (hash_name(spec.name) + init.seed * 0x9E3779B97F4A7C15) % (1 << 64)
    return INIT_KINDS.index(init.kind), numbers, np.uint64(seed)


def initial_values(spec: Table | Dense, ids: np.ndarray, length: int, dtype: str) -> np.ndarray:
    """First values (ids, length) of rows or blocks."""
    kind, numbers, seed = encode_init(spec)
    values = np.empty((len(ids), length), dtype)
    for row, row_id in zip(values, ids.tolist(), strict=True):
        k.init_row(kind, numbers[0], numbers[1], seed, row_id, row)
    return values
