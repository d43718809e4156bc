"""Check the options of a job, for local servers and servers on Ray."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from echelon.errors import ServerError


def controller_config(
    n: int,
    *,
    folder: Path | None,
    replicas: int,
    shards: int,
    staleness: int | None,
    aggregate: bool,
    lease: float,
    memory: int | None,
    restore: Path | str | None,
    heads: int | None = None,
) -> dict[str, Any]:
    """The configuration of a controller of `n` servers. Creates the folder, a temporary one if it is None."""
    if n < 1 or not 1 <= replicas <= 3:
        raise ServerError(f"{n} servers with {replicas} replicas; use at least one server, and 1, 2 or 3 replicas")
    if staleness is not None and staleness < 0:
        raise ServerError(f"staleness={staleness}; use the steps that a worker may be ahead, or None for any")
    if aggregate and staleness != 0:
        raise ServerError(f"aggregate=True needs workers in step; use staleness=0 instead of {staleness}")
    if memory is not None and memory < 1 << 20:
        raise ServerError(f"memory={memory}; it is in bytes, and a server needs at least {1 << 20}")
    if heads is not None and heads < 1:
        raise ServerError(f"heads={heads}; at least one server takes pushes, use 1 or more, or None for all")
    folder = folder or Path(tempfile.mkdtemp(prefix="echelon-servers-"))
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "folder": str(folder.resolve()),
        "shards": shards,
        "replicas": replicas,
        "expect": n,
        "settings": {"staleness": staleness, "aggregate": aggregate} | ({"heads": heads} if heads else {}),
        "lease": lease,
        "restore": None if restore is None else str(Path(restore).resolve()),
    }
