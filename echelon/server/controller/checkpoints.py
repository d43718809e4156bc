"""Checkpoints, which heads write and a manifest completes, and the expiry of rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from echelon.errors import ServerError
from echelon.server.controller.state import ControllerState, Expiry, Refusal, Requester, RunningCheckpoint, Session
from echelon.server.protocol import wire
from echelon.server.protocol.actions import WriteManifest


def on_checkpoint(controller: ControllerState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    """CHECKPOINT: write one to a path."""
    path, running = str(frame.meta["path"]), controller.running_checkpoint
    if running is not None and running.path == path:
        running.requesters.append((peer, frame.request_id))  # another worker, or the same one over a new connection
        return
    if running is not None:
        raise ServerError(f"a checkpoint to {running.path} is being written; wait for it")
    if controller.map.lost_shards or not all(controller.map.chains):
        shards = sorted(controller.map.lost_shards)[:8]
        raise Refusal("ShardsLost", f"shards {shards} are lost: a checkpoint would lack them")
    controller.last_request_id += 1
    controller.running_checkpoint = RunningCheckpoint(controller.last_request_id, path, [(peer, frame.request_id)])
    request_shard_files(controller, now)


def request_shard_files(controller: ControllerState, now: float) -> None:
    """Ask heads for the shards that are not written yet; repeatedly, since heads change."""
    checkpoint = controller.running_checkpoint
    if checkpoint is None or now < checkpoint.retry_at:
        return
    checkpoint.retry_at = now + 5.0
    shards_by_head: dict[str, list[int]] = {}
    for shard, head in enumerate(controller.map.heads):
        if head is not None and shard not in checkpoint.files:
            shards_by_head.setdefault(head, []).append(shard)
    for head, shards in shards_by_head.items():
        meta = {"id": checkpoint.checkpoint_id, "path": checkpoint.path, "shards": shards}
        controller.send_to_server(head, wire.CHECKPOINT, meta)


def on_checkpoint_written(controller: ControllerState, now: float, session: Session, frame: wire.Frame) -> None:
    """CHECKPOINT_WRITTEN: a head wrote a shard, or could not."""
    meta, checkpoint = frame.meta, controller.running_checkpoint
    if checkpoint is None or meta["id"] != checkpoint.checkpoint_id:
        return
    if "error" in meta:
        _abort_checkpoint(controller, str(meta["error"]))
        return
    checkpoint.files[int(meta["shard"])] = {key: meta[key] for key in ("file", "sha256", "bytes", "lsn")}
    if len(checkpoint.files) == controller.map.num_shards:
        manifest = {
            "shards": controller.map.num_shards,
            "specs": controller.specs,
            "settings": controller.settings,
            "count": controller.last_incarnation,
            "files": {str(shard): checkpoint.files[shard] for shard in sorted(checkpoint.files)},
        }
        controller.actions.append(WriteManifest(checkpoint.path, manifest))


def complete_checkpoint(controller: ControllerState, error: str | None) -> None:
    """The manifest is written; or it could not be, for this reason, which ends this checkpoint and nothing else."""
    if error is not None:
        _abort_checkpoint(controller, error)
        return
    checkpoint, controller.running_checkpoint = controller.running_checkpoint, None
    assert checkpoint is not None
    controller.last_checkpoint, controller.checkpoint_error = checkpoint.path, None
    controller.persist()
    byte_count = sum(file["bytes"] for file in checkpoint.files.values())
    for peer, request_id in checkpoint.requesters:
        controller.send(peer, wire.DONE, request_id, {"path": checkpoint.path, "bytes": byte_count})


def _abort_checkpoint(controller: ControllerState, message: str, error: str = "CheckpointError") -> None:
    checkpoint, controller.running_checkpoint = controller.running_checkpoint, None
    assert checkpoint is not None
    for requester in checkpoint.requesters:
        controller.refuse(*requester, error, message)


def abort_for_lost_shards(controller: ControllerState, lost_shards: Sequence[int]) -> None:
    """A checkpoint in progress would wait for these shards."""
    if (checkpoint := controller.running_checkpoint) is not None:
        lost = f"{checkpoint.path}: shards {lost_shards[:8]} were lost while it was written"
        _abort_checkpoint(controller, f"{lost}; write a checkpoint once they are back", "ShardsLost")


def on_expire(controller: ControllerState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    """EXPIRE: every server expires the old rows of a table on the shards that it heads."""
    table, older = str(frame.meta["table"]), int(frame.meta["older"])
    if older < 0:
        raise ServerError(f"older: {older}; use 0 or more log entries")
    if not any(spec["name"] == table and spec.get("what") == "table" for spec in controller.specs):
        raise ServerError(f"{table}: no table of that name is declared")
    if not controller.map.servers:
        raise ServerError(f"{table}: there is no server to hold it; start one first")
    _add_expiry(controller, (peer, frame.request_id), {"table": table, "older": older})
    send_expiry_requests(controller)


def _add_expiry(controller: ControllerState, requester: Requester, meta: dict[str, Any]) -> None:
    controller.last_request_id += 1
    number = controller.last_request_id  # of its own each time: late answers to an earlier request do not count
    servers: dict[tuple[str, int], Hashable | None] = dict.fromkeys(controller.live_servers())
    controller.expiries[number] = Expiry(requester, meta | {"of": number}, servers, controller.map.epochs)


def send_expiry_requests(controller: ControllerState) -> None:
    """Ask the servers that have yet to answer, again over a new connection; answer requests that are complete or cannot be."""
    was_repeated, live_servers = False, controller.live_servers()
    for number, expiry in list(controller.expiries.items()):
        if dead := sorted(name for name, _ in expiry.unanswered.keys() - live_servers):
            del controller.expiries[number]
            problem = f"{', '.join(dead)} died meanwhile, and may leave old rows"
            controller.refuse(*expiry.requester, "ServerError", f"{expiry.meta['table']}: {problem}; expire again")
            continue
        if not expiry.unanswered:
            del controller.expiries[number]
            if controller.map.epochs == expiry.epochs:
                peer, request_id = expiry.requester
                controller.send(peer, wire.DONE, request_id, {})
            else:  # expiring twice does no harm
                _add_expiry(controller, expiry.requester, expiry.meta)
                was_repeated = True
        for (name, incarnation), asked_peer in expiry.unanswered.items():
            peer = controller.find_peer("server", name)
            if peer is not None and peer != asked_peer:
                expiry.unanswered[name, incarnation] = peer
                controller.send(peer, wire.EXPIRE, 0, expiry.meta)
    if was_repeated:
        send_expiry_requests(controller)


def on_expired(controller: ControllerState, session: Session, number: int) -> None:
    """DONE: a server expired its rows."""
    if expiry := controller.expiries.get(number):
        expiry.unanswered.pop((session.name, session.incarnation), None)
        send_expiry_requests(controller)
