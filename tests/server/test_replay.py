"""Tables whose rule moves every row at every step: the numbers of torch's dense optimizers, row by row and late."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from echelon.errors import ServerError
from echelon.server.protocol import wire
from echelon.server.protocol.shard_sets import ShardSetCache
from echelon.server.protocol.specs import Dense, Init, Rule, StoreError, Table
from echelon.server.replica.shard_state import ShardState
from echelon.server.store import lazy_updates
from echelon.server.store.lazy_updates import UpdateHistory, history_from_runs, make_initial_rows
from echelon.server.store.store import ParameterStore

SHARDS = 8
RULES: list[tuple[Rule, Callable[[Any], torch.optim.Optimizer]]] = [
    (Rule(kind="sgd", weight_decay=0.1, every=True), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)),
    (
        Rule(kind="momentum", momentum=0.9, dampening=0.3, weight_decay=0.05, every=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.05),
    ),
    (
        Rule(kind="momentum", momentum=0.8, nesterov=True, weight_decay=0.05, every=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.05),
    ),
    (Rule(kind="adam", every=True), lambda p: torch.optim.Adam(p, lr=0.1)),
    (
        Rule(kind="adam", beta1=0.6, beta2=0.95, eps=1e-3, weight_decay=0.2, decoupled=True, every=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.6, 0.95), eps=1e-3, weight_decay=0.2),
    ),
    (Rule(kind="adam", weight_decay=0.1, every=True), lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1)),
    (
        Rule(kind="adagrad", initial=0.1, weight_decay=0.1, every=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
    ),
]


def store_of(rule: Rule, dtype: str = "f8", **more: Any) -> ParameterStore:
    store = ParameterStore(num_shards=SHARDS, memory=1 << 24)
    store.declare(
        Table(name="t", dim=3, rule=rule, init=Init(kind="normal", scale=1.0), dtype=dtype, stored=dtype, **more)
    )  # type: ignore[arg-type]
    return store


def step(store: ParameterStore, ids: np.ndarray, grads: np.ndarray, lr: float, number: int) -> None:
    if len(ids):
        store.apply("t", ids, grads, lr=lr, lsn=np.full(SHARDS, number, np.int64), step=number)
    store.advance_lazy_table("t", np.arange(SHARDS), lr)


def rate(number: int) -> float:
    """A warm-up from nothing, a while of the same, a cosine."""
    return 0.01 * number if number < 5 else 0.05 if number < 100 else 0.05 * (1.01 + math.cos(number / 40))


@pytest.mark.parametrize(("rule", "optimizer"), RULES, ids=[f"{rule.kind}-{at}" for at, (rule, _) in enumerate(RULES)])
def test_rows_are_those_of_torchs_dense_optimizer(rule: Rule, optimizer: Any) -> None:
    """Over 500 steps with a schedule, through a snapshot; one row is pushed to at every step, some once, some never."""
    store, ids = store_of(rule), np.arange(12)
    value = torch.nn.Parameter(torch.from_numpy(store.read("t", ids, "f8")[0].copy()))
    torch_one = optimizer([value])
    draw = np.random.default_rng(0)
    for number in range(1, 501):
        touched = np.array([0, *([1] * (number % 3 == 0)), *([2, 3] * (number in (7, 470))), *([4] * (number < 20))])
        grads = draw.normal(size=(len(touched), 3)) * (0 if number == 9 else 1)
        torch_one.param_groups[0]["lr"] = rate(number)
        value.grad = torch.zeros_like(value).index_add_(0, torch.from_numpy(touched), torch.from_numpy(grads))
        torch_one.step()
        step(store, touched, grads, rate(number), number)
        if number in (1, 2, 17, 33, 100, 469, 470, 500):
            assert store.read("t", ids, "f8")[0] == pytest.approx(value.detach().numpy(), rel=1e-10, abs=1e-12), number
        if number == 300:
            other = store_of(rule)
            for shard in range(SHARDS):
                other.install(shard, store.snapshot(shard))
                assert other.digest(shard) == store.digest(shard)
            store = other
    assert store.stats()["tables"]["t"]["rows"] == 5
    assert (
        make_initial_rows(store.specs["t"], ids[6:], store.lazy_tables["t"].get_history(0))
        == pytest.approx(  # type: ignore[arg-type]
            value.detach().numpy()[6:], rel=1e-10, abs=1e-12
        )
    )


@pytest.mark.parametrize("rule", [rule for rule, _ in RULES])
def test_a_read_changes_nothing_and_shards_go_their_own_ways(rule: Rule) -> None:
    one, other, ids = store_of(rule), store_of(rule), np.arange(20)
    draw = np.random.default_rng(1)
    for number in range(1, 40):
        grads, touched = draw.normal(size=(5, 3)), draw.permutation(20)[:5]
        for store in (one, other):
            here = touched if number % 2 else touched[:0]
            step(store, here, grads[: len(here)], rate(number), number)
            store.advance_lazy_table("t", np.array([number % SHARDS]), 0.01)  # of another route, another push
        one.read("t", ids, "f8")
    assert [one.digest(shard) for shard in range(SHARDS)] == [other.digest(shard) for shard in range(SHARDS)]
    assert len({one.lazy_tables["t"].get_history(shard).count for shard in range(SHARDS)}) > 1
    for shard in range(SHARDS):
        other.install(shard, one.snapshot(shard))
    assert (one.read("t", ids, "f8")[0] == other.read("t", ids, "f8")[0]).all()
    other.drop(3)
    assert other.lazy_tables["t"].get_history(3).count == 0
    assert other.lazy_tables["t"].get_history(2).count == one.lazy_tables["t"].get_history(2).count


def test_rows_that_are_set_or_admitted_late_begin_then() -> None:
    rule = Rule(kind="sgd", weight_decay=1.0, every=True)
    store, lsn = store_of(rule, admit=2), np.ones(SHARDS, np.int64)
    first = store.read("t", np.array([5]), "f8")[0]
    for number in (1, 2):
        step(store, np.array([5]), np.ones((1, 3)), 0.5, number)  # the first is not counted but moves it
    assert store.read("t", np.array([5]), "f8")[0] == pytest.approx((first * 0.5) * 0.5 - 0.5)
    store.assign("t", np.array([5, 6]), np.ones((2, 3)), lsn=lsn)
    assert (store.read("t", np.array([5, 6]), "f8")[0] == 1).all()
    step(store, np.array([], np.int64), np.empty((0, 3)), 0.5, 3)
    assert (store.read("t", np.array([5, 6]), "f8")[0] == 0.5).all()


def test_fp32_is_near_float64_after_hundreds_of_steps() -> None:
    for rule, _ in RULES:
        narrow, wide = store_of(rule, "f4"), store_of(rule)
        wide.assign("t", np.arange(4), narrow.read("t", np.arange(4), "f4")[0], lsn=np.ones(SHARDS, np.int64))
        for number in range(1, 601):
            ids = np.arange(4) if number % 200 == 1 else np.arange(0)
            for store in (narrow, wide):
                step(store, ids, np.full((len(ids), 3), 0.5), 1e-3, number)
        assert narrow.read("t", np.arange(4), "f4")[0] == pytest.approx(
            wide.read("t", np.arange(4), "f8")[0], rel=1e-4, abs=1e-5
        )


def test_a_course_is_kept_by_its_changes() -> None:
    course = UpdateHistory(Rule(kind="adam", every=True))
    course.extend(np.array([0.1] * 1000 + [0.2, 0.1]))
    ends, rates = course.to_rate_runs()
    assert (ends.tolist(), rates.tolist()) == ([1000, 1001, 1002], [0.1, 0.2, 0.1])
    again = history_from_runs(Table(name="t", dim=1, rule=Rule(kind="adam", every=True)), ends, rates)
    assert (again.rates[:1002] == course.rates[:1002]).all()
    assert [each.tolist() for each in UpdateHistory(Rule(every=True)).to_rate_runs()] == [[], []]


def test_what_no_row_could_make_up_for_is_refused() -> None:
    with pytest.raises(StoreError, match=r"rule\.every: is for sgd, momentum, adagrad, adam"):
        Rule(kind="lamb", every=True)
    with pytest.raises(StoreError, match=r"would round away the small steps of rule\.every"):
        Table(name="t", dim=3, rule=Rule(kind="adam", every=True), stored="f2")
    with pytest.raises(StoreError, match=r"rule\.every is for tables"):
        Dense(name="d", size=3, rule=Rule(kind="adam", every=True))
    store = store_of(Rule(kind="adam", every=True))
    step(store, np.arange(2), np.ones((2, 3)), 0.1, 1)
    plain = ParameterStore(num_shards=SHARDS, memory=1 << 24)
    plain.declare(Table(name="t", dim=3, dtype="f8", stored="f8"))
    with pytest.raises(StoreError, match="a lazy table that is not declared here"):
        plain.install(0, store.snapshot(0))


def test_a_step_that_is_added_up_moves_shards_that_it_has_no_gradients_for_once() -> None:
    """Two workers in step, two routes; all gradients are of the one, to the other goes the table's rate alone. Through a snapshot in between."""
    rule = Rule(kind="sgd", weight_decay=1.0, every=True)
    covers, everywhere = ShardSetCache(SHARDS), np.arange(SHARDS, dtype=np.uint16)
    state = ShardState(store_of(rule), SHARDS)
    before = state.store.read("t", np.arange(4), "f8")[0]
    mine = everywhere == state.store.shards_of("t", np.array([2]))[0]

    def entry(kind: int, meta: dict[str, Any], *arrays: np.ndarray) -> wire.Frame:
        return wire.parse(wire.join_buffers(wire.encode(kind, 0, meta, list(arrays))))

    def push(
        worker: str, cover: np.ndarray, ops: list[dict[str, Any]], rates: dict[str, float], *arrays: np.ndarray
    ) -> None:
        meta = {"worker": worker, "incarnation": 1, "seq": 1, "step": 0, "tick": True, "aggregate": True}
        frame = entry(wire.PUSH, meta | {"lr": rates, "ops": ops}, cover, *arrays)
        state.apply_push(frame, covers.get(cover), version=1, is_noop=False)

    for worker in ("a", "b"):
        push(worker, everywhere[mine], [{"table": "t"}], {"t": 0.5}, np.array([2]), np.ones((1, 3)))
        push(worker, everywhere[~mine], [], {"t": 0.5})
    assert (state.store.read("t", np.arange(4), "f8")[0] == before).all()
    other = ShardState(store_of(rule), SHARDS)
    for shard in range(SHARDS):
        other.install(shard, state.snapshot(shard))
    for each in (state, other):
        for part in (mine, ~mine):
            each.apply_entry(
                entry(wire.COMMIT_STEP, {"step": 0}, everywhere[part]), covers.get(everywhere[part]), version=1
            )
        after = each.store.read("t", np.arange(4), "f8")[0]
        assert after == pytest.approx(before * 0.5 - (np.arange(4) == 2)[:, None])
        assert {each.store.lazy_tables["t"].get_history(shard).count for shard in range(SHARDS)} == {1}
    assert [state.digest(shard) for shard in range(SHARDS)] == [other.digest(shard) for shard in range(SHARDS)]
    with pytest.raises(ServerError, match="its rule moves every row, which needs a rate"):
        push("c", everywhere, [{"table": "t"}], {}, np.array([2]), np.ones((1, 3)))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rate", [1e301, True, -math.inf])
