"""As head: bringing other replicas to where we are (who is how far, snapshots, learners that catch up), and handing shards over."""

from __future__ import annotations

import numpy as np

from echelon.server.protocol import wire
from echelon.server.protocol.actions import LINK, Close
from echelon.server.replica.pushes import Pushes
from echelon.server.replica.replica_link import Link, Moving
from echelon.server.replica.shard_state import Diverged

#: A drained shard whose new head does not come (the controller died) is served again after this.
DRAIN_LIMIT = 1.0


class Teaching(Pushes):
    """A head's links."""

    def _answer(self, now: float, link: Link, frame: wire.Frame) -> None:
        meta, kind = frame.meta, frame.kind
        if kind == wire.BEHIND:
            if meta["version"] < self.map.version:
                self._link(link.server, wire.GRANT, {"map": self.map.document(), "specs": self.specs})
            return
        if kind == wire.REFUSED:
            self._out.append(Close(LINK, link.server))
            return
        current = meta["v"] <= self.map.version
        link.newest = max(link.newest, meta["v"])
        if not current and self._asked < meta["v"]:
            self._asked = meta["v"]
            self._link(link.server, wire.BEHIND, {"version": self.map.version})
        if kind == wire.HAILED:
            if meta.get("refused"):
                link.refused[meta["refused"]] = True
            # Not up before that: what follows from it is numbered behind what is sent again, and goes out behind it.
            self._got(now, link, meta["last"], current)
            link.up, link.down = True, float("inf")
            for sent in link.sent:
                self._link(link.server, sent.kind, sent.meta, sent.arrays)
            self._ask(link)
        elif kind == wire.GOT:
            if meta.get("refused"):
                link.refused[meta["refused"]] = True
            self._got(now, link, meta["n"], current)
        elif kind == wire.SYNCED:
            self._compare(now, link, frame)
        elif kind == wire.BEAT:
            while link.beats and link.beats[0][0] <= meta["n"]:
                _, at = link.beats.popleft()
                if current:
                    link.heard = max(link.heard, at)
            if self._pulls:
                self._again(now)
        self._pump(now, link)

    def _got(self, now: float, link: Link, number: int, current: bool) -> None:
        """Everything up to a number is there."""
        if number > link.made:
            raise Diverged(f"{link.server} has message {number} of {link.made}")
        link.got = max(link.got, number)
        while link.sent and link.sent[0].number <= number:
            sent = link.sent.popleft()
            if current:
                link.heard = max(link.heard, sent.at)
        while link.waiting and link.waiting[0][0] <= number:
            _, waiting = link.waiting.popleft()
            if waiting.needs.pop(link.server, None) is not None and not waiting.needs:
                self._settle(waiting)
        if link.moving is not None:
            self._fed(now, link, link.moving, number)
        for shard, mark in [each for each in link.catching if each[1] <= number]:
            link.catching.remove((shard, mark))
            if not link.refused[shard]:
                self._caughtup(link, shard)
        if self._drains:
            self._drained()

    def _ask(self, link: Link) -> None:
        """Ask how far the replica is with shards of which we do not know it."""
        unknown = (link.backup | link.learner) & ~link.flowing & ~link.asked & ~self._unloaded
        unknown[list(link.todo)] = False
        if link.moving is not None:
            unknown[link.moving.shard] = False
        shards = np.flatnonzero(unknown)
        if link.up and len(shards):
            link.asked[shards] = True
            self._link(
                link.server, wire.SYNC, {"v": self.map.version, "of": self.map.version}, [shards.astype(np.uint16)]
            )

    def _compare(self, now: float, link: Link, frame: wire.Frame) -> None:
        shards, stamps, lsns = frame.arrays
        if frame.meta["of"] != self.map.version:
            return  # asked again since
        for shard, stamp, lsn in zip(shards.tolist(), stamps.tolist(), lsns.tolist(), strict=True):
            if not link.asked[shard]:
                continue
            link.asked[shard] = link.refused[shard] = False
            if lsn == self.state.lsn[shard] and stamp == self.state.stamp[shard]:
                link.flowing[shard] = True
                self._equal(now, link, shard)
            elif link.backup[shard]:
                link.todo.appendleft(shard)
            else:
                link.todo.append(shard)
        self._readiness()
        self._enrol(now)
        self._commit(now)
        self._again(now)

    def _equal(self, now: float, link: Link, shard: int) -> None:
        """A replica has what we have of a shard, but for entries under way."""
        link.synced[shard] = True
        if link.learner[shard]:
            # From here on nothing is acknowledged without it; once it has what was sent before, it lacks nothing.
            link.required[shard] = True
            link.catching.append((shard, link.made))
            if link.got >= link.made:
                self._got(now, link, link.got, False)
        else:
            self._readiness()
            self._unpark()
            self._enrol(now)
            self._commit(now)
            self._again(now)

    def _pump(self, now: float, link: Link) -> None:
        """Begin the next snapshot, if one is due and none is under way. Those of backups are due at once: pushes wait for them."""
        if link.up and link.todo and link.moving is None and (now >= link.resume or link.backup[link.todo[0]]):
            shard = link.todo.popleft()
            link.moving = Moving(shard, self.state.snapshot(shard))
            link.began = now
            self._feed(now, link, link.moving)

    def _feed(self, now: float, link: Link, moving: Moving) -> None:
        """Send the next parts of a snapshot; behind the last one what was pushed meanwhile."""
        while moving.parts and len(moving.unanswered) < self.parts:
            place, meta, arrays = moving.parts.popleft()
            head = {"v": self.map.version, "shard": moving.shard, "part": place, "parts": moving.total, "meta": meta}
            moving.unanswered.append(self._number(now, link, wire.SNAPSHOT, head, arrays))
        if not moving.parts and moving.number is None:
            moving.number = moving.unanswered[-1]
            link.flowing[moving.shard] = True
            for meta, arrays in moving.later:
                self._number(now, link, wire.ENTRY, meta, arrays)
            moving.later = []

    def _fed(self, now: float, link: Link, moving: Moving, number: int) -> None:
        """Everything up to a number is there."""
        while moving.unanswered and moving.unanswered[0] <= number:
            moving.unanswered.popleft()
        self._feed(now, link, moving)
        if moving.number is None or moving.number > number:
            return
        link.moving = None
        # As long a pause as the snapshot took: others use the link too.
        link.resume = now + min(now - link.began, 1.0)
        if not link.refused[moving.shard]:
            self._equal(now, link, moving.shard)

    def _caughtup(self, link: Link, shard: int) -> None:
        self._tell(
            wire.CAUGHTUP,
            {"shard": shard, "learner": link.server, "incarnation": link.incarnation, "version": self.map.version},
        )
        if self._drains:
            self._drained()

    def _hand_over(self, now: float, shards: np.ndarray) -> None:
        """Take no more pushes for these shards, and tell the controller when everything on them is answered."""
        self.draining[shards] = True
        self._readiness()
        self._drains.append((now + DRAIN_LIMIT, shards, False))
        self._drained()

    def _drained(self) -> None:
        """Tell the controller of shards on which everything is answered."""
        for place, (limit, shards, told) in enumerate(self._drains):
            if told or not len(shards):
                continue
            if all(link.got == link.made or not link.needed(self.covers.these(shards)) for link in self.links.values()):
                self._drains[place] = (limit, shards, True)
                self._tell(wire.DRAINED, {"shards": shards.tolist(), "version": self.map.version})
