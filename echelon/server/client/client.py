"""A worker's client of the parameter server: pull rows, push gradients; no acknowledged push is lost.

    client = connect("127.0.0.1:7000", secret=secret, worker="0")
    client.declare(Table(name="emb", dim=64))
    rows = client.pull({"emb": ids})["emb"]
    client.push({"emb": (ids, gradients)})

Calls block until the servers answer, and survive servers that die, move or come back. Use a client from one thread at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from echelon.errors import ServerError
from echelon.server.client.ask_shards import ChangeCursor, Changes, fetch_changes, fetch_clocks, fetch_digests
from echelon.server.client.input_arrays import (
    as_flat_ids,
    as_number_array,
    flatten_dense,
    require_mapping,
    require_pair,
)
from echelon.server.client.requests import DensePull, DensePush, Pull, Push, TablePull, TablePush
from echelon.server.client.routing import RoutingTable
from echelon.server.client.session import Session
from echelon.server.protocol import wire
from echelon.server.protocol.auth import read_secret
from echelon.server.protocol.grouped_ids import GroupedIds
from echelon.server.protocol.shard_map import ShardMap
from echelon.server.protocol.specs import DTYPE_BYTES, Dense, Table, check_learning_rate, spec_to_plain

Secret = bytes | Path | str
Arrays = Mapping[str, np.ndarray]
Spec = TypeVar("Spec", Table, Dense)
Rates = Mapping[str, float] | float | None
#: name -> (ids, gradients or rows)
TableValues = Mapping[str, tuple[np.ndarray, np.ndarray]]

#: Bytes of one push: the part of a route is one frame, which its head nests in another.
MAX_PUSH_BYTES = (wire.MAX_FRAME_BYTES * 3) // 4
#: Grouped batches of ids to keep per table: of this step, and of the next one, which was prefetched.
_MAX_CACHED_GROUPS = 2


def connect(
    address: str, *, secret: Secret, worker: str = "0", window: int = 2, timeout: float = 60.0, host: str | None = None
) -> Client:
    """Join the job whose controller listens at `address` ("host:port").

    `secret`: the job's secret, or its file (of `echelon server start`). `worker`: a name that is unique in the job. `window`: pushes that
    may be unacknowledged before `push` waits. `timeout`: seconds without progress (an unreachable server that is not replaced) until a call
    gives up.
    """
    return Client(address, secret=secret, worker=worker, window=window, timeout=timeout, host=host)


class Client:
    """A worker's client, made by `connect`. `step` counts the steps that this worker has finished."""

    def __init__(
        self, address: str, *, secret: Secret, worker: str, window: int, timeout: float, host: str | None
    ) -> None:
        if type(worker) is not str or not worker:
            raise ServerError(f"worker={worker!r}; use a string that is unique in the job, such as '0'")
        if isinstance(secret, str | Path):
            secret = read_secret(Path(secret))
        if window < 1:
            raise ServerError(f"window: {window}; use 1 or more unacknowledged pushes")
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
        """Declare a table or dense parameter, as every worker may with the same spec. Only the first `initial` counts."""
        with self._lock:
            if initial is not None and not isinstance(spec, Dense):
                raise ServerError(f"{spec.name}: initial= is for dense parameters; tables have init=, or use assign()")
            values = flatten_dense(spec, initial) if isinstance(spec, Dense) and initial is not None else None
            self._session.ask_controller(wire.DECLARE, {"spec": spec_to_plain(spec)})
            self._session.add_spec(spec)
            if isinstance(spec, Dense) and values is not None:
                self._send_assignment([], [DensePush(spec, values, self._session.block_shards[spec.name])])

    def pull(self, ids: Arrays, *, wire_dtype: str | None = None, dense: Sequence[str] = ()) -> dict[str, np.ndarray]:
        """Rows of these ids, in their order; waits if the staleness bound requires it. Uses a matching `prefetch`."""
        with self._lock:
            flat_ids = _flatten_ids(ids)
            pull = self._take_prefetched(flat_ids) if not dense and wire_dtype is None else None
            if pull is None:
                pull = self._start_pull(flat_ids, dense, step=self.step, wire_dtype=wire_dtype)
            self._session.wait_for_pull(pull)
            rows = {name: _expand_rows(pull.tables[name], np.shape(array)) for name, array in ids.items()}
            return rows | {name: pull.dense[name].values for name in dense}

    def prefetch(self, ids: Arrays, *, steps_ahead: int = 1) -> None:
        """Request rows that the `pull` of the same ids will take, `steps_ahead` steps after this one."""
        with self._lock:
            self._prefetched.append(self._start_pull(_flatten_ids(ids), (), step=self.step + steps_ahead))
            del self._prefetched[:-8]

    def pull_dense(self, names: Sequence[str], *, out: Arrays | None = None) -> dict[str, np.ndarray]:
        """Dense parameters, flat; received into the arrays of `out` if it has them."""
        with self._lock:
            names = [names] if isinstance(names, str) else names
            pull = self._start_pull({}, names, step=self.step, out=out)
            self._session.wait_for_pull(pull)
            return {name: pull.dense[name].values for name in names}

    def push(
        self, tables: TableValues | None = None, dense: Arrays | None = None, *, lr: Rates = None, tick: bool = True
    ) -> int:
        """Send gradients, after adding up those of equal ids. Returns the push's number at once; `flush` waits for it. `tick` ends a step."""
        with self._lock:
            rates = self._learning_rates(lr, [*(tables or ()), *(dense or ())])
            table_pushes = self._make_table_pushes(tables or {}, "(ids, gradients)")
            dense_pushes = [self._make_dense_push(name, values) for name, values in (dense or {}).items()]
            push = Push(self._session.routing_table, {"lr": rates}, table_pushes, dense_pushes)
            return self._send_push(push, tick=tick)

    def assign(self, tables: TableValues) -> None:
        """Set rows to these values, with fresh optimizer state; acknowledged when it returns."""
        with self._lock:
            self._send_assignment(self._make_table_pushes(tables, "(ids, rows)", allow_duplicates=False), [])

    def flush(self) -> None:
        """Wait until every push is acknowledged, and so on every replica."""
        with self._lock:
            self._session.wait_until(lambda: not len(self._session.outbox), "pushes to be acknowledged")

    def last_acknowledged(self) -> int:
        """The last push that is acknowledged along with all before it. Processes replies that have arrived."""
        with self._lock:
            session = self._session
            session.require_open()
            session.connections.poll(0.0)
            session.raise_pending()
            oldest_pending = session.outbox.oldest_pending_seq
            return session.outbox.last_seq if oldest_pending is None else oldest_pending - 1

    def pull_changes(self, table: str, since: ChangeCursor | None = None, *, limit: int = 1 << 20) -> Changes:
        """Ids and rows that changed since a cursor (None: all rows), and the new cursor.

        Returns at most about `limit` rows of each server, and no more than fit into a frame: call again with the new cursor until none come.
        """
        with self._lock:
            return fetch_changes(self._session, self._spec(table, Table), since, limit)

    def clock(self) -> tuple[int, int]:
        """Steps that the slowest and the fastest worker have finished."""
        with self._lock:
            clocks = fetch_clocks(self._session)
            return min(int(clock["min"]) for clock in clocks), max(int(clock["max"]) for clock in clocks)

    def progress(self) -> tuple[int, bool]:
        """Steps that the furthest worker ever finished; whether gradients wait until others end their step."""
        with self._lock:
            clocks = fetch_clocks(self._session)
            return max(int(clock["furthest"]) for clock in clocks), any(clock["pending"] for clock in clocks)

    def digests(self) -> dict[int, dict[str, str]]:
        """Per shard a digest of each replica's content: equal ones hold the same bytes."""
        with self._lock:
            self.flush()
            return fetch_digests(self._session)

    def status(self) -> dict[str, Any]:
        """The controller's report: servers, shards, replicas, lag, rows, bytes, rates."""
        with self._lock:
            return dict(self._session.ask_controller(wire.STATUS, {}).meta)

    def checkpoint(self, path: Path | str) -> dict[str, Any]:
        """Write all shards, each at one log number, to this folder while training continues. Returns when they are on disk."""
        with self._lock:
            self.flush()
            absolute_path = str(Path(path).absolute())  # servers have other working directories
            return dict(self._session.ask_controller(wire.CHECKPOINT, {"path": absolute_path}, timeout=3600.0).meta)

    @property
    def rolled_back_shards(self) -> dict[int, str]:
        """Shards that lost all replicas and went back to a checkpoint while the job continued, and that checkpoint. A warning reports it, too."""
        return {shard: folder for shard, (folder, _) in self._session.rolled_back_shards.items()}

    @property
    def map(self) -> ShardMap:
        """The newest map that this worker has."""
        assert self._session.map is not None
        return self._session.map

    @property
    def specs(self) -> Mapping[str, Table | Dense]:
        """The declared tables and dense parameters that this worker knows, by name."""
        return self._session.specs

    @property
    def settings(self) -> Mapping[str, Any]:
        """The job's settings: staleness, replicas, ..."""
        return self._session.controller.settings

    @property
    def staleness(self) -> int | None:
        """Steps that a worker may be ahead before its pulls wait; None: they never do."""
        return self.settings.get("staleness")

    def close(self) -> None:
        """Leave the job: unacknowledged pushes are dropped (call `flush` first), and the clocks continue without this worker."""
        with self._lock:
            self._session.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None and not self._session.closed:
                self.flush()
        finally:
            self.close()  # otherwise others would wait for this worker's clock

    def _send_push(self, push: Push, *, tick: bool) -> int:
        push.meta |= {"step": self.step, "tick": tick}
        if push.nbytes > MAX_PUSH_BYTES:
            sizes = f"a push of {push.nbytes >> 20} MiB; one is at most {MAX_PUSH_BYTES >> 20} MiB"
            raise ServerError(f"{sizes}, push it in parts with tick=False but for the last")
        if self.settings.get("aggregate"):
            push.meta["aggregate"] = True
        number = self._session.send_push(push, window=self.window)
        self.step += tick
        return number

    def _send_assignment(self, tables: list[TablePush], dense: list[DensePush]) -> None:
        self._send_push(Push(self._session.routing_table, {}, tables, dense, is_assignment=True), tick=False)
        self.flush()

    def _make_table_pushes(self, tables: TableValues, what: str, *, allow_duplicates: bool = True) -> list[TablePush]:
        pushes = []
        for name, pair in require_mapping(tables, what).items():
            given_ids, given_values = require_pair(name, pair)
            spec = self._spec(name, Table)
            shape, ids, values = np.shape(given_ids), as_flat_ids(name, given_ids), as_number_array(name, given_values)
            if values.shape not in ((ids.size, spec.dim), (*shape, spec.dim)) and (ids.size or values.size):
                expected = f"it has {spec.dim} columns, give ({ids.size}, {spec.dim})"
                raise ServerError(f"{name}: values of shape {values.shape} for {ids.size} ids; {expected}")
            rows = np.ascontiguousarray(values.reshape(ids.size, spec.dim), spec.dtype)
            grouped_ids = self._group_ids(name, ids)
            duplicates = ids.size - len(grouped_ids.ids)
            if duplicates and not allow_duplicates:
                counts = f"{duplicates} of {ids.size} ids are given more than once"
                raise ServerError(f"{name}: {counts}; assign() sets each row to one value")
            pushes.append(TablePush(spec, grouped_ids, grouped_ids.sum_gradients(rows)))
        return pushes

    def _make_dense_push(self, name: str, values: np.ndarray) -> DensePush:
        spec = self._spec(name, Dense)
        return DensePush(spec, flatten_dense(spec, values), self._session.block_shards[name])

    def _learning_rates(self, lr: Rates, names: Sequence[str]) -> dict[str, float] | None:
        requested = lr if isinstance(lr, Mapping) else {} if lr is None else dict.fromkeys(names, lr)
        rates = {}
        for name, rate in requested.items():
            # A head that does not know a table yet and a replica that does would diverge.
            if name not in self._session.specs:
                raise self._undeclared_error(name)
            check_learning_rate(name, rate)
            if name in names or not self._updates_every_row(name):
                rates[name] = float(rate)
        # The rate updates all rows of such a table, also on routes that get no rows of this push.
        for name in names:
            if name not in rates and self._updates_every_row(name):
                rates[name] = self._spec(name, Table).rule.lr
        return rates or None

    def _updates_every_row(self, name: str) -> bool:
        spec = self._session.specs.get(name)
        return isinstance(spec, Table) and spec.rule.every

    def _start_pull(
        self, ids: Arrays, dense: Sequence[str], *, step: int, wire_dtype: str | None = None, out: Arrays | None = None
    ) -> Pull:
        pull = Pull(step=step, staleness=self.staleness)
        if wire_dtype is not None and wire_dtype not in DTYPE_BYTES:
            raise ServerError(f"wire_dtype={wire_dtype!r} is no dtype; use one of {', '.join(DTYPE_BYTES)}")
        for name, table_ids in ids.items():
            spec = self._spec(name, Table)
            grouped_ids = self._group_ids(name, table_ids)
            rows = np.empty((len(grouped_ids.ids), spec.dim), spec.dtype)
            pull.tables[name] = TablePull(spec, wire_dtype or spec.dtype, grouped_ids, rows)
        for name in dense:
            dense_spec = self._spec(name, Dense)
            size, dtype = dense_spec.size, dense_spec.dtype
            values = out[name] if out and name in out else np.empty(size, dtype)
            if values.shape != (size,) or values.dtype != dtype or not values.flags.c_contiguous:
                expected = f"give a contiguous {dtype} of shape ({size},)"
                raise ServerError(f"{name}: out= is {values.dtype} of shape {values.shape}; {expected}")
            pull.dense[name] = DensePull(dense_spec, values, self._session.block_shards[name])
        self._session.send_pull(pull)
        return pull

    def _take_prefetched(self, ids: Arrays) -> Pull | None:
        # Rows of earlier steps may be older than the bound allows.
        self._prefetched = [pull for pull in self._prefetched if pull.step >= self.step]
        requested = {name: array.tobytes() for name, array in ids.items()}
        for position, pull in enumerate(self._prefetched):
            if pull.staleness is not None and pull.step - pull.staleness > self.step:
                continue  # it waits for this worker's next push
            if {name: table.grouped_ids.input_bytes for name, table in pull.tables.items()} == requested:
                del self._prefetched[position]
                return pull
        return None

    def _group_ids(self, name: str, ids: np.ndarray) -> GroupedIds:
        """Group ids by route, or take the groups of a recent call: a push follows the pull of the same ids."""
        routing_table, input_bytes = self._session.routing_table, ids.tobytes()
        cached = self._cached_groups.setdefault(name, [])
        for cached_table, grouped_ids in cached:
            if cached_table is routing_table and grouped_ids.input_bytes == input_bytes:
                return grouped_ids
        grouped_ids = routing_table.group_ids(ids)
        cached.append((routing_table, grouped_ids))
        del cached[:-_MAX_CACHED_GROUPS]
        return grouped_ids

    def _spec(self, name: str, kind: type[Spec]) -> Spec:
        spec = self._session.specs.get(name)
        if isinstance(spec, kind):
            return spec
        if spec is None:
            raise self._undeclared_error(name)
        advice = "use pull and push for tables, pull_dense and dense= for dense ones"
        raise ServerError(f"{name}: is declared as {type(spec).__name__}, not as {kind.__name__}; {advice}")

    def _undeclared_error(self, name: str) -> ServerError:
        declared = ", ".join(sorted(self._session.specs)) or "nothing"
        return ServerError(f"{name}: no such table or dense parameter (declared: {declared}); declare it first")


def _flatten_ids(ids: Arrays) -> dict[str, np.ndarray]:
    return {name: as_flat_ids(name, array) for name, array in require_mapping(ids, "ids").items()}


def _expand_rows(table: TablePull, shape: tuple[int, ...]) -> np.ndarray:
    rows = table.grouped_ids.expand(table.rows)
    return rows if len(shape) == 1 else rows.reshape(*shape, table.spec.dim)
