"""What bench.server runs beside ours: TensorFlow's ParameterServerStrategy and a server on torch.rpc.

A script of its own, so that each peer may live in its own environment: `PYTHON server_peers.py tensorflow --servers 2 --workers 2`.
It prints `ready`, then answers each line `SECONDS` on its input with one line of JSON, {"batches": ..., "seconds": ...}, and ends with
its input. All of its processes descend from it, by which the bench adds up their processor time.

Each peer does what ours does, in the kindest way that its makers document: ids made unique before they are looked up, gradients of
equal ids added up before they are sent, several steps in one call of TensorFlow's so that its scheduling hardly counts. TensorFlow is
also run as its tutorial of ParameterServerStrategy has it (tensorflow-plain): one step per scheduled function, ids looked up as they come.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import socket
import sys
import time
from typing import Any

import numpy as np

#: Batches that a worker draws once and then repeats.
POOL = 256
#: Steps in one scheduled call of TensorFlow's.
STEPS = 16
RATE = 0.01


def zipf(rows: int, batch: int, *, seed: int, batches: int = POOL) -> np.ndarray:
    """Ids of `batches` batches: rank k is drawn with a chance like 1/k^1.05, and ranks are scattered over all ids."""
    chances = np.arange(1, rows + 1, dtype=np.float64) ** -1.05
    np.cumsum(chances, out=chances)
    drawn = np.random.default_rng(seed).random((batches, batch)) * chances[-1]
    ranks = np.searchsorted(chances, drawn).astype(np.uint64)
    return ((ranks * np.uint64(2654435761)) % np.uint64(rows)).astype(np.int64)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def serve_turns(advance: Any, *, workers: int, steps: int) -> None:
    """Answer each asked-for number of seconds by running `advance()`, which does `steps` batches on each worker, for that long."""
    advance()
    print("ready", flush=True)
    for line in sys.stdin:
        began, batches = time.perf_counter(), 0
        while time.perf_counter() - began < float(line):
            advance()
            batches += steps * workers
        print(json.dumps({"batches": batches, "seconds": time.perf_counter() - began}), flush=True)


# ---------------------------------------------------------------------------------------------------------------- TensorFlow


def _tensorflow_server(cluster: dict[str, list[str]], job: str, index: int) -> None:
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=2, intra_op_parallelism_threads=1)
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job_name=job, task_index=index, protocol="grpc", config=config
    )
    server.join()


def tensorflow(settings: argparse.Namespace, *, plain: bool = False) -> None:
    """ParameterServerStrategy with its coordinator; table and accumulator sharded over the servers, Adagrad run on them."""
    count = 1 if plain else STEPS
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    ports = free_ports(settings.servers + settings.workers)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    cluster = {"ps": addresses[: settings.servers], "worker": addresses[settings.servers :]}
    context = multiprocessing.get_context("spawn")
    for job, members in cluster.items():
        for index in range(len(members)):
            context.Process(target=_tensorflow_server, args=(cluster, job, index), daemon=True).start()

    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster), rpc_layer="grpc")
    partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(settings.servers)
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    shape = (settings.rows, settings.dim)
    # A constant is made where the shard lives; a random initial value of this size would be made here and sent.
    with strategy.scope():
        table = tf.Variable(lambda shape=shape, dtype=tf.float32: tf.fill(shape, 0.01), shape=shape, dtype=tf.float32)
        accumulator = tf.Variable(
            lambda shape=shape, dtype=tf.float32: tf.fill(shape, 0.1), shape=shape, dtype=tf.float32
        )
    tables, accumulators = _shards(table), _shards(accumulator)
    size = -(-settings.rows // settings.servers)
    pool = zipf(settings.rows, settings.batch, seed=0)

    def dataset() -> Any:
        return tf.data.Dataset.from_tensor_slices(pool).repeat()

    def step(ids: Any) -> None:
        keys, places = (ids, None) if plain else tf.unique(ids)
        owner = tf.cast(keys // size, tf.int32)
        parts = tf.dynamic_partition(keys % size, owner, len(tables))
        order = tf.dynamic_partition(tf.range(tf.size(keys)), owner, len(tables))
        found = tf.dynamic_stitch(order, [tf.gather(each, part) for each, part in zip(tables, parts, strict=True)])
        if plain:
            gradients = found * 1e-3
        else:
            gradients = tf.math.unsorted_segment_sum(tf.gather(found, places) * 1e-3, places, tf.size(keys))
        for part, which, each, sums in zip(parts, order, tables, accumulators, strict=True):
            grad = tf.gather(gradients, which)
            if plain:  # its optimizers add up what a lookup's gradient has of equal ids
                part, equal = tf.unique(part)
                grad = tf.math.unsorted_segment_sum(grad, equal, tf.size(part))
            tf.raw_ops.ResourceSparseApplyAdagradV2(
                var=each.handle, accum=sums.handle, lr=RATE, epsilon=1e-7, grad=grad, indices=part
            )

    @tf.function
    def steps(batches: Any) -> None:
        for _ in range(count):
            step(next(batches))

    batches = iter(coordinator.create_per_worker_dataset(dataset))

    def advance() -> None:
        for _ in range(settings.workers * 4 * (STEPS // count)):
            coordinator.schedule(steps, args=(batches,))
        coordinator.join()

    serve_turns(advance, workers=settings.workers, steps=STEPS * 4)


def tensorflow_plain(settings: argparse.Namespace) -> None:
    """The same as the tutorial of it has a step."""
    tensorflow(settings, plain=True)


def _shards(variable: Any) -> list[Any]:
    return list(getattr(variable, "variables", [variable]))


# ------------------------------------------------------------------------------------------------------- raw loopback TCP


def loopback(settings: argparse.Namespace) -> None:
    """`rows` floats over one TCP connection of this machine, received in place: a batch is one transfer of all of it."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    if os.fork() == 0:
        values = np.ones(settings.rows, np.float32)
        connection = listener.accept()[0]
        while connection.recv(1):
            connection.sendall(values.data)
        os._exit(0)
    listener.close()
    connection = socket.create_connection(("127.0.0.1", port))
    target = np.zeros(settings.rows, np.float32)

    def advance() -> None:
        connection.sendall(b"!")
        view = target.data.cast("B")
        while view:
            view = view[connection.recv_into(view) :]

    serve_turns(advance, workers=1, steps=1)


