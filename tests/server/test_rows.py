"""Rows of a table: rules against torch.optim, first values against scipy, the index under any order of growth and removal."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.server import kernels
from echelon.server.protocol.hashing import hash_name, mix64, shard_of
from echelon.server.protocol.specs import Init, Rule, StoreError, Table
from echelon.server.store.sparse_table import SparseTable
from echelon.server.store.store import ParameterStore

ROWS, DIM = 12, 5
LSN = np.zeros(4, np.int64)


def batches(steps: int, *, every: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids with duplicates and gradients; `every`: each row in each step."""
    random = np.random.default_rng(3)
    out = []
    for _ in range(steps):
        ids = random.integers(0, ROWS, 9)
        ids = np.concatenate([np.arange(ROWS), ids]) if every else ids
        out.append((ids, random.standard_normal((len(ids), DIM))))
    return out


def pushed(rule: Rule, pushes: list[tuple[np.ndarray, np.ndarray]], first: np.ndarray, **spec: str) -> np.ndarray:
    store = ParameterStore(num_shards=4, memory=64 << 20)
    store.declare(Table(name="t", dim=DIM, rule=rule, **{"dtype": "f8", "stored": "f8", **spec}))
    store.assign("t", np.arange(ROWS), first, lsn=LSN)
    for step, (ids, grads) in enumerate(pushes, 1):
        store.apply("t", ids, grads, lsn=LSN, step=step)
    return store.read("t", np.arange(ROWS), "f8")[0]


def torchs(make, pushes, first, *, sparse: bool) -> np.ndarray:
    weight = torch.nn.Parameter(torch.from_numpy(first.copy()))
    optimizer = make([weight])
    for ids, grads in pushes:
        grad = torch.sparse_coo_tensor(
            torch.from_numpy(ids)[None], torch.from_numpy(grads), (ROWS, DIM), check_invariants=False
        )
        weight.grad = grad.coalesce() if sparse else grad.to_dense()
        with torch.sparse.check_sparse_tensor_invariants():
            optimizer.step()
    return weight.detach().numpy()


@pytest.mark.parametrize(
    ("rule", "optimizer", "sparse"),
    [
        (Rule(kind="sgd", lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1), True),
        (Rule(kind="sgd", lr=0.1, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), False),
        (
            Rule(kind="momentum", lr=0.1, weight_decay=0.1, dampening=0.5),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, dampening=0.5),
            False,
        ),
        (
            Rule(kind="momentum", lr=0.1, momentum=0.8, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
            False,
        ),
        (Rule(kind="adagrad", lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1), True),
        (
            Rule(kind="adagrad", lr=0.1, initial=0.5),
            lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
            True,
        ),
        (Rule(kind="adam", lr=0.1, steps="given"), lambda p: torch.optim.SparseAdam(p, lr=0.1), True),
        (
            Rule(kind="adam", lr=0.1, beta1=0.5, beta2=0.9, eps=1e-3, steps="given"),
            lambda p: torch.optim.SparseAdam(p, lr=0.1, betas=(0.5, 0.9), eps=1e-3),
            True,
        ),
        (Rule(kind="adam", lr=0.1, eps=0.0), lambda p: torch.optim.Adam(p, lr=0.1, eps=0.0), False),
        (
            Rule(kind="adam", lr=0.1, eps=0.0, weight_decay=0.1, decoupled=True),
            lambda p: torch.optim.AdamW(p, lr=0.1, eps=0.0, weight_decay=0.1),
            False,
        ),
    ],
)
def test_rules_are_torchs(rule, optimizer, sparse):
    first = np.random.default_rng(0).standard_normal((ROWS, DIM))
    pushes = batches(6, every=not sparse)
    np.testing.assert_allclose(
        pushed(rule, pushes, first), torchs(optimizer, pushes, first, sparse=sparse), rtol=1e-12, atol=1e-12
    )
    coarse = pushed(rule, pushes, first, dtype="f4", stored="f4")
    np.testing.assert_allclose(coarse, torchs(optimizer, pushes, first, sparse=sparse), rtol=2e-4, atol=2e-4)


