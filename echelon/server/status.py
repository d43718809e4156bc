"""Ask the controller for its status, and format it for people."""

from __future__ import annotations

import socket
from typing import Any

from echelon.errors import ServerError
from echelon.plan.format_units import format_bytes
from echelon.server.protocol import wire
from echelon.server.protocol.auth import ADMIN, authenticate
from echelon.server.protocol.connection import parse_address

ADD_SERVER_HINT = "start another with `echelon server start --controller HOST:PORT --secret-file FILE`"


def send_request(
    address: str, secret: bytes, kind: int, meta: dict[str, Any], *, timeout: float = 10.0
) -> dict[str, Any]:
    """Send the controller one request, and return its reply; ServerError if it is refused."""
    try:
        with socket.create_connection(parse_address(address), timeout=min(timeout, 10.0)) as connection:
            connection.settimeout(timeout)
            authenticate(connection, secret, ADMIN)
            wire.send(connection, wire.encode(kind, 1, meta))
            while (frame := wire.receive(connection)).request_id != 1:
                pass
    except (OSError, EOFError) as error:
        reason = "no answer in time" if isinstance(error, TimeoutError) else (str(error) or "it hung up")
        advice = "is it running, and is this its address?"
        raise ServerError(f"{address}: the controller cannot be asked ({reason}); {advice}") from None
    if frame.kind == wire.REFUSED:
        raise ServerError(str(frame.meta.get("message")))
    return frame.meta


def fetch_status(address: str, secret: bytes) -> dict[str, Any]:
    """The controller's report."""
    return send_request(address, secret, wire.STATUS, {})


def format_server_rows(status: dict[str, Any]) -> list[list[str]]:
    """A table row per server: name, heads, replicas, rows, memory, pushes/s, rows/s, lag, clock."""
    rows = []
    for name, server in sorted(status["servers"].items()):
        rates, links = server.get("rates", {}), server.get("lag", {}).values()
        lagging_entries, lagging_shards = (sum(link[key] for link in links) for key in ("entries", "shards"))
        min_clock, max_clock = server.get("clock", [0, 0])
        row = [
            name + ("" if server["here"] else " (away)") + (" (leaving)" if server["leaving"] else ""),
            server["heads"],
            server["replicas"],
            server.get("rows", ""),
            format_bytes(server["bytes"]) if "bytes" in server else "",
            f"{rates.get('pushes', 0):g}",
            f"{rates.get('rows', 0):g}",
            f"{lagging_entries}" + (f", {lagging_shards} shards" if lagging_shards else ""),
            f"{min_clock}" if min_clock == max_clock else f"{min_clock}-{max_clock}",
        ]
        rows.append([str(cell) for cell in row])
    return rows


def format_summary(status: dict[str, Any]) -> list[str]:
    """The state of shards, replicas and workers, in sentences."""
    staleness = status["settings"].get("staleness")
    bound = "workers never wait" if staleness is None else f"workers are at most {staleness} steps ahead"
    lines = [f"{status['shards']} shards, {status['replicas']} replicas wanted, map {status['version']}; {bound}"]
    for count, shards in sorted(status["shards_by_replicas"].items(), key=lambda item: int(item[0])):
        if 0 < int(count) < status["replicas"]:
            risk = "; one more death loses them" if count == "1" else ""
            lines.append(f"{shards} shards have {count} of {status['replicas']} replicas{risk}")
    if status["learning"]:
        lines.append(f"{status['learning']} shards are being copied")
    remaining_servers = sum(not server["leaving"] for server in status["servers"].values())
    if status["short"] and remaining_servers < status["replicas"]:
        lines.append(f"{remaining_servers} servers cannot hold {status['replicas']} replicas: {ADD_SERVER_HINT}")
    if status["unplaced"]:
        lines.append(f"{status['unplaced']} shards wait for a server")
    if status["lost"]:
        shard_names = ", ".join(sorted(status["lost"], key=int)[:8])
        last_servers = ", ".join(sorted({server for chain in status["lost"].values() for server in chain}))
        outlook = "if all are dead, there is no checkpoint: start again"
        if status["checkpoint"]:
            outlook = "if none does within seconds they go back to the last checkpoint"
        elif status["unreadable"]:
            outlook = f"the checkpoint cannot be read: {status['unreadable']}"
        lines.append(
            f"LOST: {len(status['lost'])} shards ({shard_names}): no replica ({last_servers}) responds; they continue as they were if one that "
            f"was only stopped or cut off comes back; {outlook}"
        )
    if status["revived"]:
        lines.append(f"WENT BACK: {len(status['revived'])} lost shards are as they were in a checkpoint")
    connected, checkpoint = sum(item["here"] for item in status["workers"].values()), status["checkpoint"] or "none yet"
    lines.append(f"{len(status['workers'])} workers, {connected} of them connected; checkpoint: {checkpoint}")
    return lines
