"""Find layers that can be cut over ranks without communication in between: columns into a row.

    up ──> activation ──> down          q, k, v ──> heads ──> out          convolution ──> batch norm ──> convolution

Candidates follow from which module reads which; tp_trial.py tests them. Modules in between that work channel by channel (batch norm, a depthwise
convolution) are cut with the columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from echelon.partition.per_column_rng import draws_per_column
from echelon.partition.tp_layers import get_channel_attributes, is_matmul_layer
from echelon.partition.tp_layouts import Candidate
from echelon.partition.tp_trial import ColumnRowPair, RecordedCall, find_layout, record_calls, works_at_values
from echelon.partition.trial_values import iterate_parameter_values
from echelon.profiler.module_calls import UnitCall, UnitCallTracer, intercept_unit_calls
from echelon.tree import tree_leaves, tree_tensors
from echelon.trials.trial_run import (
    Forward,
    RunStep,
    deterministic_training,
    find_data_dependent_modules,
    find_random_modules,
    make_repeatable,
    training_mode,
)


@dataclass(frozen=True, slots=True)
class PairAnalysis:
    """How a model's modules can be cut."""

    pairs: tuple[ColumnRowPair, ...]
    called_modules: frozenset[str]  #: modules without children, and attention, that forward calls
    #: Ids of parameters that are also used outside the calls of their modules, or whose sizes are read there.
    parameters_read_outside: frozenset[int]
    sizes_read_outside: frozenset[int]
    #: Modules whose outputs only a cross entropy reads, without in-place changes: shards do not know their views.
    cross_entropy_inputs: frozenset[str]


def find_pairs(model: nn.Module, run_step: RunStep, tp_size: int, hints: Iterable[Candidate] = ()) -> PairAnalysis:
    """Every pair of `model` for `tp_size` ranks; `run_step()` computes its loss on real numbers (float64 best)."""
    random_modules, data_dependent = find_random_modules(model, run_step), find_data_dependent_modules(model, run_step)
    with deterministic_training(model):
        analysis, calls = _analyze(model, run_step, tp_size, hints, random_modules)

    def is_valid(pair: ColumnRowPair) -> bool:
        call = calls[pair.candidate]
        return call.ancestor not in data_dependent and (not pair.draws_random or draws_per_column(pair, call))

    return replace(analysis, pairs=tuple(filter(is_valid, analysis.pairs)))


def _analyze(
    model: nn.Module, run_step: RunStep, tp_size: int, hints: Iterable[Candidate], random_modules: Container[str]
) -> tuple[PairAnalysis, Mapping[Candidate, RecordedCall]]:
    """The analysis, and the candidates' calls in training."""
    training_reads = _trace_reads(model, run_step)
    traced_runs = [training_reads]
    with suppress(Exception), training_mode(model, training=False):  # it may have a loss in training only
        traced_runs.append(_trace_reads(model, run_step))
    parameters_read = frozenset(key for run in traced_runs for key in run.glue_reads)
    sizes_read = frozenset(key for run in traced_runs for key in run.glue_size_reads)
    unit_calls = training_reads.unit_calls
    counts = Counter(call.path for call in unit_calls)
    hinted_candidates = [candidate for candidate in hints if all(counts[path] == 1 for path in candidate.paths)]

    def is_isolated(candidate: Candidate) -> bool:
        # Trials shard the activations but not the parameters, and would not notice.
        modules = [model.get_submodule(path) for path in candidate.paths]
        if {id(parameter) for module in modules for parameter in module.parameters()} & (parameters_read | sizes_read):
            return False
        shares_buffers = any(run.modules_with_shared_buffers & {*candidate.between} for run in traced_runs)
        return not shares_buffers and not any(run.bypasses_row(candidate) for run in traced_runs)

    all_candidates = (*hinted_candidates, *_iterate_candidates(model, unit_calls, counts))
    candidates, repeatable = list(filter(is_isolated, all_candidates)), make_repeatable(model, run_step)
    has_evaluation = len(traced_runs) > 1
    pairs, recorded_calls = _try_candidates(model, repeatable, tp_size, candidates, random_modules, has_evaluation)
    read_calls = {source_index for call in unit_calls for source_index, _ in call.reads}
    logits_calls = training_reads.cross_entropy_calls - read_calls - training_reads.mutated_calls
    analysis = PairAnalysis(
        pairs=tuple(pairs.values()),
        called_modules=frozenset(call.path for run in traced_runs for call in run.unit_calls),
        parameters_read_outside=parameters_read,
        sizes_read_outside=sizes_read,
        cross_entropy_inputs=frozenset(unit_calls[index].path for index in logits_calls),
    )
    return analysis, recorded_calls


