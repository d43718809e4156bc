"""The one true value of the loss and the metrics over a data set: each sample counts once, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from echelon.data.loader import Micro, evaluation_batches
from echelon.data.source import is_stream, open_source
from echelon.data.stream import Stream, evaluation_stream
from echelon.engine.averages import weighed
from echelon.engine.function_state import metrics_snapshot, snapshot, unchanged
from echelon.engine.metrics import (
    Kind,
    Metric,
    Part,
    UnjoinableError,
    classify,
    differentiable,
    joined,
    moved,
    number,
    plain,
    scalar,
    size_of,
    versions,
)
from echelon.engine.precision import autocast
from echelon.errors import JobError
from echelon.job import Job, call_loss, call_model
from echelon.loss_counts import Term, read_counts
from echelon.plan.split import sizes
from echelon.profiler.random_state import random_states
from echelon.profiler.snapshot import Snapshot
from echelon.world import usable_memory

if TYPE_CHECKING:
    from echelon.engine.run import Run


Ratios = tuple[float, ...]
#: Relative rounding of counts that are sums of float32.
_ROUNDING = 1e-5
#: Micro-batches of the first evaluation by which metrics are told apart: means, and others.
_TRIED = 4
#: Bytes of outputs and batches that are collected for metrics over the whole set, at most: this much, and this part of the memory.
_BOUND, _PART = 4 << 30, 8


@torch.no_grad()
def evaluate(run: Run, data: Any = None) -> dict[str, float]:
    """Loss and the job's metrics over `data` (default: the job's evaluation set). Every rank must call it."""
    job = run.job
    data = job.evaluation if data is None else data
    if data is None:
        raise JobError("nothing to evaluate on: give the job evaluation=, or pass a data set")
    run.model.eval()
    run.loss_keeps_state = not run.step_number or bool(run.attributes.functions.changed())
    put_back = snapshot(job, run.model) if run.loss_keeps_state else None
    metrics = metrics_snapshot(job, run.model)
    try:
        found = sums = None
        while found is None:  # again where a metric is no mean, or the loss has no common weight
            if sums is not None:
                metrics.put_back()
                if put_back is not None:
                    put_back()
            sums = _Sums(run, metrics)
            for micro in _micros(run, data):
                batch = run.move(micro.batch)
                sums.add(batch, run.values(batch), micro.samples)
            found = sums.total(turns=is_stream(data))
    finally:
        run.model.train()
        run.rest()
    return found


class _Sums:
    """Loss and metrics of an evaluation so far, on this rank."""

    def __init__(self, run: Run, metrics: Snapshot) -> None:
        """`metrics`: what metrics kept before this evaluation."""
        self._run, self._metrics, self._before = run, run.job.metrics, metrics
        self._names = ["loss", *self._metrics]
        self._sums = torch.zeros(len(self._names), 2, dtype=torch.float64, device=run.device)
        #: The first parts, by which metrics are told apart; then those of metrics over the whole set.
        self._parts: list[Part] = []
        self._turns = self._bytes = 0
        #: Metrics taken for means that later batches show to be none, and the loss if its averages have no common weight.
        self._doubted: set[str] = set()
        #: By how many averages each batch's loss is weighed, and their counts; None: by samples. Unset before the first batch that counts.
        self._ratios: Ratios | None = None
        self._weighed = False
        self._bound = min(_BOUND, usable_memory() // _PART)

    def add(self, batch: Any, values: tuple[Tensor, Any] | None, samples: int) -> None:
        """Count a micro-batch. `values`: its loss and the model's output; None on stages without a loss."""
        kinds = self._run.metric_kinds
        if values is not None:
            loss, output = values
            if samples and float(loss[1]):  # else nothing counts
                if self._weighed and not _alike(self._ratios, self._run.ratios):
                    self._doubted.add("loss")
                self._ratios, self._weighed = self._run.ratios, True
            # A part is gathered by all ranks that hold one, whatever counts.
            later = self._turns >= _TRIED and self._turns.bit_count() == 1
            wanted = self._metrics and (later or not self._decided("pair", "mean"))
            part = Part(plain(output), batch, samples) if wanted else None
            if samples:  # else a filler that only keeps the ranks in step
                rows = [loss, *(self._row(name, kinds.get(name), output, batch) for name in self._metrics)]
                self._sums += _pairs(torch.stack(rows), samples)
                if part is not None and later:
                    self._doubt(part)
                if part is not None:
                    self._collect(part)
        self._turns += 1
        if self._turns == _TRIED:
            self._settle()

    def _decided(self, *among: str) -> bool:
        """Whether every metric is known, as one of these."""
        return all(self._run.metric_kinds.get(name) in among for name in self._metrics)

    def _row(self, name: str, kind: str | None, output: Any, batch: Any) -> Tensor:
        """A metric of a batch; nothing of one over the whole set, and of one that fails while its kind is not known."""
        if kind == "whole":
            return self._sums.new_zeros(2)
        try:
            with autocast(self._run.precision, self._run.device):
                return _row(name, self._metrics[name](output, batch), self._run.device)
        except JobError:
            raise
        except Exception:
            if kind is not None or not self._metrics:
                raise
            return self._sums.new_zeros(2)

    def _doubt(self, part: Part) -> None:
        """Look again whether metrics are means: samples may be sorted, so that the first ones did not tell."""
        means = [name for name, kind in self._run.metric_kinds.items() if kind == "mean" and name in self._metrics]
        with self._tried():
            self._doubted |= {name for name in means if classify(self._metrics[name], [part]) == "whole"}

    @contextmanager
    def _tried(self) -> Iterator[None]:
        """Metrics may be called inside, and what they keep is afterwards as it was."""
        held = metrics_snapshot(self._run.job, self._run.model)
        try:
            with autocast(self._run.precision, self._run.device):
                yield
        finally:
            held.put_back()

    def _collect(self, part: Part) -> None:
        if self._decided("pair", "mean"):
            return
        if self._run.tells and self._bytes <= self._bound:
            kept = moved(part, torch.device("cpu"))
            self._bytes += size_of(kept)
            self._parts.append(kept)

    def _settle(self) -> None:
        """Agree over all ranks on the kind of every metric that is not known; every rank comes here in the same turn."""
        run, kinds = self._run, self._run.metric_kinds
        unknown = [name for name in self._metrics if name not in kinds]
        if unknown:
            mine: dict[str, Kind | None] = {}
            if run.tells:
                with self._tried():
                    mine = {name: _classified(self._metrics[name], self._parts, run.device) for name in unknown}
            votes = [each for each in run.ranks.gather(mine) if each]
            for name in unknown:
                said = {each[name] for each in votes} - {None}
                kinds[name] = said.pop() if len(said) == 1 else "whole"
        added = [name for name in unknown if kinds[name] == "whole"]
        for name in added:  # what was added up of it so far is no part of it
            self._sums[self._names.index(name)] = 0
        if added:
            self._before.put_back()  # nor is what its calls so far left behind
        if not any(kind == "whole" for kind in kinds.values()):
            self._parts = []

    def total(self, *, turns: bool) -> dict[str, float] | None:
        """What it all comes to; None: a metric is no mean, or the loss has no common weight, and it must be evaluated again. `turns`: ranks took samples in turn, not one
        share after the other."""
        run = self._run
        self._settle()
        everyone = run.ranks.gather((self._doubted, self._ratios, self._weighed))
        doubted = set[str]().union(*(each for each, _, _ in everyone))
        found = [ratios for _, ratios, weighed in everyone if weighed]
        if any(not _alike(found[0], each) for each in found):
            doubted.add("loss")
        if doubted:
            run.loss_by_samples |= "loss" in doubted
            run.metric_kinds.update({name: "whole" for name in doubted if name != "loss"})
            return None
        refused = self._whole(turns=turns)
        sums = self._sums
        run.data.sum(sums)
        run.core.sum(sums if run.tells else sums.zero_())
        means = {
            name: float(total / count) if count else float("nan")
            for name, (total, count) in zip(self._names, sums, strict=True)
        }
        return means | dict.fromkeys(refused, float("nan"))

    def _whole(self, *, turns: bool) -> list[str]:
        """Compute the metrics that are no means over all samples, on the first data rank; the names of those that cannot be."""
        run = self._run
        names = [name for name in self._metrics if run.metric_kinds[name] == "whole"]
        if not names:
            return []
        held = [size for size, tells in run.ranks.gather((self._bytes, run.tells)) if tells]
        why = ""
        if max(held) > self._bound or sum(held) > self._bound * len(held):
            why = f"their outputs take more than {self._bound / 2**30:.1f} GiB"
        gathered = run.data.collect(self._parts) if run.tells and not why else None
        self._parts = []
        problem: list[str] = []
        with run.ranks.together():
            if gathered is not None:
                problem = self._compute(names, gathered, turns=turns)
        why = why or next((each for part in run.ranks.gather(problem) for each in part), "")
        if why and run.world.main:
            run.warn(
                f"{', '.join(names)}: not a mean over samples, and cannot be computed over the whole evaluation set, because {why}; return (sum, "
                "count) from the metric, or what it needs as several such metrics"
            )
        return names if why else []

    def _compute(self, names: Sequence[str], gathered: Sequence[Sequence[Part]], *, turns: bool) -> list[str]:
        run = self._run
        if turns:
            parts = [each[turn] for turn in range(max(map(len, gathered))) for each in gathered if turn < len(each)]
        else:
            parts = [part for each in gathered for part in each]
        try:
            everything = moved(joined(parts), run.device)
        except UnjoinableError as error:
            return [str(error)]
        for name in names:
            try:
                with autocast(run.precision, run.device):
                    value = self._metrics[name](everything.output, everything.batch)
            except Exception as error:
                error.add_note(f"in metric {name!r}, over the whole evaluation set")
                raise
            self._sums[self._names.index(name)] = torch.tensor(number(name, value), dtype=torch.float64)
        return []


