"""exchange=server: rows of embedding tables are pulled before forward, and gradients of rows pushed after backward.

The ranks hold no table: its module computes with the rows that the batch reads (remote_embedding.py), which come in one message where they can be
predicted (id_prefetch.py). A step ends with one push of its gradients and a request for the next batch's rows. Under staleness=0 the servers
sum the pushes of all ranks and apply them once: what one device computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.data.loader import StepBatch
from echelon.engine import grad_clip
from echelon.engine.backends.allreduce import AllReduceBackend
from echelon.engine.backends.coordinated_stop import CoordinatedStop
from echelon.engine.backends.id_prefetch import IdPredictor
from echelon.engine.backends.launch_servers import ExternalServers, ServerLauncher
from echelon.engine.backends.remote_embedding import EmptyTable, FetchedRows, install_remote_lookup
from echelon.engine.backends.server_optimizers import learning_rate
from echelon.engine.backends.server_parameters import ServerParameters
from echelon.engine.process_groups import Communicator
from echelon.engine.run_state import RunState
from echelon.errors import ServerError

#: Ids of rows of a table and, in the same order, one gradient each.
RowGradients = tuple[np.ndarray, Tensor]


class ParameterServerBackend(AllReduceBackend):
    """Servers hold the tables, and under dense=server train every parameter."""

    can_repeat_step = False

    def __init__(self, run: RunState, external_servers: ExternalServers | None) -> None:
        super().__init__(run)
        plan = run.plan
        self._tables = {table.path: table for table in plan.server.tables}
        self.table_names = frozenset(table.parameter_name for table in self._tables.values())
        named = run.model.named_parameters() if plan.server.dense == "server" else ()
        #: Parameters outside the tables that the servers train.
        self.dense_parameters = {n: p for n, p in named if p.requires_grad and n not in self.table_names}
        self.server_trained = self.table_names | self.dense_parameters.keys()
        self._coordinated_stop: CoordinatedStop | None = None
        if plan.asynchronous:
            self.step_ranks = Communicator(0, 1, run.device)
            self._coordinated_stop = CoordinatedStop(run.data_parallel, plan.server.staleness)
        self._id_predictor = IdPredictor()
        self._fetched_rows: dict[str, list[FetchedRows]] = {}
        self._row_gradients: dict[str, RowGradients] = {}
        self._next_batch: StepBatch | None = None
        self._is_in_forward = False
        #: Updates so far, by which Adagrad decays the rate.
        self._update_count = 0
        with run.ranks.raise_on_all_ranks():
            self._parameters = ServerParameters(run, self.dense_parameters)
        self._launcher = ServerLauncher(plan, run.ranks, external_servers)
        self._undo_callbacks: list[Callable[[], None]] = []
        try:
            self._launcher.open()
            #: External servers hold an earlier run's training: it is resumed, or refused.
            self._servers_are_trained = self._parameters.declare(self._launcher, run.rank_model.initial_tables)
            run.rank_model.initial_tables = {}
            self._track_forward(run.model)
            for path, table in self._tables.items():
                module = run.model.get_submodule(path)
                self._undo_callbacks.append(install_remote_lookup(module, table, self._fetch_rows))
                if isinstance(module.weight, EmptyTable):
                    module.weight.is_in_forward = lambda: self._is_in_forward
        except BaseException:
            self.close()
            raise

    def _track_forward(self, model: nn.Module) -> None:
        """Keep `_is_in_forward` current."""

        def enter_forward(*_: Any) -> None:
            self._is_in_forward = True

        def leave_forward(*_: Any) -> None:
            self._is_in_forward = False

        self._undo_callbacks.append(model.register_forward_pre_hook(enter_forward).remove)
        self._undo_callbacks.append(model.register_forward_hook(leave_forward, always_call=True).remove)

    # The step

    def look_ahead(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        next_batch = next(batches, None)
        while next_batch is not None:
            batch, next_batch = next_batch, next(batches, None)
            self._next_batch = next_batch
            yield batch
        self._next_batch = None

    def begin_step(self, batch: StepBatch) -> None:
        if self._servers_are_trained:
            raise ServerError(
                f"servers={self._launcher.address}: they hold what this job trained before; resume from its last checkpoint, or start new servers"
            )
        self._fetched_rows, self._row_gradients = {}, {}
        predicted_ids = self._predict_ids(batch)
        for path, values in self._pull_rows(predicted_ids).items() if predicted_ids else ():
            self._fetched_rows[path] = [FetchedRows(predicted_ids[path], values.requires_grad_())]

    def begin_micro_batch(self, batch: Any, *, is_last: bool) -> None:
        super().begin_micro_batch(batch, is_last=is_last)
        self._id_predictor.set_micro_batch(batch)

    def _predict_ids(self, batch: StepBatch) -> Mapping[str, np.ndarray]:
        return self._id_predictor.predict_ids([micro_batch.batch for micro_batch in batch.micro_batches])

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
        rows = self._launcher.client.pull(self._by_name(ids_by_path))
        # A copy: the client may use its memory again, and answers may be read-only.
        copies = {path: np.array(rows[self._tables[path].parameter_name]) for path in ids_by_path}
        return {path: torch.from_numpy(copy).to(self._run.device) for path, copy in copies.items()}

    def _by_name(self, ids_by_path: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {self._tables[path].parameter_name: ids for path, ids in ids_by_path.items()}

    def finish_backward(self) -> None:
        super().finish_backward()
        for path, fetched in self._fetched_rows.items():
            gradients = [(rows.ids, rows.values.grad) for rows in fetched if rows.values.grad is not None]
            if gradients:  # each row once
                self._row_gradients[path] = gradients[0] if len(gradients) == 1 else _sum_duplicate_rows(gradients)
        self._fetched_rows = {}

    def scale_gradients(self, factor: float | Tensor) -> None:
        for _, gradients in self._row_gradients.values():
            gradients.mul_(factor)

    def gradient_norm(self, gradients: Sequence[Tensor], replica_counts: Sequence[int]) -> Tensor:
        if self.dense_parameters:  # each rank has its own part of these gradients
            gradients = [self.step_ranks.all_reduce(gradient.clone()) for gradient in gradients]
        dense_norm = grad_clip.total_norm(gradients, replica_counts, self._run.ranks)
        squared_sums = [rows.double().square().sum() for _, rows in self._sum_row_gradients().values()]
        if not squared_sums:
            return dense_norm
        return (dense_norm.double().square() + torch.stack(squared_sums).sum()).sqrt().to(dense_norm.dtype)

    def update(self, *, skipped: bool) -> None:
        """Push this rank's gradients, ask for the next batch's rows, and pull the parameters that the servers train."""
        tables, dense, learning_rates = {}, {}, {}
        if not skipped:
            rows = self._row_gradients
            tables = {self._tables[p].parameter_name: (ids, _to_numpy(grads)) for p, (ids, grads) in rows.items()}
            dense = {n: _to_numpy(p.grad.reshape(-1)) for n, p in self.dense_parameters.items() if p.grad is not None}
            groups = {name: self._parameters.optimizer_group(name) for name in (*tables, *dense)}
            learning_rates = {name: learning_rate(*group, self._update_count) for name, group in groups.items()}
            self._update_count += 1
        self._row_gradients = {}
        client = self._launcher.client
        client.push(tables, dense=dense, lr=learning_rates, tick=True)
        next_batch, self._next_batch = self._next_batch, None
        if next_batch is not None and (predicted_ids := self._predict_ids(next_batch)):
            # Of the step that now begins: under staleness=0 the answer waits for the pushes of all.
            client.prefetch(self._by_name(predicted_ids), steps_ahead=0)
        self._pull_dense_parameters()
        for parameter in self.dense_parameters.values():
            parameter.grad = None  # the servers have stepped on it

    @torch.no_grad()
    def _pull_dense_parameters(self) -> None:
        if not self.dense_parameters:
            return
        values_by_name = self._launcher.client.pull_dense(list(self.dense_parameters))
        for name, parameter in self.dense_parameters.items():
            parameter.copy_(torch.from_numpy(values_by_name[name]).view(parameter.shape))

    # Other ranks

    def agree_to_stop(self, step: int, stop_requested: bool) -> bool | None:
        return None if self._coordinated_stop is None else self._coordinated_stop.report(step, stop_requested)

    def settle(self) -> None:
        if self._coordinated_stop is not None:
            self._coordinated_stop.wait()

    def steps_ahead_of_slowest(self) -> int:
        """Steps that this rank has finished more than the slowest, as the servers count them: at most as many as when rows were last read."""
        client = self._launcher.client
        return int(client.step - client.clock()[0])

    def synchronize(self) -> None:
        self._launcher.client.flush()
        self._run.ranks.barrier()
        if self._run.plan.asynchronous:
            self._pull_dense_parameters()

    # Whole tensors

    def _sum_row_gradients(self) -> dict[str, RowGradients]:
        """By parameter the gradients of all ranks' rows, summed. Every rank must call it."""
        summed = {}
        for path, table in self._tables.items():
            weight = self._parameters.weight(path)
            no_rows = np.empty(0, np.int64), torch.empty(0, table.dim, dtype=weight.dtype, device=self._run.device)
            gradients = _gather_rows(self._run.data_parallel, *self._row_gradients.get(path, no_rows))
            summed[table.parameter_name] = _sum_duplicate_rows(gradients)
        return summed

    def gather_gradients(self) -> dict[str, Tensor]:
        row_gradients, full_gradients, data_parallel = self._sum_row_gradients(), {}, self._run.data_parallel
        for name, parameter in self.dense_parameters.items():
            use_count = data_parallel.all_reduce(torch.tensor(float(parameter.grad is not None)))
            local_gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            if use_count:
                full_gradients[name] = data_parallel.all_reduce(local_gradient).cpu()
        for table in self._tables.values() if self._run.world.is_main else ():
            ids, gradients = row_gradients[table.parameter_name]
            full_gradient = torch.zeros((table.rows, table.dim), dtype=gradients.dtype)
            full_gradient[torch.from_numpy(ids)] = gradients.cpu()
            full_gradients[table.parameter_name] = full_gradient
        return full_gradients

    def pull_tables(self) -> dict[str, Tensor]:
        self._launcher.client.flush()  # on every rank: what others pushed must be there first
        return self._parameters.pull_tables(self._launcher.client) if self._run.world.is_main else {}

    # Checkpoints

    def save(self, folder: Path) -> dict[str, Any]:
        self._launcher.client.flush()
        self._run.ranks.barrier()
        with self._run.ranks.raise_on_all_ranks():
            if self._run.world.is_main:
                self._launcher.client.checkpoint(str(folder.absolute()))
        return {"trained": sorted(self.server_trained), "updates": self._update_count}

    def load(self, folder: Path, step: int, entry: dict[str, Any] | None) -> None:
        """External servers must hold just that state: they were not used since, or started from it."""
        if self._launcher.external_servers is None:
            self._launcher.close()
            self._launcher.open(folder)
            self._servers_are_trained = self._parameters.declare(self._launcher, {})
        else:
            with self._run.ranks.raise_on_all_ranks():
                self._require_server_step(folder, step)
            self._servers_are_trained = False
        self._pull_dense_parameters()
        assert entry is not None
        self._update_count = entry["updates"]

    def _require_server_step(self, folder: Path, step: int) -> None:
        # The step of the furthest rank of the previous run.
        server_step, has_partial_step = self._launcher.client.progress() if self._servers_are_trained else (0, False)
        if not self._servers_are_trained or server_step != step or has_partial_step:
            position = f"within step {server_step}" if has_partial_step else f"at step {server_step}"
            raise ServerError(
                f"servers={self._launcher.address}: they are {position}, and the checkpoint {folder} at step {step}; start servers with "
                f"`echelon server start ... --restore {folder}`, or train with --fresh on empty ones"
            )

    def close(self) -> None:
        """Leave the servers, and stop them if they were started here."""
        super().close()
        for undo in self._undo_callbacks:
            undo()
        self._undo_callbacks = []
        self._fetched_rows, self._row_gradients = {}, {}
        self._launcher.close()


