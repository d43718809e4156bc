"""As head: entries of a shard's log on their way to the other replicas, and who waits until all of them have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from echelon.server.protocol import wire
from echelon.server.protocol.shard_sets import Cover, every, some
from echelon.server.replica.replica_link import Link, Moving, Sent, Waiting
from echelon.server.replica.state import Ground


class Entries(Ground):
    """The log."""

    def _forward(self, now: float, frame: wire.Frame, here: Cover, *, whole: bool, void: bool = False) -> None:
        for link in self.links.values():
            if link.moving is not None and link.moving.number is None:
                self._later(link.moving, frame, here, void)
            flowing = link.flowing[here.at]
            whole_there = every(flowing)
            if not whole_there and not some(flowing):
                continue
            meta: dict[str, Any] = {"v": self.map.version}
            if void:
                meta["void"] = True
            if not whole or not whole_there:
                meta["only"] = here.wire[flowing].tolist()
            self._number(now, link, wire.ENTRY, meta, [frame.raw])

    def _later(self, moving: Moving, frame: wire.Frame, here: Cover, void: bool) -> None:
        """An entry of a shard of which a replica does not have the whole snapshot yet."""
        if (here.shards == moving.shard).any():
            meta: dict[str, Any] = {"v": self.map.version, "only": [moving.shard]}
            if void:
                meta["void"] = True
            moving.later.append((meta, [frame.raw]))

    def _number(self, now: float, link: Link, kind: int, meta: dict[str, Any], arrays: Sequence[np.ndarray]) -> int:
        link.made += 1
        meta["n"] = link.made
        link.sent.append(Sent(link.made, kind, meta, arrays, now))
        if link.up:
            self._link(link.server, kind, meta, arrays)
        return link.made

    def _wait(self, waiting: Waiting) -> None:
        """Answer a worker when all that it takes is there."""
        for link in self.links.values():
            if link.got < link.made and link.needed(waiting.cover):
                waiting.needs[link.server] = link.made
                link.waiting.append((link.made, waiting))
        if not waiting.needs:
            self._settle(waiting)

    def _settle(self, waiting: Waiting) -> None:
        version, cover = self.map.version, waiting.cover
        for link in self.links.values():
            if link.lacks(cover) or (link.newest > version and link.needed(cover)):
                self._parked.append(waiting)
                return
        if waiting.peer is not None:
            kind, meta = waiting.answer
            self._send(waiting.peer, kind, waiting.request, meta)

    def _unpark(self) -> None:
        parked, self._parked = self._parked, []
        for waiting in parked:
            if not waiting.needs:
                self._settle(waiting)

    def _log(self, now: float, kind: int, meta: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
        """An entry of the head's own."""
        frame = wire.parse(wire.joined(wire.encode(kind, 0, meta, arrays)))
        cover = self.covers.of(frame.arrays[0])
        self._enter(frame, cover, self.map.version)
        self._forward(now, frame, cover, whole=True)

    def _enter(self, frame: wire.Frame, cover: Cover, version: int) -> None:
        if frame.kind == wire.COMMIT:
            self.state.commit(frame, cover, version=version)
        elif frame.kind == wire.ENROL:
            self.state.enrol(frame, cover, version=version)
            self._floor = None
        elif frame.kind == wire.EXPIRE:
            self.state.expire(frame, cover, version=version)
        elif frame.kind == wire.FORGET:
            self.state.forget(frame, cover, version=version)
        else:
            raise wire.WireError(f"an entry of kind {wire.NAMES.get(frame.kind, frame.kind)}")
