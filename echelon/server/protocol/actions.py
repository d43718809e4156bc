"""Side effects that the pure state machines request, in order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from echelon.server.protocol import wire
from echelon.server.protocol.event_loop import Connection, EventLoop

#: Kinds of connection: accepted, to another server, to the controller.
PEER, LINK, CONTROL = "peer", "link", "control"


class Send(NamedTuple):
    """Send a frame over a connection."""

    channel: str
    peer: Hashable
    kind: int
    request_id: int
    meta: dict[str, Any]
    arrays: wire.Arrays = ()


class Close(NamedTuple):
    """Close a connection."""

    channel: str
    peer: Hashable


class Persist(NamedTuple):
    """Write the controller's document and sync it to disk before the next action."""

    document: dict[str, Any]


class WriteManifest(NamedTuple):
    """Write a checkpoint's manifest, rename its folder, and report the outcome to `on_manifest`."""

    path: str
    document: dict[str, Any]


class LogEvent(NamedTuple):
    """Log an event."""

    event: str
    details: dict[str, Any]


Action = Send | Close | Persist | WriteManifest | LogEvent


def perform(
    actions: Sequence[Action],
    loop: EventLoop,
    connection_to: Callable[[str, Any], Connection | None],
    log_event: Callable[[str, Mapping[str, Any]], None],
) -> None:
    """Send, close and log. Actions on closed connections are skipped."""
    for action in actions:
        if isinstance(action, LogEvent):
            log_event(action.event, action.details)
        elif isinstance(action, Send | Close):
            connection = connection_to(action.channel, action.peer)
            if connection is not None and isinstance(action, Send):
                loop.send(connection, wire.encode(action.kind, action.request_id, action.meta, action.arrays))
            elif connection is not None:
                loop.close(connection)
