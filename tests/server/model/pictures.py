"""Copies and pictures of nodes, and the memory of an exploration: equal nodes are one object, and what an event makes of one is worked out once."""

from __future__ import annotations

from collections import deque
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from echelon.server.client.outbox import Section
from echelon.server.protocol import wire
from echelon.server.protocol.actions import Send
from echelon.server.protocol.shard_map import ShardMap
from echelon.server.protocol.shard_sets import ShardSet, ShardSetCache
from tests.server.model.nodes import EVENTS

_SHARED = (
    int,
    str,
    float,
    bytes,
    bool,
    type(None),
    wire.Frame,
    ShardMap,
    Section,
    Send,
    ShardSet,
    ShardSetCache,
)


def copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy, but for what never changes; what is shared inside stays shared."""
    if isinstance(value, _SHARED):
        return value
    if isinstance(value, np.ndarray):
        return value.copy()
    memo = {} if memo is None else memo
    kind = type(value)
    if kind is dict:
        return {key: copied(each, memo) for key, each in value.items()}
    if kind is list:
        return [copied(each, memo) for each in value]
    if kind is tuple:
        return tuple([copied(each, memo) for each in value])
    if kind is deque:
        return deque([copied(each, memo) for each in value])
    if kind is set:
        return set(value)
    if callable(value):
        return value
    if id(value) in memo:
        return memo[id(value)]
    made = memo[id(value)] = kind.__new__(kind)
    for name in getattr(kind, "__slots__", ()) or value.__dict__:
        object.__setattr__(made, name, copied(getattr(value, name), memo))
    return made


_SKIPPED = {
    "counters",
    "acceptance_cache",
    "log_state_requested_at",
    "down_since",
    "settings",
    "reports",
    "load_shard",
    "declare_spec",
    "requests",
    "shard_sets",
}


def frozen(value: Any) -> Any:
    """A hashable picture of a state."""
    if value is None or isinstance(value, int | str | float | bytes | bool):
        return value
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, ShardSet):
        return value.wire_shards.tobytes()
    if isinstance(value, wire.Frame):
        return value.raw.tobytes()
    if isinstance(value, ShardMap):
        if "_frozen" not in value.__dict__:
            value.__dict__["_frozen"] = repr(value.to_document())
        return value.__dict__["_frozen"]
    if isinstance(value, dict):
        return frozenset(
            [(key if isinstance(key, str | int) else frozen(key), frozen(each)) for key, each in value.items()]
        )
    if isinstance(value, list | tuple | deque):
        return tuple([frozen(each) for each in value])
    if isinstance(value, set | frozenset):
        return frozenset([frozen(each) for each in value])
    if is_dataclass(value):
        return tuple([frozen(getattr(value, each.name)) for each in fields(value) if each.name not in _SKIPPED])
    if callable(value):
        return None
    names = getattr(type(value), "__slots__", ()) or value.__dict__
    return tuple([frozen(getattr(value, name)) for name in names if name not in _SKIPPED])


class Memory:
    """What one exploration remembers. Another one has its own: code may have changed between them."""

    def __init__(self) -> None:
        #: Nodes by their pictures, which nobody changes; what an event makes of a node; frames by their bytes.
        self._nodes: dict[int, Any] = {}
        self._after: dict[Any, tuple[Any, list[Any]]] = {}
        self._frames: dict[bytes, wire.Frame] = {}

    def canonical(self, node: Any) -> Any:
        """The one node of this picture."""
        return self._nodes.setdefault(hash(frozen(node)), node)

    def after(self, node: Any, event: str, now: float, args: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        """The node that an event makes of one, and what that one wants done. Messages among `args` arrive as frames."""
        key = (id(node), event, now, args)
        found = self._after.get(key)
        if found is None:
            fresh = copied(node)
            given = [self._parsed(each) if isinstance(each, bytes) else each for each in args]
            actions = EVENTS[event](fresh, now, *given)
            found = self._after[key] = (self.canonical(fresh), actions)
        return found

    def _parsed(self, message: bytes) -> wire.Frame:
        """The frame of a message; frames are never changed."""
        found = self._frames.get(message)
        if found is None:
            if len(self._frames) > 200_000:
                self._frames.clear()
            found = self._frames[message] = wire.parse(np.frombuffer(message, np.uint8))
        return found