# ----------------------------------------------------------------------------------------------------------------- torch.rpc


class _Rows:
    """A server's part of the table: rows by id // servers, full Adagrad, torch's own kernels."""

    def __init__(self, rows: int, dim: int) -> None:
        import torch

        self.table = torch.full((rows, dim), 0.01)
        self.sums = torch.full((rows, dim), 0.1)

    def pull(self, ids: Any) -> Any:
        return self.table.index_select(0, ids)

    def push(self, ids: Any, gradients: Any) -> None:
        sums = self.sums.index_select(0, ids).addcmul_(gradients, gradients)
        self.sums.index_copy_(0, ids, sums)
        self.table.index_add_(0, ids, gradients / (sums.sqrt_().add_(1e-7)), alpha=-RATE)


_HELD: list[_Rows] = []


def _pull(ids: Any) -> Any:
    return _HELD[0].pull(ids)


def _push(ids: Any, gradients: Any) -> None:
    _HELD[0].push(ids, gradients)


def _rpc(name: str, rank: int, world: int, port: int) -> None:
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=options)


def _rpc_server(index: int, world: int, port: int, rows: int, dim: int) -> None:
    from torch.distributed import rpc

    _HELD.append(_Rows(rows, dim))
    _rpc(f"server{index}", index, world, port)
    rpc.shutdown()


def _rpc_worker(index: int, settings: argparse.Namespace, world: int, port: int, pipe: Any) -> None:
    import torch
    from torch.distributed import rpc

    servers = settings.servers
    _rpc(f"worker{index}", servers + index, world, port)
    pool = [torch.from_numpy(each) for each in zipf(settings.rows, settings.batch, seed=index)]
    pending: list[Any] = []
    step = 0
    while (seconds := pipe.recv()) is not None:
        began = step
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or step == began:
            unique, places = torch.unique(pool[step % POOL], return_inverse=True)
            owner = unique % servers
            order = [torch.nonzero(owner == server).flatten() for server in range(servers)]
            parts = [unique[each] // servers for each in order]
            asked = [rpc.rpc_async(f"server{s}", _pull, args=(part,)) for s, part in enumerate(parts)]
            found = torch.empty(len(unique), settings.dim)
            for which, each in zip(order, asked, strict=True):
                found[which] = each.wait()
            rows = found[places]
            gradients = torch.zeros_like(found).index_add_(0, places, rows * 1e-3)
            for each in pending:
                each.wait()
            pending = [
                rpc.rpc_async(f"server{s}", _push, args=(part, gradients[which]))
                for s, (part, which) in enumerate(zip(parts, order, strict=True))
            ]
            step += 1
        for each in pending:
            each.wait()
        pipe.send(step - began)
    rpc.shutdown()


def torch_rpc(settings: argparse.Namespace) -> None:
    """Servers that hold rows in plain tensors behind torch.rpc (TensorPipe), one push under way while the next batch is pulled."""
    [port] = free_ports(1)
    world = settings.servers + settings.workers
    context = multiprocessing.get_context("spawn")
    rows = -(-settings.rows // settings.servers)
    for index in range(settings.servers):
        context.Process(target=_rpc_server, args=(index, world, port, rows, settings.dim), daemon=True).start()
    pipes = []
    for index in range(settings.workers):
        here, there = context.Pipe()
        context.Process(target=_rpc_worker, args=(index, settings, world, port, there), daemon=True).start()
        pipes.append(here)

    run_workers(pipes)


def run_workers(pipes: list[Any]) -> None:
    """Answer each asked-for number of seconds by having every worker run for that long."""
    for seconds in itertools.chain((0.0,), map(float, sys.stdin)):
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send(seconds)
        batches = sum(pipe.recv() for pipe in pipes)
        if seconds:
            print(json.dumps({"batches": batches, "seconds": time.perf_counter() - began}), flush=True)
        else:
            print("ready", flush=True)
    for pipe in pipes:
        pipe.send(None)


def arguments(peers: list[str]) -> argparse.Namespace:
    """What to run, how large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=peers)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument(
        "--heads", type=int, default=None, help="servers that take pushes; the others are replicas only"
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--staleness", type=int, default=None)
    return parser.parse_args()


PEERS = {"tensorflow": tensorflow, "tensorflow-plain": tensorflow_plain, "torch.rpc": torch_rpc, "loopback": loopback}

if __name__ == "__main__":
    chosen = arguments(list(PEERS))
    PEERS[chosen.peer](chosen)
    # A process whose children hold channels of their own does not always end by itself; there is nothing left to save.
    sys.stdout.flush()
    os._exit(0)
