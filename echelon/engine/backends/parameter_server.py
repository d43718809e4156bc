"""A parameter server's part of a run, as one rank sees it: rows in before forward, gradients of rows out after backward.

The ranks hold no table: the module of one computes with the rows that its batch reads (`lookup`), which come in one message where it is
foreseen which they are (`foresight`). A step ends with one push of what backward left, weighed as the global loss demands, and asks at once
for the next batch's rows. Under staleness=0 the servers add the pushes of all ranks up and apply them once: what one device computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.data.loader import StepBatch
from echelon.engine.backends.id_prefetch import Foresight
from echelon.engine.backends.launch_servers import Keeper
from echelon.engine.backends.remote_embedding import Rows, Standin, install
from echelon.engine.backends.server_optimizers import rate_of, rule_of
from echelon.engine.process_groups import Group
from echelon.errors import JobError, PlanError, ServerError
from echelon.plan.parameter_server import Served

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from echelon.engine.run import Run

#: Rows that are sent at once when a table is filled or read whole.
_ROWS = 2**16
#: Steps beyond which rules that are made up for update by update hold everyone up (see docs/server.md).
TEDIOUS = 10_000
_NUMBERS = {torch.float32: "f4", torch.float64: "f8"}


def take(model: nn.Module, tables: Sequence[Served], *, keep: bool) -> dict[str, Tensor]:
    """Take the tables out of the model; what is left there has no rows, and its name and place among the optimizers. Returns the values
    that rows begin with, where `keep`."""
    values: dict[str, Tensor] = {}
    for table in tables:
        try:
            module = model.get_submodule(table.path)
        except AttributeError:
            module = None
        weight = getattr(module, "weight", None)
        if module is None or not isinstance(weight, nn.Parameter) or tuple(weight.shape) != (table.rows, table.dim):
            raise PlanError(
                f"tables: {table.path} is not a table of {table.rows} x {table.dim} in this model; leave tables out: they are found"
            )
        if keep and table.start == "model":
            values[table.path] = weight.detach()
        standin = Standin(torch.empty((0, table.dim), dtype=weight.dtype), True)
        standin.title = table.name
        module.weight = standin
    return values


class Hub:
    """What this rank has to do with the servers."""

    def __init__(self, run: Run, first: Mapping[str, Tensor]) -> None:
        """`first`: of rank 0, what rows begin with."""
        self._run, self._plan = run, run.plan
        self._tables = {table.path: table for table in run.plan.tables}
        #: Parameters that are the servers' tables, by name.
        self.names = frozenset(table.name for table in run.plan.tables)
        self._owners = _owners(run.model, run.optimizers)
        #: Of the parameters that are no tables, those that the servers train.
        self.dense: dict[str, nn.Parameter] = {}
        if run.plan.dense == "server":
            named = run.model.named_parameters()
            self.dense = {name: value for name, value in named if value.requires_grad and name not in self.names}
        #: All that the servers train, and hold the optimizer's state of.
        self.trained = self.names | self.dense.keys()
        self._foresight = Foresight()
        self._rows: dict[str, list[Rows]] = {}
        self._made: dict[str, tuple[np.ndarray, Tensor]] = {}
        self._coming: StepBatch | None = None
        self._inside = False
        #: Updates that were made, which Adagrad's decay of the rate counts.
        self.updates = 0
        with run.ranks.together():
            self._specs = self._declared(run)
        self._keeper = Keeper(run.plan, run.ranks, run.elsewhere)
        #: Servers elsewhere hold what was trained before: it is gone on with, or nothing is done.
        self._found = False
        self._restore: list[Callable[[], None]] = []
        try:
            self._keeper.open()
            self._declare(first)
            self._restore.append(self._watch(run.model))
            for path, table in self._tables.items():
                module = run.model.get_submodule(path)
                self._restore.append(install(module, table, self._fetch))
                if isinstance(module.weight, Standin):
                    module.weight.inside = lambda: self._inside
        except BaseException:
            self.close()
            raise

    @property
    def rank(self) -> int:
        """Of the data axis."""
        return self._run.data.rank

    @property
    def ranks(self) -> int:
        """That push."""
        return self._run.data.size

    def _watch(self, model: nn.Module) -> Callable[[], None]:
        """Know when forward runs; returns what ends that."""

        def enter(*_: Any) -> None:
            self._inside = True

        def leave(*_: Any) -> None:
            self._inside = False

        hooks = [model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True)]

        def forget() -> None:
            for hook in hooks:
                hook.remove()

        return forget

    # The beginning

    def _declared(self, run: Run) -> list[Any]:
        from echelon.server.protocol.specs import Dense, Init, Table

        found: list[Any] = []
        for path, table in self._tables.items():
            weight = run.model.get_submodule(path).weight
            assert isinstance(weight, Tensor)
            rule = rule_of(table.name, *self._owner(table.name), table=True)
            init = (
                Init(kind="zeros") if table.start == "model" else Init(kind="normal", scale=1.0, seed=abs(run.job.seed))
            )
            kind = _number(table.name, weight.dtype)
            found.append(Table(name=table.name, dim=table.dim, rule=rule, init=init, dtype=kind, stored=kind))
        for name, value in self.dense.items():
            rule = rule_of(name, *self._owner(name), table=False)
            found.append(Dense(name=name, size=value.numel(), rule=rule, dtype=_number(name, value.dtype)))
        return found

    def tedious(self, steps: int) -> str:
        """What is to be said of rules that hold everyone up in a run of so many steps."""
        slow = [spec.name for spec in self._specs if spec.rule.tedious]
        if not slow or steps <= TEDIOUS:
            return ""
        return (
            f"{', '.join(slow)}: weight decay through the gradient, in a run of {steps} steps: servers compute every step that a row missed "
            "when it is read, which takes ever longer; use AdamW, or no weight decay for tables"
        )

    def _owner(self, name: str) -> tuple[Optimizer, dict[str, Any]]:
        if name not in self._owners:
            raise JobError(
                f"optimizer=: no optimizer has {name}, which a server is to train; give it to one, or freeze it"
            )
        optimizer, place = self._owners[name]
        return optimizer, optimizer.param_groups[place]  # a checkpoint that is loaded puts other groups in their place

    def _declare(self, first: Mapping[str, Tensor]) -> None:
        """The first values are rank 0's."""
        run, client = self._run, self._keeper.client
        with run.ranks.together():
            self._found = run.world.main and self._compared()
        self._found = run.ranks.gather(self._found)[0]
        for main in (True, False):
            if run.world.main == main:
                for spec in self._specs:
                    value = self.dense.get(spec.name)
                    if value is None or self._found:
                        client.declare(spec)
                    else:
                        client.declare(spec, initial=_plain(value.detach().reshape(-1)))
                if main and not self._found:
                    self._fill(first)
            run.ranks.barrier()

    def _compared(self) -> bool:
        """Whether servers elsewhere hold this job's tables; refused where they are another's."""
        known, mine = self._keeper.known(), {spec.name: spec for spec in self._specs}
        if known and known != mine:
            strange = sorted(name for name in known.keys() | mine.keys() if known.get(name) != mine.get(name))[0]
            here = f"as {known[strange]}" if strange in known else "not at all"
            raise ServerError(
                f"servers={self._address}: they hold another job's {', '.join(sorted(known)[:3])}: {strange} is there {here}, and here "
                f"{mine.get(strange, 'not at all')}; start servers of this job's own (`echelon serve`)"
            )
        return bool(known)

    @property
    def _address(self) -> str:
        return self._keeper.elsewhere.address if self._keeper.elsewhere is not None else ""

    def _fill(self, first: Mapping[str, Tensor]) -> None:
        client = self._keeper.client
        for path, table in self._tables.items():
            if path in first:
                values = first[path]
                for begin in range(0, table.rows, _ROWS):
                    ids = np.arange(begin, min(begin + _ROWS, table.rows), dtype=np.int64)
                    client.assign({table.name: (ids, _plain(values[begin : begin + len(ids)]))})
            elif (padding := getattr(self._run.model.get_submodule(path), "padding_idx", None)) is not None:
                nothing = np.zeros((1, table.dim), np.float64 if self._wide(path) else np.float32)
                client.assign({table.name: (np.array([padding], np.int64), nothing)})
        client.flush()

    def _wide(self, path: str) -> bool:
        weight = self._run.model.get_submodule(path).weight
        return isinstance(weight, Tensor) and weight.dtype == torch.float64

    # The step

    def ahead(self, batches: Iterable[StepBatch]) -> Iterator[StepBatch]:
        """The same batches; while one is at work the next is known."""
        coming = iter(batches)
        following = next(coming, None)
        while following is not None:
            batch, following = following, next(coming, None)
            self._coming = following
            yield batch
        self._coming = None

    def begin(self, batch: StepBatch) -> None:
        """Before a step's first forward: the rows that it is known to read."""
        if self._found:
            raise ServerError(
                f"servers={self._address}: they hold what this job trained before; go on from its last checkpoint (resume), or start new servers"
            )
        self._rows, self._made = {}, {}
        wanted = self._foresight.ids([micro.batch for micro in batch.micros])
        if wanted:
            for path, values in self._pull(wanted).items():
                self._rows[path] = [Rows(wanted[path], values.requires_grad_())]

    def look(self, batch: Any) -> None:
        """The next forward is of this micro-batch, as the model gets it."""
        self._foresight.look(batch)

    def _fetch(self, path: str, ids: Tensor) -> tuple[Rows, Tensor]:
        flat = ids.reshape(-1).long().contiguous()
        training = torch.is_grad_enabled()
        if training:
            self._foresight.note(path, ids)
            for rows in self._rows.get(path, ()):
                places = rows.find(flat)
                if places is not None:
                    return rows, places
        unique, places = torch.unique(flat, return_inverse=True)
        wanted = unique.cpu().numpy()
        values = self._pull({path: wanted})[path]
        rows = Rows(wanted, values.requires_grad_() if training else values)
        if training:
            self._rows.setdefault(path, []).append(rows)
        return rows, places

    def _pull(self, wanted: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        names = {path: self._tables[path].name for path in wanted}
        found = self._keeper.client.pull({names[path]: ids for path, ids in wanted.items()})
        return {path: _tensor(found[name], self._run.device) for path, name in names.items()}

    def collect(self) -> None:
        """After the step's last backward: what it left of gradients, each row once."""
        self._made = {}
        for path, parts in self._rows.items():
            made = [(rows.ids, rows.values.grad) for rows in parts if rows.values.grad is not None]
            if len(made) == 1:
                self._made[path] = made[0]
            elif made:
                self._made[path] = _combined(made)
        self._rows = {}

    def forget(self) -> None:
        """Drop this rank's gradients of rows."""
        self._made = {}

    def scale(self, factor: float | Tensor) -> None:
        """Multiply this rank's gradients of rows."""
        for _, grads in self._made.values():
            grads.mul_(factor)

    def push(self, *, skipped: bool = False) -> None:
        """End the step on this rank: gradients out, the next batch's rows asked for, parameters that the servers train taken over."""
        tables, dense, rates = {}, {}, {}
        if not skipped:
            tables = {self._tables[path].name: (ids, _plain(grads)) for path, (ids, grads) in self._made.items()}
            dense = {
                name: _plain(value.grad.reshape(-1)) for name, value in self.dense.items() if value.grad is not None
            }
            rates = {name: rate_of(*self._owner(name), self.updates) for name in (*tables, *dense)}
            self.updates += 1
        self._made = {}
        client = self._keeper.client
        client.push(tables, dense=dense, lr=rates, tick=True)
        coming, self._coming = self._coming, None
        if coming is not None:
            wanted = self._foresight.ids([micro.batch for micro in coming.micros])
            if wanted:
                # Of the step that now begins: under staleness=0 the answer waits for the pushes of all.
                client.prefetch({self._tables[path].name: ids for path, ids in wanted.items()}, ahead=0)
        self.take_over()

    @torch.no_grad()
    def take_over(self) -> None:
        """Bring the parameters that the servers train up to date."""
        if not self.dense:
            return
        found = self._keeper.client.pull_dense(list(self.dense))
        for name, value in self.dense.items():
            value.copy_(torch.from_numpy(found[name]).view(value.shape))

    # What all ranks' gradients come to

    def everyones(self) -> dict[str, tuple[np.ndarray, Tensor]]:
        """By parameter the gradients of all ranks' rows, added up. Every rank must call it."""
        found = {}
        for path, table in self._tables.items():
            nothing = (
                np.empty(0, np.int64),
                torch.empty((0, table.dim), dtype=self._dtype(path), device=self._run.device),
            )
            parts = _gather(self._run.data, *self._made.get(path, nothing))
            found[table.name] = _combined(parts)
        return found

    def square(self) -> Tensor:
        """The sum of squares of that, the same on every rank. All must ask."""
        parts = [grads.double().square().sum() for _, grads in self.everyones().values()]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=self._run.device)

    def gradients(self) -> dict[str, Tensor]:
        """That as whole tables, on rank 0's CPU, and of the other parameters that the servers train; all must ask. For proofs: tables are
        small there."""
        found, whole = self.everyones(), {}
        for name, value in self.dense.items():
            used = self._run.data.sum(torch.tensor(float(value.grad is not None)))
            mine = torch.zeros_like(value) if value.grad is None else value.grad.clone()
            if used:
                whole[name] = self._run.data.sum(mine).cpu()
        for table in self._tables.values():
            ids, grads = found[table.name]
            if self._run.world.main:
                full = torch.zeros((table.rows, table.dim), dtype=grads.dtype)
                full[torch.from_numpy(ids)] = grads.cpu()
                whole[table.name] = full
        return whole

    def _dtype(self, path: str) -> torch.dtype:
        weight = self._run.model.get_submodule(path).weight
        assert isinstance(weight, Tensor)
        return weight.dtype

    # What the servers hold

    def whole(self) -> dict[str, Tensor]:
        """The tables, on rank 0's CPU; all must ask: what others pushed has to be there first, and may have to be sent again for that."""
        self.flush()
        if not self._run.world.main:
            return {}
        found = {}
        for table in self._tables.values():
            parts = [
                self._keeper.client.pull({table.name: np.arange(begin, min(begin + _ROWS, table.rows), dtype=np.int64)})
                for begin in range(0, table.rows, _ROWS)
            ]
            found[table.name] = torch.from_numpy(np.concatenate([part[table.name] for part in parts]))
        return found

    def ahead_of_slowest(self) -> int:
        """Steps that this rank has finished more than the slowest, as the servers count them. Asked after rows were read it is no more than
        it was then: clocks only go on."""
        client = self._keeper.client
        return int(client.step - client.clock()[0])

    def flush(self) -> None:
        """Wait until every push of this rank is acknowledged."""
        self._keeper.client.flush()

    def save(self, folder: Path) -> None:
        """Have the servers write all they hold; every rank must call it, between two steps."""
        self.flush()
        self._run.ranks.barrier()
        with self._run.ranks.together():
            if self._run.world.main:
                self._keeper.save(folder)

    def load(self, folder: Path, step: int) -> None:
        """Go on with what servers wrote to `folder` after so many steps, on as many servers as the plan has now; every rank must call it.
        Servers elsewhere must hold just that: they were not used since, or began from it."""
        if self._keeper.elsewhere is not None:
            with self._run.ranks.together():
                # By the furthest rank of the run before: what it pushed is in the rows, or comes into them with a next step.
                there, halves = self._keeper.client.standing() if self._found else (0, False)
                if not self._found or there != step or halves:
                    inside = f"within step {there}" if halves else f"at step {there}"
                    raise ServerError(
                        f"servers={self._address}: they are {inside}, and the checkpoint {folder} at step {step}; start servers with "
                        f"`echelon serve ... --restore {folder}`, or train with --fresh on empty ones"
                    )
            self._found = False
            self.take_over()
            return
        self._keeper.close()
        self._keeper.open(folder)
        self._declare({})
        self.take_over()

    def close(self) -> None:
        """Leave the servers, and end them where they were started here."""
        for put_back in self._restore:
            put_back()
        self._restore = []
        self._rows, self._made = {}, {}
        self._keeper.close()


