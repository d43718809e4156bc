"""Checkpoints of servers: written while they serve, restored on any number of them, and never over anything else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from echelon.errors import CheckpointError, ServerError
from echelon.server import Rule, Servers, Table, checkpoint, connect
from echelon.server.hashing import shard_of
from echelon.server.map import Map, Seat
from echelon.server.process import copied
from echelon.server.replica import Replica
from echelon.server.state import State
from tests.server.tiny import TinyStore
from tests.whole import only_whole

TABLE = Table(name="t", dim=4, rule=Rule(kind="adagrad", lr=0.1))
IDS = np.arange(64, dtype=np.int64)


def grads(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(len(IDS), 4)).astype(np.float32)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    """A checkpoint after two pushes, the rows then, and after a third push that is not in it."""
    folder = tmp_path_factory.mktemp("servers") / "checkpoint"
    with Servers(2, replicas=2, shards=16) as servers, connect(servers.address, secret=servers.secret) as client:
        client.declare(TABLE)
        for seed in (1, 2):
            client.push({"t": (IDS, grads(seed))})
        other = folder.parent / "run"
        other.mkdir()
        (other / "log.txt").write_text("dear")
        with pytest.raises(ServerError, match="holds other things than a checkpoint"):
            client.checkpoint(other)
        other.rename(other.with_name("run.partial"))
        with pytest.raises(ServerError, match=r"run\.partial: holds other things than a checkpoint that was begun"):
            client.checkpoint(other)
        assert (folder.parent / "run.partial" / "log.txt").read_text() == "dear"
        client.checkpoint(folder)
        client.checkpoint(folder)  # over an older one
        then = client.pull({"t": IDS})["t"]
        client.push({"t": (IDS, grads(3))})
        client.flush()
        after = client.pull({"t": IDS})["t"]
    assert [path.name for path in folder.parent.glob("*checkpoint*")] == ["checkpoint"]
    return folder, then, after


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_servers_goes_on_from_it(count: int, written: tuple[Path, np.ndarray, np.ndarray]) -> None:
    folder, then, after = written
    with (
        Servers(count, replicas=min(count, 2), restore=folder) as servers,
        connect(servers.address, secret=servers.secret) as client,
    ):
        assert np.array_equal(client.pull({"t": IDS})["t"], then)
        servers.restart_controller()  # goes on from its file, not from the checkpoint again
        client.push({"t": (IDS, grads(3))})
        client.flush()
        assert np.array_equal(
            client.pull({"t": IDS})["t"], after
        )  # with the optimizer's state, and applied although its number is old


@only_whole
def test_shards_that_went_back_to_it_while_the_job_went_on_are_told_of(
    written: tuple[Path, np.ndarray, np.ndarray],
) -> None:
    folder, then, _ = written
    with (
        Servers(2, replicas=1, restore=folder) as servers,
        connect(servers.address, secret=servers.secret) as client,
    ):
        client.push({"t": (IDS, grads(3))})
        client.flush()
        assert client.restored == {}
        gone = [shard for shard, head in enumerate(client.map.heads) if head == "s1"]
        servers.servers["s1"].process.kill()

        def rows_after() -> np.ndarray:
            while not client.restored:
                client.acknowledged()
            return client.pull({"t": IDS})["t"]

        with pytest.warns(
            UserWarning, match=r"went back to the checkpoint .*checkpoint: what was pushed to them since is lost"
        ):
            rows = rows_after()
        assert client.restored == dict.fromkeys(gone, str(folder.resolve()))
        back = np.isin(shard_of(IDS, client.map.shards), gone)
        assert np.array_equal(rows[back], then[back])
        assert not np.array_equal(rows[~back], then[~back])


def test_damage_is_named(written: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path) -> None:
    folder = written[0]
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    copy = tmp_path / "copy"
    copy.mkdir()
    data = bytearray((folder / manifest["files"]["3"]["file"]).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "3.safetensors").write_bytes(bytes(data))
    (tmp_path / "outside.safetensors").write_bytes(bytes(data))
    for name, message in (("3.safetensors", "damaged"), ("../outside.safetensors", "not in this folder")):
        manifest["files"]["3"]["file"] = name
        (copy / checkpoint.MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(copy, 3)
    with pytest.raises(CheckpointError, match=r"shard-00004.*older checkpoint"):
        checkpoint.load(copy, 4)


def test_a_damaged_checkpoint_is_found_before_a_controller_listens(tmp_path: Path) -> None:
    """In the words of `echelon server export`."""
    place, folder = checkpoint.partial(tmp_path / "kept"), tmp_path / "kept"
    files = {str(shard): checkpoint.save(place, shard, [({"lsn": 0}, [np.arange(9)])]) for shard in range(4)}
    checkpoint.complete(folder, {"shards": 4, "specs": [], "settings": {}, "count": 0, "files": files})
    assert checkpoint.verify(folder)["shards"] == 4
    path = folder / files["3"]["file"]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=f"^{path}: its SHA-256 is not .* take an older checkpoint$"):
        checkpoint.verify(folder)


def test_a_shard_that_is_still_to_be_read_is_not_written() -> None:
    """It is empty until then, and the next loss would go back to that."""
    (front, _), *rest = State(TinyStore(1), shards=1).snapshot(0)
    kept = [(front | {"lsn": 5}, []), *rest]
    replica = Replica(name="a", incarnation=1, store=TinyStore(1), shards=1, load=lambda folder, shard: kept)
    known = Map(
        version=1,
        servers={"a": Seat(address="", host="a", incarnation=1)},
        chains=(("a",),),
        epochs=(1,),
        learners=((),),
        workers={},
        sources={0: ("folder", 1)},
    )
    replica.on_map(0.0, known, [])
    assert replica.headed[0]
    assert copied(replica, 0) is None
    replica.on_load(0.0)
    parts = copied(replica, 0)
    assert parts is not None
    assert parts[0][0]["lsn"] == 5
