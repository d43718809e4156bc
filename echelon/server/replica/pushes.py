"""As head: a worker's push is checked, ordered, applied, forwarded; or it waits, or is refused."""

from __future__ import annotations

from collections.abc import Hashable

from echelon.errors import EchelonError
from echelon.server.protocol import wire
from echelon.server.protocol.shard_sets import Cover, every, some
from echelon.server.protocol.specs import StoreError, check_rate
from echelon.server.replica.reads import Reads
from echelon.server.replica.replica_link import Waiting
from echelon.server.replica.shard_state import Diverged, named
from echelon.server.replica.state import MALFORMED


class Pushes(Reads):
    """Taking pushes, and trying again what waits."""

    def _checked_push(self, frame: wire.Frame) -> Cover:
        cover = self._checked(frame)
        meta = frame.meta
        for name in ("incarnation", "seq", "step"):
            if type(meta[name]) is not int or not 0 <= meta[name] < 1 << 62:
                raise wire.WireError(f"PUSH: {name} {meta[name]!r} is no number from 0")
        if type(meta["worker"]) is not str or type(meta["ops"]) is not list:
            raise wire.WireError("PUSH: a worker's name and a list of operations are expected")
        if meta.get("lr"):
            try:
                for name, rate in meta["lr"].items():
                    check_rate(name, rate)
            except StoreError as error:
                raise wire.WireError(f"PUSH: {error}") from error
        if len(meta["ops"]) > 1:
            names = [named(op) for op in meta["ops"]]
            if len(set(names)) < len(names):
                raise wire.WireError("PUSH: one operation per table or dense parameter")
        return cover

    def _push(self, now: float, peer: Hashable, frame: wire.Frame, cover: Cover) -> bool:
        """Take a push, or refuse it; False: it must wait."""
        meta = frame.meta
        if not every(self.ready[cover.at]):
            if every(self.headed[cover.at]) or meta["version"] > self.map.version:
                return False
            self._stale(peer, frame)
            return True
        if self._doubtful(now, cover):
            return False
        if self.map.workers.get(meta["worker"], 0) > meta["incarnation"]:
            why = f"worker {meta['worker']} was started again, or another has its name; this one is its former life. Give each worker a name of its own (worker=)"
            self._refuse(peer, frame, "Superseded", why)
            return True
        if meta["incarnation"] <= self.map.horizon and self.map.over(meta["incarnation"]):
            why = f"worker {meta['worker']} was away for so long that it was given up; start it anew"
            self._refuse(peer, frame, "Superseded", why)
            return True
        fresh, gap = self.state.due(frame, cover)
        if gap:
            return False
        answer = (wire.ACK, {"seq": meta["seq"]})
        new = fresh is None or some(fresh)
        if fresh is not None and self.state.refused_before(frame, cover):
            why = f"push {meta['seq']} was refused before, and its answer lost; nothing of it was applied"
            answer = (wire.REFUSED, {"error": "ServerError", "message": why})
        if new:
            here = cover if fresh is None else cover.part(fresh)
            void = False
            try:
                self.state.push(frame, here, version=self.map.version, whole=fresh is None, void=False)
            except Diverged:
                raise
            except EchelonError as error:
                # Counted, on all replicas, or the next one would wait for it.
                self.state.push(frame, here, version=self.map.version, whole=fresh is None, void=True)
                void, answer = True, (wire.REFUSED, {"error": type(error).__name__, "message": str(error)})
                self.counts["refused"] += 1
            self.counts["pushes"] += 1
            self._forward(now, frame, here, whole=fresh is None, void=void)
        self._wait(Waiting(peer, frame.request, cover, answer))
        if new:
            self._floor = (
                None  # also without a tick: on shards out of a checkpoint a worker counts from its first push on
            )
            if meta.get("tick"):
                self._ticked(now)
        return True

    def _ticked(self, now: float) -> None:
        """A clock moved: what waited for it goes on."""
        if self.state.pending:
            self._commit(now)
        if self._pulls:
            self._pulls = [each for each in self._pulls if not self._pull(now, *each)]

    def _again(self, now: float) -> None:
        """Whatever waits is tried again."""
        progress = bool(self._pushes)
        while progress:
            waiting = sorted(self._pushes, key=lambda each: (each[1].meta["worker"], each[1].meta["seq"]))
            self._pushes = []
            left = [each for each in waiting if not self._tried(now, *each)]
            progress = len(left) < len(waiting) and bool(left)
            self._pushes = left + self._pushes
        if self._pulls:
            self._pulls = [each for each in self._pulls if not self._pull(now, *each)]

    def _tried(self, now: float, peer: Hashable, frame: wire.Frame, cover: Cover) -> bool:
        try:
            return self._push(now, peer, frame, cover)
        except (wire.WireError, *MALFORMED) as error:
            self._garbage(peer, frame, error)
            return True
