"""A head's side of the connection to one other replica: what was sent and not answered, and which shards are equal there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from echelon.server.protocol.shard_sets import Cover, every, some


class Sent(NamedTuple):
    """A numbered message that is kept until it is answered."""

    number: int
    kind: int
    meta: dict[str, Any]
    arrays: Sequence[np.ndarray]
    at: float


class Waiting:
    """A worker's frame that is answered once all replicas have it."""

    __slots__ = ("answer", "cover", "needs", "peer", "request")

    def __init__(self, peer: Any, request: int, cover: Cover, answer: tuple[int, dict[str, Any]]) -> None:
        self.peer, self.request, self.cover, self.answer = peer, request, cover, answer
        #: Per replica the number of the message that it has yet to answer.
        self.needs: dict[str, int] = {}


class Moving:
    """A shard's snapshot on its way to a replica: some parts at a time, so that entries of other shards get between them."""

    __slots__ = ("later", "number", "parts", "shard", "total", "unanswered")

    def __init__(self, shard: int, parts: Sequence[tuple[dict[str, Any], Sequence[np.ndarray]]]) -> None:
        self.shard, self.total = shard, len(parts)
        #: Place, what it says, arrays of parts that are yet to be sent.
        self.parts = deque((place, meta, arrays) for place, (meta, arrays) in enumerate(parts))
        self.unanswered: deque[int] = deque()
        #: Entries of the shard since the snapshot was taken: they follow its last part.
        self.later: list[tuple[dict[str, Any], Sequence[np.ndarray]]] = []
        #: Of the last part; None while some are yet to be sent.
        self.number: int | None = None


class Link:
    """To one replica, in one of its lives. Arrays are per shard."""

    def __init__(self, server: str, incarnation: int, shards: int, number: int) -> None:
        self.server, self.incarnation = server, incarnation
        #: Tells this link from earlier ones to the same replica: messages are numbered from 1 in each.
        self.number = number
        self.up = False
        self.down = float("inf")
        #: The newest map that the replica is known to have. While ours is older, nothing is acknowledged by its answers.
        self.newest = 0
        #: The number of the last message made, and of the last one answered.
        self.made = 0
        self.got = 0
        self.sent: deque[Sent] = deque()
        self.waiting: deque[tuple[int, Waiting]] = deque()
        #: When the newest message that it has answered was sent: what reads are leased by.
        self.heard = float("-inf")
        self.beat = float("-inf")
        self.beats: deque[tuple[int, float]] = deque()
        self.backup = np.zeros(shards, bool)
        self.learner = np.zeros(shards, bool)
        #: Equal there, up to messages under way; entries are sent for `flowing` ones (those whose snapshot is under way too).
        self.synced = np.zeros(shards, bool)
        self.flowing = np.zeros(shards, bool)
        #: Asked how far it is, and no answer yet.
        self.asked = np.zeros(shards, bool)
        #: Learners without whose answer nothing is acknowledged any more.
        self.required = np.zeros(shards, bool)
        #: It knows a newer map and did not take an entry.
        self.refused = np.zeros(shards, bool)
        self.todo: deque[int] = deque()
        #: The snapshot that is under way.
        self.moving: Moving | None = None
        self.resume = float("-inf")
        self.began = 0.0
        #: (shard, number): once that is answered, the learner has everything that was ever acknowledged.
        self.catching: list[tuple[int, int]] = []

    def needed(self, cover: Cover) -> bool:
        """Whether an acknowledgement on some of these shards needs its answer."""
        return some(self.backup[cover.at]) or some(self.required[cover.at])

    def lacks(self, cover: Cover) -> bool:
        """Whether something is missing there of shards that need its answer."""
        at = cover.at
        if every(self.synced[at]) and not some(self.refused[at]):
            return False
        return bool(((self.backup[at] | self.required[at]) & (~self.synced[at] | self.refused[at])).any())

    def forget(self, shards: np.ndarray) -> None:
        """Nothing is known any more of how these shards are there."""
        for each in (self.synced, self.flowing, self.asked, self.required, self.refused):
            each[shards] = False
        self.todo = deque(shard for shard in self.todo if not shards[shard])
        self.catching = [(shard, number) for shard, number in self.catching if not shards[shard]]
        if self.moving is not None and shards[self.moving.shard]:
            self.moving = None

    def lost(self) -> None:
        """The connection is gone; what was asked for is asked again, what was sent is sent again."""
        self.up = False
        self.asked[:] = False
        self.beats.clear()