def _classified(metric: Metric, parts: Sequence[Part], device: torch.device) -> Kind | None:
    return classify(metric, [moved(part, device) for part in parts])


def _pairs(values: Tensor, samples: int) -> Tensor:
    """(sum, count) for each value, of means (whose count is NaN) as well."""
    means = values[:, 1].isnan()
    return torch.where(means[:, None], torch.stack([values[:, 0] * samples, means.double() * samples], 1), values)


def _alike(one: Ratios | None, other: Ratios | None) -> bool:
    """Whether one weight joins losses whose averages have these counts: the same kind of count, in the same proportions."""
    if one is None or other is None or len(one) != len(other):
        return one is None and other is None
    return all(math.isclose(*each, rel_tol=_ROUNDING) for each in zip(one, other, strict=True))


def measured(
    job: Job, model: nn.Module, batch: Any, *, weigh: bool = True, stateful: bool = True
) -> tuple[Tensor, Any, Ratios | None]:
    """The loss of a batch as (sum, count) or (mean, NaN), the model's output, from which metrics are computed, and the counts of the averages that
    the loss adds up, as multiples of the first; None where it is weighed by samples."""
    output = call_model(job, model, batch)
    before = versions((output, batch))
    around = _as_before(job, model) if stateful and weigh else nullcontext()
    loss = call_loss(job, output, batch, model)
    ratios: Ratios | None = None
    if weigh and job.loss is not None and isinstance(loss, Tensor) and versions((output, batch)) == before:
        terms = _terms(job, model, output, batch, loss, around)
        if terms:
            first, *others = (float(each.count) for each in terms)
            if first or not any(others):
                ratios = tuple(each / first for each in others) if first else ()
                loss = weighed(loss, terms[0])
    where = (loss[0] if isinstance(loss, tuple) else loss).device
    return _row("loss", loss, where), output, ratios