def _try_candidates(
    model: nn.Module,
    run_step: RunStep,
    tp_size: int,
    candidates: Sequence[Candidate],
    random_modules: Container[str],
    has_evaluation: bool,
) -> tuple[dict[str, ColumnRowPair], Mapping[Candidate, RecordedCall]]:
    """The candidates that work at all parameter values, by their rows, and their calls at the first."""
    first_calls: dict[Candidate, RecordedCall] = {}
    pairs: dict[str, ColumnRowPair] = {}
    for trial_index, values_name in enumerate(iterate_parameter_values(model, run_step)):
        if first_calls and (values_name == "initial" or not pairs):
            continue  # initial values add nothing
        try:
            remaining = [pair.candidate for pair in pairs.values()] if first_calls else candidates
            recorded_runs = [record_calls(model, remaining, run_step)]
            if has_evaluation and not first_calls:
                with training_mode(model, training=False):
                    recorded_runs.append(record_calls(model, candidates, run_step))
        except Exception:  # a model that does not accept such parameters; the next differ
            continue
        if first_calls:
            rank, recorded, is_trained = (tp_size - 1) * (trial_index % 2), recorded_runs[0], values_name == "trained"
            for row, pair in list(pairs.items()):
                call = recorded.get(pair.candidate)
                if call is None or not works_at_values(call, pair.layout, rank, check_gradients=is_trained):
                    del pairs[row]
            continue
        first_calls = recorded_runs[0]
        for candidate in candidates:
            if candidate.row not in pairs and candidate in first_calls:
                calls = [run[candidate] for run in recorded_runs if candidate in run]
                layout_and_partial = find_layout(calls, run_step, tp_size)
                if layout_and_partial is not None:
                    draws_random = first_calls[candidate].ancestor in random_modules
                    pairs[candidate.row] = ColumnRowPair(candidate, *layout_and_partial, draws_random)
    return pairs, first_calls


def _trace_reads(model: nn.Module, run_step: RunStep) -> _ReadTracer:
    leaves = [path for path, module in model.named_modules() if _owns_parameters(module)]
    tracer = _ReadTracer(model)

    def run() -> Any:
        with intercept_unit_calls(model, leaves, tracer.handle_call), tracer:
            return run_step()  # with gradients: some forwards take them

    result_tensors = tree_tensors(make_repeatable(model, run)())
    tracer.result_calls = {call_index for call_index, _ in tracer.find_origins(result_tensors)}
    return tracer


