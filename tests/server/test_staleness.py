"""How far workers may drift apart, and that synchronous training is one device's, to the last bits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from echelon.server import Client, Dense, Init, Rule, Servers, Table, connect

#: Seconds; a first run compiles the loops for float64 meanwhile.
WAIT = 120.0


def joined(stack: ExitStack, servers: Servers, name: str) -> Client:
    return stack.enter_context(connect(servers.address, secret=servers.secret, worker=name, timeout=WAIT))


def in_background(work: Callable[[], object]) -> Future[object]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


@pytest.fixture(scope="module")
def bounded():
    with Servers(2, replicas=2, staleness=2) as running:
        yield running


@pytest.fixture
def table(bounded, request):
    with connect(bounded.address, secret=bounded.secret, worker="declarer") as client:
        client.declare(Table(name=request.node.name, dim=2, rule=Rule(kind="sgd", lr=1.0), init=Init(kind="zeros")))
    return request.node.name


def step(client: Client, name: str) -> np.ndarray:
    rows = client.pull({name: [1]})[name]
    client.push({name: ([1], -np.ones((1, 2)))})
    client.flush()
    return rows


def test_a_pull_waits_for_the_slowest_within_the_bound(bounded, table):
    with ExitStack() as stack:
        fast, slow = joined(stack, bounded, "fast"), joined(stack, bounded, "slow")
        assert fast.staleness == 2
        for _ in range(3):
            step(fast, table)
        ahead = in_background(lambda: step(fast, table))
        time.sleep(0.3)
        assert not ahead.done(), "3 steps ahead of a worker that has done none, where 2 are allowed"
        step(slow, table)
        [seen] = ahead.result(WAIT)  # type: ignore[misc]
        assert seen[0] >= 4


def test_the_bound_holds_for_every_pull_of_unequal_workers(bounded, table):
    begun, finished = {"a": 0, "b": 0, "c": 0}, {"a": 0, "b": 0, "c": 0}
    worst = []
    with ExitStack() as stack:
        clients = {name: joined(stack, bounded, name) for name in begun}

        def train(name: str) -> None:
            for number in range(12):
                rows = clients[name].pull({table: [1]})[table]
                begun[name] = number
                worst.append(number - min(finished.values()))
                # Everything that all workers had finished 2 steps ago is in what was read.
                assert rows[0, 0] >= 3 * (number - 2)
                if name == "a":
                    time.sleep(0.01)
                finished[name] = number + 1  # counted before it is sent: the bound is on what servers have
                clients[name].push({table: ([1], -np.ones((1, 2)))})

        threads = [in_background(lambda name=name: train(name)) for name in clients]
        for thread in threads:
            thread.result(WAIT)
    assert max(worst) <= 2
    assert max(worst) >= 1


def test_a_lost_worker_leaves_the_clock(bounded, table):
    with ExitStack() as stack:
        fast = joined(stack, bounded, "fast")
        lost = connect(bounded.address, secret=bounded.secret, worker="lost", timeout=WAIT)
        for _ in range(3):
            step(fast, table)
        ahead = in_background(lambda: step(fast, table))
        time.sleep(0.1)
        assert not ahead.done()
        lost._session.controller.close(leave=False)  # as a dead process would: no word, only the end of its connections
        lost._session.connections.close()
        ahead.result(WAIT)


def test_a_worker_that_joins_late_begins_where_the_slowest_is(bounded, table):
    with ExitStack() as stack:
        first = joined(stack, bounded, "first")
        for _ in range(5):
            step(first, table)
        late = joined(stack, bounded, "late")
        assert late.step == first.step
        assert late.clock() == (first.step, first.step)
        step(first, table)
        step(late, table)


@pytest.mark.slow
def test_synchronous_training_equals_one_process():
    draw = np.random.default_rng(0)
    steps, workers, rows, dim = 6, 3, 40, 3
    ids = draw.integers(0, rows, (steps, workers, 16))
    targets = draw.normal(size=(rows, dim))
    rule = Rule(kind="adam", lr=0.05)
    with Servers(2, replicas=2, staleness=0, aggregate=True) as servers, ExitStack() as stack:
        clients = [joined(stack, servers, str(number)) for number in range(workers)]
        start = threading.Barrier(workers)
        for client in clients:
            client.declare(Table(name="t", dim=dim, rule=rule, init=Init(kind="zeros"), dtype="f8", stored="f8"))
            client.declare(Dense(name="w", size=dim, rule=rule, dtype="f8"), initial=np.ones(dim))

        def train(number: int) -> None:
            client = clients[number]
            start.wait()
            for at in range(steps):
                found = client.pull({"t": ids[at, number]}, dense=["w"])
                error = (found["t"] * found["w"] - targets[ids[at, number]]) / (16 * workers)
                client.push({"t": (ids[at, number], error * found["w"])}, dense={"w": (error * found["t"]).sum(0)})

        for future in [in_background(lambda number=number: train(number)) for number in range(workers)]:
            future.result(WAIT)
        # One more step has to begin for the last one to be seen by all.
        result = clients[0].pull({"t": np.arange(rows)}, dense=["w"])
        for client in clients:
            client.flush()  # a replica has others' pushes for certain only when these are acknowledged
        digests = clients[0].digests()

    table, weights = np.zeros((rows, dim)), np.ones(dim)
    states = [
        (np.zeros((rows, dim)), np.zeros((rows, dim)), np.zeros((rows, 1))),
        (np.zeros(dim), np.zeros(dim), np.zeros(1)),
    ]
    for at in range(steps):
        gradient, dense = np.zeros((rows, dim)), np.zeros(dim)
        for number in range(workers):
            those = ids[at, number]
            error = (table[those] * weights - targets[those]) / (16 * workers)
            np.add.at(gradient, those, error * weights)
            dense += (error * table[those]).sum(0)
        touched = np.unique(ids[at])
        for value, grad, (first, second, count), where in (
            (table, gradient, states[0], touched),
            (weights, dense, states[1], slice(None)),
        ):
            count[where] += 1
            first[where] = 0.9 * first[where] + 0.1 * grad[where]
            second[where] = 0.999 * second[where] + 0.001 * grad[where] ** 2
            root = np.sqrt(1 - 0.999 ** count[where])
            # Of a table it is SparseAdam, whose epsilon is added before the correction; else Adam.
            epsilon = 1e-8 if value is table else 1e-8 * root
            value[where] -= 0.05 * root / (1 - 0.9 ** count[where]) * first[where] / (np.sqrt(second[where]) + epsilon)
    assert np.abs(result["t"] - table).max() < 1e-12
    assert np.abs(result["w"] - weights).max() < 1e-12
    assert all(len(set(those.values())) == 1 for those in digests.values())
