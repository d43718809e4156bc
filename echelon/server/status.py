"""How the servers are: asked of the controller, shown to people."""

from __future__ import annotations

import socket
from typing import Any

from echelon.errors import ServerError
from echelon.plan.format_units import size
from echelon.server.protocol import wire
from echelon.server.protocol.auth import ADMIN, greet
from echelon.server.protocol.event_loop import split

MORE = "start another with `echelon serve --controller HOST:PORT --secret-file FILE`"


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


def rows(found: dict[str, Any]) -> list[list[str]]:
    """A line of figures for each server: name, heads, replicas, rows, memory, pushes/s, rows/s, lag, clock."""
    lines = []
    for name, each in sorted(found["servers"].items()):
        rates, lag = each.get("rates", {}), each.get("lag", {})
        behind = sum(link["entries"] for link in lag.values())
        missing = sum(link["shards"] for link in lag.values())
        low, high = each.get("clock", [0, 0])
        state = "" if each["here"] else " (away)"
        lines.append(
            [
                name + state + (" (leaving)" if each["leaving"] else ""),
                str(each["heads"]),
                str(each["replicas"]),
                str(each.get("rows", "")),
                size(each["bytes"]) if "bytes" in each else "",
                f"{rates.get('pushes', 0):g}",
                f"{rates.get('rows', 0):g}",
                f"{behind}" + (f", {missing} shards" if missing else ""),
                f"{low}" if low == high else f"{low}-{high}",
            ]
        )
    return lines


def in_words(found: dict[str, Any]) -> list[str]:
    """What the figures do not say."""
    bound = found["settings"].get("staleness")
    lines = [
        f"{found['shards']} shards, {found['replicas']} replicas wished, map {found['version']}; "
        + ("workers never wait" if bound is None else f"workers are at most {bound} steps ahead")
    ]
    for count, shards in sorted(found["shards_by_replicas"].items(), key=lambda each: int(each[0])):
        if 0 < int(count) < found["replicas"]:
            lines.append(
                f"{shards} shards have {count} of {found['replicas']} replicas"
                + ("; one more death loses them" if count == "1" else "")
            )
    if found["learning"]:
        lines.append(f"{found['learning']} shards are being copied")
    staying = sum(not each["leaving"] for each in found["servers"].values())
    if found["short"] and staying < found["replicas"]:
        lines.append(f"{staying} servers cannot hold {found['replicas']} replicas: {MORE}")
    if found["unplaced"]:
        lines.append(f"{found['unplaced']} shards wait for servers to be placed on")
    if found["lost"]:
        names = ", ".join(sorted(found["lost"], key=int)[:8])
        had = ", ".join(sorted({server for chain in found["lost"].values() for server in chain}))
        lines.append(
            f"LOST: {len(found['lost'])} shards ({names}): none of their replicas ({had}) is heard of; they go on as they were if one that was "
            "only stopped or cut off comes back; "
            + (
                "if none does within seconds they go back to the last checkpoint"
                if found["checkpoint"]
                else f"the checkpoint cannot be read: {found['unreadable']}"
                if found["unreadable"]
                else "if all are dead, there is no checkpoint: start anew"
            )
        )
    if found["revived"]:
        lines.append(f"WENT BACK: {len(found['revived'])} shards were lost and are as they were in a checkpoint")
    here = sum(each["here"] for each in found["workers"].values())
    lines.append(
        f"{len(found['workers'])} workers, {here} of them here; checkpoint: {found['checkpoint'] or 'none yet'}"
    )
    return lines