def test_a_rate_that_no_rule_takes_is_refused_before_anything_changes(rate: float, together: bool) -> None:
    """Also that of a table of which the push has nothing: with it all rows would move, at the end of the entry or of the step."""
    store, cover = store_of(Rule(kind="adam", every=True)), np.arange(SHARDS, dtype=np.uint16)
    store.declare(Table(name="u", dim=1))
    state = ShardState(store, SHARDS)
    meta = {"worker": "a", "incarnation": 1, "seq": 1, "step": 0, "tick": True, "aggregate": together}
    ops = {"lr": {"t": rate}, "ops": [{"table": "u"}]}
    frame = wire.parse(
        wire.join_buffers(wire.encode(wire.PUSH, 0, meta, [cover, np.arange(4), np.ones((4, 1), np.float32)]))
    )
    frame.meta.update(ops)  # JSON has no infinity
    before = [state.digest(shard) for shard in range(SHARDS)]
    with pytest.raises(StoreError, match="a rate of"):
        state.apply_push(frame, ShardSetCache(SHARDS).get(cover), version=1, is_noop=False)
    assert [state.digest(shard) for shard in range(SHARDS)] == before
    assert not state.pending_pushes


@pytest.mark.parametrize("rule", [rule for rule, _ in RULES])
def test_updates_are_made_up_for_in_parts_between_which_a_server_says_that_it_lives(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that takes long must not look like a death; the parts give the same bytes."""
    signs: list[int] = []
    table = Table(name="t", dim=3, rule=rule, init=Init(kind="normal", scale=1.0))
    whole, parts = (
        ParameterStore(num_shards=SHARDS, memory=1 << 24),
        ParameterStore(num_shards=SHARDS, memory=1 << 24, keep_alive=lambda: signs.append(1)),
    )
    few, many = np.arange(5), np.arange(40)
    for store, at_once in ((whole, 1 << 40), (parts, 100)):
        monkeypatch.setattr(lazy_updates, "_MAX_WORK_PER_CALL", at_once)
        store.declare(table)
        empty = store.bytes
        for number in range(1, 40):
            step(store, few[: number % 3], np.ones((number % 3, 3), np.float32), 0.1, number)
        assert store.bytes > empty + 39 * 8  # rates are memory too
        signs.clear()
        store.read("t", many)
        assert store is whole or len(signs) >= (2 if rule.kind in ("sgd", "momentum") else 13)
        step(store, many, np.ones((40, 3), np.float32), 0.1, 40)
    assert whole.read("t", many)[0].tobytes() == parts.read("t", many)[0].tobytes()
    assert [whole.digest(shard) for shard in range(SHARDS)] == [parts.digest(shard) for shard in range(SHARDS)]
