"""Our side of bench.server, spoken to as its peers are (see server_peers.py): servers, their controller and workers, each a process."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from typing import Any

import numpy as np

from bench.server_peers import POOL, RATE, arguments, run_workers, zipf
from echelon.server import Dense, Rule, Servers, Table, connect

#: Rows that a worker creates with one push before anything is timed.
FILL = 1 << 16


def emb(dim: int) -> Table:
    """The table that is timed: full Adagrad, as the peers have it."""
    from echelon.server import Init

    return Table(
        name="emb", dim=dim, rule=Rule(kind="adagrad", lr=RATE, initial=0.1), init=Init(kind="constant", value=0.01)
    )


def work(index: int, settings: Any, address: str, secret: bytes, pipe: Any) -> None:
    """A worker: makes its part of the rows, then pulls, prefetches and pushes for as long as it is told."""
    client = connect(address, secret=secret, worker=str(index))
    client.declare(emb(settings.dim))
    for start in range(index * FILL, settings.rows, settings.workers * FILL):
        ids = np.arange(start, min(start + FILL, settings.rows))
        client.push({"emb": (ids, np.zeros((len(ids), settings.dim), np.float32))}, tick=False)
    client.flush()
    pool = list(zipf(settings.rows, settings.batch, seed=index))
    gradients = np.empty((settings.batch, settings.dim), np.float32)
    step = 0
    while (seconds := pipe.recv()) is not None:
        began, end = step, time.perf_counter() + seconds
        while time.perf_counter() < end or step == began:
            ids = pool[step % POOL]
            rows = client.pull({"emb": ids})["emb"]
            client.prefetch({"emb": pool[(step + 1) % POOL]})
            np.multiply(rows, np.float32(1e-3), out=gradients)
            client.push({"emb": (ids, gradients)})
            step += 1
        client.flush()
        pipe.send(step - began)
    client.close()


def train(settings: Any) -> None:
    """The sparse table under load."""
    memory = int(settings.rows * settings.dim * 8 * 1.4) * settings.replicas // settings.servers + (256 << 20)
    with Servers(
        settings.servers,
        replicas=settings.replicas,
        heads=settings.heads,
        memory=memory,
        staleness=settings.staleness,
    ) as servers:
        context = multiprocessing.get_context("spawn")
        pipes, workers = [], []
        for index in range(settings.workers):
            here, there = context.Pipe()
            worker = context.Process(
                target=work, args=(index, settings, servers.address, servers.secret, there), daemon=True
            )
            worker.start()
            pipes.append(here)
            workers.append(worker)
        run_workers(pipes)
        for worker in workers:
            worker.join(20)


def dense(settings: Any) -> None:
    """Pulls of one dense parameter of `rows` elements: a batch is a pull of all of it."""
    with Servers(settings.servers, replicas=settings.replicas) as servers:
        client = connect(servers.address, secret=servers.secret)
        client.declare(
            Dense(name="w", size=settings.rows, rule=Rule(kind="sgd")), initial=np.ones(settings.rows, np.float32)
        )
        out = {"w": np.zeros(settings.rows, np.float32)}

        def advance() -> None:
            client.pull_dense(["w"], out=out)

        from bench.server_peers import serve_turns

        serve_turns(advance, workers=1, steps=1)
        client.close()


if __name__ == "__main__":
    chosen = arguments(["train", "dense"])
    {"train": train, "dense": dense}[chosen.peer](chosen)
    sys.stdout.flush()
    os._exit(0)
