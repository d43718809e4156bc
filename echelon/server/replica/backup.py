"""As backup or learner: entries and snapshots of the head that our map names, in their order; those of anyone else are refused."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from echelon.errors import EchelonError
from echelon.server.protocol import wire
from echelon.server.protocol.actions import LogEvent
from echelon.server.protocol.shard_sets import ShardSet, all_set, any_set
from echelon.server.replica.catch_up import ReplicaCatchUp
from echelon.server.replica.shard_state import ReplicaDiverged

#: Answers to "is this taken" that are kept under one map.
_MAX_CACHED_ACCEPTANCES = 4096


class BackupRole(ReplicaCatchUp):
    """A backup's side of the links to it."""

    def _on_hello(self, peer: Hashable, frame: wire.Frame) -> None:
        meta = frame.meta
        if meta["member"] != self.incarnation:
            self._send_to_peer(
                peer, wire.REFUSED, 0, {"error": "Superseded", "message": f"{self.name} is in life {self.incarnation}"}
            )
            return
        head_id = (str(meta["head"]), int(meta["incarnation"]))
        # One connection per head: what an older one still brings is not heard.
        for stale_peer in [
            other_peer for other_peer, other_head in self._head_of_peer.items() if other_head[0] == head_id[0]
        ]:
            del self._head_of_peer[stale_peer]
            self._frames_awaiting_map.pop(stale_peer, None)
        self._head_of_peer[peer] = head_id
        link_id = int(meta["link"])
        if self._last_received.get(head_id, (0, 0))[0] != link_id:
            self._last_received[head_id] = (link_id, 0)
            self._refused_shards.pop(head_id, None)
        answer: dict[str, Any] = {"last": self._last_received[head_id][1], "v": self.map.version}
        self._send_to_peer(peer, wire.HELLO_REPLY, 0, self._with_refused_shards(head_id, answer))

    def _with_refused_shards(self, head_id: tuple[str, int], answer: dict[str, Any]) -> dict[str, Any]:
        """Said until the head asks again how far these shards are: an answer that names them may be lost."""
        if self._refused_shards.get(head_id):
            answer["refused"] = sorted(self._refused_shards[head_id])
        return answer

    def _accepts(self, head: str, version: int, shard_set: ShardSet) -> np.ndarray:
        """Per shard whether an entry of this head is taken. Kept until the map or `_is_unloaded` change."""
        key = (head, version, shard_set)
        cached = self._acceptance_cache.get(key)
        if cached is None:
            is_held = self.map.replica_mask(self.name) if head != self.name else np.zeros(self.map.num_shards, bool)
            accepted = (is_held & self.map.head_mask(head) & (self._epochs <= version) & ~self._is_unloaded)[
                shard_set.index
            ]
            if len(self._acceptance_cache) >= _MAX_CACHED_ACCEPTANCES:
                self._acceptance_cache.clear()
            cached = self._acceptance_cache[key] = accepted
        return cached

    def _on_head_frame(self, now: float, peer: Hashable, frame: wire.Frame) -> None:
        meta, kind, head_id = frame.meta, frame.kind, self._head_of_peer[peer]
        head, version = head_id[0], meta["v"]
        self._last_answered[head] = now
        if kind == wire.HEARTBEAT:
            self._send_to_peer(peer, wire.HEARTBEAT, 0, {"n": meta["n"], "v": self.map.version})
            return
        if kind == wire.LOG_STATE:
            shards = frame.arrays[0]
            shards = shards[self._accepts(head, version, self.shard_sets.get(shards))]
            if head_id in self._refused_shards:
                self._refused_shards[head_id] -= set(shards.tolist())
            self._send_to_peer(
                peer,
                wire.LOG_STATE_REPLY,
                0,
                {"v": self.map.version, "of": meta["of"]},
                [shards, self.state.entry_version[shards], self.state.lsn[shards]],
            )
            return
        number = meta["n"]
        link_id, last_number = self._last_received[head_id]
        if number > last_number:
            if number != last_number + 1:
                raise wire.WireError(f"message {number} of {head} after {last_number}")
            self._last_received[head_id] = (link_id, number)
            refused_shards = (
                self._on_entry(now, head, frame) if kind == wire.LOG_ENTRY else self._on_snapshot_part(now, head, frame)
            )
            if len(refused_shards):
                self._refused_shards.setdefault(head_id, set()).update(refused_shards.tolist())
            last_number = number
        self._send_to_peer(
            peer, wire.REPLICA_ACK, 0, self._with_refused_shards(head_id, {"n": last_number, "v": self.map.version})
        )

    def _on_entry(self, now: float, head: str, outer: wire.Frame) -> np.ndarray:
        """Apply an entry; the shards for which it is not taken."""
        frame = wire.parse(outer.arrays[0])
        only_shards, version = outer.meta.get("only"), outer.meta["v"]
        shard_set = self.shard_sets.get(frame.arrays[0] if only_shards is None else np.array(only_shards, np.uint16))
        is_accepted = self._accepts(head, version, shard_set)
        all_accepted = all_set(is_accepted)
        if all_accepted or any_set(is_accepted):
            accepted_shards = shard_set if all_accepted else shard_set.subset(is_accepted)
            self.counters["entries"] += 1
            if frame.kind == wire.PUSH:
                is_next, has_gap = self.state.check_sequence(frame, accepted_shards)
                if has_gap or (is_next is not None and not all_set(is_next)):
                    raise ReplicaDiverged(
                        f"push {frame.meta['seq']} of worker {frame.meta['worker']} does not follow here on {accepted_shards.wire_shards}"
                    )
                is_noop = bool(outer.meta.get("void"))
                try:
                    # Heads keep to the memory's bound; replicas take what their head took, or they would part from it.
                    with self.state.store.without_memory_limit():
                        self.state.apply_push(
                            frame,
                            accepted_shards,
                            version=version,
                            covers_all_shards=only_shards is None and all_accepted,
                            is_noop=is_noop,
                        )
                except EchelonError as error:
                    raise ReplicaDiverged(f"{self.name} cannot take what the head took: {error}") from error
                self._min_clock = None
            else:
                self._apply_entry(frame, accepted_shards, version)
        return shard_set.wire_shards[:0] if all_accepted else shard_set.wire_shards[~is_accepted]

    def _on_snapshot_part(self, now: float, head: str, frame: wire.Frame) -> np.ndarray:
        """A part of a snapshot; the shard if it is not taken."""
        meta = frame.meta
        shard = int(meta["shard"])
        shard_array = np.array([shard], np.uint16)
        if not self._accepts(head, meta["v"], self.shard_sets.get(shard_array)).all():
            self._incoming_snapshots.pop(shard, None)
            return shard_array
        if meta["part"] == 0:
            self._incoming_snapshots[shard] = []
        parts = self._incoming_snapshots.get(shard)
        if parts is None or len(parts) != meta["part"]:
            return shard_array
        parts.append((meta["meta"], frame.arrays))
        if len(parts) == meta["parts"]:
            del self._incoming_snapshots[shard]
            try:
                self.state.install(shard, parts)
            except EchelonError as error:
                # No room here: the shard goes without this replica, which is no reason to take all others with it.
                self.state.drop(shard)
                self._queued_actions.append(LogEvent("refused", {"shard": shard, "why": str(error)}))
                return shard_array
            self._min_clock = None
        return shard_array[:0]