def _owners(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, tuple[Optimizer, int]]:
    """By parameter its optimizer, and the number of its group there."""
    of = {
        id(value): (each, place)
        for each in optimizers
        for place, group in enumerate(each.param_groups)
        for value in group["params"]
    }
    return {name: of[id(value)] for name, value in model.named_parameters() if id(value) in of}


def _number(name: str, dtype: torch.dtype) -> Any:
    if dtype not in _NUMBERS:
        raise PlanError(
            f"exchange=server: {name} is {str(dtype).removeprefix('torch.')}, and servers compute in float32 or float64; build the "
            "model in float32 (precision= decides what forward computes in)"
        )
    return _NUMBERS[dtype]


def _plain(value: Tensor) -> np.ndarray:
    found: np.ndarray = value.detach().cpu().contiguous().numpy()
    return found


def _tensor(rows: np.ndarray, device: torch.device) -> Tensor:
    # A copy: the client may use its memory again, and answers may be read-only.
    return torch.from_numpy(np.array(rows)).to(device)


def _combined(parts: Sequence[tuple[np.ndarray, Tensor]]) -> tuple[np.ndarray, Tensor]:
    """Gradients of rows with equal ids added up, in the order of the ids."""
    ids, places = np.unique(np.concatenate([ids for ids, _ in parts]), return_inverse=True)
    grads = torch.cat([grads for _, grads in parts])
    summed = torch.zeros((len(ids), grads.shape[1]), dtype=grads.dtype, device=grads.device)
    return ids, summed.index_add_(0, torch.from_numpy(places.reshape(-1)).to(grads.device), grads)


def _gather(group: Group, ids: np.ndarray, grads: Tensor) -> list[tuple[np.ndarray, Tensor]]:
    """Every rank's rows, in rank order."""
    if group.size == 1:
        return [(ids, grads)]
    counts = group.gather(len(ids))
    most = max(counts)
    mine = torch.zeros(most, dtype=torch.int64, device=grads.device)
    mine[: len(ids)] = torch.from_numpy(ids).to(grads.device)
    values = grads.new_zeros((most, grads.shape[1]))
    values[: len(ids)] = grads
    all_ids = [torch.empty_like(mine) for _ in counts]
    all_values = [torch.empty_like(values) for _ in counts]
    dist.all_gather(all_ids, mine, group=group.group)
    dist.all_gather(all_values, values, group=group.group)
    return [
        (each[:count].cpu().numpy(), rows[:count])
        for count, each, rows in zip(counts, all_ids, all_values, strict=True)
    ]