class _ReadTracer(UnitCallTracer):
    """Also records which calls a cross entropy reads, modules that use other modules' parameters, and buffers read elsewhere."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._call_unit_tracked)
        self.cross_entropy_calls: set[int] = set()
        self.mutated_calls: set[int] = set()  #: calls whose outputs were changed in place, before a cross entropy
        self._cross_entropy_results = WeakTensorKeyDictionary()  #: values computed from a cross entropy: no shards
        self.result_calls: set[int] = set()  #: calls that the loss or a buffer is computed from
        self.modules_with_shared_buffers: set[str] = set()  #: with a per-channel buffer that is read outside
        self._model = model
        self._channel_buffers = [
            (path, module._buffers, name)
            for path, module in model.named_modules()
            if get_channel_attributes(module) is not None
            for name, value in module._buffers.items()
            if value is not None and value.dim()
        ]

    def bypasses_row(self, candidate: Candidate) -> bool:
        """Whether the columns' outputs reach the loss or a buffer other than through the row (a penalty), which a rank would compute on its
        shard."""
        pair_modules = {*candidate.columns, *candidate.between}
        reached_calls: set[int] = set()
        for call_index, call in enumerate(self.unit_calls):
            reads_reached = any(source_index in reached_calls for source_index, _ in call.reads)
            if call.path in pair_modules or (call.path != candidate.row and reads_reached):
                reached_calls.add(call_index)
        return bool(self.result_calls & reached_calls)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.cross_entropy:
            cross_entropy_input = args[0] if args else (kwargs or {})["input"]
            self.cross_entropy_calls |= {call_index for call_index, _ in self.find_origins([cross_entropy_input])}
        out = self._call_tracking_writes(func, types, args, kwargs)
        # Not `.dtype`, which a shard has as well.
        if getattr(func, "__name__", "") != "__get__" or isinstance(out, Tensor | torch.Size):
            self._record_shared_buffers(tree_leaves((args, kwargs)))
        return out

    def _call_tracking_writes(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        inputs = tree_tensors((args, kwargs))
        tracked_inputs = [(x, x._version, self.find_origins([x])) for x in inputs if self.find_origins([x])]
        out = super().__torch_function__(func, types, args, kwargs)
        for leaf, version, origins in tracked_inputs:
            if leaf._version != version and leaf not in self._cross_entropy_results:
                self.mutated_calls |= {call_index for call_index, _ in origins}
        if func is F.cross_entropy or any(leaf in self._cross_entropy_results for leaf in inputs):
            for tensor in tree_tensors(out):
                self._cross_entropy_results[tensor] = True
        return out

    def _call_unit_tracked(self, path: str, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        module = self._model.get_submodule(path)
        own_ids = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        with _ForeignTensorRecorder(own_ids, self._record_foreign_reads):
            return forward(*args, **kwargs)

    def _record_foreign_reads(self, foreign_values: list[Any]) -> None:
        self._record_shared_buffers(foreign_values)
        for value in foreign_values:
            if isinstance(value, nn.Parameter):
                self.glue_reads.setdefault(id(value), set()).add(len(self.unit_calls))

    def _record_shared_buffers(self, values: list[Any]) -> None:
        tensor_ids = {id(value) for value in values if isinstance(value, Tensor)}
        shared = {path for path, buffers, name in self._channel_buffers if id(buffers[name]) in tensor_ids}
        self.modules_with_shared_buffers |= shared


class _ForeignTensorRecorder(TorchFunctionMode):
    """Reports inputs of operators that are not a module's own, while it runs."""

    def __init__(self, own_tensor_ids: set[int], record: Callable[[list[Any]], None]) -> None:
        super().__init__()
        self._own_tensor_ids, self._record = own_tensor_ids, record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._record([leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) not in self._own_tensor_ids])
        return func(*args, **(kwargs or {}))


def _owns_parameters(module: nn.Module) -> bool:
    """Whether a module is a leaf with parameters or channels, or attention, which does not call its child."""
    if list(module.children()) and type(module) is not nn.MultiheadAttention:
        return False
    return next(module.parameters(), None) is not None or get_channel_attributes(module) is not None


def _iterate_candidates(
    model: nn.Module, calls: Sequence[UnitCall], call_counts: Mapping[str, int]
) -> Iterator[Candidate]:
    readers_by_call: dict[int, set[int]] = {}
    for call_index, call in enumerate(calls):
        for source_index, _ in call.reads:
            readers_by_call.setdefault(source_index, set()).add(call_index)
    for call_index, call in enumerate(calls):
        if not call.reads or not is_matmul_layer(model.get_submodule(call.path)):
            continue
        columns, between = _trace_sources(model, calls, call_index)
        inner_calls = {call_index, *between}
        all_called_once = all(call_counts[calls[index].path] == 1 for index in (*columns, *inner_calls))
        all_matmuls = all(is_matmul_layer(model.get_submodule(calls[index].path)) for index in columns)
        only_readers = all(readers_by_call[index] <= inner_calls for index in (*columns, *between))
        if columns and all_matmuls and all_called_once and only_readers:
            column_paths, between_paths = (tuple(calls[index].path for index in part) for part in (columns, between))
            yield Candidate(column_paths, call.path, between_paths)


def _trace_sources(model: nn.Module, calls: Sequence[UnitCall], row_index: int) -> tuple[list[int], list[int]]:
    """The calls that a row reads, (columns, between), looking through channel-wise modules."""
    columns: set[int] = set()
    between: set[int] = set()
    pending = {source_index for source_index, _ in calls[row_index].reads}
    while pending:
        call_index = pending.pop()
        call = calls[call_index]
        if call.reads and get_channel_attributes(model.get_submodule(call.path)) is not None:
            between.add(call_index)
            pending |= {source_index for source_index, _ in call.reads} - columns - between
        else:
            columns.add(call_index)
    return sorted(columns), sorted(between)