def _to_numpy(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().cpu().contiguous().numpy()
    return array


def _sum_duplicate_rows(row_gradients: Sequence[RowGradients]) -> RowGradients:
    """The sum over equal ids, in the order of the ids."""
    ids, positions = np.unique(np.concatenate([ids for ids, _ in row_gradients]), return_inverse=True)
    gradients = torch.cat([gradients for _, gradients in row_gradients])
    summed = torch.zeros((len(ids), gradients.shape[1]), dtype=gradients.dtype, device=gradients.device)
    return ids, summed.index_add_(0, torch.from_numpy(positions.reshape(-1)).to(gradients.device), gradients)


def _gather_rows(communicator: Communicator, ids: np.ndarray, gradients: Tensor) -> list[RowGradients]:
    """Every rank's rows, in rank order."""
    if communicator.size == 1:
        return [(ids, gradients)]
    counts = communicator.all_gather_object(len(ids))

    def gather(rows: Tensor) -> list[Tensor]:
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded, group=communicator.process_group)
        return [rank_rows[:count] for rank_rows, count in zip(gathered, counts, strict=True)]

    all_ids = [rank_ids.cpu().numpy() for rank_ids in gather(torch.from_numpy(ids).to(gradients.device))]
    return list(zip(all_ids, gather(gradients), strict=True))
