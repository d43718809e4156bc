"""How the servers are: asked of the controller, shown to people."""

from __future__ import annotations

import socket
from typing import Any

from echelon.errors import ServerError
from echelon.plan.format_units import format_bytes
from echelon.server.protocol import wire
from echelon.server.protocol.auth import ADMIN, authenticate
from echelon.server.protocol.event_loop import parse_address

ADD_SERVER_HINT = "start another with `echelon server start --controller HOST:PORT --secret-file FILE`"


def send_request(
    address: str, secret: bytes, kind: int, meta: dict[str, Any], *, timeout: float = 10.0
) -> dict[str, Any]:
    """Ask the controller one thing; a refusal is an error."""
    try:
        with socket.create_connection(parse_address(address), timeout=min(timeout, 10.0)) as connection:
            connection.settimeout(timeout)
            authenticate(connection, secret, ADMIN)
            wire.send(connection, wire.encode(kind, 1, meta))
            while True:
                frame = wire.receive(connection)
                if frame.request_id == 1:
                    break
    except (OSError, EOFError) as error:
        reason = "no answer in time" if isinstance(error, TimeoutError) else (str(error) or "it hung up")
        raise ServerError(
            f"{address}: the controller cannot be asked ({reason}); is it running, and is this its address?"
        ) from None
    if frame.kind == wire.REFUSED:
        raise ServerError(str(frame.meta.get("message")))
    return frame.meta


def fetch_status(address: str, secret: bytes) -> dict[str, Any]:
    """The controller's report."""
    return send_request(address, secret, wire.STATUS, {})


def format_server_rows(status: dict[str, Any]) -> list[list[str]]:
    """A line of figures for each server: name, heads, replicas, rows, memory, pushes/s, rows/s, lag, clock."""
    lines = []
    for name, server in sorted(status["servers"].items()):
        rates, lag = server.get("rates", {}), server.get("lag", {})
        lagging_entries = sum(link["entries"] for link in lag.values())
        lagging_shards = sum(link["shards"] for link in lag.values())
        min_clock, max_clock = server.get("clock", [0, 0])
        state = "" if server["here"] else " (away)"
        lines.append(
            [
                name + state + (" (leaving)" if server["leaving"] else ""),
                str(server["heads"]),
                str(server["replicas"]),
                str(server.get("rows", "")),
                format_bytes(server["bytes"]) if "bytes" in server else "",
                f"{rates.get('pushes', 0):g}",
                f"{rates.get('rows', 0):g}",
                f"{lagging_entries}" + (f", {lagging_shards} shards" if lagging_shards else ""),
                f"{min_clock}" if min_clock == max_clock else f"{min_clock}-{max_clock}",
            ]
        )
    return lines


def format_summary(status: dict[str, Any]) -> list[str]:
    """What the figures do not say."""
    staleness = status["settings"].get("staleness")
    lines = [
        f"{status['shards']} shards, {status['replicas']} replicas wished, map {status['version']}; "
        + ("workers never wait" if staleness is None else f"workers are at most {staleness} steps ahead")
    ]
    for count, shards in sorted(status["shards_by_replicas"].items(), key=lambda item: int(item[0])):
        if 0 < int(count) < status["replicas"]:
            lines.append(
                f"{shards} shards have {count} of {status['replicas']} replicas"
                + ("; one more death loses them" if count == "1" else "")
            )
    if status["learning"]:
        lines.append(f"{status['learning']} shards are being copied")
    remaining_servers = sum(not item["leaving"] for item in status["servers"].values())
    if status["short"] and remaining_servers < status["replicas"]:
        lines.append(f"{remaining_servers} servers cannot hold {status['replicas']} replicas: {ADD_SERVER_HINT}")
    if status["unplaced"]:
        lines.append(f"{status['unplaced']} shards wait for servers to be placed on")
    if status["lost"]:
        shard_names = ", ".join(sorted(status["lost"], key=int)[:8])
        former_servers = ", ".join(sorted({server for chain in status["lost"].values() for server in chain}))
        lines.append(
            f"LOST: {len(status['lost'])} shards ({shard_names}): none of their replicas ({former_servers}) is heard of; they go on as they were if one that was "
            "only stopped or cut off comes back; "
            + (
                "if none does within seconds they go back to the last checkpoint"
                if status["checkpoint"]
                else f"the checkpoint cannot be read: {status['unreadable']}"
                if status["unreadable"]
                else "if all are dead, there is no checkpoint: start anew"
            )
        )
    if status["revived"]:
        lines.append(f"WENT BACK: {len(status['revived'])} shards were lost and are as they were in a checkpoint")
    connected_workers = sum(item["here"] for item in status["workers"].values())
    lines.append(
        f"{len(status['workers'])} workers, {connected_workers} of them here; checkpoint: {status['checkpoint'] or 'none yet'}"
    )
    return lines
