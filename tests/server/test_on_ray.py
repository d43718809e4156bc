"""Ray places, starts and watches: two nodes on one machine, and everything on them dies in turn.

The cluster's test needs Ray (`pip install 'echelon[ray]'`); which node a server goes to is decided without it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from echelon.cli.app import app
from echelon.errors import LaunchError, ServerError
from echelon.server import on_ray
from echelon.server.client.client import Client, connect
from echelon.server.node_placement import NodeResources, choose_node, find_crowded_node
from echelon.server.on_ray import RayServers, Worker
from echelon.server.protocol.auth import read_secret
from echelon.server.protocol.hashing import shard_of
from echelon.server.protocol.specs import Init, Rule, Table

NODES = [NodeResources(id=name, cpus=4.0, memory=100.0) for name in "abc"]
IDS = np.arange(64)
#: Rows of which each life of each worker has so many of its own, in all shards, beside those that all push to.
OWN = 1000
SHARDS = 16


def own(number: int, life: int) -> int:
    """The first of them."""
    return OWN * (1 + number * 10 + life)


def test_servers_go_where_the_fewest_are():
    taken: dict[str, int] = {}
    for _ in range(7):
        node = choose_node(NODES, taken)
        assert node is not None
        taken[node] = taken.get(node, 0) + 1
    assert sorted(taken.values()) == [2, 2, 3]
    assert choose_node(NODES, {"a": 1, "b": 0, "c": 2}, avoid="b") == "a"
    assert choose_node(NODES[:1], {}, avoid="a") == "a"


def test_servers_go_only_where_they_fit():
    assert choose_node(NODES, {"a": 4, "b": 3, "c": 4}, cpus=1.0) == "b"
    assert choose_node(NODES, {"a": 4, "b": 4, "c": 4}, cpus=1.0) is None
    assert choose_node(NODES, {"a": 1}, memory=60.0) == "b"
    assert choose_node(NODES, {}, memory=101.0) is None


def test_a_node_is_crowded_when_another_could_have_one_of_its_servers():
    assert find_crowded_node(NODES, {"a": 2, "b": 1}) == "a"
    assert find_crowded_node(NODES, {"a": 1, "b": 1}) is None
    assert find_crowded_node(NODES, {"a": 2, "b": 1, "c": 1}) is None
    assert find_crowded_node(NODES[:1], {"a": 2}) is None
    assert find_crowded_node(NODES, {}) is None


def test_importing_the_servers_does_not_load_ray():
    code = "import sys, echelon.server, echelon.server.on_ray; print('ray' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ServerError, match=r"need Ray.*pip install 'echelon\[ray\]'"):
        RayServers(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on", "moon"], "--on moon: expected"),
        (["--cluster", "10.0.0.1:6379"], "or add --on ray"),
        (["--on", "ray", "--host", "a", "--bind", "0.0.0.0"], "--bind, --host: not an option of servers on Ray"),
        (["--on", "ray", "--servers", "0"], "--servers 0: servers on Ray"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], message: str, tmp_path: Path):
    answer = CliRunner().invoke(app, ["server", "start", "--folder", str(tmp_path / "job"), *options])
    assert isinstance(answer.exception, SystemExit)
    assert answer.exit_code == 2
    assert message in " ".join(answer.output.split())
    assert not (tmp_path / "job").exists()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes with addresses of their own, on one machine."""
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else they start only once nobody else wants the processor
    monkeypatch.setenv("RAY_health_check_period_ms", "1000")  # a node that is gone without a word: 5 s, not 15
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'echelon[ray]'")
    from ray.cluster_utils import Cluster

    # Ray ends actors when this machine, not this test, is short of memory.
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    small = {"num_cpus": 3, "object_store_memory": 80 << 20}
    found = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        found.small = small
        found.second = found.add_node(**small, node_ip_address="127.0.0.2")
        ray.init(address=found.address, log_to_driver=False)
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


