"""What the pure state machines want done, in order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from echelon.server.protocol import wire
from echelon.server.protocol.event_loop import Connection, EventLoop

#: Kinds of connection: one that was accepted, one to another server, the one to the controller.
PEER, LINK, CONTROL = "peer", "link", "control"


class Send(NamedTuple):
    """Send a frame over a connection; where it is gone, nothing happens."""

    channel: str
    peer: Hashable
    kind: int
    request_id: int
    meta: dict[str, Any]
    arrays: Sequence[np.ndarray | wire.ChunkedArray] = ()


class Close(NamedTuple):
    """Close a connection."""

    channel: str
    peer: Hashable


class Persist(NamedTuple):
    """Write the controller's document and sync it to the disk, before anything that follows."""

    document: dict[str, Any]


class WriteManifest(NamedTuple):
    """Complete a checkpoint: write its manifest, give the folder its name, and tell `on_manifest` how that went."""

    path: str
    document: dict[str, Any]


class LogEvent(NamedTuple):
    """Say something that people should hear of."""

    event: str
    details: dict[str, Any]


Action = Send | Close | Persist | WriteManifest | LogEvent


def perform(
    actions: Sequence[Action],
    loop: EventLoop,
    connection_to: Callable[[str, Any], Connection | None],
    log_event: Callable[[str, Mapping[str, Any]], None],
) -> None:
    """Send, close and log. An action on a connection that is gone does nothing."""
    for action in actions:
        if isinstance(action, LogEvent):
            log_event(action.event, action.details)
        elif isinstance(action, Send | Close):
            connection = connection_to(action.channel, action.peer)
            if connection is None:
                continue
            if isinstance(action, Send):
                loop.send(connection, wire.encode(action.kind, action.request_id, action.meta, action.arrays))
            else:
                loop.close(connection)
