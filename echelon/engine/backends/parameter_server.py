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
from echelon.engine.backends.id_prefetch import IdPredictor
from echelon.engine.backends.launch_servers import ServerLauncher
from echelon.engine.backends.remote_embedding import EmptyTable, FetchedRows, install_remote_lookup
from echelon.engine.backends.server_optimizers import learning_rate, make_rule
from echelon.engine.process_groups import Communicator
from echelon.errors import JobError, PlanError, ServerError
from echelon.plan.parameter_server import ServedTable

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from echelon.engine.run import Run

#: Rows that are sent at once when a table is filled or read whole.
_ROWS_PER_MESSAGE = 2**16
#: Steps beyond which rules that are made up for update by update hold everyone up (see docs/server.md).
MAX_REPLAYED_UPDATES = 10_000
_SERVER_DTYPES = {torch.float32: "f4", torch.float64: "f8"}


def remove_tables(model: nn.Module, tables: Sequence[ServedTable], *, keep_values: bool) -> dict[str, Tensor]:
    """Take the tables out of the model; what is left there has no rows, and its name and place among the optimizers. Returns the values
    that rows begin with, where `keep_values`."""
    initial_tables: dict[str, Tensor] = {}
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
        if keep_values and table.initialized_by == "model":
            initial_tables[table.path] = weight.detach()
        empty_table = EmptyTable(torch.empty((0, table.dim), dtype=weight.dtype), True)
        empty_table.parameter_name = table.parameter_name
        module.weight = empty_table
    return initial_tables


