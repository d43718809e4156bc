"""The parameters of a model that servers hold: tables and, under dense=server, all others, each with its optimizer's rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.engine.backends.launch_servers import ServerLauncher
from echelon.engine.backends.server_optimizers import make_rule
from echelon.engine.run_state import RunState
from echelon.errors import JobError, PlanError, ServerError
from echelon.plan.parameter_server import ServedTable

#: Rows per message when a table is filled or read whole.
_ROWS_PER_MESSAGE = 2**16
#: Steps beyond which rules that are replayed update by update delay all workers (see docs/server.md).
_MAX_REPLAYED_UPDATES = 10_000
_SERVER_DTYPES: dict[torch.dtype, Any] = {torch.float32: "f4", torch.float64: "f8"}


class ServerParameters:
    """The parameters of one run that servers hold: `dense`, and the tables of its plan."""

    def __init__(self, run: RunState, dense: Mapping[str, nn.Parameter]) -> None:
        from echelon.server.protocol.specs import Dense, Init, Table

        self._run, self._dense, self._tables = run, dense, run.plan.server.tables
        #: By id of a parameter its optimizer, and the number of its group there.
        self._groups: dict[int, tuple[Optimizer, int]] = {
            id(parameter): (optimizer, index)
            for optimizer in run.optimizers
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._parameters = dict(run.model.named_parameters())
        self._specs: list[Any] = []
        for table in self._tables:
            name = table.parameter_name
            is_filled = table.initialized_by == "model"
            init = Init(kind="zeros") if is_filled else Init(kind="normal", scale=1.0, seed=abs(run.job.seed))
            rule = make_rule(name, *self.optimizer_group(name), is_table=True)
            dtype = _server_dtype(name, self.weight(table.path).dtype)
            self._specs.append(Table(name=name, dim=table.dim, rule=rule, init=init, dtype=dtype, stored=dtype))
        for name, parameter in dense.items():
            rule = make_rule(name, *self.optimizer_group(name), is_table=False)
            dtype = _server_dtype(name, parameter.dtype)
            self._specs.append(Dense(name=name, size=parameter.numel(), rule=rule, dtype=dtype))
        slow_tables = [spec.name for spec in self._specs if spec.rule.replays_each_update]
        if slow_tables and run.total_steps > _MAX_REPLAYED_UPDATES:
            run.warn(
                f"{', '.join(slow_tables)}: weight decay through the gradient, in a run of {run.total_steps} steps: servers compute every step that a row missed "
                "when it is read, which takes longer and longer; use AdamW, or no weight decay for tables"
            )

    def weight(self, path: str) -> Tensor:
        """What the module at `path` holds in place of its table."""
        weight = self._run.model.get_submodule(path).weight
        assert isinstance(weight, Tensor)
        return weight

    def optimizer_group(self, name: str) -> tuple[Optimizer, dict[str, Any]]:
        """The optimizer and the group of a parameter."""
        group_place = self._groups.get(id(self._parameters.get(name)))
        if group_place is None:
            raise JobError(
                f"optimizer=: no optimizer has {name}, which a server must train; give it to one, or freeze it"
            )
        optimizer, index = group_place
        return optimizer, optimizer.param_groups[index]  # by its number: loading a checkpoint replaces groups

    def declare(self, launcher: ServerLauncher, initial_tables: Mapping[str, Tensor]) -> bool:
        """Declare the parameters with rank 0's values; returns whether external servers hold them trained already."""
        run, client = self._run, launcher.client
        are_trained = False
        with run.ranks.raise_on_all_ranks():
            if run.world.is_main:
                are_trained = self._check_existing_specs(launcher)
        are_trained = run.ranks.broadcast_object(are_trained)
        for is_main in (True, False):
            if run.world.is_main == is_main:
                for spec in self._specs:
                    parameter = None if are_trained else self._dense.get(spec.name)
                    initial = None if parameter is None else parameter.detach().reshape(-1).cpu().numpy()
                    client.declare(spec, initial=initial)
                if is_main and not are_trained:
                    self._fill_tables(client, initial_tables)
            run.ranks.barrier()
        return are_trained

    def _check_existing_specs(self, launcher: ServerLauncher) -> bool:
        """Whether external servers hold this job's parameters; refused where they are another's."""
        existing = dict(launcher.client.specs) if launcher.external_servers is not None else {}
        expected = {spec.name: spec for spec in self._specs}
        if existing and existing != expected:
            names = sorted(existing.keys() | expected.keys())
            differing = next(name for name in names if existing.get(name) != expected.get(name))
            existing_text = f"as {existing[differing]}" if differing in existing else "not at all"
            raise ServerError(
                f"servers={launcher.address}: they hold another job's {', '.join(sorted(existing)[:3])}: {differing} is there {existing_text}, and here "
                f"{expected.get(differing, 'not at all')}; start servers of this job's own (`echelon server start`)"
            )
        return bool(existing)

    def _fill_tables(self, client: Any, initial_tables: Mapping[str, Tensor]) -> None:
        for table in self._tables:
            padding_id = getattr(self._run.model.get_submodule(table.path), "padding_idx", None)
            if table.path in initial_tables:
                values = initial_tables[table.path]
                for ids in _row_chunks(table):
                    rows = values[int(ids[0]) : int(ids[-1]) + 1].detach().cpu().contiguous().numpy()
                    client.assign({table.parameter_name: (ids, rows)})
            elif padding_id is not None:
                row = np.zeros((1, table.dim), _SERVER_DTYPES[self.weight(table.path).dtype])
                client.assign({table.parameter_name: (np.array([padding_id], np.int64), row)})
        client.flush()

    def pull_tables(self, client: Any) -> dict[str, Tensor]:
        """The whole tables."""
        full_tables = {}
        for table in self._tables:
            name = table.parameter_name
            chunks = [client.pull({name: ids})[name] for ids in _row_chunks(table)]
            full_tables[name] = torch.from_numpy(np.concatenate(chunks))
        return full_tables


def _row_chunks(table: ServedTable) -> Iterator[np.ndarray]:
    for begin in range(0, table.rows, _ROWS_PER_MESSAGE):
        yield np.arange(begin, min(begin + _ROWS_PER_MESSAGE, table.rows), dtype=np.int64)


def _server_dtype(name: str, dtype: torch.dtype) -> Any:
    if dtype not in _SERVER_DTYPES:
        raise PlanError(
            f"exchange=server: {name} is {str(dtype).removeprefix('torch.')}, and servers compute in float32 or float64; build the "
            "model in float32 (precision= decides what forward computes in)"
        )
    return _SERVER_DTYPES[dtype]
