"""As head: a worker's push is checked, ordered, applied, forwarded; or it waits, or is refused."""

from __future__ import annotations

from collections.abc import Hashable

from echelon.errors import EchelonError
from echelon.server.protocol import wire
from echelon.server.protocol.shard_sets import ShardSet, all_set, any_set
from echelon.server.protocol.specs import StoreError, check_learning_rate
from echelon.server.replica.reads import ReadHandler
from echelon.server.replica.replica_link import PendingAck
from echelon.server.replica.shard_state import ReplicaDiverged, target_name
from echelon.server.replica.state import MALFORMED_ERRORS


class PushHandler(ReadHandler):
    """Taking pushes, and trying again what waits."""

    def _check_push(self, frame: wire.Frame) -> ShardSet:
        shard_set = self._parse_shard_set(frame)
        meta = frame.meta
        for name in ("incarnation", "seq", "step"):
            if type(meta[name]) is not int or not 0 <= meta[name] < 1 << 62:
                raise wire.WireError(f"PUSH: {name} {meta[name]!r} is no number from 0")
        if type(meta["worker"]) is not str or type(meta["ops"]) is not list:
            raise wire.WireError("PUSH: a worker's name and a list of operations are expected")
        if meta.get("lr"):
            try:
                for name, rate in meta["lr"].items():
                    check_learning_rate(name, rate)
            except StoreError as error:
                raise wire.WireError(f"PUSH: {error}") from error
        if len(meta["ops"]) > 1:
            names = [target_name(op) for op in meta["ops"]]
            if len(set(names)) < len(names):
                raise wire.WireError("PUSH: one operation per table or dense parameter")
        return shard_set

    def _try_push(self, now: float, peer: Hashable, frame: wire.Frame, shard_set: ShardSet) -> bool:
        """Take a push, or refuse it; False: it must wait."""
        meta = frame.meta
        if not all_set(self.is_ready[shard_set.index]):
            if all_set(self.is_head[shard_set.index]) or meta["version"] > self.map.version:
                return False
            self._send_stale(peer, frame)
            return True
        if self._may_be_superseded(now, shard_set):
            return False
        if self.map.workers.get(meta["worker"], 0) > meta["incarnation"]:
            message = f"worker {meta['worker']} was started again, or another has its name; this one is its former life. Give each worker a name of its own (worker=)"
            self._refuse(peer, frame, "Superseded", message)
            return True
        if meta["incarnation"] <= self.map.horizon and self.map.is_expired(meta["incarnation"]):
            message = f"worker {meta['worker']} was away for so long that it was given up; start it anew"
            self._refuse(peer, frame, "Superseded", message)
            return True
        is_next, has_gap = self.state.check_sequence(frame, shard_set)
        if has_gap:
            return False
        answer = (wire.ACK, {"seq": meta["seq"]})
        is_new = is_next is None or any_set(is_next)
        if is_next is not None and self.state.was_refused(frame, shard_set):
            message = f"push {meta['seq']} was refused before, and its answer lost; nothing of it was applied"
            answer = (wire.REFUSED, {"error": "ServerError", "message": message})
        if is_new:
            new_shards = shard_set if is_next is None else shard_set.subset(is_next)
            is_noop = False
            try:
                self.state.apply_push(
                    frame, new_shards, version=self.map.version, covers_all_shards=is_next is None, is_noop=False
                )
            except ReplicaDiverged:
                raise
            except EchelonError as error:
                # Counted, on all replicas, or the next one would wait for it.
                self.state.apply_push(
                    frame, new_shards, version=self.map.version, covers_all_shards=is_next is None, is_noop=True
                )
                is_noop, answer = True, (wire.REFUSED, {"error": type(error).__name__, "message": str(error)})
                self.counters["refused"] += 1
            self.counters["pushes"] += 1
            self._forward(now, frame, new_shards, covers_all_shards=is_next is None, is_noop=is_noop)
        self._ack_when_replicated(PendingAck(peer, frame.request_id, shard_set, answer))
        if is_new:
            self._min_clock = (
                None  # also without a tick: on shards out of a checkpoint a worker counts from its first push on
            )
            if meta.get("tick"):
                self._on_clock_advanced(now)
        return True

    def _on_clock_advanced(self, now: float) -> None:
        """A clock moved: what waited for it goes on."""
        if self.state.pending_pushes:
            self._commit_steps(now)
        if self._waiting_reads:
            self._waiting_reads = [request for request in self._waiting_reads if not self._try_read(now, *request)]

    def _retry_waiting(self, now: float) -> None:
        """Whatever waits is tried again."""
        made_progress = bool(self._waiting_pushes)
        while made_progress:
            requests = sorted(
                self._waiting_pushes, key=lambda request: (request[1].meta["worker"], request[1].meta["seq"])
            )
            self._waiting_pushes = []
            still_waiting = [request for request in requests if not self._retry_push(now, *request)]
            made_progress = len(still_waiting) < len(requests) and bool(still_waiting)
            self._waiting_pushes = still_waiting + self._waiting_pushes
        if self._waiting_reads:
            self._waiting_reads = [request for request in self._waiting_reads if not self._try_read(now, *request)]

    def _retry_push(self, now: float, peer: Hashable, frame: wire.Frame, shard_set: ShardSet) -> bool:
        try:
            return self._try_push(now, peer, frame, shard_set)
        except (wire.WireError, *MALFORMED_ERRORS) as error:
            self._reject_malformed(peer, frame, error)
            return True
