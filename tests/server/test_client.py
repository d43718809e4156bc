"""The client against real server processes: what it gives back, and what it says when it cannot."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from echelon.errors import EchelonError, ServerError
from echelon.server import Client, Dense, Init, Rule, Servers, Table, connect
from echelon.server.protocol.auth import write_secret

SGD = Rule(kind="sgd", lr=1.0)
ZERO = Init(kind="zeros")


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers(2, replicas=2) as running:
        yield running


@pytest.fixture
def client(servers: Servers) -> Iterator[Client]:
    with connect(servers.address, secret=servers.secret, timeout=20.0) as connected:
        yield connected


@pytest.fixture
def table(client: Client, request: pytest.FixtureRequest) -> str:
    """A table of this test's own, of four columns that begin at zero."""
    client.declare(Table(name=request.node.name, dim=4, rule=SGD, init=ZERO))
    return request.node.name


def test_a_table_all_of_whose_rows_move_moves_on_every_route_and_replica(client):
    rule = Rule(kind="sgd", lr=0.5, weight_decay=1.0, every=True)
    for name in ("moving", "still"):
        client.declare(Table(name=name, dim=2, rule=rule, init=Init(kind="constant", value=8.0)))
    client.push({"moving": (np.array([3]), np.zeros((1, 2)))}, lr={"moving": 0.5, "still": 0.5})
    client.push({"moving": (np.array([], np.int64), np.empty((0, 2)))})
    client.push({"moving": (np.array([5]), np.ones((1, 2)))}, tick=False)
    many = np.arange(64)
    rows = client.pull({"moving": many})["moving"]
    assert (rows[many != 5] == 1.0).all()  # 8, halved three times
    assert (rows[5] == 0.5).all()
    assert (client.pull({"still": many})["still"] == 8.0).all()
    assert all(len(set(each.values())) == 1 for each in client.digests().values())


def test_how_far_the_furthest_came_is_known_after_it_left(servers, client, table, request):
    with connect(servers.address, secret=servers.secret, worker=request.node.name) as other:
        for _ in range(3):
            other.push({table: (np.arange(4), np.zeros((4, 4)))})
        furthest = other.step
        other.flush()
    assert client.progress() == (max(furthest, client.progress()[0]), False)
    assert client.progress()[0] >= furthest > client.clock()[0]


def test_rows_come_in_the_order_of_the_ids_and_equal_ids_are_added_up(client, table):
    ids = np.array([7, -3, 7, 2**62, 7])
    client.push({table: (ids, -np.arange(20, dtype=np.float32).reshape(5, 4))})
    rows = client.pull({table: ids})[table]
    assert np.array_equal(rows[0], [0 + 8 + 16, 1 + 9 + 17, 2 + 10 + 18, 3 + 11 + 19])
    assert np.array_equal(rows[0], rows[2])
    assert np.array_equal(rows[1], [4, 5, 6, 7])
    assert np.array_equal(rows[3], [12, 13, 14, 15])
    assert client.pull({table: ids.reshape(5, 1)})[table].shape == (5, 1, 4)
    assert client.pull({table: np.empty(0, np.int64)})[table].shape == (0, 4)


def test_many_rows_over_all_routes_and_several_tables_at_once(client, table):
    wide = Table(name=f"{table} wide", dim=96, rule=SGD, init=ZERO)
    client.declare(wide)
    ids = np.random.default_rng(0).permutation(30_000)
    values = ids[:, None] + np.arange(96)
    client.push({wide.name: (ids, -values), table: (ids[:100], -values[:100, :4])})
    found = client.pull({table: ids[:100], wide.name: ids})
    assert np.array_equal(found[wide.name], values)
    assert np.array_equal(found[table], values[:100, :4])


def test_absent_rows_read_as_their_first_value_which_all_workers_agree_on(servers, client, request):
    spec = Table(name=request.node.name, dim=8, rule=SGD, init=Init(kind="normal", scale=0.5, seed=3))
    client.declare(spec)
    ids = np.arange(1000)
    before = client.pull({spec.name: ids})[spec.name]
    assert 0.4 < before.std() < 0.6
    client.push({spec.name: (ids, np.ones((1000, 8)))})
    with connect(servers.address, secret=servers.secret, worker="1") as other:
        assert np.array_equal(other.pull({spec.name: ids})[spec.name], before - 1)


def test_what_was_prefetched_is_taken_by_the_pull_of_the_same_ids(client, table):
    ids = np.arange(50)
    client.prefetch({table: ids})
    client.flush()
    client.status()  # the rows are read before the push: a prefetch is as of when it was asked
    client.pull({table: ids + 1})
    client.push({table: (ids, -np.ones((50, 4)))})
    assert not client.pull({table: ids})[table].any()
    assert client.pull({table: ids})[table].all()


