"""How the servers are: asked of the controller, shown to people."""

from __future__ import annotations

import socket
from typing import Any

from echelon.errors import ServerError
from echelon.server import wire
from echelon.server.loop import split
from echelon.server.secret import ADMIN, greet


def request(address: str, secret: bytes, kind: int, meta: dict[str, Any], *, patience: float = 10.0) -> dict[str, Any]:
    """Ask the controller one thing; a refusal is an error."""
    try:
        with socket.create_connection(split(address), timeout=min(patience, 10.0)) as connection:
            connection.settimeout(patience)
            greet(connection, secret, ADMIN)
            wire.send(connection, wire.encode(kind, 1, meta))
            while True:
                frame = wire.receive(connection)
                if frame.request == 1:
                    break
    except (OSError, EOFError) as error:
        why = "no answer in time" if isinstance(error, TimeoutError) else (str(error) or "it hung up")
        raise ServerError(
            f"{address}: the controller cannot be asked ({why}); is it running, and is this its address?"
        ) from None
    if frame.kind == wire.REFUSED:
        raise ServerError(str(frame.meta.get("message")))
    return frame.meta


def ask(address: str, secret: bytes) -> dict[str, Any]:
    """The controller's report."""
    return request(address, secret, wire.STATUS, {})
