"""The controller's process: its state machine, its sockets, its document."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.errors import DocumentError, EchelonError, ServerError
from echelon.files import acquire_lock, atomic_write
from echelon.server.controller import events
from echelon.server.controller.state import SERVER_LEASE, open_controller
from echelon.server.log import EventLogger, log_event
from echelon.server.protocol import wire
from echelon.server.protocol.actions import Action, Persist, WriteManifest, perform
from echelon.server.protocol.auth import WORKER
from echelon.server.protocol.event_loop import Connection, EventLoop
from echelon.server.protocol.specs import Dense, spec_from_plain
from echelon.server.store import shard_checkpoint

DOCUMENT_NAME = "controller.json"
#: Blocks of one dense parameter: a typing mistake must not take all servers' memory.
MAX_DENSE_BLOCKS = 1 << 24
#: Requests of workers.
_WORKER_REQUESTS = (
    wire.JOIN, wire.WATCH, wire.DECLARE, wire.STATUS, wire.HEARTBEAT, wire.LEAVE, wire.CHECKPOINT, wire.EXPIRE,
)  # fmt: skip


class ControllerProcess:
    """The controller. It writes its document before it answers.

    If the folder has a document, its job continues: other settings are refused, unless a controller that was started with them is restarted
    (`is_restart`).
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
        self._log_event = log
        folder.mkdir(parents=True, exist_ok=True)
        self._document_path = folder / DOCUMENT_NAME
        try:
            # Until the process ends, so that a successor reads what a dying controller still writes.
            self._lock = acquire_lock(folder / "controller.lock", timeout=5.0)
        except TimeoutError:
            raise ServerError(f"{folder}: another controller uses it; stop that one, or give another folder") from None
        document, restored_state = read_document(self._document_path), None
        if restore is not None and document is not None and not is_restart:
            advice = "leave out restore to continue it, or give a new folder"
            raise ServerError(f"{folder}: holds a job already, which cannot begin from {restore}; {advice}")
        if restore is not None and document is None:
            # Verified before anyone connects: later, a shard that cannot be read is lost.
            manifest = shard_checkpoint.verify_checkpoint(restore)
            shards = int(manifest["shards"])
            restored_state = (str(restore.resolve()), manifest["specs"], int(manifest["count"]))
        self.controller = open_controller(
            document, num_shards=shards, replicas=replicas, expect=expect, settings=settings, now=time.monotonic(),
            lease=lease, restore=restored_state,
        )  # fmt: skip
        if document is not None and not is_restart:
            requested = {"shards": shards, "replicas": replicas, **(settings or {})}
            _check_same_settings(folder, self.controller.job_settings(), requested)
        self.loop = EventLoop(self, secret)
        self.address = self.loop.listen(bind)

    def run(self) -> None:
        self.loop.run()

    def on_open(self, connection: Connection) -> None: ...

    def on_frame(self, connection: Connection, frame: wire.Frame) -> None:
        if connection.role == WORKER and frame.kind not in _WORKER_REQUESTS:
            self.loop.close(connection)
        elif (refusal := _find_refusal(frame)) is not None:
            self.loop.send(connection, wire.encode(wire.REFUSED, frame.request_id, refusal))
        else:
            self._perform(events.on_frame(self.controller, time.monotonic(), connection.tag, frame))

    def on_close(self, connection: Connection) -> None:
        if connection.tag is not None:
            self._perform(events.on_peer_lost(self.controller, time.monotonic(), connection.tag))

    def on_tick(self, now: float) -> None:
        self._perform(events.on_tick(self.controller, now))

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Persist):
                self._persist(action.document)
            elif isinstance(action, WriteManifest):
                self._perform(events.on_manifest(self.controller, _complete_checkpoint(action)))
            else:
                perform((action,), self.loop, lambda _, peer: self.loop.peers.get(peer), self._log_event)

    def _persist(self, document: Mapping[str, Any]) -> None:
        try:
            atomic_write(self._document_path, json.dumps(document, separators=(",", ":")))
        except OSError as error:
            # Nobody may hear of what is not on disk.
            advice = "the controller ends, make room and start it again"
            raise ServerError(f"{self._document_path}: cannot be written ({error}); {advice}") from error


def read_document(path: Path) -> dict[str, Any] | None:
    """A controller's document, or None if there is none."""
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DocumentError(f"{path}: {error}; not a controller's document, or damaged") from None
    if not isinstance(document, dict):
        raise DocumentError(f"{path}: not a JSON object, so not a controller's document")
    return document


def _check_same_settings(folder: Path, existing: Mapping[str, Any], requested: Mapping[str, Any]) -> None:
    names = [name for name in requested if requested[name] != existing.get(name)]
    if names:
        have, want = (", ".join(f"{name}={values.get(name)}" for name in names) for values in (existing, requested))
        raise ServerError(f"{folder}: holds a job with {have}, but {want} was requested; use those or a new folder")


def _find_refusal(frame: wire.Frame) -> dict[str, str] | None:
    """Why a request is refused before it can reach the document: a spec that no server can hold, or a folder with other files."""
    try:
        if frame.kind == wire.DECLARE:
            spec = spec_from_plain(frame.meta["spec"], "spec")
            if isinstance(spec, Dense) and spec.blocks > MAX_DENSE_BLOCKS:
                raise ServerError(f"{spec.name}.size: {spec.size}; servers hold at most {MAX_DENSE_BLOCKS} blocks")
        elif frame.kind == wire.CHECKPOINT:
            shard_checkpoint.check_target_folder(Path(str(frame.meta["path"])))
    except EchelonError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        message = f"{wire.KIND_NAMES[frame.kind]}: {type(error).__name__}: {error}"
        return {"error": "ServerError", "message": message}
    return None


def _complete_checkpoint(action: WriteManifest) -> str | None:
    """Complete a checkpoint that servers wrote; why it cannot be completed, if so."""
    try:
        shard_checkpoint.complete_checkpoint(Path(action.path), action.document)
    except (EchelonError, OSError) as error:
        advice = "give a folder that the controller and all servers can write to"
        return f"{action.path}: the checkpoint cannot be completed ({error}); {advice}"
    return None