def test_an_array_of_ids_that_is_filled_anew_is_another_batch(client, table):
    everything, ids = np.arange(100), np.arange(50)
    client.push({table: (everything, -np.repeat(everything, 4).reshape(100, 4))})
    client.prefetch({table: ids})
    ids += 50
    assert np.array_equal(client.pull({table: ids})[table][:, 0], ids)
    ids[0] = 3
    client.push({table: (ids, np.repeat(ids, 4).reshape(50, 4))})
    assert client.pull({table: everything})[table][:, 0].nonzero()[0].tolist() == [1, 2, *range(4, 51)]


def test_rows_that_were_prefetched_for_an_earlier_step_are_not_taken(client, table):
    ids = np.arange(50)
    client.prefetch({table: ids}, steps_ahead=0)
    client.push({table: (ids, -np.ones((50, 4)))})
    assert client.pull({table: ids})[table].all()


def test_large_answers_come_in_several_frames(client, table, monkeypatch):
    monkeypatch.setattr("echelon.server.client.requests.MAX_ROWS_BYTES", 50_000)
    spec = Dense(name=f"{table} dense", size=300_000, rule=SGD)
    client.declare(spec, initial=np.arange(spec.size))
    ids = np.arange(20_000)
    client.push({table: (ids, -np.repeat(ids, 4).reshape(-1, 4))})
    before = client.pull({table: ids}, dense=[spec.name])
    assert np.array_equal(before[table][:, 3], ids)
    assert np.array_equal(before[spec.name], np.arange(spec.size))


def test_a_push_that_no_frame_holds_is_refused_before_it_is_numbered(client, table, monkeypatch):
    monkeypatch.setattr("echelon.server.client.client.MAX_PUSH_BYTES", 1000)
    with pytest.raises(ServerError, match="push it in parts"):
        client.push({table: (np.arange(1000), np.ones((1000, 4)))})
    monkeypatch.undo()
    assert client.push({table: ([1], np.ones((1, 4)))}) == 1


def test_dense_parameters_begin_with_the_first_workers_values(servers, client, request):
    spec = Dense(name=request.node.name, size=200_000, rule=SGD)
    client.declare(spec, initial=np.arange(spec.size))
    with connect(servers.address, secret=servers.secret, worker="1") as other:
        other.declare(spec, initial=np.zeros(spec.size))
        other.push(dense={spec.name: np.ones((400, 500))}, lr=2.0)
        out = {spec.name: np.empty(spec.size, np.float32)}
        other.flush()
        found = client.pull_dense([spec.name], out=out)[spec.name]
    assert found is out[spec.name]
    assert np.array_equal(found, np.arange(spec.size) - 2.0)


def test_changed_gives_what_others_pushed_since(servers, client, table):
    with connect(servers.address, secret=servers.secret, worker="1") as other:
        other.push({table: (np.arange(100), -np.ones((100, 4)))})
        other.flush()
        ids, rows, since = client.pull_changes(table)
        assert sorted(ids) == list(range(100))
        assert rows.shape == (100, 4)
        assert rows.all()
        other.push({table: (np.array([5, 500]), -np.ones((2, 4)))})
        other.flush()
        ids, rows, since = client.pull_changes(table, since)
        assert {int(each): row[0] for each, row in zip(ids, rows, strict=True)} == {5: 2.0, 500: 1.0}
        assert len(client.pull_changes(table, since)[0]) == 0


def test_a_mark_of_another_head_does_not_count(client, table):
    """After a failover log numbers may go back: what the new head counted anew would be missed."""
    client.push({table: (np.arange(50), -np.ones((50, 4)))})
    client.flush()
    _, _, since = client.pull_changes(table)
    ahead = replace(since, lsns=since.lsns + 100)
    assert len(client.pull_changes(table, ahead)[0]) == 0
    former = replace(ahead, generations=tuple((epoch - 1, source) for epoch, source in since.generations))
    assert sorted(client.pull_changes(table, former)[0]) == list(range(50))


@pytest.mark.parametrize(("form", "near"), [("f2", 1e-3), ("i2", 1e-4), ("i1", 1e-2), ("f8", 1e-7)])
def test_rows_can_be_sent_narrower(client, table, form, near):
    values = np.random.default_rng(1).uniform(-1, 1, (300, 4))
    client.push({table: (np.arange(300), -values)})
    assert np.abs(client.pull({table: np.arange(300)}, wire_dtype=form)[table] - values).max() < near


