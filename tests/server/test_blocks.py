"""Dense parameters: against torch.optim, and readers that keep what they read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from echelon.server.protocol.specs import BLOCK_SIZE, Dense, Init, Rule, StoreError
from echelon.server.store.store import ParameterStore

LSN = np.zeros(4, np.int64)
SIZE = BLOCK_SIZE + 100


def cut(values: np.ndarray) -> list[np.ndarray]:
    return [values[:BLOCK_SIZE], values[BLOCK_SIZE:]]


def trained(rule: Rule, grads: list[np.ndarray], first: np.ndarray, **more: object) -> np.ndarray:
    store = ParameterStore(num_shards=4, memory=64 << 20)
    store.declare(Dense(name="w", size=SIZE, rule=rule, dtype="f8"))
    store.initialize_blocks("w", np.arange(2), cut(first), lsn=LSN)
    for step, grad in enumerate(grads, 1):
        store.apply("w", np.arange(2), cut(grad), lsn=LSN, step=step)
    return np.concatenate(store.read_blocks("w", np.arange(2)))


@pytest.mark.parametrize(
    ("rule", "optimizer"),
    [
        (Rule(kind="sgd", lr=0.1, weight_decay=0.01), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01)),
        (
            Rule(kind="momentum", lr=0.1, dampening=0.3, weight_decay=0.01),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
        ),
        (
            Rule(kind="momentum", lr=0.1, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        ),
        (
            Rule(kind="adagrad", lr=0.1, initial=0.1, weight_decay=0.01),
            lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1, weight_decay=0.01),
        ),
        (Rule(kind="adam", lr=0.1, weight_decay=0.01), lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01)),
        (
            Rule(kind="adam", lr=0.1, weight_decay=0.1, decoupled=True, steps="given"),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        ),
    ],
    ids=lambda case: case.kind if isinstance(case, Rule) else "",
)
def test_rules_are_torchs(rule, optimizer):
    random = np.random.default_rng(0)
    first = random.standard_normal(SIZE)
    grads = [random.standard_normal(SIZE) for _ in range(4)]
    weight = torch.nn.Parameter(torch.from_numpy(first.copy()))
    torchs = optimizer([weight])
    for grad in grads:
        weight.grad = torch.from_numpy(grad)
        torchs.step()
    np.testing.assert_allclose(trained(rule, grads, first), weight.detach().numpy(), rtol=1e-12, atol=1e-12)


def test_lamb_has_one_trust_ratio_for_the_parameter():
    random = np.random.default_rng(1)
    w = first = random.standard_normal(SIZE)
    grads = [random.standard_normal(SIZE) for _ in range(3)]
    m = v = np.zeros(SIZE)
    for t, g in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + 0.01 * w
        w = w - 0.1 * np.linalg.norm(w) / np.linalg.norm(u) * u
    rule = Rule(kind="lamb", lr=0.1, weight_decay=0.01)
    np.testing.assert_allclose(trained(rule, grads, first), w, rtol=1e-11, atol=1e-12)
    store = ParameterStore(num_shards=4, memory=64 << 20)
    store.declare(Dense(name="w", size=SIZE, rule=rule))
    with pytest.raises(StoreError, match="w: 1 of its 2 blocks pushed"):
        store.apply("w", np.array([0]), [np.zeros(BLOCK_SIZE)], lsn=LSN)
    assert store.stats()["dense"]["w"]["blocks"] == 0


def test_what_a_reader_holds_stays_as_it_was():
    store = ParameterStore(num_shards=4, memory=64 << 20)
    store.declare(Dense(name="w", size=SIZE, rule=Rule(kind="sgd", lr=1.0), init=Init(kind="constant", value=3.0)))
    store.apply("w", np.arange(2), cut(np.ones(SIZE)), lsn=LSN)
    held = store.read_blocks("w", np.arange(2))
    raw = memoryview(held[0])
    alone = store._dense_parameters["w"].blocks[1].values
    tail, held = held[1][5:], None
    del alone
    store.apply("w", np.arange(2), cut(np.ones(SIZE)), lsn=LSN)
    assert (np.asarray(raw) == 2).all()
    assert (tail == 2).all()
    assert all((block == 1).all() for block in store.read_blocks("w", np.arange(2)))
    raw = tail = None
    before = store._dense_parameters["w"].blocks[1].values.ctypes.data
    store.apply("w", np.array([1]), [np.ones(100)], lsn=LSN)
    assert store._dense_parameters["w"].blocks[1].values.ctypes.data == before  # nobody looks: no copy
    with pytest.raises(ValueError, match="read-only"):
        store.read_blocks("w", np.array([0]))[0][0] = 1


def test_the_first_values_count_and_a_block_named_twice_is_added_up():
    store = ParameterStore(num_shards=4, memory=64 << 20)
    store.declare(Dense(name="w", size=3, rule=Rule(kind="adagrad", lr=1.0, eps=0.0), dtype="f8"))
    block = np.array([0])
    np.testing.assert_array_equal(store.read_blocks("w", block)[0], 0)
    store.initialize_blocks("w", block, [np.arange(3.0)], lsn=np.zeros(4, np.int64))
    store.initialize_blocks("w", block, [np.ones(3)], lsn=LSN)
    store.apply("w", np.array([0, 0]), [np.full(3, 3.0), np.full(3, -1.0)], lsn=np.full(4, 7))
    np.testing.assert_allclose(store.read_blocks("w", block)[0], np.arange(3) - 1.0)
    shard = int(store.shards_of("w", block)[0])
    assert store.changed_ids_until("w", [shard], np.array([6]))[0].tolist() == [0]
    assert store.changed_ids_until("w", [shard], np.array([7]))[0].tolist() == []
    with pytest.raises(StoreError, match="w: 2 values for block 0, which has 3"):
        store.apply("w", block, [np.zeros(2)], lsn=LSN)
    with pytest.raises(StoreError, match="w: block 1 of 1"):
        store.read_blocks("w", np.array([1]))
