"""Checkpoints that heads write and the manifest that makes them one; rows that expire."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from echelon.server.controller.state import ControllerState, MemberSession, PendingExpiry, RunningCheckpoint
from echelon.server.protocol import wire
from echelon.server.protocol.actions import Action, Persist, WriteManifest


class Checkpoints(ControllerState):
    """What servers are asked to do for somebody who waits."""

    def _begin_checkpoint(self, now: float, peer: Hashable, request_id: int, path: str) -> None:
        if self._running_checkpoint is not None and self._running_checkpoint.path == path:
            self._running_checkpoint.requesters.append(
                (peer, request_id)
            )  # another worker, or the same one after its connection ended
            return
        if self._running_checkpoint is not None:
            self._refuse(
                peer,
                request_id,
                "ServerError",
                f"a checkpoint to {self._running_checkpoint.path} is being written; wait for it",
            )
            return
        if self.map.lost_shards or not all(self.map.chains):
            self._refuse(
                peer,
                request_id,
                "ShardsLostError",
                f"shards {sorted(self.map.lost_shards)[:8]} are lost: a checkpoint would lack them",
            )
            return
        self._last_request_id += 1
        self._running_checkpoint = RunningCheckpoint(
            checkpoint_id=self._last_request_id, path=path, requesters=[(peer, request_id)]
        )
        self._request_shard_files(now)

    def _request_shard_files(self, now: float) -> None:
        """Ask heads for the shards that are not written yet; again after a while, since heads change."""
        checkpoint = self._running_checkpoint
        if checkpoint is None or now < checkpoint.retry_at:
            return
        checkpoint.retry_at = now + 5.0
        shards_by_head: dict[str, list[int]] = {}
        for shard, head in enumerate(self.map.heads):
            if head is not None and shard not in checkpoint.files:
                shards_by_head.setdefault(head, []).append(shard)
        for head, shards in shards_by_head.items():
            peer = self._find_peer("server", head)
            if peer is not None:
                self._send(
                    peer,
                    wire.CHECKPOINT,
                    0,
                    {"id": checkpoint.checkpoint_id, "path": checkpoint.path, "shards": shards},
                )

    def _on_checkpoint_written(self, meta: dict[str, Any]) -> None:
        checkpoint = self._running_checkpoint
        if checkpoint is None or meta["id"] != checkpoint.checkpoint_id:
            return
        if "error" in meta:
            self._abort_checkpoint("CheckpointError", str(meta["error"]))
            return
        checkpoint.files[int(meta["shard"])] = {key: meta[key] for key in ("file", "sha256", "bytes", "lsn")}
        if len(checkpoint.files) < self.map.num_shards:
            return
        manifest = {
            "shards": self.map.num_shards,
            "specs": self.specs,
            "settings": self.settings,
            "count": self.last_incarnation,
            "files": {str(shard): checkpoint.files[shard] for shard in sorted(checkpoint.files)},
        }
        self._queued_actions.append(WriteManifest(checkpoint.path, manifest))

    def on_manifest(self, error: str | None) -> list[Action]:
        """The manifest is written and the folder has its name; or why not, which ends that checkpoint and nothing else."""
        if error is not None:
            self._abort_checkpoint("CheckpointError", error)
            return self._take_actions()
        checkpoint, self._running_checkpoint = self._running_checkpoint, None
        assert checkpoint is not None
        self.last_checkpoint, self.checkpoint_error = checkpoint.path, None
        self._queued_actions.append(Persist(self.to_document()))
        byte_count = sum(file["bytes"] for file in checkpoint.files.values())
        for peer, request_id in checkpoint.requesters:
            self._send(peer, wire.DONE, request_id, {"path": checkpoint.path, "bytes": byte_count})
        return self._take_actions()

    def _abort_checkpoint(self, error: str, message: str) -> None:
        """The checkpoint that is being written will not be."""
        checkpoint, self._running_checkpoint = self._running_checkpoint, None
        assert checkpoint is not None
        for peer, request_id in checkpoint.requesters:
            self._refuse(peer, request_id, error, message)

    def _abort_for_lost_shards(self, lost_shards: Sequence[int]) -> None:
        """Shards are lost, which a checkpoint that is being written would wait for."""
        if self._running_checkpoint is not None:
            message = f"{self._running_checkpoint.path}: shards {lost_shards[:8]} were lost while it was written; write one when they are back"
            self._abort_checkpoint("ShardsLostError", message)

    def _begin_expiry(self, peer: Hashable, request_id: int, meta: dict[str, Any]) -> None:
        table, older = str(meta["table"]), int(meta["older"])
        if older < 0:
            self._refuse(peer, request_id, "ServerError", f"older: {older}; entries of the log are counted from 0")
            return
        if not any(spec["name"] == table and spec.get("what") == "table" for spec in self.specs):
            self._refuse(peer, request_id, "ServerError", f"{table}: no table of that name is declared")
            return
        if not self.map.servers:
            self._refuse(
                peer, request_id, "ServerError", f"{table}: no server is here that has rows of it; start one first"
            )
            return
        self._add_expiry(peer, request_id, {"table": table, "older": older})
        self._send_expiry_requests()

    def _add_expiry(self, peer: Hashable, request_id: int, meta: dict[str, Any]) -> None:
        """Every server is to expire rows of what it heads, under a number of its own: answers of an earlier asking do not count."""
        self._last_request_id += 1
        owing: dict[tuple[str, int], Hashable | None] = {
            (name, entry.incarnation): None for name, entry in self.map.servers.items()
        }
        self._expiries[self._last_request_id] = PendingExpiry(
            peer=peer,
            request_id=request_id,
            meta=meta | {"of": self._last_request_id},
            unanswered=owing,
            epochs=self.map.epochs,
        )

    def _send_expiry_requests(self) -> None:
        """Ask servers that owe an answer, again where their connection is another; whoever waits hears when none does, or cannot any more."""
        was_repeated = False
        for number, expiry in list(self._expiries.items()):
            live_servers = {(name, entry.incarnation) for name, entry in self.map.servers.items()}
            dead_servers = sorted(name for name, incarnation in expiry.unanswered.keys() - live_servers)
            if dead_servers:
                del self._expiries[number]
                message = f"{expiry.meta['table']}: {', '.join(dead_servers)} died meanwhile, old rows of theirs may be there still; expire them again"
                self._refuse(expiry.peer, expiry.request_id, "ServerError", message)
                continue
            if not expiry.unanswered:
                del self._expiries[number]
                if self.map.epochs == expiry.epochs:
                    self._send(expiry.peer, wire.DONE, expiry.request_id, {})
                else:  # an expiry does no harm twice
                    self._add_expiry(expiry.peer, expiry.request_id, expiry.meta)
                    was_repeated = True
            for (name, incarnation), asked_peer in expiry.unanswered.items():
                peer = self._find_peer("server", name)
                if peer is not None and peer != asked_peer:
                    expiry.unanswered[name, incarnation] = peer
                    self._send(peer, wire.EXPIRE, 0, expiry.meta)
        if was_repeated:
            self._send_expiry_requests()

    def _on_expired(self, session: MemberSession, number: int) -> None:
        expiry = self._expiries.get(number)
        if expiry is not None:
            expiry.unanswered.pop((session.name, session.incarnation), None)
            self._send_expiry_requests()
