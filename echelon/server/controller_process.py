"""The controller's process: its state machine, its sockets, its file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, ServerError
from echelon.server import atomic_file
from echelon.server.controller import SERVER_LEASE, Controller
from echelon.server.log import Say, say
from echelon.server.protocol import wire
from echelon.server.protocol.actions import Action, Close, Manifest, Note, Persist, Send
from echelon.server.protocol.auth import WORKER
from echelon.server.protocol.event_loop import Connection, Loop, split

#: Blocks of one dense parameter: a slip of the pen must not take all servers' memory.
LARGEST = 1 << 24


class ControllerProcess:
    """The controller: listens, and writes its document before it answers.

    Where the folder has one already it goes on from there: options that are not that job's are refused, unless this is but a next life
    (`again`) of a controller that was started with them.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        folder: Path,
        bind: str = "127.0.0.1:0",
        shards: int = 256,
        replicas: int = 2,
        expect: int = 1,
        settings: Mapping[str, Any] | None = None,
        lease: float = SERVER_LEASE,
        restore: Path | None = None,
        again: bool = False,
        say: Say = say,
    ) -> None:
        from echelon.server.store import shard_checkpoint

        self._say = say
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "controller.json"
        # One life at a time: what a dying one still writes is read by the next, or never written.
        self._lock = open(folder / "controller.lock", "w")  # noqa: SIM115 (held until the process ends)
        _lock(self._lock, folder)
        document = atomic_file.read(self._file)
        restored = None
        if restore is not None and document is not None and not again:
            raise ServerError(
                f"{folder}: holds a job already, which goes on where it was and is not begun from {restore}; leave out restore to go on "
                "with it, or give a new folder"
            )
        if restore is not None and document is None:
            manifest = shard_checkpoint.verify(
                restore
            )  # before anyone connects: later, a shard that cannot be read is lost
            shards = int(manifest["shards"])
            restored = (str(restore.resolve()), manifest["specs"], int(manifest["count"]))
        self.core = Controller(
            document,
            shards=shards,
            replicas=replicas,
            expect=expect,
            settings=settings,
            now=time.monotonic(),
            lease=lease,
            restore=restored,
        )
        if document is not None and not again:
            _require_same(folder, self.core, {"shards": shards, "replicas": replicas, **(settings or {})})
        self.loop = Loop(self, secret)
        self.address = self.loop.listen(*split(bind))
        self._peers: dict[Any, Connection] = {}
        self._next = 0

    def run(self) -> None:
        """Until told to end."""
        self.loop.run()

    def opened(self, connection: Connection) -> None:
        self._next += 1
        connection.tag = self._next
        self._peers[self._next] = connection

    def received(self, connection: Connection, frame: wire.Frame) -> None:
        if connection.role == WORKER and frame.kind not in _WORKERS:
            self.loop.close(connection)
            return
        if frame.kind == wire.DECLARE and not self._declarable(connection, frame):
            return
        if frame.kind == wire.CHECKPOINT and not self._writable(connection, frame):
            return
        self._do(self.core.on_frame(time.monotonic(), connection.tag, frame))

    def closed(self, connection: Connection) -> None:
        if connection.tag is not None:
            self._peers.pop(connection.tag, None)
            self._do(self.core.on_lost(time.monotonic(), connection.tag))

    def tick(self, now: float) -> None:
        self._do(self.core.on_tick(now))

    def _declarable(self, connection: Connection, frame: wire.Frame) -> bool:
        """A spec that no server could take must not reach the document."""
        from echelon.server.protocol.specs import Dense, spec_from_plain

        try:
            spec = spec_from_plain(frame.meta["spec"], "spec")
            if isinstance(spec, Dense) and spec.blocks > LARGEST:
                raise ServerError(
                    f"{spec.name}.size: {spec.size}; servers hold at most {LARGEST} blocks of one parameter"
                )
        except EchelonError as error:
            refusal = {"error": type(error).__name__, "message": str(error)}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            refusal = {"error": "ServerError", "message": f"DECLARE: {type(error).__name__}: {error}"}
        else:
            return True
        self.loop.send(connection, wire.encode(wire.REFUSED, frame.request, refusal))
        return False

    def _writable(self, connection: Connection, frame: wire.Frame) -> bool:
        """Nothing but a checkpoint may be replaced by one."""
        from echelon.server.store import shard_checkpoint

        try:
            shard_checkpoint.require_room(Path(str(frame.meta["path"])))
        except (EchelonError, KeyError, OSError, ValueError) as error:
            refusal = {"error": "CheckpointError", "message": str(error)}
            self.loop.send(connection, wire.encode(wire.REFUSED, frame.request, refusal))
            return False
        return True

    def _complete(self, action: Manifest) -> str | None:
        """Make a whole checkpoint of what servers wrote; why that cannot be done."""
        from echelon.server.store import shard_checkpoint

        try:
            shard_checkpoint.complete(Path(action.path), action.document)
        except (EchelonError, OSError) as error:
            return (
                f"{action.path}: the checkpoint cannot be completed ({error}); "
                "give a folder that the controller and all servers can write to"
            )
        return None

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                connection = self._peers.get(action.whom)
                if connection is not None:
                    self.loop.send(connection, wire.encode(action.kind, action.request, action.meta, action.arrays))
            elif isinstance(action, Persist):
                try:
                    atomic_file.write(self._file, action.document)
                except OSError as error:
                    # Nobody may hear of what is not on the disk.
                    raise ServerError(
                        f"{self._file}: cannot be written ({error}); the controller ends, make room there and start it again"
                    ) from error
            elif isinstance(action, Manifest):
                self._do(self.core.on_manifest(self._complete(action)))
            elif isinstance(action, Close):
                connection = self._peers.get(action.whom)
                if connection is not None:
                    self.loop.close(connection)
            elif isinstance(action, Note):
                self._say(action.event, action.details)


def _require_same(folder: Path, core: Controller, given: Mapping[str, Any]) -> None:
    """A job has its settings for life: others are refused, and both sides are said."""
    found = {"shards": core.map.shards, "replicas": core.replicas, **core.settings}
    differing = [name for name in given if given[name] != found.get(name)]
    if differing:
        there, here = (", ".join(f"{name}={side.get(name)}" for name in differing) for side in (found, given))
        raise ServerError(
            f"{folder}: holds a job already, with {there}, and {here} is asked for; ask for what it has, or give a new folder"
        )


def _lock(file: Any, folder: Path, patience: float = 5.0) -> None:
    import fcntl

    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{folder}: another controller runs on this folder; end it, or give this one its own"
                ) from None
            time.sleep(0.02)


#: What a worker may ask of the controller.
_WORKERS = {
    wire.JOIN,
    wire.WATCH,
    wire.DECLARE,
    wire.STATUS,
    wire.BEAT,
    wire.LEAVE,
    wire.CHECKPOINT,
    wire.EXPIRE,
}