def _as_before(job: Job, model: nn.Module) -> AbstractContextManager[None]:
    """Inside, what the loss keeps is as it is now; afterwards as it was on entry."""
    put_back = snapshot(job, model)

    @contextmanager
    def again() -> Iterator[None]:
        with unchanged(job, model):
            put_back()
            yield

    return again()


def _terms(
    job: Job, model: nn.Module, output: Any, batch: Any, loss: Tensor, around: AbstractContextManager[None]
) -> tuple[Term, ...]:
    """The averages that `loss` adds up, from the graph of a second call: class weights and masks count otherwise than by samples. The
    first call has no graph, so that a loss that asks whether gradients are enabled sees an evaluation."""
    if isinstance(loss, FakeTensor):
        return ()
    try:
        with torch.enable_grad(), random_states(), around:
            again = call_loss(job, differentiable(output), batch, model)
    except JobError:
        raise
    except Exception:  # a loss that cannot be called twice, or edits in place, which autograd refuses
        return ()
    if not isinstance(again, Tensor) or not torch.allclose(again.detach(), loss, rtol=_ROUNDING, equal_nan=True):
        return ()  # it differs with gradients enabled, as label smoothing in training does
    reading = read_counts(again)
    return () if reading.opaque else reading.terms


def _row(name: str, value: Any, device: torch.device) -> Tensor:
    pair = value if isinstance(value, tuple) else (value, math.nan)
    # Half precision has too few digits for a sum over a batch.
    parts = [torch.as_tensor(scalar(part, name), dtype=torch.float64, device=device) for part in pair]
    return torch.stack([part.detach() for part in parts])


def _micros(run: Run, data: Any) -> Iterator[Micro]:
    data_ranks = run.data
    rank, ranks = data_ranks.rank, data_ranks.size
    # All ranks have as many samples here, so that no more than the smallest share fits everywhere.
    size = run.plan.micro or (min if run.plan.shares else max)(sizes(run.job.batch, ranks, run.plan.shares))
    collate, seed = run.job.collate, run.job.seed
    with run.ranks.together():
        pin = run.device.type == "cuda"
        if is_stream(data):
            stream = Stream(data, collate=collate, seed=seed)
            alike = run.ranks.size // ranks
            agree = run.ranks.gather
            return evaluation_stream(stream, rank=rank, ranks=ranks, size=size, agree=agree, pin=pin, alike=alike)
        source = open_source(data, collate=collate, seed=seed)
        return evaluation_batches(source, rank=rank, ranks=ranks, size=size, pin=pin, workers=run.workers)
