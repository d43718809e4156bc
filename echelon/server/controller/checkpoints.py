"""Checkpoints that heads write and the manifest that makes them one; rows that expire."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from echelon.server.controller.state import Expiring, Ground, Session, Writing
from echelon.server.protocol import wire
from echelon.server.protocol.actions import Action, Manifest, Persist


class Checkpoints(Ground):
    """What servers are asked to do for somebody who waits."""

    def _begin_checkpoint(self, now: float, peer: Hashable, request: int, path: str) -> None:
        if self._writing is not None and self._writing.path == path:
            self._writing.askers.append((peer, request))  # another worker, or the same one after its connection ended
            return
        if self._writing is not None:
            self._refuse(
                peer, request, "ServerError", f"a checkpoint to {self._writing.path} is being written; wait for it"
            )
            return
        if self.map.lost or not all(self.map.chains):
            self._refuse(
                peer,
                request,
                "ShardsLost",
                f"shards {sorted(self.map.lost)[:8]} are lost: a checkpoint would lack them",
            )
            return
        self._numbers += 1
        self._writing = Writing(number=self._numbers, path=path, askers=[(peer, request)])
        self._ask_checkpoint(now)

    def _ask_checkpoint(self, now: float) -> None:
        """Ask heads for the shards that are not written yet; again after a while, since heads change."""
        writing = self._writing
        if writing is None or now < writing.again:
            return
        writing.again = now + 5.0
        wanted: dict[str, list[int]] = {}
        for shard, head in enumerate(self.map.heads):
            if head is not None and shard not in writing.files:
                wanted.setdefault(head, []).append(shard)
        for head, shards in wanted.items():
            peer = self._peer_of("server", head)
            if peer is not None:
                self._send(peer, wire.CHECKPOINT, 0, {"id": writing.number, "path": writing.path, "shards": shards})

    def _written(self, meta: dict[str, Any]) -> None:
        writing = self._writing
        if writing is None or meta["id"] != writing.number:
            return
        if "error" in meta:
            self._give_up("CheckpointError", str(meta["error"]))
            return
        writing.files[int(meta["shard"])] = {key: meta[key] for key in ("file", "sha256", "bytes", "lsn")}
        if len(writing.files) < self.map.shards:
            return
        manifest = {
            "shards": self.map.shards,
            "specs": self.specs,
            "settings": self.settings,
            "count": self.count,
            "files": {str(shard): writing.files[shard] for shard in sorted(writing.files)},
        }
        self._out.append(Manifest(writing.path, manifest))

    def on_manifest(self, error: str | None) -> list[Action]:
        """The manifest is written and the folder has its name; or why not, which ends that checkpoint and nothing else."""
        if error is not None:
            self._give_up("CheckpointError", error)
            return self._actions()
        writing, self._writing = self._writing, None
        assert writing is not None
        self.checkpoint, self.unreadable = writing.path, None
        self._out.append(Persist(self.document()))
        size = sum(each["bytes"] for each in writing.files.values())
        for peer, request in writing.askers:
            self._send(peer, wire.DONE, request, {"path": writing.path, "bytes": size})
        return self._actions()

    def _give_up(self, error: str, why: str) -> None:
        """The checkpoint that is being written will not be."""
        writing, self._writing = self._writing, None
        assert writing is not None
        for peer, request in writing.askers:
            self._refuse(peer, request, error, why)

    def _lack(self, gone: Sequence[int]) -> None:
        """Shards are lost, which a checkpoint that is being written would wait for."""
        if self._writing is not None:
            why = (
                f"{self._writing.path}: shards {gone[:8]} were lost while it was written; write one when they are back"
            )
            self._give_up("ShardsLost", why)

    def _expire(self, peer: Hashable, request: int, meta: dict[str, Any]) -> None:
        table, older = str(meta["table"]), int(meta["older"])
        if older < 0:
            self._refuse(peer, request, "ServerError", f"older: {older}; entries of the log are counted from 0")
            return
        if not any(spec["name"] == table and spec.get("what") == "table" for spec in self.specs):
            self._refuse(peer, request, "ServerError", f"{table}: no table of that name is declared")
            return
        if not self.map.servers:
            self._refuse(
                peer, request, "ServerError", f"{table}: no server is here that has rows of it; start one first"
            )
            return
        self._ask_all(peer, request, {"table": table, "older": older})
        self._ask_expiring()

    def _ask_all(self, peer: Hashable, request: int, meta: dict[str, Any]) -> None:
        """Every server is to expire rows of what it heads, under a number of its own: answers of an earlier asking do not count."""
        self._numbers += 1
        owing: dict[tuple[str, int], Hashable | None] = {
            (name, seat.incarnation): None for name, seat in self.map.servers.items()
        }
        self._expiring[self._numbers] = Expiring(
            peer=peer, request=request, meta=meta | {"of": self._numbers}, owing=owing, epochs=self.map.epochs
        )

    def _ask_expiring(self) -> None:
        """Ask servers that owe an answer, again where their connection is another; whoever waits hears when none does, or cannot any more."""
        asked_again = False
        for number, each in list(self._expiring.items()):
            here = {(name, seat.incarnation) for name, seat in self.map.servers.items()}
            gone = sorted(name for name, life in each.owing.keys() - here)
            if gone:
                del self._expiring[number]
                why = f"{each.meta['table']}: {', '.join(gone)} died meanwhile, old rows of theirs may be there still; expire them again"
                self._refuse(each.peer, each.request, "ServerError", why)
                continue
            if not each.owing:
                del self._expiring[number]
                if self.map.epochs == each.epochs:
                    self._send(each.peer, wire.DONE, each.request, {})
                else:  # an expiry does no harm twice
                    self._ask_all(each.peer, each.request, each.meta)
                    asked_again = True
            for (name, life), asked in each.owing.items():
                peer = self._peer_of("server", name)
                if peer is not None and peer != asked:
                    each.owing[name, life] = peer
                    self._send(peer, wire.EXPIRE, 0, each.meta)
        if asked_again:
            self._ask_expiring()

    def _expired(self, session: Session, number: int) -> None:
        each = self._expiring.get(number)
        if each is not None:
            each.owing.pop((session.name, session.incarnation), None)
            self._ask_expiring()
