"""A worker's process of bench.crashes and bench.moves. Importing this loads the compiled loops: a fork server does it once for all workers."""

from __future__ import annotations

from typing import Any

import numpy as np

import bench.common  # noqa: F401 (what the main module imports, which children import again)
from bench.history_check import WIDTH, work
from echelon.server import connect
from echelon.server.protocol.grouped_ids import group_by_route

TABLE = "sums"


def live(address: str, secret: bytes, name: str, base: int, column: int, seed: int, path: str, pipe: Any) -> None:
    """One life of a worker, until something comes by the pipe."""
    client = connect(address, secret=secret, worker=name)
    with open(path, "w") as record:
        work(client, TABLE, base, column, seed, record, pipe.poll)
    client.close()


_loaded = group_by_route(np.arange(8), np.zeros(2, np.uint16), 1)
_loaded.expand(_loaded.sum_gradients(np.ones((8, WIDTH), np.float32)))
