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
from echelon.server.client.combine import Grouped
from echelon.server.client.connection_pool import Request
from echelon.server.client.requests import LARGE, DenseGrad, Grads, Parcel, Pull, Roads, Wanted, WantedDense
from echelon.server.client.session import Session
from echelon.server.protocol import wire
from echelon.server.protocol.auth import read_secret
from echelon.server.protocol.shard_map import Map
from echelon.server.protocol.specs import SIZES, Dense, Table, check_rate, spec_to_plain

Ids = np.ndarray
#: name -> (ids, gradients or rows)
Pushes = Mapping[str, tuple[Ids, np.ndarray]]

#: Bytes of one push: a route's part of it is one frame, which a head forwards inside another.
LARGEST = (wire.MAX_FRAME * 3) // 4
#: Batches of ids whose order is remembered: this step's, and the next one's that was prefetched.
_KEPT = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Since:
    """How far a worker knows a table: a log number per shard. For `changed`."""

    table: str
    marks: np.ndarray
    #: Per shard under whose headship the mark was read: another head may have counted other entries.
    lives: tuple[tuple[int, int], ...]


def connect(
    address: str,
    *,
    secret: bytes | Path | str,
    worker: str = "0",
    window: int = 2,
    patience: float = 60.0,
    host: str | None = None,
) -> Client:
    """Join the job whose controller listens at `address` ("host:port").

    `secret`: of the job, or the file that has it (of `echelon serve`). `worker`: a name that no other worker of the job has.
    `window`: pushes that may be unacknowledged before `push` waits. `patience`: seconds without a way on (a server that cannot be
    reached and is not replaced) until a call gives up.
    """
    return Client(address, secret=secret, worker=worker, window=window, patience=patience, host=host)


