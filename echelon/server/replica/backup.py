"""As backup or learner: entries and snapshots of the head that our map names, in their order; those of anyone else are refused."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from echelon.errors import EchelonError
from echelon.server.protocol import wire
from echelon.server.protocol.actions import Note
from echelon.server.protocol.shard_sets import Cover, every, some
from echelon.server.replica.catch_up import Teaching
from echelon.server.replica.shard_state import Diverged

#: Answers to "is this taken" that are kept under one map.
_KEPT = 4096


class Following(Teaching):
    """A backup's side of the links to it."""

    def _hail(self, peer: Hashable, frame: wire.Frame) -> None:
        meta = frame.meta
        if meta["member"] != self.incarnation:
            self._send(
                peer, wire.REFUSED, 0, {"error": "Superseded", "message": f"{self.name} is in life {self.incarnation}"}
            )
            return
        who = (str(meta["head"]), int(meta["incarnation"]))
        # One connection per head: what an older one still brings is not heard.
        for other in [each for each, known in self._heads.items() if known[0] == who[0]]:
            del self._heads[other]
            self._stalled.pop(other, None)
        self._heads[peer] = who
        number = int(meta["link"])
        if self._received.get(who, (0, 0))[0] != number:
            self._received[who] = (number, 0)
            self._refused.pop(who, None)
        answer: dict[str, Any] = {"last": self._received[who][1], "v": self.map.version}
        self._send(peer, wire.HAILED, 0, self._with_refused(who, answer))

    def _with_refused(self, who: tuple[str, int], answer: dict[str, Any]) -> dict[str, Any]:
        """Said until the head asks again how far these shards are: an answer that names them may be lost."""
        if self._refused.get(who):
            answer["refused"] = sorted(self._refused[who])
        return answer

    def _accepts(self, head: str, version: int, cover: Cover) -> np.ndarray:
        """Per shard whether an entry of this head is taken. Kept until the map or `_unloaded` change."""
        key = (head, version, cover)
        known = self._taking.get(key)
        if known is None:
            held = self.map.held_by(self.name) if head != self.name else np.zeros(self.map.shards, bool)
            taken = (held & self.map.headed_by(head) & (self._epochs <= version) & ~self._unloaded)[cover.at]
            if len(self._taking) >= _KEPT:
                self._taking.clear()
            known = self._taking[key] = taken
        return known

    def _follow(self, now: float, peer: Hashable, frame: wire.Frame) -> None:
        meta, kind, who = frame.meta, frame.kind, self._heads[peer]
        head, version = who[0], meta["v"]
        self._answered[head] = now
        if kind == wire.BEAT:
            self._send(peer, wire.BEAT, 0, {"n": meta["n"], "v": self.map.version})
            return
        if kind == wire.SYNC:
            shards = frame.arrays[0]
            shards = shards[self._accepts(head, version, self.covers.of(shards))]
            if who in self._refused:
                self._refused[who] -= set(shards.tolist())
            self._send(
                peer,
                wire.SYNCED,
                0,
                {"v": self.map.version, "of": meta["of"]},
                [shards, self.state.stamp[shards], self.state.lsn[shards]],
            )
            return
        number = meta["n"]
        link, last = self._received[who]
        if number > last:
            if number != last + 1:
                raise wire.WireError(f"message {number} of {head} after {last}")
            self._received[who] = (link, number)
            refused = self._entry(now, head, frame) if kind == wire.ENTRY else self._part(now, head, frame)
            if len(refused):
                self._refused.setdefault(who, set()).update(refused.tolist())
            last = number
        self._send(peer, wire.GOT, 0, self._with_refused(who, {"n": last, "v": self.map.version}))

    def _entry(self, now: float, head: str, outer: wire.Frame) -> np.ndarray:
        """Apply an entry; the shards for which it is not taken."""
        frame = wire.parse(outer.arrays[0])
        only, version = outer.meta.get("only"), outer.meta["v"]
        cover = self.covers.of(frame.arrays[0] if only is None else np.array(only, np.uint16))
        taken = self._accepts(head, version, cover)
        whole = every(taken)
        if whole or some(taken):
            here = cover if whole else cover.part(taken)
            self.counts["entries"] += 1
            if frame.kind == wire.PUSH:
                fresh, gap = self.state.due(frame, here)
                if gap or (fresh is not None and not every(fresh)):
                    raise Diverged(
                        f"push {frame.meta['seq']} of worker {frame.meta['worker']} does not follow here on {here.wire}"
                    )
                void = bool(outer.meta.get("void"))
                try:
                    # Heads keep to the memory's bound; replicas take what their head took, or they would part from it.
                    with self.state.store.unbounded():
                        self.state.push(frame, here, version=version, whole=only is None and whole, void=void)
                except EchelonError as error:
                    raise Diverged(f"{self.name} cannot take what the head took: {error}") from error
                self._floor = None
            else:
                self._enter(frame, here, version)
        return cover.wire[:0] if whole else cover.wire[~taken]

    def _part(self, now: float, head: str, frame: wire.Frame) -> np.ndarray:
        """A part of a snapshot; the shard if it is not taken."""
        meta = frame.meta
        shard = int(meta["shard"])
        one = np.array([shard], np.uint16)
        if not self._accepts(head, meta["v"], self.covers.of(one)).all():
            self._arriving.pop(shard, None)
            return one
        if meta["part"] == 0:
            self._arriving[shard] = []
        parts = self._arriving.get(shard)
        if parts is None or len(parts) != meta["part"]:
            return one
        parts.append((meta["meta"], frame.arrays))
        if len(parts) == meta["parts"]:
            del self._arriving[shard]
            try:
                self.state.install(shard, parts)
            except EchelonError as error:
                # No room here: the shard goes without this replica, which is no reason to take all others with it.
                self.state.drop(shard)
                self._out.append(Note("refused", {"shard": shard, "why": str(error)}))
                return one
            self._floor = None
        return one[:0]
