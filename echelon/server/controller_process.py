"""The controller's process: its state machine, its sockets, its file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, ServerError
from echelon.server import atomic_file
from echelon.server.controller import events
from echelon.server.controller.state import SERVER_LEASE, ControllerState, open_controller
from echelon.server.log import EventLogger, log_event
from echelon.server.protocol import wire
from echelon.server.protocol.actions import Action, Persist, WriteManifest, perform
from echelon.server.protocol.auth import WORKER
from echelon.server.protocol.event_loop import Connection, EventLoop, parse_address

#: Blocks of one dense parameter: a slip of the pen must not take all servers' memory.
MAX_DENSE_BLOCKS = 1 << 24


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
        is_restart: bool = False,
        log: EventLogger = log_event,
    ) -> None:
        from echelon.server.store import shard_checkpoint

        self._log_event = log
        folder.mkdir(parents=True, exist_ok=True)
        self._document_path = folder / "controller.json"
        # One life at a time: what a dying one still writes is read by the next, or never written.
        self._lock_file = open(folder / "controller.lock", "w")  # noqa: SIM115 (held until the process ends)
        _lock_folder(self._lock_file, folder)
        document = atomic_file.read_json(self._document_path)
        restored_state = None
        if restore is not None and document is not None and not is_restart:
            raise ServerError(
                f"{folder}: holds a job already, which goes on where it was and is not begun from {restore}; leave out restore to go on "
                "with it, or give a new folder"
            )
        if restore is not None and document is None:
            manifest = shard_checkpoint.verify_checkpoint(
                restore
            )  # before anyone connects: later, a shard that cannot be read is lost
            shards = int(manifest["shards"])
            restored_state = (str(restore.resolve()), manifest["specs"], int(manifest["count"]))
        self.controller = open_controller(
            document,
            num_shards=shards,
            replicas=replicas,
            expect=expect,
            settings=settings,
            now=time.monotonic(),
            lease=lease,
            restore=restored_state,
        )
        if document is not None and not is_restart:
            _check_same_settings(folder, self.controller, {"shards": shards, "replicas": replicas, **(settings or {})})
        self.loop = EventLoop(self, secret)
        self.address = self.loop.listen(*parse_address(bind))
        self._peers: dict[Any, Connection] = {}
        self._last_peer_id = 0

    def run(self) -> None:
        """Until told to end."""
        self.loop.run()

    def on_open(self, connection: Connection) -> None:
        self._last_peer_id += 1
        connection.tag = self._last_peer_id
        self._peers[self._last_peer_id] = connection

    def on_frame(self, connection: Connection, frame: wire.Frame) -> None:
        if connection.role == WORKER and frame.kind not in _WORKER_REQUESTS:
            self.loop.close(connection)
            return
        if frame.kind == wire.DECLARE and not self._check_declaration(connection, frame):
            return
        if frame.kind == wire.CHECKPOINT and not self._check_checkpoint_target(connection, frame):
            return
        self._perform(events.on_frame(self.controller, time.monotonic(), connection.tag, frame))

    def on_close(self, connection: Connection) -> None:
        if connection.tag is not None:
            self._peers.pop(connection.tag, None)
            self._perform(events.on_peer_lost(self.controller, time.monotonic(), connection.tag))

    def on_tick(self, now: float) -> None:
        self._perform(events.on_tick(self.controller, now))

    def _check_declaration(self, connection: Connection, frame: wire.Frame) -> bool:
        """A spec that no server could take must not reach the document."""
        from echelon.server.protocol.specs import Dense, spec_from_plain

        try:
            spec = spec_from_plain(frame.meta["spec"], "spec")
            if isinstance(spec, Dense) and spec.blocks > MAX_DENSE_BLOCKS:
                raise ServerError(
                    f"{spec.name}.size: {spec.size}; servers hold at most {MAX_DENSE_BLOCKS} blocks of one parameter"
                )
        except EchelonError as error:
            refusal = {"error": type(error).__name__, "message": str(error)}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            refusal = {"error": "ServerError", "message": f"DECLARE: {type(error).__name__}: {error}"}
        else:
            return True
        self.loop.send(connection, wire.encode(wire.REFUSED, frame.request_id, refusal))
        return False

    def _check_checkpoint_target(self, connection: Connection, frame: wire.Frame) -> bool:
        """Nothing but a checkpoint may be replaced by one."""
        from echelon.server.store import shard_checkpoint

        try:
            shard_checkpoint.check_target_folder(Path(str(frame.meta["path"])))
        except (EchelonError, KeyError, OSError, ValueError) as error:
            refusal = {"error": "CheckpointError", "message": str(error)}
            self.loop.send(connection, wire.encode(wire.REFUSED, frame.request_id, refusal))
            return False
        return True

    def _complete_checkpoint(self, action: WriteManifest) -> str | None:
        """Make a whole checkpoint of what servers wrote; why that cannot be done."""
        from echelon.server.store import shard_checkpoint

        try:
            shard_checkpoint.complete_checkpoint(Path(action.path), action.document)
        except (EchelonError, OSError) as error:
            return (
                f"{action.path}: the checkpoint cannot be completed ({error}); "
                "give a folder that the controller and all servers can write to"
            )
        return None

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Persist):
                self._persist(action.document)
            elif isinstance(action, WriteManifest):
                self._perform(events.on_manifest(self.controller, self._complete_checkpoint(action)))
            else:
                perform((action,), self.loop, self._connection_to, self._log_event)

    def _connection_to(self, channel: str, peer: Any) -> Connection | None:
        return self._peers.get(peer)

    def _persist(self, document: Mapping[str, Any]) -> None:
        try:
            atomic_file.write_json(self._document_path, document)
        except OSError as error:
            # Nobody may hear of what is not on the disk.
            raise ServerError(
                f"{self._document_path}: cannot be written ({error}); the controller ends, make room and start it again"
            ) from error


def _check_same_settings(folder: Path, controller: ControllerState, requested: Mapping[str, Any]) -> None:
    """A job has its settings for life: others are refused, and both sides are said."""
    existing = controller.job_settings()
    differing = [name for name in requested if requested[name] != existing.get(name)]
    if differing:
        existing_text, requested_text = (
            ", ".join(f"{name}={settings.get(name)}" for name in differing) for settings in (existing, requested)
        )
        raise ServerError(
            f"{folder}: holds a job already, with {existing_text}, and {requested_text} is asked for; ask for what it has, or give a new folder"
        )


def _lock_folder(file: Any, folder: Path, timeout: float = 5.0) -> None:
    import fcntl

    deadline = time.monotonic() + timeout
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
_WORKER_REQUESTS = {
    wire.JOIN,
    wire.WATCH,
    wire.DECLARE,
    wire.STATUS,
    wire.HEARTBEAT,
    wire.LEAVE,
    wire.CHECKPOINT,
    wire.EXPIRE,
}