def test_rowwise_adagrad_and_lamb_by_their_formulas():
    w = np.random.default_rng(0).standard_normal((ROWS, DIM))
    sums, m, v, t = np.full(ROWS, 0.25), np.zeros((ROWS, DIM)), np.zeros((ROWS, DIM)), np.zeros(ROWS)
    pushes = batches(6, every=False)
    rowwise, lamb = w.copy(), w.copy()
    for ids, grads in pushes:
        total = np.zeros((ROWS, DIM))
        np.add.at(total, ids, grads)
        for i in set(ids.tolist()):
            g = total[i] + 0.1 * rowwise[i]
            sums[i] += (g * g).mean()
            rowwise[i] -= 0.1 * g / (np.sqrt(sums[i]) + 1e-10)
            g = total[i]
            t[i] += 1
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g * g
            u = m[i] / (1 - 0.9 ** t[i]) / (np.sqrt(v[i] / (1 - 0.999 ** t[i])) + 1e-6) + 0.1 * lamb[i]
            lamb[i] -= 0.1 * np.linalg.norm(lamb[i]) / np.linalg.norm(u) * u
    rule = Rule(kind="rowwise_adagrad", lr=0.1, weight_decay=0.1, initial=0.25)
    np.testing.assert_allclose(pushed(rule, pushes, w), rowwise, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(
        pushed(Rule(kind="lamb", lr=0.1, weight_decay=0.1), pushes, w), lamb, rtol=1e-12, atol=1e-12
    )


def test_a_rate_of_the_push_replaces_the_rules_own_and_a_step_that_is_missing_is_named():
    store = ParameterStore(num_shards=4, memory=64 << 20)
    store.declare(Table(name="t", dim=2, rule=Rule(kind="sgd", lr=9.0), init=Init(kind="zeros")))
    store.apply("t", np.array([7]), np.ones((1, 2)), lr=0.5, lsn=LSN)
    assert store.read("t", np.array([7]))[0].tolist() == [[-0.5, -0.5]]
    store.declare(Table(name="a", dim=2, rule=Rule(kind="adam", steps="given"), admit=2))
    with pytest.raises(StoreError, match=r"a: step=None: its rule corrects bias by the push's step"):
        store.apply("a", np.array([7]), np.ones((1, 2)), lsn=LSN)
    assert store.stats()["tables"]["a"]["waiting"] == 0


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**63 - 1), st.sampled_from(["uniform", "normal"]))
def test_first_values_are_a_function_of_name_seed_and_id(number, seed, kind):
    tables = []
    for dtype in ("f8", "f4"):
        store = ParameterStore(num_shards=4, memory=1 << 20)
        store.declare(
            Table(name="t", dim=9, init=Init(kind=kind, scale=0.5, value=2.0, seed=seed), dtype=dtype, stored=dtype)
        )
        tables.append(store.read("t", np.array([number]), dtype)[0][0])
    base = (hash_name("t") + seed * 0x9E3779B97F4A7C15 + number) % 2**64
    key = mix64(np.array([base], np.uint64))
    hashes = mix64(key + np.arange(1, 10, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    chance = ((hashes >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53
    expected = 2.0 + 0.5 * (2 * chance - 1 if kind == "uniform" else scipy.special.ndtri(chance))
    np.testing.assert_allclose(tables[0], expected, rtol=1e-13, atol=1e-13)
    np.testing.assert_array_equal(tables[1], tables[0].astype(np.float32))


@given(st.floats(1e-300, 1, exclude_max=True))
def test_the_normal_quantile_is_scipys(p):
    assert kernels.normal_quantile(p) == pytest.approx(scipy.special.ndtri(p), rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("shards", [1, 4])
@given(st.data())
@settings(max_examples=30)
def test_the_index_is_a_dictionary(shards, data):
    """Rows come and go in any order; the index is that of a dict, whatever collides. Few distinct low bits, so that much does."""
    spec = Table(name="t", dim=1, rule=Rule(kind="sgd", lr=1.0), init=Init(kind="zeros"), dtype="f8", stored="f8")
    rows = SparseTable(spec, num_shards=shards, address_space=1 << 20, spill=None)
    universe = _colliding(shards)
    model: dict[int, float] = {}
    stamp = np.arange(shards, dtype=np.int64)
    for _ in range(data.draw(st.integers(1, 12))):
        ids = np.array(data.draw(st.lists(st.sampled_from(universe), unique=True, max_size=40)), np.int64)
        what = data.draw(st.sampled_from(["write"] * 4 + ["remove"] * 2 + ["clear"]))
        if what == "write":
            where, missing, absent = rows.find(ids)
            assert absent == missing.sum() == sum(int(i) not in model for i in ids)
            assert [bool(w) for w in where] == [int(i) in model for i in ids]
            rows.grow_index(missing)
            rows.write(ids, rows.find(ids)[0], -np.ones((len(ids), 1)), stamp, lr=1.0, step=None, is_assignment=False)
            for i in ids.tolist():
                model[i] = model.get(i, 0.0) + 1
        elif what == "remove":
            rows.remove(ids)  # those that are not here are nothing to it
            model = {i: count for i, count in model.items() if i not in ids.tolist()}
        else:
            shard = data.draw(st.integers(0, shards - 1))
            rows.rows_of_shard(shard, clear=True)
            model = {i: count for i, count in model.items() if shard_of(np.array([i]), shards)[0] != shard}
        assert rows.count == len(model)
        known = np.array(sorted(universe), np.int64)
        assert rows.read(known)[:, 0].tolist() == [model.get(i, 0.0) for i in known.tolist()]
        for shard in range(shards):
            numbers = rows.rows_of_shard(shard)
            mine = [i for i in sorted(model) if shard_of(np.array([i]), shards)[0] == shard]
            assert sorted(rows.read_column(numbers, 0).tolist()) == mine
            assert rows.read_column(numbers, 1).tolist() == [shard] * len(mine)
    assert rows.row_allocator[1] <= 1 + len(universe)


def _unmix(x: int) -> int:
    """The integer that mix64 sends to x."""
    mask = 2**64 - 1
    x ^= (x >> 31) ^ (x >> 62)
    x = x * pow(0x94D049BB133111EB, -1, 2**64) & mask
    x ^= (x >> 27) ^ (x >> 54)
    x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    x ^= (x >> 30) ^ (x >> 60)
    return x - 2**64 if x >= 2**63 else x


def _colliding(shards: int) -> list[int]:
    """Ids of which many share a home slot, and some all the 32 bits that the index keeps of a hash."""
    random = np.random.default_rng(5)
    hashes = [(int(random.integers(2**32)) << 32) | low for low in (0, 1, 15, 16, 0xFFFFFFFF) for _ in range(8)]
    hashes += [(int(random.integers(2**32)) << 32) | int(random.integers(2**32)) for _ in range(40)]
    ids = [_unmix(h) for h in hashes]
    assert [int(mix64(np.array([i]))[0]) for i in ids] == hashes
    return ids