class Client:
    """What `connect` gives. `step` counts the steps that this worker has finished."""

    def __init__(
        self, address: str, *, secret: bytes | Path | str, worker: str, window: int, patience: float, host: str | None
    ) -> None:
        _require_numba()
        if type(worker) is not str or not worker:
            raise ServerError(f"worker={worker!r}; a worker has a name of its own, give a string such as '0'")
        if isinstance(secret, str | Path):
            secret = read_secret(Path(secret))
        if window < 1:
            raise ServerError(f"window: {window}; at least one push must be under way, use 1 or more")
        from echelon.server.kernels.jit_warmup import work

        work()
        self.worker, self.window, self.step = worker, window, 0
        self._lock = threading.RLock()
        self._prefetched: list[Pull] = []
        self._sorted: dict[str, list[tuple[Roads, Grouped]]] = {}
        self._session = Session(address, secret=secret, worker=worker, patience=patience, host=host)
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
            values = _flat(spec, initial) if isinstance(spec, Dense) and initial is not None else None
            self._session.control(wire.DECLARE, {"spec": spec_to_plain(spec)})
            self._session.learn(spec)
            if isinstance(spec, Dense) and values is not None:
                first = DenseGrad(spec, values, self._session.blocks[spec.name])
                self._send(Parcel(self._session.roads, {}, [], [first], sets=True), tick=False)
                self.flush()

    def pull(
        self, ids: Mapping[str, Ids], *, wire: str | None = None, dense: Sequence[str] = ()
    ) -> dict[str, np.ndarray]:
        """Rows of these ids, in their order; waits for as long as the staleness bound asks. Takes what was prefetched, if it is the same."""
        with self._lock:
            wanted = {name: _ids(name, given) for name, given in _by_name(ids, "ids").items()}
            pull = self._take_prefetched(wanted) if not dense and wire is None else None
            if pull is None:
                pull = self._ask(wanted, dense, step=self.step, form=wire)
            self._session.finish(pull)
            found = {name: _expanded(pull.tables[name], np.shape(given)) for name, given in ids.items()}
            return found | {name: pull.dense[name].values for name in dense}

    def prefetch(self, ids: Mapping[str, Ids], *, ahead: int = 1) -> None:
        """Ask for rows already; the `pull` of the same ids takes them. `ahead`: of how many steps after this one (0: once it is pushed)."""
        with self._lock:
            wanted = {name: _ids(name, given) for name, given in _by_name(ids, "ids").items()}
            self._prefetched.append(self._ask(wanted, (), step=self.step + ahead))
            del self._prefetched[:-8]

    def pull_dense(self, names: Sequence[str], *, out: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Dense parameters, flat; into the arrays of `out` where given."""
        with self._lock:
            names = [names] if isinstance(names, str) else names
            pull = self._ask({}, names, step=self.step, out=out)
            self._session.finish(pull)
            return {name: pull.dense[name].values for name in names}

    def push(
        self,
        tables: Pushes | None = None,
        dense: Mapping[str, np.ndarray] | None = None,
        *,
        lr: Mapping[str, float] | float | None = None,
        tick: bool = True,
    ) -> int:
        """Send gradients; equal ids are added up first. Returns its number when it is under way, which `flush` waits for. `tick` ends a step."""
        with self._lock:
            rates = self._rates(lr, [*(tables or ()), *(dense or ())])
            parcel = Parcel(
                self._session.roads,
                {"lr": rates},
                [
                    self._grads(name, *_pair(name, pair))
                    for name, pair in _by_name(tables or {}, "(ids, gradients)").items()
                ],
                [self._grad(self._dense(name), values) for name, values in (dense or {}).items()],
            )
            return self._send(parcel, tick=tick)

    def assign(self, tables: Pushes) -> None:
        """Set rows to these values, with fresh optimizer state; acknowledged when it returns."""
        with self._lock:
            sets = []
            for name, pair in _by_name(tables, "(ids, rows)").items():
                sets.append(self._grads(name, *_pair(name, pair), add=False))
            self._send(Parcel(self._session.roads, {}, sets, [], sets=True), tick=False)
            self.flush()

    def flush(self) -> None:
        """Wait until every push is acknowledged: it is then on every replica."""
        with self._lock:
            self._session.wait(lambda: not len(self._session.outbox), "pushes to be acknowledged")

    def acknowledged(self) -> int:
        """The last push that is acknowledged, as all before it are. Takes in answers that have arrived."""
        with self._lock:
            self._session.require_open()
            self._session.courier.turn(0.0)
            self._session.check()
            return self._session.outbox.last if self._session.outbox.oldest is None else self._session.outbox.oldest - 1

    def changed(
        self, table: str, since: Since | None = None, *, limit: int = 1 << 20
    ) -> tuple[np.ndarray, np.ndarray, Since]:
        """Ids and rows that changed since that mark (None: all there are), and the new mark.

        About `limit` rows of each server at most, and no more than a frame holds: ask on with the mark until none come.
        """
        with self._lock:
            spec = self._table(table)
            limit = max(1, min(limit, LARGE // (spec.dim * SIZES[spec.dtype] + 8)))
            marks, lives = np.zeros(self._session.roads.shards, np.int64), list(_lives(self.map))
            if since is not None:
                same = np.array([now == then for now, then in zip(lives, since.lives, strict=True)])
                marks = np.where(same, since.marks, 0)
            found: list[tuple[np.ndarray, np.ndarray]] = []

            def ask(cover: np.ndarray) -> tuple[dict[str, Any], list[np.ndarray]]:
                now = _lives(self.map)
                for shard in cover:
                    if now[shard] != lives[shard]:
                        lives[shard], marks[shard] = now[shard], 0
                return {"table": table, "wire": spec.dtype, "limit": limit}, [cover, marks[cover]]

            def take(cover: np.ndarray, frame: wire.Frame) -> None:
                ids, rows, new = frame.arrays
                found.append((ids, rows))
                marks[cover] = new

            self._session.everywhere(wire.CHANGED, ask, take)
            ids = np.concatenate([ids for ids, _ in found])
            rows = np.concatenate([rows for _, rows in found])
            return ids, rows, Since(table=table, marks=marks, lives=tuple(lives))

    def clock(self) -> tuple[int, int]:
        """Steps that the slowest and the fastest worker have finished."""
        with self._lock:
            found: list[tuple[int, int]] = []
            self._session.everywhere(
                wire.CLOCK,
                lambda cover: ({}, [cover]),
                lambda cover, frame: found.append((int(frame.meta["min"]), int(frame.meta["max"]))),
            )
            return min(low for low, _ in found), max(high for _, high in found)

    def standing(self) -> tuple[int, bool]:
        """Steps that the furthest worker there ever was has finished; whether gradients wait for others to end their step."""
        with self._lock:
            found: list[tuple[int, bool]] = []
            self._session.everywhere(
                wire.CLOCK,
                lambda cover: ({}, [cover]),
                lambda cover, frame: found.append((int(frame.meta["furthest"]), bool(frame.meta["pending"]))),
            )
            return max(furthest for furthest, _ in found), any(pending for _, pending in found)

    def digests(self) -> dict[int, dict[str, str]]:
        """Per shard, of every replica, a digest of all that it holds: equal ones hold the same bytes."""
        with self._lock:
            self.flush()
            while (found := self._digests_of(self._session.roads)) is None:
                pass  # somebody left or a connection was lost meanwhile
            return found

    def _digests_of(self, roads: Roads) -> dict[int, dict[str, str]] | None:
        """The digests under this map; None if it changed, or a connection was lost, before all were here."""
        session = self._session
        found: dict[int, dict[str, str]] = {shard: {} for shard in range(roads.shards)}
        holders = {server for route in roads.routes for server in route.chain}
        answered: list[int] = []
        requests = []

        def up() -> bool:
            return all(session.courier.up(server) for server in holders)

        session.wait(lambda: up() or session.roads is not roads, "every replica to be reachable")
        if session.roads is not roads:
            return None
        for server in holders:
            cover = np.sort(np.concatenate([route.shards for route in roads.routes if server in route.chain]))

            def done(request: Request, frame: wire.Frame, cover: np.ndarray = cover, server: str = server) -> None:
                answered.append(1)
                if frame.kind == wire.DIGESTS:
                    for shard, digest in zip(cover, _digests(frame), strict=True):
                        found[int(shard)][server] = digest

            requests.append(Request(wire.DIGEST, {"version": session.outbox.version}, [cover], done))
            session.courier.ask(server, requests[-1])
        session.wait(lambda: len(answered) == len(holders) or not up() or session.roads is not roads, "digests")
        if len(answered) == len(holders):
            return found
        for request in requests:
            session.courier.abandon(request)
        return None

    def status(self) -> dict[str, Any]:
        """What the controller knows: servers, shards, replicas, lag, rows, bytes, rates."""
        with self._lock:
            return dict(self._session.control(wire.STATUS, {}).meta)

    def checkpoint(self, path: Path | str) -> dict[str, Any]:
        """Write all shards, each at one log number, to this folder; training may go on. Returns when it is on the disk."""
        with self._lock:
            self.flush()
            place = str(Path(path).absolute())  # servers have folders of their own to start from
            return dict(self._session.control(wire.CHECKPOINT, {"path": place}, patience=3600.0).meta)

    @property
    def restored(self) -> dict[int, str]:
        """Shards that lost all replicas while the job went on, and the checkpoint that they went back to. A warning says so once, too."""
        return {shard: folder for shard, (folder, _) in self._session.restored.items()}

    @property
    def map(self) -> Map:
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
        return self._session.herald.settings

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

    def _send(self, parcel: Parcel, *, tick: bool) -> int:
        parcel.meta |= {"step": self.step, "tick": tick}
        if parcel.size > LARGEST:
            raise ServerError(
                f"a push of {parcel.size >> 20} MiB; one is at most {LARGEST >> 20} MiB, push it in parts with tick=False but for the last"
            )
        if self.settings.get("aggregate"):
            parcel.meta["aggregate"] = True
        number = self._session.send(parcel, window=self.window)
        self.step += tick
        return number

    def _grads(self, name: str, ids: Ids, values: np.ndarray, *, add: bool = True) -> Grads:
        spec = self._table(name)
        shape, ids, values = np.shape(ids), _ids(name, ids), _numbers(name, values)
        if values.shape not in ((ids.size, spec.dim), (*shape, spec.dim)) and (ids.size or values.size):
            raise ServerError(
                f"{name}: values of shape {values.shape} for {ids.size} ids; it has {spec.dim} columns, give ({ids.size}, {spec.dim})"
            )
        rows = np.ascontiguousarray(values.reshape(ids.size, spec.dim), spec.dtype)
        order = self._sort(name, ids)
        if not add and len(order.ids) < ids.size:
            raise ServerError(
                f"{name}: {ids.size - len(order.ids)} of {ids.size} ids are given more than once; assign() sets each row to one value"
            )
        return Grads(spec, order, order.sum(rows))

    def _grad(self, spec: Dense, values: np.ndarray) -> DenseGrad:
        return DenseGrad(spec, _flat(spec, values), self._session.blocks[spec.name])

    def _rates(self, lr: Mapping[str, float] | float | None, names: Sequence[str]) -> dict[str, float] | None:
        given = lr if isinstance(lr, Mapping) else {} if lr is None else dict.fromkeys(names, lr)
        rates = {}
        for name, rate in given.items():
            # Of what is declared: a head that does not know a table yet, and a replica that does, would part.
            if name not in self._session.specs:
                raise ServerError(self._unknown(name, "table or dense parameter", None))
            check_rate(name, rate)
            if name in names or not self._moves(name):
                rates[name] = float(rate)
        # With its rate all rows of such a table move, also on routes to which nothing of this push goes; and with it alone.
        rates |= {name: self._table(name).rule.lr for name in names if name not in rates and self._moves(name)}
        return rates or None

    def _moves(self, name: str) -> bool:
        spec = self._session.specs.get(name)
        return isinstance(spec, Table) and spec.rule.every

    def _ask(
        self,
        ids: Mapping[str, Ids],
        dense: Sequence[str],
        *,
        step: int,
        form: str | None = None,
        out: Mapping[str, np.ndarray] | None = None,
    ) -> Pull:
        pull = Pull(step=step, bound=self.staleness)
        for name, given in ids.items():
            spec = self._table(name)
            if form is not None and form not in SIZES:
                raise ServerError(f"{name}: wire={form!r} is no kind of number; use one of {', '.join(SIZES)}")
            order = self._sort(name, given)
            rows = np.empty((len(order.ids), spec.dim), spec.dtype)
            pull.tables[name] = Wanted(spec, form or spec.dtype, order, rows)
        for name in dense:
            spec_ = self._dense(name)
            values = out[name] if out and name in out else np.empty(spec_.size, spec_.dtype)
            if values.shape != (spec_.size,) or values.dtype != spec_.dtype or not values.flags.c_contiguous:
                raise ServerError(
                    f"{name}: out= is {values.dtype} of shape {values.shape}; give a contiguous {spec_.dtype} of shape ({spec_.size},)"
                )
            pull.dense[name] = WantedDense(spec_, values, self._session.blocks[name])
        self._session.start(pull)
        return pull

    def _take_prefetched(self, ids: Mapping[str, Ids]) -> Pull | None:
        # Rows of an earlier step may be older than the bound allows.
        self._prefetched = [each for each in self._prefetched if each.step >= self.step]
        given = {name: each.tobytes() for name, each in ids.items()}
        for place, pull in enumerate(self._prefetched):
            if pull.bound is not None and pull.step - pull.bound > self.step:
                continue  # it waits for what this worker pushes next
            if {name: wanted.order.given for name, wanted in pull.tables.items()} == given:
                del self._prefetched[place]
                return pull
        return None

    def _sort(self, name: str, ids: Ids) -> Grouped:
        """Sort ids by route; those of the last calls are kept (a push follows the pull of the same ids)."""
        roads, given = self._session.roads, ids.tobytes()
        kept = self._sorted.setdefault(name, [])
        for those, order in kept:
            if those is roads and order.given == given:
                return order
        order = roads.sort(ids)
        kept.append((roads, order))
        del kept[:-_KEPT]
        return order

    def _table(self, name: str) -> Table:
        spec = self._session.specs.get(name)
        if not isinstance(spec, Table):
            raise ServerError(self._unknown(name, "table", spec))
        return spec

    def _dense(self, name: str) -> Dense:
        spec = self._session.specs.get(name)
        if not isinstance(spec, Dense):
            raise ServerError(self._unknown(name, "dense parameter", spec))
        return spec

    def _unknown(self, name: str, what: str, spec: object) -> str:
        if spec is not None:
            return f"{name}: is declared as {type(spec).__name__}, not as a {what}; use pull and push for tables, pull_dense and dense= for dense ones"
        known = ", ".join(sorted(self._session.specs)) or "nothing"
        return f"{name}: no such {what} (declared: {known}); declare it first"


def _ids(name: str, ids: Any) -> np.ndarray:
    found = _numbers(name, ids)
    if not found.size:
        return np.empty(0, np.int64)  # an empty list has no dtype of its own
    if found.dtype.kind not in "iu":
        raise ServerError(f"{name}: ids of dtype {found.dtype}; they are integers, use int64")
    return np.ascontiguousarray(found.reshape(-1), np.int64)


def _by_name(given: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ServerError(f"{type(given).__name__} where a mapping is expected; give {{table's name: {what}}}")
    return given


def _pair(name: str, pair: Any) -> tuple[Any, Any]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ServerError(f"{name}: {type(pair).__name__}, where two things are expected; give (ids, values)")
    return pair[0], pair[1]


def _numbers(name: str, values: Any) -> np.ndarray:
    try:
        found = np.asarray(values)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # tensors that need a gradient, on a device or of a dtype of torch's own
        raise ServerError(
            f"{name}: values that are no array ({error}); give numpy's, of a tensor t.detach().float().cpu().numpy()"
        ) from None
    if found.dtype.kind not in "fiub" and found.size:
        raise ServerError(f"{name}: values of dtype {found.dtype}; they are real numbers, use float32")
    return found


def _flat(spec: Dense, values: np.ndarray) -> np.ndarray:
    """A copy of a dense parameter's values, checked."""
    values = _numbers(spec.name, values)
    if values.size != spec.size:
        raise ServerError(
            f"{spec.name}: {values.size} values of shape {values.shape}; it was declared with {spec.size} elements"
        )
    return np.array(values.reshape(-1), spec.dtype)


def _expanded(wanted: Wanted, shape: tuple[int, ...]) -> np.ndarray:
    rows = wanted.order.expand(wanted.rows)
    return rows if len(shape) == 1 else rows.reshape(*shape, wanted.table.dim)


def _lives(map: Map) -> tuple[tuple[int, int], ...]:
    """Per shard since which version its head is head, and since which what it holds came out of a checkpoint."""
    return tuple((epoch, map.sources.get(shard, ("", 0))[1]) for shard, epoch in enumerate(map.epochs))


def _digests(frame: wire.Frame) -> list[str]:
    if frame.arrays:
        return [row.tobytes().hex() for row in frame.arrays[0].reshape(-1, 32)]
    return [str(each) for each in frame.meta["digests"]]


def _require_numba() -> None:
    from importlib.util import find_spec

    if find_spec("numba") is None:
        raise ServerError(
            "the parameter server's client needs numba, which is not installed; pip install 'echelon[server]'"
        )
