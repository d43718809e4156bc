"""One server's part in the protocol, without sockets and without a clock: frames and the time go in, actions come out.

As **head** of a shard it orders pushes, applies them, forwards each frame's bytes to the other replicas, and answers the worker when
all of them have it. As **backup** (or learner) it takes what the head that its map names sends, in order. What makes this safe:

- A replica refuses entries of anyone but the head in its own map, and entries that head sent under a map older than its headship. So a
  head that was replaced, and does not know it yet, never gets the answers that it needs to acknowledge anything.
- (stamp, lsn) names a shard's state: the map's version under which the last entry was ordered, and how many there were. A new head
  compares it with each replica before it takes pushes; where it differs the replica gets a snapshot. lsn alone would not do: after a
  failover two replicas may have as many entries and not the same.
- Frames of a map that is newer than one's own wait until that map is here (the sender is asked for it).
- Every push of a worker covers every shard, so a shard takes push n + 1 only after n; one that is ahead waits.
- Reads are answered while every backup (and learner that counts) has answered something sent within the last LEASE under a map that is
  not newer than this head's; a new head waits until LEASE has passed since its own last answer to the old one.

Frames of workers (meta; arrays): PULL {version, worker, incarnation, step, bound, ops: [{table, wire} | {dense}]}; cover u16, then ids or
blocks per op -> ROWS {counts}. PUSH {version, worker, incarnation, seq, step, tick, aggregate, lr, ops: [{table} | {table, assign} |
{dense} | {set}]}; cover, then per op ids and values (n, dim), or blocks and one array per block -> ACK {seq}. Either may be answered STALE
{version}: nothing was done, ask again under a map at least that new; or REFUSED {error, message}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from echelon.errors import DocumentError, EchelonError, ServerError
from echelon.server import wire
from echelon.server.actions import CONTROL, LINK, PEER, Action, Close, Note, Send
from echelon.server.covers import Cover, Covers
from echelon.server.links import Link, Sent, Waiting
from echelon.server.map import Map, empty
from echelon.server.state import Diverged, Part, State, Store, named
from echelon.server.windows import ABSENT, FAR

LEASE = 0.3
#: A lonely head that has not heard of the controller for so long waits; well below the grace after which its shards go to others.
DOUBT = 1.0
#: A drained shard whose new head does not come (the controller died) is served again after this.
DRAIN_LIMIT = 1.0
COMMIT, ENROL, EXPIRE = wire.COMMIT, wire.ENROL, wire.EXPIRE

#: What a frame with other contents than its kind should have makes a handler raise.
MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, MemoryError)


class Replica:
    """The state machine. `load(folder, shard)` reads a shard out of a checkpoint; `declare(spec document)` makes a table known."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        store: Store,
        shards: int,
        lease: float = LEASE,
        load: Callable[[str, int], Sequence[Part]] | None = None,
        declare: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.name, self.incarnation, self.lease = name, incarnation, lease
        self.state = State(store, shards)
        self.covers = Covers(shards)
        self.map: Map = empty(shards)
        self.specs: list[dict[str, Any]] = []
        self._load, self._declare = load, declare
        self._out: list[Action] = []
        # As head.
        self.links: dict[str, Link] = {}
        self.headed = np.zeros(shards, bool)
        #: Shards that are yet to be read out of a checkpoint: folder, and the version that ordered it.
        self.loading: dict[int, tuple[str, int]] = {}
        self._unloaded = np.zeros(shards, bool)
        self.ready = np.zeros(shards, bool)
        self.draining = np.zeros(shards, bool)
        self._drains: list[tuple[float, np.ndarray, bool]] = []
        self._links_made = 0
        self._asked_at = 0.0
        self._reads_from = np.full(shards, -np.inf)
        #: Replicas that the job wishes for; when the controller was last heard; shards that we alone have.
        self.wished = 1
        self.confirmed = 0.0
        self._single = np.zeros(shards, bool)
        self._parked: list[Waiting] = []
        self._pushes: list[tuple[Hashable, wire.Frame]] = []
        self._pulls: list[tuple[Hashable, wire.Frame]] = []
        self._live: list[int] = []
        self._floor: np.ndarray | None = None
        # As backup.
        self._heads: dict[Hashable, tuple[str, int]] = {}
        #: Of each head: the number of its link, and of the last message of that; and shards of which it was refused something.
        self._received: dict[tuple[str, int], tuple[int, int]] = {}
        self._refused: dict[tuple[str, int], set[int]] = {}
        self._stalled: dict[Hashable, list[wire.Frame]] = {}
        self._arriving: dict[int, list[Part]] = {}
        self._answered: dict[str, float] = {}
        self._taking: dict[str, np.ndarray] = {}
        self._epochs = np.zeros(shards, np.int64)
        self._asked = -1
        self.counts = {"pushes": 0, "pulls": 0, "entries": 0, "rows": 0, "refused": 0, "stale": 0}

    # What happens

    def on_frame(self, now: float, peer: Hashable, frame: wire.Frame) -> list[Action]:
        """A frame over a connection that was accepted: of a worker, or of another server as head."""
        try:
            if peer in self._stalled and frame.kind not in (wire.GRANT, wire.BEHIND):
                self._stalled[peer].append(frame)
            else:
                self._receive(now, peer, frame)
        except (wire.WireError, DocumentError, *MALFORMED) as error:
            self._garbage(peer, frame, error)
        return self._actions()

    def on_answer(self, now: float, server: str, frame: wire.Frame) -> list[Action]:
        """A frame over our own connection to another server."""
        link = self.links.get(server)
        if link is not None:
            self._answer(now, link, frame)
        return self._actions()

    def on_link(self, now: float, server: str) -> list[Action]:
        """Our connection to another server is there."""
        link = self.links.get(server)
        if link is not None:
            meta = {
                "head": self.name,
                "incarnation": self.incarnation,
                "member": link.incarnation,
                "link": link.number,
                "v": self.map.version,
            }
            self._link(server, wire.HAIL, meta)
        return self._actions()

    def on_link_lost(self, now: float, server: str) -> list[Action]:
        """Our connection to another server is gone."""
        if server in self.links:
            self.links[server].lost()
            self.links[server].down = min(now, self.links[server].down)
        return self._actions()

    def on_peer_lost(self, now: float, peer: Hashable) -> list[Action]:
        """A connection that was accepted is gone: nobody waits for its answers."""
        self._pushes = [each for each in self._pushes if each[0] != peer]
        self._pulls = [each for each in self._pulls if each[0] != peer]
        self._heads.pop(peer, None)
        self._stalled.pop(peer, None)
        return self._actions()

    def on_map(self, now: float, new: Map, specs: Sequence[dict[str, Any]]) -> list[Action]:
        """The controller's word, from itself or passed on."""
        self._install(now, new, specs)
        return self._actions()

    def on_control(self, now: float, frame: wire.Frame) -> list[Action]:
        """A frame of the controller, other than a map."""
        if frame.kind == wire.HANDOVER:
            shards = np.array([shard for shard in frame.meta["shards"] if self.headed[shard]], np.int64)
            self.draining[shards] = True
            self._readiness()
            self._drains.append((now + DRAIN_LIMIT, shards, False))
            self._drained()
        elif frame.kind == wire.EXPIRE:
            self._expire(now, frame)
        return self._actions()

    def on_controller(self, now: float) -> list[Action]:
        """The connection to the controller is there (again): what it may not have heard is said again."""
        self._tell(wire.INSTALLED, {"version": self.map.version})
        for link in self.links.values():
            catching = {shard for shard, _ in link.catching}
            for shard in np.flatnonzero(link.required & ~link.refused).tolist():
                if shard not in catching:
                    self._caughtup(link, shard)
        return self._actions()

    def cut_off(self, now: float, longer: float = 1.0) -> list[str]:
        """Replicas without whose answer nothing goes on, and that cannot be reached for so long."""
        return [
            server
            for server, link in self.links.items()
            if now - link.down > longer and (link.backup.any() or link.required.any())
        ]

    def on_tick(self, now: float) -> list[Action]:
        """Time passes: call it every 50 ms or so."""
        for link in self.links.values():
            if link.up and now - link.beat >= self.lease / 3:
                link.beat = now
                number = link.beats[-1][0] + 1 if link.beats else 1
                link.beats.append((number, now))
                self._link(link.server, wire.BEAT, {"n": number, "v": self.map.version})
            self._pump(now, link)
        for link in [each for each in self.links.values() if now - each.down > 1.0 and each.sent]:
            if not link.backup.any() and not link.required.any():
                # A learner that is away: what is kept for it would grow without end. It begins anew when it is back.
                learner = link.learner
                self._drop_link(link.server)
                self._fresh_link(now, link.server, link.incarnation)
                self.links[link.server].learner = learner
        for entry in [each for each in self._drains if each[0] <= now]:
            self._drains.remove(entry)
            self.draining[entry[1]] = False
            self._readiness()
            self._enrol(now)
            self._commit(now)
        if now - self._asked_at > 0.5:
            # Replicas do not answer for shards that they are still loading.
            self._asked_at = now
            for link in self.links.values():
                link.asked[:] = False
                self._ask(link)
        self._again(now)
        return self._actions()

    def _garbage(self, peer: Hashable, frame: wire.Frame, error: Exception) -> None:
        if peer in self._heads:
            raise Diverged(f"{frame} of {self._heads[peer]}: {type(error).__name__}: {error}") from error
        why = f"{wire.NAMES.get(frame.kind, frame.kind)}: {type(error).__name__}: {error}"
        self._out += [Note("garbage", {"why": why}), Close(PEER, peer)]

    def _actions(self) -> list[Action]:
        out, self._out = self._out, []
        return out

    def _send(
        self, peer: Hashable, kind: int, request: int, meta: dict[str, Any], arrays: Sequence[np.ndarray] = ()
    ) -> None:
        self._out.append(Send(PEER, peer, kind, request, meta, arrays))

    def _link(self, server: str, kind: int, meta: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        self._out.append(Send(LINK, server, kind, 0, meta, arrays))

    def _tell(self, kind: int, meta: dict[str, Any]) -> None:
        self._out.append(Send(CONTROL, None, kind, 0, meta))

    def _receive(self, now: float, peer: Hashable, frame: wire.Frame) -> None:
        kind = frame.kind
        if kind == wire.PUSH:
            self._checked_push(frame)
            if not self._push(now, peer, frame):
                self._pushes.append((peer, frame))
            elif self._pushes:
                self._again(now)
        elif kind in (wire.PULL, wire.CHANGED, wire.CLOCK, wire.DIGEST):
            self._checked(frame)
            if not self._pull(now, peer, frame):
                self._pulls.append((peer, frame))
        elif kind == wire.HAIL:
            self._hail(peer, frame)
        elif kind == wire.GRANT:
            self._install(now, Map.from_document(frame.meta["map"]), frame.meta["specs"])
        elif kind == wire.BEHIND:
            self._send(peer, wire.GRANT, 0, {"map": self.map.document(), "specs": self.specs})
        elif kind in (wire.ENTRY, wire.SNAPSHOT, wire.SYNC, wire.BEAT) and peer in self._heads:
            if frame.meta["v"] > self.map.version:
                self._stalled[peer] = [frame]
                self._send(peer, wire.BEHIND, 0, {"version": self.map.version})
                return
            self._follow(now, peer, frame)
        else:
            raise wire.WireError(f"no {wire.NAMES.get(kind, kind)} is taken here")

    # Workers

    def _checked(self, frame: wire.Frame) -> None:
        self.covers.of(frame.arrays[0])
        if type(frame.meta["version"]) is not int:
            raise wire.WireError(f"{wire.NAMES[frame.kind]}: version {frame.meta['version']!r} is no number")

    def _checked_push(self, frame: wire.Frame) -> None:
        self._checked(frame)
        meta = frame.meta
        for name in ("incarnation", "seq", "step"):
            if type(meta[name]) is not int or not 0 <= meta[name] < 1 << 62:
                raise wire.WireError(f"PUSH: {name} {meta[name]!r} is no number from 0")
        if type(meta["worker"]) is not str or type(meta["ops"]) is not list:
            raise wire.WireError("PUSH: a worker's name and a list of operations are expected")
        rates = meta.get("lr")
        if rates and not all(isinstance(rate, int | float) and math.isfinite(rate) for rate in rates.values()):
            raise wire.WireError("PUSH: learning rates are finite numbers by name")
        if len(meta["ops"]) > 1:
            names = [named(op) for op in meta["ops"]]
            if len(set(names)) < len(names):
                raise wire.WireError("PUSH: one operation per table or dense parameter")

    def _push(self, now: float, peer: Hashable, frame: wire.Frame) -> bool:
        """Take a push, or refuse it; False: it must wait."""
        meta, cover = frame.meta, self.covers.of(frame.arrays[0])
        if not self.ready[cover.at].all():
            if self.headed[cover.at].all() or meta["version"] > self.map.version:
                return False
            self._stale(peer, frame)
            return True
        if self._doubtful(now, cover):
            return False
        if self.map.workers.get(meta["worker"], 0) > meta["incarnation"]:
            why = f"worker {meta['worker']} was started again; this one is its former life"
            self._refuse(peer, frame, "Superseded", why)
            return True
        fresh, gap = self.state.due(frame, cover)
        if gap:
            return False
        answer = (wire.ACK, {"seq": meta["seq"]})
        new = fresh is None or bool(fresh.any())
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
        if new and meta.get("tick"):
            self._floor = None
            self._ticked(now)
        return True

    def _stale(self, peer: Hashable, frame: wire.Frame) -> None:
        self.counts["stale"] += 1
        self._send(peer, wire.STALE, frame.request, {"version": self.map.version})

    def _refuse(self, peer: Hashable, frame: wire.Frame, error: str, message: str) -> None:
        self.counts["refused"] += 1
        self._send(peer, wire.REFUSED, frame.request, {"error": error, "message": message})

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

    def _tried(self, now: float, peer: Hashable, frame: wire.Frame) -> bool:
        try:
            return self._push(now, peer, frame)
        except (wire.WireError, *MALFORMED) as error:
            self._garbage(peer, frame, error)
            return True

    def floor(self) -> np.ndarray:
        """Per shard the least clock of the workers that are counted."""
        if self._floor is None:
            self._floor = self.state.windows.floor(self._live)
        return self._floor

    def _doubtful(self, now: float, cover: Cover) -> bool:
        """Whether shards that should have replicas, and have none who would refuse us, may be another's by now.

        A chain of one that lost its backups goes back to a checkpoint some time after the controller lost sight of it; it must not
        acknowledge anything after that. While the controller is heard, it did not.
        """
        return self.wished > 1 and now - self.confirmed > DOUBT and bool(self._single[cover.at].any())

    def _leased(self, now: float, cover: Cover) -> bool:
        if (self._reads_from[cover.at] > now).any():
            return False
        late = (link for link in self.links.values() if now - link.heard >= self.lease)
        return not any(link.needed(cover) for link in late)

    def _pull(self, now: float, peer: Hashable, frame: wire.Frame) -> bool:
        """Answer a read; False: it must wait."""
        meta, cover = frame.meta, self.covers.of(frame.arrays[0])
        if not self.headed[cover.at].all():
            if frame.kind == wire.DIGEST and self.map.held_by(self.name)[cover.at].all():
                self._digest(peer, frame)
                return True
            if meta["version"] > self.map.version:
                return False
            self._stale(peer, frame)
            return True
        if (
            not self._leased(now, cover)
            or self._doubtful(now, cover)
            or (self.loading and self._unloaded[cover.at].any())
        ):
            return False
        try:
            return self._read(peer, frame)
        except EchelonError as error:
            self._refuse(peer, frame, type(error).__name__, str(error))
        except MALFORMED as error:
            self._out += [Note("garbage", {"why": f"{frame}: {error}"}), Close(PEER, peer)]
        return True

    def _read(self, peer: Hashable, frame: wire.Frame) -> bool:
        meta, arrays = frame.meta, frame.arrays
        cover = self.covers.of(arrays[0])
        if frame.kind == wire.PULL:
            if meta["bound"] is not None and int(self.floor()[cover.at].min()) < meta["step"] - meta["bound"]:
                return False
            if meta["bound"] is not None and any(
                step < meta["step"] and any(np.isin(held.shards, cover.shards).any() for held in waiting)
                for step, waiting in self.state.pending.items()
            ):
                return False  # its commit is yet to be logged
            store, found, counts = self.state.store, [], []
            for op, ids in zip(meta["ops"], arrays[1:], strict=True):
                part = (
                    store.read(op["table"], ids, op["wire"]) if "table" in op else store.read_blocks(op["dense"], ids)
                )
                self.counts["rows"] += len(ids)
                found += part
                counts.append(len(part))
            if sum(each.nbytes for each in found) > wire.MAX_FRAME - wire.MAX_META:
                raise ServerError(f"an answer of more than {wire.MAX_FRAME >> 20} MiB; ask for fewer rows at once")
            self.counts["pulls"] += 1
            self._send(peer, wire.ROWS, frame.request, {"counts": counts}, found)
        elif frame.kind == wire.CHANGED:
            store, name = self.state.store, meta["table"]
            if arrays[1].shape != arrays[0].shape or arrays[1].dtype != np.int64:
                raise wire.WireError("CHANGED: one log number per shard is expected")
            ids, until = store.changed_until(name, cover.shards, arrays[1], meta["limit"])
            rows = store.read(name, ids, meta["wire"])
            self._send(peer, wire.ROWS, frame.request, {"counts": [1, len(rows), 1]}, [ids, *rows, until])
        elif frame.kind == wire.CLOCK:
            slot = self.state.windows.slots.get((meta["worker"], meta["incarnation"]))
            windows = self.state.windows
            if slot is None or ((windows.clock[slot] == ABSENT) & ~windows.restored)[cover.at].any():
                return False
            floor = self.floor()[cover.at]
            most = max((int(self.state.windows.clock[live][cover.at].max()) for live in self._live), default=0)
            mine = int(self.state.windows.clock[slot][cover.at].max())
            self._send(peer, wire.CLOCKED, frame.request, {"min": int(floor.min()), "max": most, "mine": mine})
        else:
            self._digest(peer, frame)
        return True

    def _digest(self, peer: Hashable, frame: wire.Frame) -> None:
        digests = [np.frombuffer(self.state.digest(int(shard)), np.uint8) for shard in frame.arrays[0]]
        self._send(
            peer,
            wire.DIGESTS,
            frame.request,
            {"version": self.map.version},
            [np.stack(digests), self.state.lsn[frame.arrays[0]]],
        )

    # As head: entries

    def _forward(self, now: float, frame: wire.Frame, here: Cover, *, whole: bool, void: bool = False) -> None:
        for link in self.links.values():
            flowing = link.flowing[here.at]
            every = bool(flowing.all())
            if not every and not flowing.any():
                continue
            meta: dict[str, Any] = {"v": self.map.version}
            if void:
                meta["void"] = True
            if not whole or not every:
                meta["only"] = here.wire[flowing].tolist()
            self._number(now, link, wire.ENTRY, meta, [frame.raw])

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
        if any(link.lacks(cover) or (link.newest > version and link.needed(cover)) for link in self.links.values()):
            self._parked.append(waiting)
            return
        if waiting.peer is not None:
            kind, meta = waiting.answer
            self._send(waiting.peer, kind, waiting.request, meta)

    def _log(self, now: float, kind: int, meta: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
        """An entry of the head's own."""
        frame = wire.parse(wire.joined(wire.encode(kind, 0, meta, arrays)))
        cover = self.covers.of(frame.arrays[0])
        self._enter(frame, cover, self.map.version)
        self._forward(now, frame, cover, whole=True)

    def _enter(self, frame: wire.Frame, cover: Cover, version: int) -> None:
        if frame.kind == COMMIT:
            self.state.commit(frame, cover, version=version)
        elif frame.kind == ENROL:
            self.state.enrol(frame, cover, version=version)
            self._floor = None
        elif frame.kind == EXPIRE:
            self.state.expire(frame, cover, version=version)
        else:
            raise wire.WireError(f"an entry of kind {wire.NAMES.get(frame.kind, frame.kind)}")

    def _enrol(self, now: float) -> None:
        """Count the map's workers on all shards that we head, from the least clock there is."""
        windows = self.state.windows
        for worker, incarnation in sorted(self.map.workers.items()):
            slot = windows.slot(worker, incarnation)
            new = np.flatnonzero(self.ready & (windows.clock[slot] == ABSENT) & ~windows.restored)
            if len(new):
                floor = self.floor()[new]
                starts = np.where(floor == FAR, np.maximum(windows.clock[:, new].max(axis=0), 0), floor)
                cover = new.astype(np.uint16)
                self._log(now, ENROL, {"worker": worker, "incarnation": incarnation}, [cover, starts])

    def _commit(self, now: float) -> None:
        """Log the commit of each step that all workers have ticked."""
        for step in sorted(self.state.pending):
            shards = np.zeros(self.map.shards, bool)
            for held in self.state.pending[step]:
                shards[held.shards] = True
            cover = np.flatnonzero(shards & self.ready & (self.floor() > step))
            if len(cover):
                self._log(now, COMMIT, {"step": step}, [cover.astype(np.uint16)])

    def _expire(self, now: float, frame: wire.Frame) -> None:
        cover = np.flatnonzero(self.ready)
        if len(cover):
            before = np.maximum(self.state.lsn[cover] - int(frame.meta["older"]) + 1, 0)
            self._log(now, EXPIRE, {"table": frame.meta["table"]}, [cover.astype(np.uint16), before])
        self._tell(wire.DONE, {"of": frame.meta.get("of")})

    # As head: links

    def _answer(self, now: float, link: Link, frame: wire.Frame) -> None:
        meta, kind = frame.meta, frame.kind
        if kind == wire.GRANT:
            self._install(now, Map.from_document(meta["map"]), meta["specs"])
            return
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
            link.up, link.down = True, float("inf")
            if meta.get("refused"):
                link.refused[meta["refused"]] = True
            self._got(now, link, meta["last"], current)
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
        if link.moving is not None and link.moving[1] <= number:
            shard, _ = link.moving
            link.moving = None
            # As long a pause as the snapshot took: others use the link too.
            link.resume = now + min(now - link.began, 1.0)
            if link.flowing[shard] and not link.refused[shard]:
                self._equal(now, link, shard)
        for shard, mark in [each for each in link.catching if each[1] <= number]:
            link.catching.remove((shard, mark))
            if not link.refused[shard]:
                self._caughtup(link, shard)
        if self._drains:
            self._drained()

    def _caughtup(self, link: Link, shard: int) -> None:
        self._tell(
            wire.CAUGHTUP,
            {"shard": shard, "learner": link.server, "incarnation": link.incarnation, "version": self.map.version},
        )
        if self._drains:
            self._drained()

    def _ask(self, link: Link) -> None:
        """Ask how far the replica is with shards of which we do not know it."""
        unknown = (link.backup | link.learner) & ~link.flowing & ~link.asked & ~self._unloaded
        unknown[list(link.todo)] = False
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
        """Send the next snapshot, if one is due and none is under way."""
        while link.up and link.todo and link.moving is None and now >= link.resume:
            shard = link.todo.popleft()
            parts = self.state.snapshot(shard)
            number = 0
            for place, (meta, arrays) in enumerate(parts):
                head = {"v": self.map.version, "shard": shard, "part": place, "parts": len(parts), "meta": meta}
                number = self._number(now, link, wire.SNAPSHOT, head, arrays)
            link.flowing[shard] = True
            link.moving = (shard, number)
            link.began = now

    def _readiness(self) -> None:
        ready = self.headed & ~self.draining & ~self._unloaded
        for link in self.links.values():
            ready &= ~link.backup | link.synced
        self.ready = ready

    def _unpark(self) -> None:
        parked, self._parked = self._parked, []
        for waiting in parked:
            if not waiting.needs:
                self._settle(waiting)

    def _drained(self) -> None:
        """Tell the controller of shards on which everything is answered."""
        for place, (limit, shards, told) in enumerate(self._drains):
            if told or not len(shards):
                continue
            if all(link.got == link.made or not link.needed(self.covers.these(shards)) for link in self.links.values()):
                self._drains[place] = (limit, shards, True)
                self._tell(wire.DRAINED, {"shards": shards.tolist(), "version": self.map.version})

    # Maps

    def _install(self, now: float, new: Map, specs: Sequence[dict[str, Any]]) -> None:
        old = self.map
        if new.version <= old.version:
            return
        seat = new.servers.get(self.name)
        if seat is None or seat.incarnation != self.incarnation:
            # Taken for dead. Whether what we hold is worth anything the controller says, not whoever passes its map on: a later
            # version may have us back, with shards that nobody else has.
            return
        if new.shards != old.shards:
            raise wire.WireError(f"a map of {new.shards} shards where there are {old.shards}")
        for spec in specs[len(self.specs) :]:
            if self._declare is not None:
                self._declare(spec)
        self.map, self.specs = new, list(specs)
        self._taking, self._epochs = {}, np.array(new.epochs, np.int64)
        held = new.held_by(self.name)
        before = old.held_by(self.name)
        for shard in np.flatnonzero(before & ~held):
            self.state.drop(int(shard))
            self._arriving.pop(int(shard), None)
        self._restore(held)
        self.headed = new.headed_by(self.name)
        several = len(new.servers) > 1
        self._single = np.fromiter((several and len(chain) == 1 for chain in new.chains), bool, new.shards)
        changed = np.fromiter((epoch > old.version for epoch in new.epochs), bool, new.shards)
        for shard in np.flatnonzero(changed & self.headed):
            former = old.heads[shard]
            answered = self._answered.get(former, -np.inf) if former is not None and former != self.name else -np.inf
            self._reads_from[shard] = answered + self.lease
        self.draining &= self.headed & ~changed
        self._drains = [each for each in self._drains if self.draining[each[1]].all()]
        self._relink(now, new, changed)
        self._live = [self.state.windows.slot(worker, incarnation) for worker, incarnation in new.workers.items()]
        self._floor = None
        self._readiness()
        self._rewait()
        self._tell(wire.INSTALLED, {"version": new.version})
        for link in self.links.values():
            self._ask(link)
        stalled, self._stalled = self._stalled, {}
        for peer, frames in stalled.items():
            for frame in frames:
                if peer in self._stalled:
                    self._stalled[peer].append(frame)
                    continue
                try:
                    self._receive(now, peer, frame)
                except (wire.WireError, *MALFORMED) as error:
                    self._garbage(peer, frame, error)
        self._enrol(now)
        self._commit(now)
        self._again(now)

    def _restore(self, held: np.ndarray) -> None:
        """Which shards the map orders out of a checkpoint, and we do not have from it yet."""
        self.loading = {
            shard: (folder, version)
            for shard, (folder, version) in self.map.sources.items()
            if held[shard] and self.name in self.map.chains[shard] and self.state.stamp[shard] < version
        }
        self._unloaded[:] = False
        self._unloaded[list(self.loading)] = True

    def on_load(self, now: float) -> list[Action]:
        """Read the next shard that is to come out of a checkpoint (`loading`); one at a time, as each may take a while."""
        if not self.loading:
            return []
        shard, (folder, version) = next(iter(self.loading.items()))
        del self.loading[shard]
        self._unloaded[shard] = False
        try:
            if self._load is None:
                raise ServerError("nothing here can read checkpoints")
            self.state.install(shard, self._load(folder, shard))
            self.state.stamp[shard] = version
            if shard in self.map.revived:
                self.state.windows.restore(shard)
        except (EchelonError, OSError, *MALFORMED) as error:
            # A backup gets it from its head; without the head's the shard stays lost. The others here are as good as before.
            self.state.drop(shard)
            self._out.append(Note("unreadable", {"shard": shard, "folder": folder, "why": str(error)}))
            if self.headed[shard]:
                self._unloaded[shard] = True
                self._tell(wire.RETURN, {"shard": shard, "why": str(error), "version": self.map.version})
        self._floor = None
        self._readiness()
        for link in self.links.values():
            self._ask(link)
        self._enrol(now)
        self._commit(now)
        self._again(now)
        return self._actions()

    def _fresh_link(self, now: float, server: str, incarnation: int) -> None:
        self._links_made += 1
        self.links[server] = Link(server, incarnation, self.map.shards, self._links_made)
        self.links[server].down = now

    def _relink(self, now: float, new: Map, changed: np.ndarray) -> None:
        wanted: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for shard in np.flatnonzero(self.headed):
            for place, servers in enumerate((new.chains[shard][1:], new.learners[shard])):
                for server in servers:
                    if server not in wanted:
                        wanted[server] = (np.zeros(new.shards, bool), np.zeros(new.shards, bool))
                    wanted[server][place][shard] = True
        for server in [each for each in self.links if each not in wanted]:
            self._drop_link(server)
        for server, (backup, learner) in wanted.items():
            incarnation = new.servers[server].incarnation
            if server in self.links and self.links[server].incarnation != incarnation:
                self._drop_link(server)
            if server not in self.links:
                self._fresh_link(now, server, incarnation)
            link = self.links[server]
            again = link.refused & (backup | learner)
            link.forget(changed | again | ~(backup | learner))
            link.backup, link.learner = backup, learner
            link.required &= learner
            link.asked[:] = False

    def _drop_link(self, server: str) -> None:
        link = self.links.pop(server)
        for _, waiting in link.waiting:
            waiting.needs.pop(server, None)
            if not waiting.needs and waiting not in self._parked:
                self._parked.append(waiting)
        self._out.append(Close(LINK, server))

    def _rewait(self) -> None:
        """Who waits for whom, under a new map."""
        everyone: dict[int, Waiting] = {id(waiting): waiting for waiting in self._parked}
        for link in self.links.values():
            everyone |= {id(waiting): waiting for _, waiting in link.waiting}
        gone = set()
        for key, waiting in everyone.items():
            if not self.headed[waiting.cover.at].all():
                gone.add(key)
                if waiting.peer is not None:
                    self._send(waiting.peer, wire.STALE, waiting.request, {"version": self.map.version})
                continue
            for server in list(waiting.needs):
                if not self.links[server].needed(waiting.cover):
                    del waiting.needs[server]
        for link in self.links.values():
            link.waiting = type(link.waiting)(
                each for each in link.waiting if id(each[1]) not in gone and link.server in each[1].needs
            )
        self._parked = []
        for key, waiting in everyone.items():
            if key not in gone and not waiting.needs:
                self._settle(waiting)

    # As backup

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
        """Per shard whether an entry of this head is taken."""
        if head not in self._taking:
            held = self.map.held_by(self.name) if head != self.name else np.zeros(self.map.shards, bool)
            self._taking[head] = held & self.map.headed_by(head)
        return self._taking[head][cover.at] & (self._epochs[cover.at] <= version) & ~self._unloaded[cover.at]

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
        every = bool(taken.all())
        if every or taken.any():
            here = cover if every else cover.part(taken)
            self.counts["entries"] += 1
            if frame.kind == wire.PUSH:
                fresh, gap = self.state.due(frame, here)
                if gap or (fresh is not None and not fresh.all()):
                    raise Diverged(
                        f"push {frame.meta['seq']} of worker {frame.meta['worker']} does not follow here on {here.wire}"
                    )
                void = bool(outer.meta.get("void"))
                try:
                    # Heads keep to the memory's bound; replicas take what their head took, or they would part from it.
                    with self.state.store.unbounded():
                        self.state.push(frame, here, version=version, whole=only is None and every, void=void)
                except EchelonError as error:
                    raise Diverged(f"{self.name} cannot take what the head took: {error}") from error
                self._floor = None
            else:
                self._enter(frame, here, version)
        return cover.wire[:0] if every else cover.wire[~taken]

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