def test_assigned_rows_are_as_given(client, table):
    values = np.random.default_rng(2).random((64, 4), np.float32)
    client.assign({table: (np.arange(64), values)})
    assert np.array_equal(client.pull({table: np.arange(64)})[table], values)


def test_pushes_are_numbered_and_flush_acknowledges_them(client, table):
    before = client.step
    numbers = [client.push({table: ([1], np.ones((1, 4)))}) for _ in range(5)]
    assert numbers == list(range(1, 6))
    assert 3 <= client.last_acknowledged() <= 5
    client.flush()
    assert client.last_acknowledged() == 5
    assert client.step == before + 5


def test_a_step_may_have_several_pushes(client, table):
    before = client.step
    client.push({table: ([1], np.ones((1, 4)))}, tick=False)
    client.push({table: ([1], np.ones((1, 4)))})
    assert client.step == before + 1
    assert client.clock() == (before + 1, before + 1)


def test_replicas_hold_the_same_bytes(client, table):
    client.push({table: (np.arange(1000), np.ones((1000, 4)))})
    digests = client.digests()
    assert all(len(those) == 2 and len(set(those.values())) == 1 for those in digests.values())


def test_status_knows_servers_and_tables(client, table):
    client.push({table: (np.arange(1000), np.ones((1000, 4)))})
    client.flush()
    deadline, rows = time.monotonic() + 20.0, {}
    while time.monotonic() < deadline and set(rows.values()) != {1000}:  # servers report from time to time
        reports = client.status()["servers"]
        rows = {name: report["tables"].get(table, {"rows": 0})["rows"] for name, report in reports.items()}
        time.sleep(0.05)
    assert list(rows.values()) == [1000, 1000]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda client, name: client.pull({"nothing": [1]}), "nothing: no such table .* declare it first"),
        (lambda client, name: client.pull_dense([name]), "is declared as Table"),
        (lambda client, name: client.pull({name: [1.5]}), "ids of dtype float64.*use int64"),
        (lambda client, name: client.pull({name: [1]}, wire_dtype="f3"), "wire_dtype='f3'.*use one of"),
        (
            lambda client, name: client.push({name: ([1, 2], np.ones((2, 3)))}),
            r"shape \(2, 3\) for 2 ids.*give \(2, 4\)",
        ),
        (lambda client, name: client.push(dense={name: np.ones(3)}), "is declared as Table"),
        (lambda client, name: client.assign({name: ([1, 1], np.ones((2, 4)))}), "more than once"),
        (lambda client, name: client.declare(Table(name=name, dim=5)), "5"),
        (lambda client, name: client.declare(Table(name="t", dim=5), initial=np.ones(5)), "use assign"),
    ],
)
def test_wrong_use_says_what_and_what_instead(client, table, call, said):
    with pytest.raises(EchelonError, match=said):
        call(client, table)
    client.push({table: ([1], np.ones((1, 4)))})  # and the connection is as good as before
    client.flush()


def test_out_must_fit(client, request):
    client.declare(Dense(name=request.node.name, size=10))
    with pytest.raises(ServerError, match=r"float64 of shape \(10,\); give a contiguous f4"):
        client.pull_dense([request.node.name], out={request.node.name: np.empty(10)})
    with pytest.raises(ServerError, match=r"11 values.*has 10 elements"):
        client.push(dense={request.node.name: np.ones(11)})


def test_a_stranger_is_turned_away(servers):
    with pytest.raises(EchelonError, match="does not hold this job's secret"):
        connect(servers.address, secret=b"another secret of a good length", timeout=20.0)


def test_a_controller_that_is_not_there_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ServerError, match=rf"controller 127.0.0.1:{port}: no answer for [01] s.*is it running there"):
        connect(f"127.0.0.1:{port}", secret=b"x" * 32, timeout=0.4)


def test_a_window_of_none_is_refused():
    with pytest.raises(ServerError, match="window: 0"):
        connect("127.0.0.1:1", secret=b"x" * 32, window=0)


def test_nothing_may_be_asked_for_and_a_closed_client_says_so(servers: Servers, table: str) -> None:
    with connect(servers.address, secret=servers.secret, worker="empty") as other:
        assert other.pull({table: []})[table].shape == (0, 4)
        other.push({table: ([], [])})
        other.flush()
        other.close()
        for call in (
            lambda: other.pull({table: [1]}),
            lambda: other.push({table: ([1], np.ones((1, 4)))}),
            other.clock,
        ):
            with pytest.raises(ServerError, match="was closed; connect"):
                call()


