"""Real processes: servers join and leave under load, the controller dies and comes back, garbage comes in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.garbage import attack
from echelon.errors import ServerError
from echelon.server import Client, Rule, Servers, Table, connect
from echelon.server.status import fetch_status

IDS = np.arange(500)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """Two servers, for all tests here."""
    with Servers(2, replicas=2, shards=16) as running:
        yield running


class Load:
    """A worker that pushes ones until told to stop; how many pushes it made."""

    def __init__(self, servers: Servers, table: str) -> None:
        self.client: Client = connect(servers.address, secret=servers.secret, worker=table)
        self.table, self.count = table, 0
        self.client.declare(Table(name=table, dim=2, rule=Rule(kind="sgd", lr=1.0)))
        self.first = self.client.pull({table: IDS})[table]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._error: BaseException | None = None

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.client.push({self.table: (IDS, np.ones((len(IDS), 2), np.float32))})
                self.count += 1
            self.client.flush()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        try:
            if self._error is not None:
                raise self._error
            last = self.client.pull({self.table: IDS})[self.table]
            # Ones add up exactly (first values are small): each push counts once, on every row.
            assert np.abs(self.first - last - self.count).max() < 0.01
        finally:
            self.client.close()


def until(what: Callable[[], bool], why: str) -> None:
    """Wait for something; not for ever."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.05)


@pytest.mark.slow
def test_join_drain_and_death_under_load(servers: Servers) -> None:
    """Shards move to a new server, off an old one, and away from a dead one; nothing is lost or counted twice."""
    with Load(servers, "moved") as load:
        new = servers.start()

        def settled(least: int) -> bool:
            found = fetch_status(servers.address, servers.secret)
            return (
                not found["short"] and not found["learning"] and found["servers"].get(new, {}).get("heads", 0) >= least
            )

        until(lambda: settled(5), "the new server got no shards")
        before = load.count
        from echelon.server.protocol import wire
        from echelon.server.status import send_request

        send_request(servers.address, servers.secret, wire.DRAIN, {"server": "s1"}, timeout=60)
        assert fetch_status(servers.address, servers.secret)["servers"]["s1"]["replicas"] == 0
        until(lambda: load.count > before + 5, "pushes stopped")
        servers.servers["s1"].stop()
        del servers.servers["s1"]
        os.kill(servers.servers["s2"].pid, signal.SIGKILL)
        servers.servers["s2"].stop()
        del servers.servers["s2"]
        servers.start()
        until(lambda: settled(8), "replicas were not made again")
        digests = load.client.status()
        assert not digests["lost"]


def test_the_controller_is_not_missed(servers: Servers) -> None:
    """Pushes go on while it is dead; then it goes on from its file."""
    with Load(servers, "alone") as load:
        version = fetch_status(servers.address, servers.secret)["version"]
        os.kill(servers.controller.pid, signal.SIGKILL)
        before = load.count
        until(lambda: load.count > before + 20, "pushes stopped without the controller")
        servers.restart_controller()
        servers.wait_until_ready()
        assert fetch_status(servers.address, servers.secret)["version"] >= version


def test_a_checkpoint_that_cannot_be_completed_ends_nobody(servers: Servers, tmp_path: Path) -> None:
    """Whoever asked hears why; the controller goes on, and the next one may succeed."""
    stray = tmp_path / "kept.partial" / "shard-of-mine"
    stray.mkdir(parents=True)
    controller = servers.controller
    with connect(servers.address, secret=servers.secret) as client:
        with pytest.raises(
            ServerError, match=r"kept: the checkpoint cannot be completed .*shard-of-mine.*; give a folder"
        ):
            client.checkpoint(tmp_path / "kept")
        stray.rmdir()
        client.checkpoint(tmp_path / "kept")
    assert servers.controller is controller
    assert controller.process.poll() is None


def test_a_controller_that_cannot_write_its_file_ends_and_says_so(servers: Servers) -> None:
    """Nobody may hear of what is not on the disk; once there is room it goes on."""
    document, kept = servers.folder / "controller.json", servers.folder / "kept.json"
    document.rename(kept)
    document.mkdir()  # which no file can replace
    with pytest.raises(ServerError):
        connect(servers.address, secret=servers.secret, worker="unheard", timeout=1.0)
    servers.controller.process.wait(10)
    document.rmdir()
    kept.rename(document)
    assert servers.controller.describe_end().startswith(f"{document}: cannot be written")
    servers.restart_controller()
    servers.wait_until_ready()
    assert "unheard" not in fetch_status(servers.address, servers.secret)["workers"]


def test_garbage(servers: Servers) -> None:
    """Strangers get nothing, holders of the secret who send garbage end nobody. (100,000 frames: python -m bench.garbage.)"""
    assert attack(servers, 300, 1)["crashes"] == 0


@pytest.mark.slow
def test_what_dies_is_started_again(servers: Servers, capfd: pytest.CaptureFixture[str]) -> None:
    """The controller from its file, a server as a new one that gets the shards; both are said."""
    servers.serve_in_background()
    with Load(servers, "tended"):
        old = servers.controller
        os.kill(old.pid, signal.SIGKILL)
        until(lambda: servers.controller is not old, "no new controller")

        def whole(*gone: str) -> bool:
            try:
                found = fetch_status(servers.address, servers.secret)
            except ServerError:
                return False
            here = {name for name, each in found["servers"].items() if each["here"] and each["replicas"] == 16}
            return len(here) == 2 and not here & set(gone)

        until(whole, "servers did not come back to the controller")
        name = min(servers.servers)
        os.kill(servers.servers[name].pid, signal.SIGKILL)
        until(lambda: whole(name), "no new server")
    said = capfd.readouterr().err
    assert "the controller died (it was killed by signal 9" in said
    assert f"server {name} died" in said
    assert "the other replicas continue, and a new server replaces it" in said


@pytest.mark.slow
def test_what_becomes_of_the_shards_of_a_dead_server_is_said() -> None:
    """With one replica nothing of it goes on."""
    said: list[str] = []
    with Servers(1, replicas=1, shards=2) as alone:
        os.kill(alone.servers["s1"].pid, signal.SIGKILL)
        alone.servers["s1"].process.wait()
        alone.restart_dead(said.append)
    assert "; its shards go back to the last checkpoint, or are lost without one, and a new server" in said[0]
    assert said[1] == "server s2 started"


@pytest.mark.slow
def test_servers_end_with_their_parent(tmp_path: Path) -> None:
    """Also when it is killed; and the secret is in nobody's arguments."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom echelon.server.local_servers import Servers\n"
        "servers = Servers(1, replicas=1, shards=2, folder=Path(sys.argv[1]), secret=bytes(range(32)))\n"
        "print(servers.controller.pid, servers.servers['s1'].pid, flush=True)\ntime.sleep(600)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "job")], cwd=root, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        children = [int(each) for each in parent.stdout.readline().split()]
        assert len(children) == 2
        for child in children:
            assert bytes(range(32)).hex().encode() not in Path(f"/proc/{child}/cmdline").read_bytes()
            assert bytes(range(32)).hex().encode() not in Path(f"/proc/{child}/environ").read_bytes()
        parent.kill()
    until(lambda: not any(_alive(child) for child in children), "servers outlived their parent")
    assert bytes(range(32)).hex() not in "".join(path.read_text() for path in (tmp_path / "job").glob("*.log"))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False