class ServerBackend:
    """What this rank has to do with the servers."""

    def __init__(self, run: Run, initial_tables: Mapping[str, Tensor]) -> None:
        """`initial_tables`: of rank 0, what rows begin with."""
        self._run, self._plan = run, run.plan
        self._tables_by_path = {table.path: table for table in run.plan.server.tables}
        #: Parameters that are the servers' tables, by name.
        self.table_names = frozenset(table.parameter_name for table in run.plan.server.tables)
        self._optimizer_groups = _find_optimizer_groups(run.model, run.optimizers)
        #: Of the parameters that are no tables, those that the servers train.
        self.dense_parameters: dict[str, nn.Parameter] = {}
        if run.plan.server.dense == "server":
            named = run.model.named_parameters()
            self.dense_parameters = {
                name: parameter for name, parameter in named if parameter.requires_grad and name not in self.table_names
            }
        #: All that the servers train, and hold the optimizer's state of.
        self.trained_names = self.table_names | self.dense_parameters.keys()
        self._id_predictor = IdPredictor()
        self._fetched_rows: dict[str, list[FetchedRows]] = {}
        self._row_gradients: dict[str, tuple[np.ndarray, Tensor]] = {}
        self._next_batch: StepBatch | None = None
        self._is_in_forward = False
        #: Updates that were made, which Adagrad's decay of the rate counts.
        self.update_count = 0
        with run.ranks.raise_on_all_ranks():
            self._specs = self._make_specs(run)
        self._launcher = ServerLauncher(run.plan, run.ranks, run.external_servers)
        #: Servers elsewhere hold what was trained before: it is gone on with, or nothing is done.
        self._servers_are_trained = False
        self._undo_callbacks: list[Callable[[], None]] = []
        try:
            self._launcher.open()
            self._declare_parameters(initial_tables)
            self._undo_callbacks.append(self._track_forward(run.model))
            for path, table in self._tables_by_path.items():
                module = run.model.get_submodule(path)
                self._undo_callbacks.append(install_remote_lookup(module, table, self._fetch_rows))
                if isinstance(module.weight, EmptyTable):
                    module.weight.is_in_forward = lambda: self._is_in_forward
        except BaseException:
            self.close()
            raise

    @property
    def rank(self) -> int:
        """Of the data axis."""
        return self._run.data_parallel.rank

    @property
    def rank_count(self) -> int:
        """That push."""
        return self._run.data_parallel.size

    def _track_forward(self, model: nn.Module) -> Callable[[], None]:
        """Know when forward runs; returns what ends that."""

        def enter_forward(*_: Any) -> None:
            self._is_in_forward = True

        def leave_forward(*_: Any) -> None:
            self._is_in_forward = False

        hooks = [
            model.register_forward_pre_hook(enter_forward),
            model.register_forward_hook(leave_forward, always_call=True),
        ]

        def remove_hooks() -> None:
            for hook in hooks:
                hook.remove()

        return remove_hooks

    # The beginning

    def _make_specs(self, run: Run) -> list[Any]:
        from echelon.server.protocol.specs import Dense, Init, Table

        specs: list[Any] = []
        for path, table in self._tables_by_path.items():
            weight = run.model.get_submodule(path).weight
            assert isinstance(weight, Tensor)
            rule = make_rule(table.parameter_name, *self._optimizer_group(table.parameter_name), is_table=True)
            init = (
                Init(kind="zeros")
                if table.initialized_by == "model"
                else Init(kind="normal", scale=1.0, seed=abs(run.job.seed))
            )
            dtype = _server_dtype(table.parameter_name, weight.dtype)
            specs.append(
                Table(name=table.parameter_name, dim=table.dim, rule=rule, init=init, dtype=dtype, stored=dtype)
            )
        for name, parameter in self.dense_parameters.items():
            rule = make_rule(name, *self._optimizer_group(name), is_table=False)
            specs.append(
                Dense(name=name, size=parameter.numel(), rule=rule, dtype=_server_dtype(name, parameter.dtype))
            )
        return specs

    def slow_replay_warning(self, steps: int) -> str:
        """What is to be said of rules that hold everyone up in a run of so many steps."""
        slow_tables = [spec.name for spec in self._specs if spec.rule.replays_each_update]
        if not slow_tables or steps <= MAX_REPLAYED_UPDATES:
            return ""
        return (
            f"{', '.join(slow_tables)}: weight decay through the gradient, in a run of {steps} steps: servers compute every step that a row missed "
            "when it is read, which takes ever longer; use AdamW, or no weight decay for tables"
        )

    def _optimizer_group(self, name: str) -> tuple[Optimizer, dict[str, Any]]:
        if name not in self._optimizer_groups:
            raise JobError(
                f"optimizer=: no optimizer has {name}, which a server is to train; give it to one, or freeze it"
            )
        optimizer, group_index = self._optimizer_groups[name]
        return optimizer, optimizer.param_groups[
            group_index
        ]  # a checkpoint that is loaded puts other groups in their place

    def _declare_parameters(self, initial_tables: Mapping[str, Tensor]) -> None:
        """The first values are rank 0's."""
        run, client = self._run, self._launcher.client
        with run.ranks.raise_on_all_ranks():
            self._servers_are_trained = run.world.is_main and self._check_existing_specs()
        self._servers_are_trained = run.ranks.all_gather_object(self._servers_are_trained)[0]
        for is_main in (True, False):
            if run.world.is_main == is_main:
                for spec in self._specs:
                    parameter = self.dense_parameters.get(spec.name)
                    if parameter is None or self._servers_are_trained:
                        client.declare(spec)
                    else:
                        client.declare(spec, initial=_to_numpy(parameter.detach().reshape(-1)))
                if is_main and not self._servers_are_trained:
                    self._fill_tables(initial_tables)
            run.ranks.barrier()

    def _check_existing_specs(self) -> bool:
        """Whether servers elsewhere hold this job's tables; refused where they are another's."""
        existing, expected = self._launcher.existing_specs(), {spec.name: spec for spec in self._specs}
        if existing and existing != expected:
            differing = sorted(
                name for name in existing.keys() | expected.keys() if existing.get(name) != expected.get(name)
            )[0]
            existing_text = f"as {existing[differing]}" if differing in existing else "not at all"
            raise ServerError(
                f"servers={self._address}: they hold another job's {', '.join(sorted(existing)[:3])}: {differing} is there {existing_text}, and here "
                f"{expected.get(differing, 'not at all')}; start servers of this job's own (`echelon serve`)"
            )
        return bool(existing)

    @property
    def _address(self) -> str:
        return self._launcher.external_servers.address if self._launcher.external_servers is not None else ""

    def _fill_tables(self, initial_tables: Mapping[str, Tensor]) -> None:
        client = self._launcher.client
        for path, table in self._tables_by_path.items():
            if path in initial_tables:
                values = initial_tables[path]
                for begin in range(0, table.rows, _ROWS_PER_MESSAGE):
                    ids = np.arange(begin, min(begin + _ROWS_PER_MESSAGE, table.rows), dtype=np.int64)
                    client.assign({table.parameter_name: (ids, _to_numpy(values[begin : begin + len(ids)]))})
            elif (padding := getattr(self._run.model.get_submodule(path), "padding_idx", None)) is not None:
                zero_row = np.zeros((1, table.dim), np.float64 if self._is_float64(path) else np.float32)
                client.assign({table.parameter_name: (np.array([padding], np.int64), zero_row)})
        client.flush()

    def _is_float64(self, path: str) -> bool:
        weight = self._run.model.get_submodule(path).weight
        return isinstance(weight, Tensor) and weight.dtype == torch.float64

    # The step

    def look_ahead(self, batches: Iterable[StepBatch]) -> Iterator[StepBatch]:
        """The same batches; while one is at work the next is known."""
        iterator = iter(batches)
        next_batch = next(iterator, None)
        while next_batch is not None:
            batch, next_batch = next_batch, next(iterator, None)
            self._next_batch = next_batch
            yield batch
        self._next_batch = None

    def begin_step(self, batch: StepBatch) -> None:
        """Before a step's first forward: the rows that it is known to read."""
        if self._servers_are_trained:
            raise ServerError(
                f"servers={self._address}: they hold what this job trained before; go on from its last checkpoint (resume), or start new servers"
            )
        self._fetched_rows, self._row_gradients = {}, {}
        predicted_ids = self._id_predictor.predict_ids([micro.batch for micro in batch.micro_batches])
        if predicted_ids:
            for path, values in self._pull_rows(predicted_ids).items():
                self._fetched_rows[path] = [FetchedRows(predicted_ids[path], values.requires_grad_())]

    def set_micro_batch(self, batch: Any) -> None:
        """The next forward is of this micro-batch, as the model gets it."""
        self._id_predictor.set_micro_batch(batch)

    def _fetch_rows(self, path: str, ids: Tensor) -> tuple[FetchedRows, Tensor]:
        flat_ids = ids.reshape(-1).long().contiguous()
        training = torch.is_grad_enabled()
        if training:
            self._id_predictor.observe_lookup(path, ids)
            for rows in self._fetched_rows.get(path, ()):
                positions = rows.find_positions(flat_ids)
                if positions is not None:
                    return rows, positions
        unique_tensor, positions = torch.unique(flat_ids, return_inverse=True)
        unique_ids = unique_tensor.cpu().numpy()
        values = self._pull_rows({path: unique_ids})[path]
        rows = FetchedRows(unique_ids, values.requires_grad_() if training else values)
        if training:
            self._fetched_rows.setdefault(path, []).append(rows)
        return rows, positions

    def _pull_rows(self, ids_by_path: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        names = {path: self._tables_by_path[path].parameter_name for path in ids_by_path}
        rows_by_name = self._launcher.client.pull({names[path]: ids for path, ids in ids_by_path.items()})
        return {path: _to_tensor(rows_by_name[name], self._run.device) for path, name in names.items()}

    def collect_gradients(self) -> None:
        """After the step's last backward: what it left of gradients, each row once."""
        self._row_gradients = {}
        for path, fetched in self._fetched_rows.items():
            row_gradients = [(rows.ids, rows.values.grad) for rows in fetched if rows.values.grad is not None]
            if len(row_gradients) == 1:
                self._row_gradients[path] = row_gradients[0]
            elif row_gradients:
                self._row_gradients[path] = _sum_duplicate_rows(row_gradients)
        self._fetched_rows = {}

    def discard_gradients(self) -> None:
        """Drop this rank's gradients of rows."""
        self._row_gradients = {}

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply this rank's gradients of rows."""
        for _, grads in self._row_gradients.values():
            grads.mul_(factor)

    def push(self, *, skipped: bool = False) -> None:
        """End the step on this rank: gradients out, the next batch's rows asked for, parameters that the servers train taken over."""
        tables, dense, learning_rates = {}, {}, {}
        if not skipped:
            tables = {
                self._tables_by_path[path].parameter_name: (ids, _to_numpy(grads))
                for path, (ids, grads) in self._row_gradients.items()
            }
            dense = {
                name: _to_numpy(parameter.grad.reshape(-1))
                for name, parameter in self.dense_parameters.items()
                if parameter.grad is not None
            }
            learning_rates = {
                name: learning_rate(*self._optimizer_group(name), self.update_count) for name in (*tables, *dense)
            }
            self.update_count += 1
        self._row_gradients = {}
        client = self._launcher.client
        client.push(tables, dense=dense, lr=learning_rates, tick=True)
        next_batch, self._next_batch = self._next_batch, None
        if next_batch is not None:
            predicted_ids = self._id_predictor.predict_ids([micro.batch for micro in next_batch.micro_batches])
            if predicted_ids:
                # Of the step that now begins: under staleness=0 the answer waits for the pushes of all.
                client.prefetch(
                    {self._tables_by_path[path].parameter_name: ids for path, ids in predicted_ids.items()},
                    steps_ahead=0,
                )
        self.pull_dense_parameters()

    @torch.no_grad()
    def pull_dense_parameters(self) -> None:
        """Bring the parameters that the servers train up to date."""
        if not self.dense_parameters:
            return
        values_by_name = self._launcher.client.pull_dense(list(self.dense_parameters))
        for name, parameter in self.dense_parameters.items():
            parameter.copy_(torch.from_numpy(values_by_name[name]).view(parameter.shape))

    # What all ranks' gradients come to

    def sum_row_gradients(self) -> dict[str, tuple[np.ndarray, Tensor]]:
        """By parameter the gradients of all ranks' rows, added up. Every rank must call it."""
        summed = {}
        for path, table in self._tables_by_path.items():
            no_rows = (
                np.empty(0, np.int64),
                torch.empty((0, table.dim), dtype=self._table_dtype(path), device=self._run.device),
            )
            rank_gradients = _gather_rows(self._run.data_parallel, *self._row_gradients.get(path, no_rows))
            summed[table.parameter_name] = _sum_duplicate_rows(rank_gradients)
        return summed

    def squared_norm(self) -> Tensor:
        """The sum of squares of that, the same on every rank. All must ask."""
        squared_sums = [grads.double().square().sum() for _, grads in self.sum_row_gradients().values()]
        return (
            torch.stack(squared_sums).sum()
            if squared_sums
            else torch.zeros((), dtype=torch.float64, device=self._run.device)
        )

    def gather_gradients(self) -> dict[str, Tensor]:
        """That as whole tables, on rank 0's CPU, and of the other parameters that the servers train; all must ask. For proofs: tables are
        small there."""
        row_gradients, full_gradients = self.sum_row_gradients(), {}
        for name, parameter in self.dense_parameters.items():
            use_count = self._run.data_parallel.all_reduce(torch.tensor(float(parameter.grad is not None)))
            local_gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            if use_count:
                full_gradients[name] = self._run.data_parallel.all_reduce(local_gradient).cpu()
        for table in self._tables_by_path.values():
            ids, grads = row_gradients[table.parameter_name]
            if self._run.world.is_main:
                full_gradient = torch.zeros((table.rows, table.dim), dtype=grads.dtype)
                full_gradient[torch.from_numpy(ids)] = grads.cpu()
                full_gradients[table.parameter_name] = full_gradient
        return full_gradients

    def _table_dtype(self, path: str) -> torch.dtype:
        weight = self._run.model.get_submodule(path).weight
        assert isinstance(weight, Tensor)
        return weight.dtype

    # What the servers hold

    def pull_tables(self) -> dict[str, Tensor]:
        """The tables, on rank 0's CPU; all must ask: what others pushed has to be there first, and may have to be sent again for that."""
        self.flush()
        if not self._run.world.is_main:
            return {}
        full_tables = {}
        for table in self._tables_by_path.values():
            chunks = [
                self._launcher.client.pull(
                    {table.parameter_name: np.arange(begin, min(begin + _ROWS_PER_MESSAGE, table.rows), dtype=np.int64)}
                )
                for begin in range(0, table.rows, _ROWS_PER_MESSAGE)
            ]
            full_tables[table.parameter_name] = torch.from_numpy(
                np.concatenate([chunk[table.parameter_name] for chunk in chunks])
            )
        return full_tables

    def steps_ahead_of_slowest(self) -> int:
        """Steps that this rank has finished more than the slowest, as the servers count them. Asked after rows were read it is no more than
        it was then: clocks only go on."""
        client = self._launcher.client
        return int(client.step - client.clock()[0])

    def flush(self) -> None:
        """Wait until every push of this rank is acknowledged."""
        self._launcher.client.flush()

    def save(self, folder: Path) -> None:
        """Have the servers write all they hold; every rank must call it, between two steps."""
        self.flush()
        self._run.ranks.barrier()
        with self._run.ranks.raise_on_all_ranks():
            if self._run.world.is_main:
                self._launcher.save(folder)

    def load(self, folder: Path, step: int) -> None:
        """Go on with what servers wrote to `folder` after so many steps, on as many servers as the plan has now; every rank must call it.
        Servers elsewhere must hold just that: they were not used since, or began from it."""
        if self._launcher.external_servers is not None:
            with self._run.ranks.raise_on_all_ranks():
                # By the furthest rank of the run before: what it pushed is in the rows, or comes into them with a next step.
                server_step, has_partial_step = (
                    self._launcher.client.progress() if self._servers_are_trained else (0, False)
                )
                if not self._servers_are_trained or server_step != step or has_partial_step:
                    position_text = f"within step {server_step}" if has_partial_step else f"at step {server_step}"
                    raise ServerError(
                        f"servers={self._address}: they are {position_text}, and the checkpoint {folder} at step {step}; start servers with "
                        f"`echelon serve ... --restore {folder}`, or train with --fresh on empty ones"
                    )
            self._servers_are_trained = False
            self.pull_dense_parameters()
            return
        self._launcher.close()
        self._launcher.open(folder)
        self._declare_parameters({})
        self.pull_dense_parameters()

    def close(self) -> None:
        """Leave the servers, and end them where they were started here."""
        for undo in self._undo_callbacks:
            undo()
        self._undo_callbacks = []
        self._fetched_rows, self._row_gradients = {}, {}
        self._launcher.close()


def _find_optimizer_groups(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, tuple[Optimizer, int]]:
    """By parameter its optimizer, and the number of its group there."""
    group_by_id = {
        id(parameter): (optimizer, group_index)
        for optimizer in optimizers
        for group_index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    return {
        name: group_by_id[id(parameter)] for name, parameter in model.named_parameters() if id(parameter) in group_by_id
    }


def _server_dtype(name: str, dtype: torch.dtype) -> Any:
    if dtype not in _SERVER_DTYPES:
        raise PlanError(
            f"exchange=server: {name} is {str(dtype).removeprefix('torch.')}, and servers compute in float32 or float64; build the "
            "model in float32 (precision= decides what forward computes in)"
        )
    return _SERVER_DTYPES[dtype]


def _to_numpy(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().cpu().contiguous().numpy()
    return array


def _to_tensor(rows: np.ndarray, device: torch.device) -> Tensor:
    # A copy: the client may use its memory again, and answers may be read-only.
    return torch.from_numpy(np.array(rows)).to(device)


def _sum_duplicate_rows(row_gradients: Sequence[tuple[np.ndarray, Tensor]]) -> tuple[np.ndarray, Tensor]:
    """Gradients of rows with equal ids added up, in the order of the ids."""
    ids, positions = np.unique(np.concatenate([ids for ids, _ in row_gradients]), return_inverse=True)
    grads = torch.cat([grads for _, grads in row_gradients])
    summed = torch.zeros((len(ids), grads.shape[1]), dtype=grads.dtype, device=grads.device)
    return ids, summed.index_add_(0, torch.from_numpy(positions.reshape(-1)).to(grads.device), grads)


def _gather_rows(communicator: Communicator, ids: np.ndarray, grads: Tensor) -> list[tuple[np.ndarray, Tensor]]:
    """Every rank's rows, in rank order."""
    if communicator.size == 1:
        return [(ids, grads)]
    counts = communicator.all_gather_object(len(ids))
    max_count = max(counts)
    padded_ids = torch.zeros(max_count, dtype=torch.int64, device=grads.device)
    padded_ids[: len(ids)] = torch.from_numpy(ids).to(grads.device)
    padded_grads = grads.new_zeros((max_count, grads.shape[1]))
    padded_grads[: len(ids)] = grads
    all_ids = [torch.empty_like(padded_ids) for _ in counts]
    all_grads = [torch.empty_like(padded_grads) for _ in counts]
    dist.all_gather(all_ids, padded_ids, group=communicator.process_group)
    dist.all_gather(all_grads, padded_grads, group=communicator.process_group)
    return [
        (rank_ids[:count].cpu().numpy(), rank_grads[:count])
        for count, rank_ids, rank_grads in zip(counts, all_ids, all_grads, strict=True)
    ]
