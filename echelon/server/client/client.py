"""A worker's face of the parameter server: pull, push, and nothing that was acknowledged is ever lost.

    client = connect("127.0.0.1:7000", secret=secret, worker="0")
    client.declare(Table(name="emb", dim=64))
    rows = client.pull({"emb": ids})["emb"]
    client.push({"emb": (ids, gradients)})

Calls block as long as the servers do; whoever dies, moves or comes back, they go on where they were. One thread at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from echelon.errors import ServerError
from echelon.server.client.connection_pool import Request
from echelon.server.client.requests import (
    MAX_ROWS_BYTES,
    DensePull,
    DensePush,
    Pull,
    Push,
    RoutingTable,
    TablePull,
    TablePush,
)
from echelon.server.client.session import Session
from echelon.server.protocol import wire
from echelon.server.protocol.auth import read_secret
from echelon.server.protocol.grouped_ids import GroupedIds
from echelon.server.protocol.shard_map import ShardMap
from echelon.server.protocol.specs import DTYPE_BYTES, Dense, Table, check_learning_rate, spec_to_plain

Ids = np.ndarray
#: name -> (ids, gradients or rows)
TableValues = Mapping[str, tuple[Ids, np.ndarray]]

#: Bytes of one push: a route's part of it is one frame, which a head forwards inside another.
MAX_PUSH_BYTES = (wire.MAX_FRAME_BYTES * 3) // 4
#: Batches of ids whose order is remembered: this step's, and the next one's that was prefetched.
_MAX_CACHED_GROUPS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChangeCursor:
    """How far a worker knows a table: a log number per shard. For `changed`."""

    table: str
    lsns: np.ndarray
    #: Per shard under whose headship the mark was read: another head may have counted other entries.
    generations: tuple[tuple[int, int], ...]


def connect(
    address: str,
    *,
    secret: bytes | Path | str,
    worker: str = "0",
    window: int = 2,
    timeout: float = 60.0,
    host: str | None = None,
) -> Client:
    """Join the job whose controller listens at `address` ("host:port").

    `secret`: of the job, or the file that has it (of `echelon server start`). `worker`: a name that no other worker of the job has.
    `window`: pushes that may be unacknowledged before `push` waits. `timeout`: seconds without a way on (a server that cannot be
    reached and is not replaced) until a call gives up.
    """
    return Client(address, secret=secret, worker=worker, window=window, timeout=timeout, host=host)


class Client:
    """What `connect` gives. `step` counts the steps that this worker has finished."""

    def __init__(
        self, address: str, *, secret: bytes | Path | str, worker: str, window: int, timeout: float, host: str | None
    ) -> None:
        _require_numba()
        if type(worker) is not str or not worker:
            raise ServerError(f"worker={worker!r}; a worker has a name of its own, give a string such as '0'")
        if isinstance(secret, str | Path):
            secret = read_secret(Path(secret))
        if window < 1:
            raise ServerError(f"window: {window}; at least one push must be under way, use 1 or more")
        from echelon.server.jit_warmup import warm_up_client

        warm_up_client()
        self.worker, self.window, self.step = worker, window, 0
        self._lock = threading.RLock()
        self._prefetched: list[Pull] = []
        self._cached_groups: dict[str, list[tuple[RoutingTable, GroupedIds]]] = {}
        self._session = Session(address, secret=secret, worker=worker, timeout=timeout, host=host)
        try:
            self.step = self.clock()[0]
        except BaseException:
            self.close()
            raise

    def declare(self, spec: Table | Dense, *, initial: np.ndarray | None = None) -> None:
        """Make a table or dense parameter known. Every worker may; the same name must mean the same. Only the first `initial` counts."""
        with self._lock:
            if initial is not None and not isinstance(spec, Dense):
                raise ServerError(
                    f"{spec.name}: initial= is for dense parameters; a table's rows begin as its init says, or use assign()"
                )
            values = _flatten_dense(spec, initial) if isinstance(spec, Dense) and initial is not None else None
            self._session.ask_controller(wire.DECLARE, {"spec": spec_to_plain(spec)})
            self._session.add_spec(spec)
            if isinstance(spec, Dense) and values is not None:
                initial_push = DensePush(spec, values, self._session.block_shards[spec.name])
                self._send_push(
                    Push(self._session.routing_table, {}, [], [initial_push], is_assignment=True), tick=False
                )
                self.flush()

    def pull(
        self, ids: Mapping[str, Ids], *, wire_dtype: str | None = None, dense: Sequence[str] = ()
    ) -> dict[str, np.ndarray]:
        """Rows of these ids, in their order; waits for as long as the staleness bound asks. Takes what was prefetched, if it is the same."""
        with self._lock:
            flat_ids = {name: _as_flat_ids(name, array) for name, array in _require_mapping(ids, "ids").items()}
            pull = self._take_prefetched(flat_ids) if not dense and wire_dtype is None else None
            if pull is None:
                pull = self._start_pull(flat_ids, dense, step=self.step, wire_dtype=wire_dtype)
            self._session.wait_for_pull(pull)
            rows = {name: _expand_rows(pull.tables[name], np.shape(array)) for name, array in ids.items()}
            return rows | {name: pull.dense[name].values for name in dense}

    def prefetch(self, ids: Mapping[str, Ids], *, steps_ahead: int = 1) -> None:
        """Ask for rows already; the `pull` of the same ids takes them. `steps_ahead`: of how many steps after this one (0: once it is pushed)."""
        with self._lock:
            flat_ids = {name: _as_flat_ids(name, array) for name, array in _require_mapping(ids, "ids").items()}
            self._prefetched.append(self._start_pull(flat_ids, (), step=self.step + steps_ahead))
            del self._prefetched[:-8]

    def pull_dense(self, names: Sequence[str], *, out: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Dense parameters, flat; into the arrays of `out` where given."""
        with self._lock:
            names = [names] if isinstance(names, str) else names
            pull = self._start_pull({}, names, step=self.step, out=out)
            self._session.wait_for_pull(pull)
            return {name: pull.dense[name].values for name in names}

    def push(
        self,
        tables: TableValues | None = None,
        dense: Mapping[str, np.ndarray] | None = None,
        *,
        lr: Mapping[str, float] | float | None = None,
        tick: bool = True,
    ) -> int:
        """Send gradients; equal ids are added up first. Returns its number when it is under way, which `flush` waits for. `tick` ends a step."""
        with self._lock:
            rates = self._learning_rates(lr, [*(tables or ()), *(dense or ())])
            push = Push(
                self._session.routing_table,
                {"lr": rates},
                [
                    self._make_table_push(name, *_require_pair(name, pair))
                    for name, pair in _require_mapping(tables or {}, "(ids, gradients)").items()
                ],
                [self._make_dense_push(self._dense_spec(name), values) for name, values in (dense or {}).items()],
            )
            return self._send_push(push, tick=tick)

    def assign(self, tables: TableValues) -> None:
        """Set rows to these values, with fresh optimizer state; acknowledged when it returns."""
        with self._lock:
            table_pushes = []
            for name, pair in _require_mapping(tables, "(ids, rows)").items():
                table_pushes.append(self._make_table_push(name, *_require_pair(name, pair), allow_duplicates=False))
            self._send_push(Push(self._session.routing_table, {}, table_pushes, [], is_assignment=True), tick=False)
            self.flush()

    def flush(self) -> None:
        """Wait until every push is acknowledged: it is then on every replica."""
        with self._lock:
            self._session.wait_until(lambda: not len(self._session.outbox), "pushes to be acknowledged")

    def last_acknowledged(self) -> int:
        """The last push that is acknowledged, as all before it are. Takes in answers that have arrived."""
        with self._lock:
            self._session.require_open()
            self._session.connections.poll(0.0)
            self._session.raise_pending()
            return (
                self._session.outbox.last_seq
                if self._session.outbox.oldest_pending_seq is None
                else self._session.outbox.oldest_pending_seq - 1
            )

    def pull_changes(
        self, table: str, since: ChangeCursor | None = None, *, limit: int = 1 << 20
    ) -> tuple[np.ndarray, np.ndarray, ChangeCursor]:
        """Ids and rows that changed since that mark (None: all there are), and the new mark.

        About `limit` rows of each server at most, and no more than a frame holds: ask on with the mark until none come.
        """
        with self._lock:
            spec = self._table_spec(table)
            limit = max(1, min(limit, MAX_ROWS_BYTES // (spec.dim * DTYPE_BYTES[spec.dtype] + 8)))
            lsns, generations = (
                np.zeros(self._session.routing_table.num_shards, np.int64),
                list(_shard_generations(self.map)),
            )
            if since is not None:
                is_same_generation = np.array(
                    [current == previous for current, previous in zip(generations, since.generations, strict=True)]
                )
                lsns = np.where(is_same_generation, since.lsns, 0)
            changes: list[tuple[np.ndarray, np.ndarray]] = []

            def build_request(shards: np.ndarray) -> tuple[dict[str, Any], list[np.ndarray]]:
                current = _shard_generations(self.map)
                for shard in shards:
                    if current[shard] != generations[shard]:
                        generations[shard], lsns[shard] = current[shard], 0
                return {"table": table, "wire": spec.dtype, "limit": limit}, [shards, lsns[shards]]

            def on_reply(shards: np.ndarray, frame: wire.Frame) -> None:
                ids, rows, new_lsns = frame.arrays
                changes.append((ids, rows))
                lsns[shards] = new_lsns

            self._session.ask_every_shard(wire.CHANGED, build_request, on_reply)
            ids = np.concatenate([ids for ids, _ in changes])
            rows = np.concatenate([rows for _, rows in changes])
            return ids, rows, ChangeCursor(table=table, lsns=lsns, generations=tuple(generations))

    def clock(self) -> tuple[int, int]:
        """Steps that the slowest and the fastest worker have finished."""
        with self._lock:
            clocks: list[tuple[int, int]] = []
            self._session.ask_every_shard(
                wire.CLOCK,
                lambda shards: ({}, [shards]),
                lambda shards, frame: clocks.append((int(frame.meta["min"]), int(frame.meta["max"]))),
            )
            return min(slowest for slowest, _ in clocks), max(fastest for _, fastest in clocks)

    def progress(self) -> tuple[int, bool]:
        """Steps that the furthest worker there ever was has finished; whether gradients wait for others to end their step."""
        with self._lock:
            replies: list[tuple[int, bool]] = []
            self._session.ask_every_shard(
                wire.CLOCK,
                lambda shards: ({}, [shards]),
                lambda shards, frame: replies.append((int(frame.meta["furthest"]), bool(frame.meta["pending"]))),
            )
            return max(furthest for furthest, _ in replies), any(pending for _, pending in replies)

    def digests(self) -> dict[int, dict[str, str]]:
        """Per shard, of every replica, a digest of all that it holds: equal ones hold the same bytes."""
        with self._lock:
            self.flush()
            while (digests := self._try_digests(self._session.routing_table)) is None:
                pass  # somebody left or a connection was lost meanwhile
            return digests

    def _try_digests(self, routing_table: RoutingTable) -> dict[int, dict[str, str]] | None:
        """The digests under this map; None if it changed, or a connection was lost, before all were here."""
        session = self._session
        digests: dict[int, dict[str, str]] = {shard: {} for shard in range(routing_table.num_shards)}
        holders = {server for route in routing_table.routes for server in route.chain}
        answered: list[int] = []
        requests = []

        def all_reachable() -> bool:
            return all(session.connections.is_ready(server) for server in holders)

        session.wait_until(
            lambda: all_reachable() or session.routing_table is not routing_table, "every replica to be reachable"
        )
        if session.routing_table is not routing_table:
            return None
        for server in holders:
            held_shards = np.sort(
                np.concatenate([route.shards for route in routing_table.routes if server in route.chain])
            )

            def handle_reply(
                request: Request, frame: wire.Frame, shards: np.ndarray = held_shards, server: str = server
            ) -> None:
                answered.append(1)
                if frame.kind == wire.DIGEST_REPLY:
                    for shard, digest in zip(shards, _parse_digests(frame), strict=True):
                        digests[int(shard)][server] = digest

            requests.append(Request(wire.DIGEST, {"version": session.outbox.map_version}, [held_shards], handle_reply))
            session.connections.send_request(server, requests[-1])
        session.wait_until(
            lambda: len(answered) == len(holders) or not all_reachable() or session.routing_table is not routing_table,
            "digests",
        )
        if len(answered) == len(holders):
            return digests
        for request in requests:
            session.connections.abandon(request)
        return None

    def status(self) -> dict[str, Any]:
        """What the controller knows: servers, shards, replicas, lag, rows, bytes, rates."""
        with self._lock:
            return dict(self._session.ask_controller(wire.STATUS, {}).meta)

    def checkpoint(self, path: Path | str) -> dict[str, Any]:
        """Write all shards, each at one log number, to this folder; training may go on. Returns when it is on the disk."""
        with self._lock:
            self.flush()
            absolute_path = str(Path(path).absolute())  # servers have folders of their own to start from
            return dict(self._session.ask_controller(wire.CHECKPOINT, {"path": absolute_path}, timeout=3600.0).meta)

    @property
    def rolled_back_shards(self) -> dict[int, str]:
        """Shards that lost all replicas while the job went on, and the checkpoint that they went back to. A warning says so once, too."""
        return {shard: folder for shard, (folder, _) in self._session.rolled_back_shards.items()}

    @property
    def map(self) -> ShardMap:
        """The newest map that this worker knows."""
        assert self._session.map is not None
        return self._session.map

    @property
    def specs(self) -> Mapping[str, Table | Dense]:
        """What is declared, by name, as far as this worker knows."""
        return self._session.specs

    @property
    def settings(self) -> Mapping[str, Any]:
        """Of the job, as the controller has them: staleness, replicas, ..."""
        return self._session.controller.settings

    @property
    def staleness(self) -> int | None:
        """The bound that pulls wait for; None: they never do."""
        return self.settings.get("staleness")

    def close(self) -> None:
        """Leave the job: unacknowledged pushes are given up (call `flush` first), the clocks go on without this worker."""
        with self._lock:
            self._session.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None and not self._session.closed:
                self.flush()
        finally:
            self.close()  # or others would wait for this worker's clock

    def _send_push(self, push: Push, *, tick: bool) -> int:
        push.meta |= {"step": self.step, "tick": tick}
        if push.nbytes > MAX_PUSH_BYTES:
            raise ServerError(
                f"a push of {push.nbytes >> 20} MiB; one is at most {MAX_PUSH_BYTES >> 20} MiB, push it in parts with tick=False but for the last"
            )
        if self.settings.get("aggregate"):
            push.meta["aggregate"] = True
        number = self._session.send_push(push, window=self.window)
        self.step += tick
        return number

    def _make_table_push(self, name: str, ids: Ids, values: np.ndarray, *, allow_duplicates: bool = True) -> TablePush:
        spec = self._table_spec(name)
        shape, ids, values = np.shape(ids), _as_flat_ids(name, ids), _as_number_array(name, values)
        if values.shape not in ((ids.size, spec.dim), (*shape, spec.dim)) and (ids.size or values.size):
            raise ServerError(
                f"{name}: values of shape {values.shape} for {ids.size} ids; it has {spec.dim} columns, give ({ids.size}, {spec.dim})"
            )
        rows = np.ascontiguousarray(values.reshape(ids.size, spec.dim), spec.dtype)
        grouped_ids = self._group_ids(name, ids)
        if not allow_duplicates and len(grouped_ids.ids) < ids.size:
            raise ServerError(
                f"{name}: {ids.size - len(grouped_ids.ids)} of {ids.size} ids are given more than once; assign() sets each row to one value"
            )
        return TablePush(spec, grouped_ids, grouped_ids.sum_gradients(rows))

    def _make_dense_push(self, spec: Dense, values: np.ndarray) -> DensePush:
        return DensePush(spec, _flatten_dense(spec, values), self._session.block_shards[spec.name])

    def _learning_rates(self, lr: Mapping[str, float] | float | None, names: Sequence[str]) -> dict[str, float] | None:
        requested = lr if isinstance(lr, Mapping) else {} if lr is None else dict.fromkeys(names, lr)
        rates = {}
        for name, rate in requested.items():
            # Of what is declared: a head that does not know a table yet, and a replica that does, would part.
            if name not in self._session.specs:
                raise ServerError(self._undeclared_message(name, "table or dense parameter", None))
            check_learning_rate(name, rate)
            if name in names or not self._updates_every_row(name):
                rates[name] = float(rate)
        # With its rate all rows of such a table move, also on routes to which nothing of this push goes; and with it alone.
        rates |= {
            name: self._table_spec(name).rule.lr
            for name in names
            if name not in rates and self._updates_every_row(name)
        }
        return rates or None

    def _updates_every_row(self, name: str) -> bool:
        spec = self._session.specs.get(name)
        return isinstance(spec, Table) and spec.rule.every

    def _start_pull(
        self,
        ids: Mapping[str, Ids],
        dense: Sequence[str],
        *,
        step: int,
        wire_dtype: str | None = None,
        out: Mapping[str, np.ndarray] | None = None,
    ) -> Pull:
        pull = Pull(step=step, staleness=self.staleness)
        for name, table_ids in ids.items():
            spec = self._table_spec(name)
            if wire_dtype is not None and wire_dtype not in DTYPE_BYTES:
                raise ServerError(
                    f"{name}: wire_dtype={wire_dtype!r} is no kind of number; use one of {', '.join(DTYPE_BYTES)}"
                )
            grouped_ids = self._group_ids(name, table_ids)
            rows = np.empty((len(grouped_ids.ids), spec.dim), spec.dtype)
            pull.tables[name] = TablePull(spec, wire_dtype or spec.dtype, grouped_ids, rows)
        for name in dense:
            dense_spec = self._dense_spec(name)
            values = out[name] if out and name in out else np.empty(dense_spec.size, dense_spec.dtype)
            if values.shape != (dense_spec.size,) or values.dtype != dense_spec.dtype or not values.flags.c_contiguous:
                raise ServerError(
                    f"{name}: out= is {values.dtype} of shape {values.shape}; give a contiguous {dense_spec.dtype} of shape ({dense_spec.size},)"
                )
            pull.dense[name] = DensePull(dense_spec, values, self._session.block_shards[name])
        self._session.send_pull(pull)
        return pull

    def _take_prefetched(self, ids: Mapping[str, Ids]) -> Pull | None:
        # Rows of an earlier step may be older than the bound allows.
        self._prefetched = [array for array in self._prefetched if array.step >= self.step]
        requested = {name: array.tobytes() for name, array in ids.items()}
        for position, pull in enumerate(self._prefetched):
            if pull.staleness is not None and pull.step - pull.staleness > self.step:
                continue  # it waits for what this worker pushes next
            if {name: table.grouped_ids.input_bytes for name, table in pull.tables.items()} == requested:
                del self._prefetched[position]
                return pull
        return None

    def _group_ids(self, name: str, ids: Ids) -> GroupedIds:
        """Sort ids by route; those of the last calls are kept (a push follows the pull of the same ids)."""
        routing_table, input_bytes = self._session.routing_table, ids.tobytes()
        cached = self._cached_groups.setdefault(name, [])
        for cached_table, grouped_ids in cached:
            if cached_table is routing_table and grouped_ids.input_bytes == input_bytes:
                return grouped_ids
        grouped_ids = routing_table.group_ids(ids)
        cached.append((routing_table, grouped_ids))
        del cached[:-_MAX_CACHED_GROUPS]
        return grouped_ids

    def _table_spec(self, name: str) -> Table:
        spec = self._session.specs.get(name)
        if not isinstance(spec, Table):
            raise ServerError(self._undeclared_message(name, "table", spec))
        return spec

    def _dense_spec(self, name: str) -> Dense:
        spec = self._session.specs.get(name)
        if not isinstance(spec, Dense):
            raise ServerError(self._undeclared_message(name, "dense parameter", spec))
        return spec

    def _undeclared_message(self, name: str, what: str, spec: object) -> str:
        if spec is not None:
            return f"{name}: is declared as {type(spec).__name__}, not as a {what}; use pull and push for tables, pull_dense and dense= for dense ones"
        declared = ", ".join(sorted(self._session.specs)) or "nothing"
        return f"{name}: no such {what} (declared: {declared}); declare it first"


def _as_flat_ids(name: str, ids: Any) -> np.ndarray:
    array = _as_number_array(name, ids)
    if not array.size:
        return np.empty(0, np.int64)  # an empty list has no dtype of its own
    if array.dtype.kind not in "iu":
        raise ServerError(f"{name}: ids of dtype {array.dtype}; they are integers, use int64")
    return np.ascontiguousarray(array.reshape(-1), np.int64)


def _require_mapping(values: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ServerError(f"{type(values).__name__} where a mapping is expected; give {{table's name: {what}}}")
    return values


def _require_pair(name: str, pair: Any) -> tuple[Any, Any]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ServerError(f"{name}: {type(pair).__name__}, where two things are expected; give (ids, values)")
    return pair[0], pair[1]


def _as_number_array(name: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # tensors that need a gradient, on a device or of a dtype of torch's own
        raise ServerError(
            f"{name}: values that are no array ({error}); give numpy's, of a tensor t.detach().float().cpu().numpy()"
        ) from None
    if array.dtype.kind not in "fiub" and array.size:
        raise ServerError(f"{name}: values of dtype {array.dtype}; they are real numbers, use float32")
    return array


def _flatten_dense(spec: Dense, values: np.ndarray) -> np.ndarray:
    """A copy of a dense parameter's values, checked."""
    values = _as_number_array(spec.name, values)
    if values.size != spec.size:
        raise ServerError(
            f"{spec.name}: {values.size} values of shape {values.shape}; it was declared with {spec.size} elements"
        )
    return np.array(values.reshape(-1), spec.dtype)


def _expand_rows(table: TablePull, shape: tuple[int, ...]) -> np.ndarray:
    rows = table.grouped_ids.expand(table.rows)
    return rows if len(shape) == 1 else rows.reshape(*shape, table.spec.dim)


def _shard_generations(map: ShardMap) -> tuple[tuple[int, int], ...]:
    """Per shard since which version its head is head, and since which what it holds came out of a checkpoint."""
    return tuple((epoch, map.restored_from.get(shard, ("", 0))[1]) for shard, epoch in enumerate(map.epochs))


def _parse_digests(frame: wire.Frame) -> list[str]:
    if frame.arrays:
        return [row.tobytes().hex() for row in frame.arrays[0].reshape(-1, 32)]
    return [str(digest) for digest in frame.meta["digests"]]


def _require_numba() -> None:
    from importlib.util import find_spec

    if find_spec("numba") is None:
        raise ServerError(
            "the parameter server's client needs numba, which is not installed; pip install 'echelon[server]'"
        )