def test_a_worker_leaves_also_when_its_last_push_was_refused(servers, client, request):
    name = request.node.name
    other = connect(servers.address, secret=servers.secret, worker=name)
    other.declare(Table(name=name, dim=4, rule=SGD, init=ZERO))
    # So that servers refuse what this one thinks is right.
    other._session.specs[name] = replace(other._session.specs[name], dim=2)
    with pytest.raises(ServerError, match="was refused"), other:
        other.push({name: (np.arange(4), np.ones((4, 2)))})
    assert name not in client.status()["workers"]


def test_what_one_call_was_refused_is_not_told_to_the_next(client, table):
    client._session.specs["nowhere"] = replace(client._session.specs[table], name="nowhere")
    for _ in range(3):
        with pytest.raises(ServerError, match="CHANGED was refused"):
            client.pull_changes("nowhere")
        client.push({table: (np.arange(4), np.ones((4, 4)))})
        client.flush()
    del client._session.specs["nowhere"]


def test_changes_come_in_parts_that_frames_hold(client, table, monkeypatch):
    monkeypatch.setattr("echelon.server.client.ask_shards.MAX_ROWS_BYTES", 2400)  # 100 rows
    client.push({table: (np.arange(5000), np.ones((5000, 4)))})
    client.flush()
    ids, _, mark = client.pull_changes(table)
    seen = [ids]
    while len(ids):
        ids, rows, mark = client.pull_changes(table, mark)
        assert len(rows) == len(ids) <= 2 * 400
        seen.append(ids)
    assert sorted(np.concatenate(seen).tolist()) == list(range(5000))


def test_first_values_that_do_not_fit_leave_nothing_declared(client, request):
    spec = Dense(name=request.node.name, size=8, rule=SGD)
    with pytest.raises(ServerError, match="7 values of shape"):
        client.declare(spec, initial=np.zeros(7))
    with pytest.raises(ServerError, match="initial= is for dense parameters"):
        client.declare(Table(name=request.node.name, dim=1), initial=np.zeros(7))
    client.declare(spec, initial=np.arange(8.0))
    assert client.pull_dense([request.node.name])[request.node.name].tolist() == list(range(8))


def test_ids_that_are_no_integers_are_not_prefetched_either(client, table):
    with pytest.raises(ServerError, match="ids of dtype float64"):
        client.prefetch({table: np.array([1.5])})


def test_what_is_no_push_is_refused_before_anything_is_sent(client, table):
    ids, two = np.arange(2), np.ones((2, 4))
    for wrong, words in (
        (lambda: client.push({table: (ids, two)}, lr=float("nan")), "a rate of nan"),
        (lambda: client.push({table: (ids, two)}, lr={"nowhere": 1.0}), "nowhere: no such table"),
        (lambda: client.push({table: (ids, two.T)}), r"values of shape \(4, 2\) for 2 ids"),
        (lambda: client.push({table: (ids, two.reshape(-1))}), r"values of shape \(8,\) for 2 ids"),
        (lambda: client.push({table: (ids, two * 1j)}), "values of dtype complex128"),
        (lambda: client.push({table: (ids, two.astype(str))}), "real numbers"),
        (lambda: client.push({table: ids}), r"give \(ids, values\)"),
        (lambda: client.pull([table]), "give {table's name: ids}"),
        (lambda: client.push({table: (ids, torch.ones(2, 4, requires_grad=True))}), "t.detach"),
    ):
        with pytest.raises(EchelonError, match=words):
            wrong()
    client.push({table: (ids.reshape(1, 2), two.reshape(1, 2, 4))})
    client.push({table: ([], [])})
    client.flush()
    assert (client.pull({table: ids})[table] == -1).all()


def test_a_forked_child_has_no_client(client, table):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            client.push({table: (np.arange(2), np.ones((2, 4)))})
        except ServerError as error:
            client.close()
            os._exit("which was forked; connect() in this process" in str(error))
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    client.push({table: (np.arange(2), np.ones((2, 4)))})
    client.flush()
    assert (client.pull({table: np.arange(2)})[table] == -1).all()


def test_a_secret_may_be_given_as_its_file_and_a_worker_has_a_name(servers, tmp_path):
    write_secret(tmp_path / "secret", servers.secret)
    connect(servers.address, secret=tmp_path / "secret", worker="by file").close()
    for name in ("", 0):
        with pytest.raises(ServerError, match="unique in the job"):
            connect(servers.address, secret=servers.secret, worker=name)


def test_servers_that_make_no_sense_are_not_started():
    for wrong, words in (
        ({"staleness": -1}, "staleness=-1"),
        ({"aggregate": True}, "use staleness=0"),
        ({"memory": 10}, "in bytes"),
        ({"replicas": 4}, "1, 2 or 3 replicas"),
    ):
        with pytest.raises(ServerError, match=words):
            Servers(2, **wrong)