def until(what: Callable[[], Any], patience: float = 240.0) -> Any:
    """What it gives once it gives something."""
    deadline = time.monotonic() + patience
    while not (found := what()):
        assert time.monotonic() < deadline, what
        time.sleep(0.2)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_errors_of_workers_and_of_the_cluster_are_told(cluster: Any):
    def wrong(client: Client, worker: Worker) -> None:
        raise ValueError(f"of worker {worker.number}")

    def lost(client: Client, worker: Worker) -> None:
        os._exit(3)

    with pytest.raises(LaunchError, match=r"0 of 2 servers came up within 4 s; each asks for .*100"):
        RayServers(2, cpus=100.0, timeout=4.0)
    with RayServers(1, replicas=1, shards=4, cpus=0.0) as servers:
        with pytest.raises(ValueError, match="of worker 0"):
            servers.run(wrong, 1)
        with pytest.raises(LaunchError, match="worker 0 was lost 2 times"):
            servers.run(lost, 1, max_attempts=2)
        with pytest.raises(ServerError, match="no server of that name"):
            servers.stop("s7")
        # Neither Ray nor the system tells the secret.
        said = [file for file in Path(cluster.head_node.get_session_dir_path()).rglob("*") if file.is_file()]
        process = Path(f"/proc/{servers.status()['servers']['s1']['pid']}")
        said += [process / "cmdline", process / "environ"]
        assert len(said) > 10
        for file in said:
            text = file.read_bytes()
            assert servers.secret not in text, file
            assert servers.secret.hex().encode() not in text, file


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_servers_by_hand_on_a_cluster(cluster: Any, tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "echelon",
        "server",
        "start",
        "--on",
        "ray",
        "--cluster",
        cluster.address,
        "--servers",
        "2",
    ]
    command += ["--shards", "4", "--folder", str(tmp_path / "job"), "--json"]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            line = process.stdout.readline()
            assert line, "it ended"
            text += line
        said = json.loads(text)
        with connect(said["controller"], secret=read_secret(Path(said["secret_file"]))) as client:
            until(lambda: len({seat["host"] for seat in client.status()["servers"].values()}) == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_actors_and_a_node_die_and_no_push_is_lost_or_applied_twice(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import ray

    monkeypatch.setattr(on_ray, "SILENT_SERVER_TIMEOUT", 3.0)

    path = tmp_path / "said"
    path.mkdir()

    def work(client: Client, worker: Worker) -> int:
        """Push ones until told to end; what was sent and what was acknowledged is on the disk before the next."""
        client.declare(Table(name="sums", dim=4, rule=Rule(kind="sgd", lr=1.0), init=Init(kind="zeros")))
        mine = own(worker.number, worker.attempt)
        ids = np.append(IDS, np.arange(mine, mine + OWN))
        (path / f"{mine}.node").write_text(worker.node)
        (path / f"{mine}.pid").write_text(str(os.getpid()))
        count = 0
        with open(path / f"{mine}.sent", "w") as sent, open(path / f"{mine}.acknowledged", "w") as acknowledged:
            while not (path / "enough").exists():
                count += 1
                print(count, file=sent, flush=True)
                client.push({"sums": (ids, np.full((len(ids), 4), -1.0, np.float32))})
                print(client.last_acknowledged(), file=acknowledged, flush=True)
                time.sleep(0.01)
        return count

    def last(file: Path) -> int:
        lines = file.read_text().split()
        return int(lines[-1]) if lines else 0

    def whole(servers: RayServers, nodes: int) -> Any:
        """Two servers that both hold everything, on so many nodes, and the controller answers."""
        try:
            report = servers.status()
        except Exception:
            return None
        seats = report["servers"]
        held = all(each["replicas"] == SHARDS and each["here"] for each in seats.values())
        right = len(seats) == 2 and held and not (report["short"] or report["learning"] or report["unplaced"])
        return report if right and len({each["host"] for each in seats.values()}) == nodes else None

    def acknowledged() -> int:
        return sum(last(file) for file in path.glob("*.acknowledged"))

    def go_on(more: int = 20) -> None:
        """Pushes are acknowledged again."""
        before = acknowledged()
        until(lambda: acknowledged() > before + more)

    def lives() -> int:
        return len(list(path.glob("*.pid")))

    with RayServers(2, replicas=2, shards=SHARDS, cpus=0.5) as servers:
        first = until(lambda: whole(servers, 2))
        addresses = {each["NodeID"]: each["NodeManagerAddress"] for each in ray.nodes()}
        for name, seat in first["servers"].items():
            assert seat["host"] == seat["node"] == servers.servers[name].node
            assert seat["address"].rpartition(":")[0] == addresses[seat["host"]]

        results: list[list[int]] = []
        workers = threading.Thread(target=lambda: results.append(servers.run(work, 2, cpus=0.5)), daemon=True)
        workers.start()
        until(lambda: lives() == 2)
        go_on()
        assert len({file.read_text() for file in path.glob("*.node")}) == 2

        # A server's actor, as Ray ends it.
        (victim, *_), names = list(servers.servers.values()), set(servers.servers)
        ray.kill(victim.actor)
        go_on()
        until(lambda: victim.name not in (whole(servers, 2) or {"servers": names})["servers"])

        # The controller's process: nothing stops, and the next one goes on from its file.
        version, pid = servers.status()["version"], until(lambda: servers.controller.pid)
        os.kill(pid, signal.SIGKILL)
        go_on()
        assert until(lambda: whole(servers, 2))["version"] >= version
        assert until(lambda: servers.controller.pid) != pid

        # A server's process is stopped: Ray does not see it, the controller does.
        stopped = next(iter(servers.servers.values()))
        os.kill(stopped.pid, signal.SIGSTOP)
        go_on()
        until(lambda: stopped.name not in (whole(servers, 2) or {"servers": {stopped.name}})["servers"])
        until(lambda: not Path(f"/proc/{stopped.pid}").exists())
        assert stopped.name not in until(lambda: whole(servers, 2))["servers"]

        # A worker's process: it is replaced under a new incarnation.
        os.kill(int((path / f"{own(0, 0)}.pid").read_text()), signal.SIGKILL)
        until(lambda: lives() == 3)
        go_on()

        # A node with all that is on it, without a word: its server, and a worker if one is there.
        cluster.remove_node(cluster.second, allow_graceful=False)
        go_on()
        until(lambda: whole(servers, 1))
        go_on()

        # Another node comes: the two servers are on one, and spread again.
        cluster.add_node(**cluster.small, node_ip_address="127.0.0.3")
        until(lambda: whole(servers, 2))
        go_on()

        # One server more, one fewer.
        extra = servers.start()
        until(lambda: servers.status()["servers"].get(extra, {}).get("heads"))
        servers.stop(extra)
        until(lambda: whole(servers, 2))

        (path / "enough").touch()
        workers.join(240.0)
        assert not workers.is_alive()
        (counts,) = results
        with connect(servers.address, secret=servers.secret, worker="reader") as reader:
            reader.declare(Table(name="sums", dim=4, rule=Rule(kind="sgd", lr=1.0), init=Init(kind="zeros")))
            lived = sorted(int(file.stem) for file in path.glob("*.sent"))
            found = {mine: reader.pull({"sums": np.arange(mine, mine + OWN)})["sums"][:, 0] for mine in lived}
            shared = reader.pull({"sums": IDS})["sums"][:, 0]

            def equal() -> bool:
                return all(len(each) == 2 and len(set(each.values())) == 1 for each in reader.digests().values())

            # That the reader came is an entry too, which the other replica may hear of after it was answered.
            until(equal, 20.0)
    # Every shard has everything acknowledged and nothing twice. What a life that was killed had not heard of yet may be in some only.
    for mine, rows in found.items():
        least, most = last(path / f"{mine}.acknowledged"), last(path / f"{mine}.sent")
        assert ((least <= rows) & (rows <= most)).all(), (mine, least, most, rows)
    for number, count in enumerate(counts):
        # The last life of each ended well: each of its pushes, exactly once.
        mine = max(each for each in lived if (each // OWN - 1) // 10 == number)
        assert (found[mine] == count).all()
    for row in IDS:
        # And so has every row that all of them pushed to: as often as rows of the same shard.
        of_shard = [
            rows[shard_of(np.arange(mine, mine + OWN), SHARDS) == shard_of(np.array([row]), SHARDS)]
            for mine, rows in found.items()
        ]
        assert all(len(set(rows)) == 1 for rows in of_shard)
        assert shared[row] == sum(rows[0] for rows in of_shard)
