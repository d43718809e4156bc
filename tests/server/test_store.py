"""The store of one server: against a model of plain dictionaries, and what it does when memory ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.server.protocol.hashing import shard_of
from echelon.server.protocol.specs import BLOCK_SIZE, Dense, Init, Rule, StoreError, StoreFull, Table
from echelon.server.store import write_log
from echelon.server.store.store import ParameterStore

SHARDS = 4
MEMORY = 16 << 20


def stamps(lsn: int) -> np.ndarray:
    return np.full(SHARDS, lsn, np.int64)


def digests(store: ParameterStore) -> list[bytes]:
    return [store.digest(shard) for shard in range(SHARDS)]


class Model:
    """A table as dictionaries: Adagrad, admission, log numbers."""

    def __init__(self, spec: Table) -> None:
        self.spec, self.rows, self.waiting = spec, {}, {}

    def apply(self, ids, grads, lsn):
        sums = {}
        for i, grad in zip(ids.tolist(), grads, strict=True):
            sums[i] = sums[i] + grad if i in sums else grad
        for i, grad in sums.items():
            if i not in self.rows:
                count = self.waiting.pop(i, (0, 0))[0] + 1
                if count < self.spec.admit:
                    self.waiting[i] = (count, lsn)
                    continue
                self.rows[i] = (np.full(self.spec.dim, self.spec.init.value), np.zeros(self.spec.dim), 0)
            weights, sums_of_squares, _ = self.rows[i]
            squares = sums_of_squares + grad * grad
            self.rows[i] = (weights - self.spec.rule.lr * grad / (np.sqrt(squares) + 1e-10), squares, lsn)

    def assign(self, ids, values, lsn):
        for i, value in zip(ids.tolist(), values, strict=True):
            self.waiting.pop(i, None)
            self.rows[i] = (value, np.zeros(self.spec.dim), lsn)

    def forget(self, gone):
        self.rows = {i: row for i, row in self.rows.items() if not gone(i, row[2])}
        self.waiting = {i: count for i, count in self.waiting.items() if not gone(i, count[1])}


def where(i: int) -> int:
    return int(shard_of(np.array([i]), SHARDS)[0])


small = st.lists(st.integers(-20, 20), max_size=12)


@given(st.integers(1, 3), st.sampled_from([0, 40, write_log.MIN_CAPACITY]), st.data())
@settings(max_examples=60)
def test_a_table_is_a_dictionary_of_rows(admit, logged, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_log, "MIN_CAPACITY", logged)
        check_a_table(admit, data)


def check_a_table(admit: int, data: st.DataObject) -> None:
    rule = Rule(kind="adagrad", lr=0.5)
    spec = Table(
        name="t", dim=3, rule=rule, init=Init(kind="constant", value=0.25), dtype="f8", stored="f8", admit=admit
    )
    store, twin, model = (
        ParameterStore(num_shards=SHARDS, memory=MEMORY),
        ParameterStore(num_shards=SHARDS, memory=MEMORY),
        Model(spec),
    )
    store.declare(spec)
    store.declare(spec)
    twin.declare(spec)
    everything = np.arange(-20, 21)
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    for lsn in range(1, data.draw(st.integers(2, 14))):
        what = data.draw(st.sampled_from(["apply"] * 5 + ["assign", "expire", "drop", "move"]))
        ids = np.array(data.draw(small), np.int64)
        values = random.standard_normal((len(ids), 3))
        shard = data.draw(st.integers(0, SHARDS - 1))
        if what == "apply":
            store.check_operations([("t", ids, values, "apply")])
            store.apply("t", ids, values, lsn=stamps(lsn))
            model.apply(ids, values, lsn)
        elif what == "assign":
            store.assign("t", ids, values, lsn=stamps(lsn))
            model.assign(ids, values, lsn)
        elif what == "expire":
            before = data.draw(st.integers(0, lsn))
            count = len(model.rows)
            model.forget(lambda i, last, shard=shard, before=before: where(i) == shard and last < before)
            assert store.expire("t", [shard], before) == count - len(model.rows)
        elif what == "drop":
            store.drop(shard)
            model.forget(lambda i, last, shard=shard: where(i) == shard)
        else:
            twin.install(shard, store.snapshot(shard))
            store.drop(shard)
            store.install(shard, twin.snapshot(shard))
        expected = [model.rows[i][0] if i in model.rows else np.full(3, 0.25) for i in everything.tolist()]
        np.testing.assert_allclose(store.read("t", everything, "f8")[0], expected, rtol=1e-13, atol=1e-13)
        assert store.stats()["tables"]["t"]["rows"] == len(model.rows)
        assert store.stats()["tables"]["t"]["waiting"] == len(model.waiting)
        for shard in range(SHARDS):
            changed = store.changed_ids_until("t", [shard], np.array([lsn - 2]))[0].tolist()
            assert sorted(changed) == sorted(
                i for i, row in model.rows.items() if row[2] > lsn - 2 and where(i) == shard
            )
    for shard in range(SHARDS):
        twin.install(shard, store.snapshot(shard))
    assert digests(twin) == digests(store)
    for since in range(-1, 4):
        expected = sorted(i for i, row in model.rows.items() if row[2] > since)
        assert sorted(twin.changed_ids_until("t", range(SHARDS), stamps(since))[0].tolist()) == expected


@pytest.mark.parametrize("stored", ["f4", "f2", "i2", "i1"])
@pytest.mark.parametrize("kind", ["momentum", "rowwise_adagrad", "adam"])
def test_replicas_are_equal_to_the_byte_whatever_they_went_through(stored, kind):
    spec = Table(name="t", dim=7, rule=Rule(kind=kind, lr=0.1, dampening=0.5), stored=stored, admit=2)
    dense = Dense(name="w", size=BLOCK_SIZE + 5, rule=Rule(kind="adam"))
    one, other = ParameterStore(num_shards=SHARDS, memory=MEMORY), ParameterStore(num_shards=SHARDS, memory=MEMORY)
    for store in (one, other):
        store.declare(spec)
        store.declare(dense)
    random = np.random.default_rng(0)
    other.apply("t", np.arange(1000, 1500), np.ones((500, 7)), lsn=stamps(1))
    other.apply("t", np.arange(1000, 1500), np.ones((500, 7)), lsn=stamps(2))
    for lsn in range(1, 9):
        ids = random.integers(-50, 50, 80)
        grads = random.standard_normal((80, 7))
        blocks = [random.standard_normal(BLOCK_SIZE), random.standard_normal(5)]
        for store in (one, other):
            store.apply("t", ids, grads, lsn=stamps(lsn))
            store.apply("w", np.arange(2), blocks, lsn=stamps(lsn))
        assert digests(one) != digests(other)
        if lsn == 4:  # a replica joins: what it held is gone, rows come in another order and under other numbers
            for shard in (3, 1, 2, 0):
                other.install(shard, [*reversed(one.snapshot(shard))])
            other.apply("t", np.arange(1000, 1500), np.ones((500, 7)), lsn=stamps(1))
    other.expire("t", range(SHARDS), 2)
    one.expire("t", range(SHARDS), np.full(SHARDS, 2))
    assert digests(one) == digests(other)
    shard = where(3)
    before = digests(one)
    one.apply("t", np.array([3]), np.zeros((1, 7)), lsn=stamps(9))
    assert [a != b for a, b in zip(digests(one), before, strict=True)] == [s == shard for s in range(SHARDS)]


def test_changes_come_oldest_first_and_go_on_where_they_ended():
    store = ParameterStore(num_shards=SHARDS, memory=MEMORY)
    store.declare(Table(name="t", dim=1))
    for lsn in range(1, 21):
        store.apply("t", np.arange(lsn * 10, lsn * 10 + 10), np.ones((10, 1)), lsn=stamps(lsn))
    since, seen = stamps(5), []
    while True:
        ids, after = store.changed_ids_until("t", range(SHARDS), since, 25)
        assert len(ids) < 25 + 10
        seen += ids.tolist()
        if not len(ids):
            break
        assert (after >= since).all()
        since = after
    assert sorted(seen) == list(range(60, 210))
    assert len(store.changed_ids_until("t", range(SHARDS), stamps(20), 5)[0]) == 0


@pytest.mark.parametrize("least", [0, 1500, write_log.MIN_CAPACITY])
def test_what_changed_is_the_same_by_the_log_and_by_a_walk(least, monkeypatch):
    monkeypatch.setattr(write_log, "MIN_CAPACITY", least)
    store = ParameterStore(num_shards=SHARDS, memory=MEMORY)
    store.declare(Table(name="t", dim=1))
    store.declare(Table(name="fresh", dim=1))
    for lsn in range(1, 200):
        for ids in np.split(np.arange(lsn * 3, lsn * 3 + 9), 3):
            store.apply("t", ids, np.ones((3, 1)), lsn=stamps(lsn))
        reach = store._tables["t"]._write_log.ids_since(np.arange(SHARDS), stamps(lsn - 50))[0]
        assert lsn < 50 or reach.all() == (least > 1500)
        ids = store.changed_ids_until("t", range(SHARDS), stamps(lsn - 10))[0]
        assert sorted(ids.tolist()) == list(range(max(3, 3 * lsn - 27), 3 * lsn + 9))
    assert len(store.changed_ids_until("fresh", range(SHARDS), stamps(-1))[0]) == 0


def test_memory_ends_with_an_error_and_nothing_applied(tmp_path):
    store = ParameterStore(num_shards=SHARDS, memory=1 << 20)
    store.declare(Table(name="t", dim=30, rule=Rule(kind="sgd", lr=1.0), admit=2))
    store.declare(Dense(name="w", size=BLOCK_SIZE))
    store.declare(Dense(name="v", size=2 * BLOCK_SIZE))
    ids = np.arange(8000)
    store.apply("t", ids[:5000], np.ones((5000, 30)), lsn=stamps(1))
    store.apply("t", ids[:5000], np.ones((5000, 30)), lsn=stamps(2))
    before, held = digests(store), store.bytes
    for push in (ids, ids[::-1].repeat(2)):
        full = pytest.raises(
            StoreFull,
            match=r"table t: \d+ new rows of \d+ bytes.* and this server holds \d+ of at most 1048576; nothing was applied; raise memory=",
        )
        store.apply("t", ids[:100], np.zeros((100, 30)), lsn=stamps(2), lr=0.0)
        with full:
            for lsn in range(3, 6):
                store.apply(
                    "t",
                    np.concatenate([push, np.arange(10_000 * lsn, 10_000 * lsn + 20_000)]),
                    np.ones((len(push) + 20_000, 30)),
                    lsn=stamps(lsn),
                )
    with pytest.raises(StoreFull, match="dense blocks need"):
        store.initialize_blocks("v", np.arange(2), [np.zeros(BLOCK_SIZE)] * 2, lsn=stamps(1))
    with pytest.raises(StoreFull):
        store.apply("v", np.arange(2), [np.zeros(BLOCK_SIZE)] * 2, lsn=stamps(5))
    assert (digests(store), store.bytes) == (before, held)
    store.expire("t", range(SHARDS), 3)
    assert store.stats()["tables"]["t"]["rows"] == 0
    store.apply("t", ids[5000:], np.ones((3000, 30)), lsn=stamps(5))
    store.apply("t", ids[5000:], np.ones((3000, 30)), lsn=stamps(6))
    assert store.bytes <= 1 << 20
    assert store.stats()["tables"]["t"]["rows"] == 3000


def test_an_entry_of_several_fits_whole_or_is_refused_whole():
    store = ParameterStore(num_shards=SHARDS, memory=1 << 20)
    store.declare(Table(name="a", dim=30, rule=Rule(kind="sgd")))
    store.declare(Table(name="b", dim=30, rule=Rule(kind="sgd")))
    ids, grads = np.arange(4500), np.ones((4500, 30))
    store.check_operations([("a", ids, grads, "apply")])
    store.check_operations([("b", ids, grads, "apply")])
    with pytest.raises(StoreFull, match=r"table a: 4500 new rows.*table b: 4500 new rows"):
        store.check_operations([("a", ids, grads, "apply"), ("b", ids, grads, "apply")])
    with pytest.raises(StoreError, match=r"b: values of shape \(4500, 30\) for 4499 ids"):
        store.check_operations([("a", ids, grads, "apply"), ("b", ids[1:], grads, "apply")])
    with pytest.raises(StoreError, match="c: no table of that name; declared: a, b"):
        store.check_operations([("c", ids, grads, "apply")])
    with pytest.raises(StoreFull, match="table a: 9000 new rows"):
        store.check_operations([("a", ids, grads, "apply"), ("a", ids + 4500, grads, "apply")])
    with pytest.raises(StoreFull, match=r"table a: 4500 new rows.*table a: 4500 new rows"):
        store.check_operations([("a", ids, grads, "assign"), ("a", ids + 4500, grads, "apply")])
    with pytest.raises(StoreError, match="a: no dense parameter of that name"):
        store.check_operations([("a", ids, grads, "set")])
    for rate in (10**400, float("nan"), "1", True):
        with pytest.raises(StoreError, match=r"a: a rate of .*; use a finite number"):
            store.check_operations([("a", ids, grads, "apply")], 1, {"a": rate})
        with pytest.raises(StoreError, match=r"a: a rate of .*; use a finite number"):
            store.apply("a", ids, grads, lr=rate, lsn=stamps(1))
    assert store.stats()["tables"]["a"]["rows"] == 0


def test_a_replica_takes_what_its_head_took_and_an_install_is_whole_or_not():
    head, backup = ParameterStore(num_shards=SHARDS, memory=8 << 20), ParameterStore(num_shards=SHARDS, memory=1 << 20)
    for store in (head, backup):
        store.declare(Table(name="t", dim=30, rule=Rule(kind="sgd")))
        store.declare(Dense(name="w", size=3 * BLOCK_SIZE, rule=Rule(kind="sgd")))
    ids, grads = np.arange(8000), np.ones((8000, 30))
    head.apply("t", ids, grads, lsn=stamps(1))
    backup.apply("t", ids[:5500], grads[:5500], lsn=stamps(1))
    head.apply("w", np.arange(3), [np.zeros(BLOCK_SIZE)] * 3, lsn=stamps(1))
    before = digests(backup)
    heavy = int(head.shards_of("w", np.array([0]))[0])
    with pytest.raises(StoreFull, match=r"table t: \d+ new rows"):
        backup.install(heavy, head.snapshot(heavy))
    assert digests(backup) == before
    with backup.without_memory_limit():
        for shard in range(SHARDS):
            backup.install(shard, head.snapshot(shard))
        backup.apply("t", ids + 8000, grads, lsn=stamps(2))
        backup.apply("w", np.arange(3), [np.ones(BLOCK_SIZE)] * 3, lsn=stamps(2))
    head.apply("t", ids + 8000, grads, lsn=stamps(2))
    head.apply("w", np.arange(3), [np.ones(BLOCK_SIZE)] * 3, lsn=stamps(2))
    assert digests(backup) == digests(head)
    with pytest.raises(StoreFull):
        backup.apply("t", ids - 8000, grads, lsn=stamps(2))
    held = backup.bytes
    for shard in range(1, SHARDS):
        backup.drop(shard)
        backup.drop(shard)
    assert backup.bytes < held - 32 * 1024  # indices go at once; rows stay for whoever comes
    assert backup.digest(0) == head.digest(0)
    with backup.without_memory_limit():
        for shard in range(SHARDS):
            backup.install(shard, head.snapshot(shard))
    assert (digests(backup), backup.bytes) == (digests(head), held)


def test_rows_beyond_memory_go_to_a_file(tmp_path):
    store, plain = (
        ParameterStore(num_shards=SHARDS, memory=1 << 20, spill=tmp_path / "deep"),
        ParameterStore(num_shards=SHARDS, memory=64 << 20),
    )
    for each in (store, plain):
        each.declare(Table(name="t", dim=60, rule=Rule(kind="adagrad")))
    random = np.random.default_rng(0)
    for lsn in range(1, 4):
        ids, grads = random.integers(0, 10_000, 8000), random.standard_normal((8000, 60))
        for each in (store, plain):
            each.apply("t", ids, grads, lsn=stamps(lsn))
    assert digests(store) == digests(plain)
    stats = store.stats()["tables"]["t"]
    assert stats["bytes"] < 1 << 20 < plain.stats()["tables"]["t"]["bytes"] <= stats["spilled"] + stats["bytes"]
    assert list((tmp_path / "deep").iterdir()) == []  # the file has no name: it is gone with the process
    store.close()


def test_what_does_not_belong_is_refused():
    store, other = ParameterStore(num_shards=SHARDS, memory=MEMORY), ParameterStore(num_shards=SHARDS, memory=MEMORY)
    store.declare(Table(name="t", dim=4))
    with pytest.raises(StoreError, match=r"t: declared as .*dim=4.*now as .*dim=8"):
        store.declare(Table(name="t", dim=8))
    with pytest.raises(StoreError, match="w: rowwise_adagrad needs rows"):
        store.declare(Dense(name="w", size=4, rule=Rule(kind="rowwise_adagrad")))
    store.apply("t", np.arange(50), np.ones((50, 4)), lsn=stamps(1))
    parts = store.snapshot(1)
    with pytest.raises(StoreError, match="t: rows of a table that is not declared here"):
        other.install(1, parts)
    other.declare(Table(name="t", dim=4))
    with pytest.raises(StoreError, match="rows of other shards in a snapshot of shard 2"):
        other.install(2, parts)
    with pytest.raises(StoreError, match="t: duplicate ids in a snapshot of shard 1"):
        other.install(1, parts * 2)
    other.declare(Table(name="u", dim=400))
    with pytest.raises(StoreError, match="u: rows of shape"):
        other.install(1, [({**meta, "name": "u"}, arrays) for meta, arrays in parts])
    assert other.stats()["rows"].sum() == 0
    with pytest.raises(StoreError, match="ids: float64"):
        store.read("t", np.array([0.5]))
    frozen = np.ones((2, 4), np.float32)
    frozen.flags.writeable = False
    store.apply("t", np.arange(2), frozen, lsn=stamps(2))
    assert store.read("t", np.empty(0, np.int64), "i1")[0].shape == (0, 4)
    store.apply("t", np.empty(0, np.int64), np.empty((0, 4)), lsn=stamps(3))


@pytest.mark.parametrize("rule", [Rule(kind="momentum", momentum=0.9), Rule(kind="adam")])
def test_remembered_rows_are_forgotten_where_rows_move(rule):
    """A push takes the places of rows from the read before it: not after rows expired, were installed or dropped, or tables grew."""
    draw = np.random.default_rng(0)
    spec = Table(name="t", dim=2, rule=rule, init=Init(kind="normal", scale=0.1))
    quick, slow = (ParameterStore(num_shards=SHARDS, memory=MEMORY) for _ in range(2))
    for store in (quick, slow):
        store.declare(spec)
    for lsn in range(1, 120):
        ids = np.unique(draw.integers(0, 40 + 10 * lsn, 50))
        quick.read("t", ids)
        shard, what = lsn % SHARDS, lsn % 6
        if what == 0:
            gone = [store.expire("t", range(SHARDS), lsn - 3) for store in (quick, slow)]
            assert gone[0] == gone[1] > 0
        elif what == 2:
            quick.install(shard, slow.snapshot(shard))
        elif what == 4:
            for store in (quick, slow):
                store.assign("t", ids[::2], np.ones((len(ids[::2]), 2), np.float32), lsn=stamps(lsn))
        elif what == 5:
            quick.drop(shard)
            quick.read("t", ids)
            quick.install(shard, slow.snapshot(shard))
        grads = draw.normal(size=(len(ids), 2)).astype(np.float32)
        for store in (quick, slow):
            store.apply("t", ids, grads, lsn=stamps(lsn), step=lsn)
        assert digests(quick) == digests(slow), lsn


def test_a_push_may_bring_other_ids_than_the_read_that_it_is_taken_to_follow():
    """As many, with the same first and last one: other rows, rows that are not there, the same in another order."""
    quick, slow = (ParameterStore(num_shards=SHARDS, memory=MEMORY) for _ in range(2))
    for store in (quick, slow):
        store.declare(Table(name="t", dim=2))
        store.apply("t", np.arange(100), np.ones((100, 2)), lsn=stamps(1))
    for lsn, middle in enumerate(([50, 51, 52], [2, 1, 3], [1, 200, 3], [300, 301, 302], [1, 2, 3]), start=2):
        quick.read("t", np.array([0, 1, 2, 3, 99]))
        assert quick._tables["t"]._read_cache
        for store in (quick, slow):
            store.apply("t", np.array([0, *middle, 99]), np.arange(10.0).reshape(5, 2), lsn=stamps(lsn))
        assert not quick._tables["t"]._read_cache
        assert digests(quick) == digests(slow)
        changed = quick.changed_ids_until("t", range(SHARDS), stamps(lsn - 1))[0]
        assert sorted(changed.tolist()) == sorted([0, *middle, 99])


def test_ids_that_should_be_there_once_and_are_not_do_not_part_replicas(monkeypatch):
    """One that is sure of its room and one that is not: rows that are there get one gradient after the other, new ones are made once."""
    sure, unsure = (ParameterStore(num_shards=SHARDS, memory=MEMORY) for _ in range(2))
    monkeypatch.setattr(unsure._limit, "guarantees", lambda *_: False)
    for store in (sure, unsure):
        store.declare(Table(name="t", dim=1, rule=Rule(kind="adagrad", lr=1.0), init=Init(kind="zeros")))
    for lsn, ids in enumerate(([1, 2, 3], [3, 1, 3, 7, 7, 2], [7, 8], [8, 8]), start=1):
        for store in (sure, unsure):
            store.apply("t", np.array(ids), np.ones((len(ids), 1)), lsn=stamps(lsn), ids_are_unique=True)
        assert digests(sure) == digests(unsure)
    assert sorted(sure.changed_ids_until("t", range(SHARDS), stamps(-1))[0].tolist()) == [1, 2, 3, 7, 8]
    # Adagrad: 1 + 1/sqrt(2) + 1/sqrt(3); added up first the second update would be of 2.
    np.testing.assert_allclose(sure.read("t", np.array([3]))[0], -(1 + 2**-0.5 + 3**-0.5), rtol=1e-6)


def test_what_is_remembered_of_reads_is_bounded():
    store = ParameterStore(num_shards=SHARDS, memory=MEMORY)
    store.declare(Table(name="t", dim=1))
    store.declare(Table(name="narrow", dim=1, stored="f2"))
    for first in range(20):
        for name in ("t", "narrow"):
            store.read(name, np.arange(first, 60_000 + first))
    store.read("t", np.arange(200_000))
    kept = store._tables["t"]._read_cache
    assert 0 < sum(len(rows) for rows in kept.values()) <= 1 << 19
    assert all(len(rows) <= 1 << 16 for rows in kept.values())
    assert not store._tables["narrow"]._read_cache


def test_what_is_declared_takes_of_the_room_that_was_reckoned():
    store = ParameterStore(num_shards=SHARDS, memory=MEMORY)
    store.declare(Table(name="t", dim=1))
    for lsn in (1, 2):
        store.apply("t", np.arange(3), np.ones((3, 1)), lsn=stamps(lsn))
    assert store._limit._guaranteed_rows
    store.declare(Table(name="u", dim=1))
    assert not store._limit._guaranteed_rows


def test_updates_of_all_rows_take_of_the_room_that_was_reckoned():
    """Else a push is refused when half of it is applied."""
    store = ParameterStore(num_shards=SHARDS, memory=MEMORY)
    store.declare(Table(name="t", dim=1))
    store.declare(Table(name="m", dim=1, rule=Rule(kind="sgd", lr=0.1, every=True)))
    store.apply("t", np.arange(3), np.ones((3, 1)), lsn=stamps(1))
    store._limit.bytes = store.bytes + 4096
    store.apply("t", np.arange(3), np.ones((3, 1)), lsn=stamps(2))
    held = store.bytes
    while store.bytes - held < 4096:
        store.advance_lazy_table("m", np.arange(SHARDS), lr=0.1)
    before = [store.digest(shard) for shard in range(SHARDS)]
    with pytest.raises(StoreFull):
        store.apply("t", np.array([0, 1, 9]), np.ones((3, 1)), lsn=stamps(3), ids_are_unique=True)
    assert [store.digest(shard) for shard in range(SHARDS)] == before


def test_the_slots_that_are_counted_are_those_that_there_are():
    store = ParameterStore(num_shards=SHARDS, memory=1 << 26)
    store.declare(Table(name="t", dim=1))
    table = store._tables["t"]
    for lsn, ids in enumerate((np.arange(3000), np.arange(50_000), np.arange(7))):
        store.apply("t", ids, np.ones((len(ids), 1)), lsn=stamps(lsn + 1))
        assert table.index.bytes == 8 * int((table.index.arrays[2] + 1).sum())
    kept = store.snapshot(1)
    for change in (lambda: store.drop(1), lambda: store.install(1, kept), lambda: store.drop(0)):
        change()
        assert table.index.bytes == 8 * int((table.index.arrays[2] + 1).sum())
