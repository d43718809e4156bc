"""The one true value of the loss and the metrics over a data set: each sample counts once, on any number of ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon.data.loader import Micro, evaluation_batches
from echelon.data.source import is_stream, open_source
from echelon.data.stream import Stream, evaluation_stream
from echelon.engine.checkpoint.function_state import metrics_snapshot, snapshot, unchanged
from echelon.engine.evaluated_loss import Ratios, pair_of, recounted
from echelon.engine.loss_weights import LowCounts
from echelon.engine.metrics import (
    Kind,
    Part,
    UnjoinableError,
    adds_up,
    classify,
    cloned,
    is_mean,
    is_same,
    is_whole,
    joined,
    moved,
    number,
    plain,
    rows,
    size_of,
    versions,
)
from echelon.engine.precision import autocast
from echelon.errors import JobError
from echelon.job import call_loss
from echelon.loss_counts import given_again
from echelon.plan.batch_split import sizes
from echelon.trials.random_state import random_states
from echelon.trials.snapshot import Snapshot
from echelon.trials.trial_context import one_process
from echelon.world import usable_memory

if TYPE_CHECKING:
    from echelon.engine.run import Run


#: Relative rounding of counts that are sums of float32.
_ROUNDING = 1e-5
#: Micro-batches of the first evaluation by which metrics are told apart: means, and others.
_TRIED = 4
#: Rows of a batch by which later batches are checked, and those by which ranks are compared.
_ROWS, _EACH = 256, 8
#: Bytes of outputs and batches on a rank up to which every metric is computed over the whole set.
_SMALL = 16 << 20
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
        editing: set[str] = set()
        while found is None:  # again where a metric is no mean or edits its arguments, or the loss has no common weight
            if sums is not None:
                metrics.put_back()
                if put_back is not None:
                    put_back()
            sums = _Sums(run, metrics, editing)
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

    def __init__(self, run: Run, metrics: Snapshot, editing: set[str]) -> None:
        """`metrics`: what metrics kept before this evaluation. `editing`: those that edit their arguments; ranks add to it at the end."""
        self._run, self._metrics, self._before = run, run.job.metrics, metrics
        self._editing, self._found_editing = editing, set[str]()
        self._names = ["loss", *self._metrics]
        self._sums = torch.zeros(len(self._names), 2, dtype=torch.float64, device=run.device)
        #: The first parts, by which the kinds of metrics are found; then those of metrics over the whole set.
        self._parts: list[Part] = []
        self._turns = self._bytes = 0
        #: Whether a batch was left out of the parts.
        self._incomplete = False
        self._previous: Part | None = None
        #: Metrics taken for means that later batches show to be none, and the loss if its averages have no common weight.
        self._doubted: set[str] = set()
        #: By how many averages each batch's loss is weighed, and their counts; None: by samples. Unset before the first batch that counts.
        self._ratios: Ratios | None = None
        self._weighed = False
        #: What batches divided their sums by in which the loss counted nothing.
        self._floor = 0.0
        #: The counts of what is given as (sum, count), by name.
        self._counts: dict[str, LowCounts] = {}
        self._bound = min(_BOUND, usable_memory() // _PART)

    def add(self, batch: Any, values: tuple[Tensor, Any] | None, samples: int) -> None:
        """Count a micro-batch. `values`: its loss and the model's output; None on stages without a loss."""
        if values is not None:
            loss, output = values
            floor = self._run.loss_floor
            if samples and self._run.ratios is None and self._is_low("loss", loss, samples):
                loss, floor = self._recounted(loss, output, batch, samples)
            self._floor = floor or self._floor
            if samples and float(loss[1]):  # else nothing counts
                if self._weighed and not _alike(self._ratios, self._run.ratios):
                    self._doubted.add("loss")
                self._ratios, self._weighed = self._run.ratios, True
            # A part is gathered by all ranks that hold one, whatever counts.
            due = is_whole(output) or not self._incomplete or self._turns.bit_count() == 1
            wanted = self._metrics and not self._decided("pair") and (due or not self._decided("pair", "mean"))
            part = Part(plain(output), batch, samples) if wanted else None
            if samples:  # else a filler that only keeps the ranks in step
                found = self._rows(output, batch)
                self._doubt_pairs(found, output, batch, samples)
                self._sums += _pairs(torch.stack([loss, *found]), samples)
                if part is not None:
                    self._doubt(part)
                    self._collect(part)
                else:
                    self._incomplete = True
        self._turns += 1
        if self._turns == _TRIED:
            self._settle()

    def _is_low(self, name: str, row: Tensor, samples: int) -> bool:
        """Whether a count may be more than what was counted."""
        count = float(row[1])
        return not math.isnan(count) and self._counts.setdefault(name, LowCounts()).is_low(count, samples)

    def _recounted(self, loss: Tensor, output: Any, batch: Any, samples: int) -> tuple[Tensor, float]:
        run, whole = self._run, plain(output)

        def again(times: int) -> Any:
            given = given_again((whole, batch), samples, times)
            with one_process(), random_states(), unchanged(run.job, run.model), autocast(run.precision, run.device):
                return None if given is None else call_loss(run.job, given[0], given[1], run.model)

        found, floor = recounted(loss, again)
        if found is not None and found[1] != loss[1]:
            self._counts["loss"].hidden = max(self._counts["loss"].hidden, float(loss[1]))
        return loss if found is None else found, floor

    def _doubt_pairs(self, found: Sequence[Tensor], output: Any, batch: Any, samples: int) -> None:
        """Look whether metrics given as (sum, count) add up where the count is low."""
        run = self._run
        rows_of_pairs = [
            (name, row) for name, row in zip(self._metrics, found, strict=True) if run.metric_kinds.get(name) != "whole"
        ]
        low = [name for name, row in rows_of_pairs if self._is_low(name, row, samples)]
        part = Part(plain(output), batch, samples) if low else None
        if part is None or not run.tells:
            return
        with self._tried():
            self._doubted |= {name for name in low if not adds_up(self._metrics[name], part)}

    def _decided(self, *among: str) -> bool:
        """Whether every metric is known, as one of these."""
        return all(self._run.metric_kinds.get(name) in among for name in self._metrics)

    def _row(self, name: str, kind: str | None, output: Any, batch: Any) -> Tensor:
        """A metric of a batch; nothing of one over the whole set, and of one that fails while its kind is not known."""
        if kind == "whole":
            return self._sums.new_zeros(2)
        try:
            with autocast(self._run.precision, self._run.device):
                return pair_of(name, self._metrics[name](output, batch), self._run.device)
        except JobError:
            raise
        except Exception:
            if kind is not None or not self._metrics:
                raise
            return self._sums.new_zeros(2)

    def _rows(self, output: Any, batch: Any) -> list[Tensor]:
        """Every metric of a batch. Each sees the same output and batch, whatever others write to them."""
        first, found = not self._turns, []
        kept = (plain(output), batch) if first and self._metrics else (output, batch)
        before = versions(kept)
        for name in self._metrics:
            given = cloned(kept) if first or name in self._editing else kept
            found.append(self._row(name, self._run.metric_kinds.get(name), *given))
            if (first and not is_same(given, kept)) or (given is kept and versions(kept) != before):
                self._found_editing.add(name)
                before = versions(kept)
        return found

    def _doubt(self, part: Part) -> None:
        """Look again whether metrics are means: samples may be sorted, so that the first ones did not show it."""
        part = rows(part, 0, _ROWS) if part.samples > _ROWS else part
        means = [name for name in self._metrics if self._run.metric_kinds.get(name) == "mean"]
        if means and self._incomplete and self._run.tells:
            with self._tried():
                self._doubted |= {name for name in means if not is_mean(self._metrics[name], self._previous, part)}
        with contextlib.suppress(UnjoinableError):  # a few rows may agree by chance
            part = joined([part, self._previous]) if self._previous is not None else part
        self._previous = rows(part, 0, min(_ROWS, part.samples))

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
        limit = _SMALL if self._decided("pair", "mean") else self._bound
        self._bytes += size_of(part)
        if self._incomplete or (self._bytes > limit and self._turns >= _TRIED):
            self._incomplete, self._parts = True, []
        elif self._run.tells:
            self._parts.append(moved(part, torch.device("cpu")))

    def _settle(self) -> None:
        """Agree over all ranks on the kind of every metric that is not known; every rank comes here in the same turn."""
        run, kinds = self._run, self._run.metric_kinds
        unknown = [name for name in self._metrics if name not in kinds]
        if unknown:
            mine: dict[str, Kind | None] = {}
            if run.tells:
                with self._tried():
                    mine = {name: self._kind(name) for name in unknown}
            votes = [each for each in run.ranks.gather(mine) if each]
            for name in unknown:
                said = {each[name] for each in votes} - {None}
                kinds[name] = said.pop() if len(said) == 1 else "whole"
        added = [name for name in unknown if kinds[name] == "whole"]
        for name in added:  # what was added up of it so far is no part of it
            self._sums[self._names.index(name)] = 0
        if added:
            self._before.put_back()  # nor is what its calls so far left behind

    def _kind(self, name: str) -> Kind | None:
        parts = [moved(part, self._run.device) for part in self._parts]
        if parts and self._run.attributes.steered_by(lambda: self._metrics[name](parts[0].output, parts[0].batch)):
            return "whole"  # every rank must have what the whole set leaves behind
        return classify(self._metrics[name], parts)

    def total(self, *, turns: bool) -> dict[str, float] | None:
        """What it all comes to; None: a metric is no mean, or the loss has no common weight, and it must be evaluated again. `turns`: ranks took samples in turn, not one
        share after the other."""
        run = self._run
        self._settle()
        self._compare_ranks()
        everyone = run.ranks.gather((self._doubted, self._ratios, self._weighed, self._found_editing, self._floor))
        doubted = set[str]().union(*(each for each, *_ in everyone))
        editing = set[str]().union(*(each for *_, each, _ in everyone)) - self._editing
        self._editing |= editing
        found = [ratios for _, ratios, weighed, *_ in everyone if weighed]
        if any(not _alike(found[0], each) for each in found):
            doubted.add("loss")
        if doubted:
            run.loss_by_samples |= "loss" in doubted
            run.metric_kinds.update({name: "whole" for name in doubted if name != "loss"})
        if doubted or editing:
            return None
        refused = self._whole(turns=turns)
        sums = self._sums
        run.data.sum(sums)
        run.core.sum(sums if run.tells else sums.zero_())
        if not sums[0, 1]:
            sums[0, 1] = max(floor for *_, floor in everyone)  # as one device, which counts nothing either, divides
        means = {
            name: float(total / count) if count else float("nan")
            for name, (total, count) in zip(self._names, sums, strict=True)
        }
        return means | dict.fromkeys(refused, float("nan"))

    def _compare_ranks(self) -> None:
        """Look whether metrics are means over samples of several ranks too: one may have the long ones, another the short ones."""
        run = self._run
        if not any(run.ranks.gather(self._incomplete and run.tells)) or not run.tells:
            return
        last = self._previous
        some = None if last is None else moved(rows(last, 0, min(_EACH, last.samples)), torch.device("cpu"))
        parts = [moved(each, run.device) for each in run.data.collect(some) or () if each is not None]
        with self._tried():
            for name in self._metrics if len(parts) > 1 else ():
                if run.metric_kinds[name] == "mean" and not all(
                    is_mean(self._metrics[name], *pair) for pair in pairwise(parts)
                ):
                    self._doubted.add(name)

    def _whole(self, *, turns: bool) -> list[str]:
        """Compute metrics over all samples, on the first data rank: those that are no means, and of a small set the means too. Returns the names of those
        that cannot be computed."""
        run = self._run
        state = [each for *each, tells in run.ranks.gather((self._bytes, self._incomplete, run.tells)) if tells]
        small = not any(incomplete for _, incomplete in state) and max(size for size, _ in state) <= _SMALL
        needed = [name for name in self._metrics if run.metric_kinds[name] == "whole"]
        means = [name for name in self._metrics if run.metric_kinds[name] == "mean"] if small else []
        if not needed and not means:
            return []
        why = ""
        if max(size for size, _ in state) > self._bound:
            why = f"their outputs take more than {self._bound / 2**30:.1f} GiB"
        gathered = run.data.collect(self._parts) if run.tells and not why else None
        self._parts = []
        problem, done = "", list[str]()
        with run.ranks.together():
            if gathered is not None:
                problem, done = self._compute(needed, means, gathered, turns=turns)
        answers = run.ranks.gather((problem, done, gathered is not None))
        for name in set(means).intersection(*(theirs for _, theirs, computed in answers if computed)):
            if gathered is None:  # its batches are counted there
                self._sums[self._names.index(name)] = 0
        if needed and any(computed for *_, computed in answers):
            run.attributes.share_metrics(mine=gathered is not None)
        why = why or next((each for each, *_ in answers if each), "")
        if why and needed and run.world.main:
            run.warn(
                f"{', '.join(needed)}: not a mean over samples, and cannot be computed over the whole evaluation set, because {why}; return (sum, "
                "count) from the metric, or what it needs as several such metrics"
            )
        return needed if why else []

    def _compute(
        self, needed: Sequence[str], means: Sequence[str], gathered: Sequence[Sequence[Part]], *, turns: bool
    ) -> tuple[str, list[str]]:
        """Why it cannot be done, and the `means` for which it was."""
        if turns:
            parts = [each[turn] for turn in range(max(map(len, gathered))) for each in gathered if turn < len(each)]
        else:
            parts = [part for each in gathered for part in each]
        try:
            everything = moved(joined(parts), self._run.device)
        except UnjoinableError as error:
            return str(error), []
        done = []
        for name in means:
            with contextlib.suppress(Exception), self._tried():  # it takes batches: then its mean stands
                self._put(name, everything)
                done.append(name)
        for name in needed:
            try:
                with autocast(self._run.precision, self._run.device):
                    self._put(name, everything)
            except Exception as error:
                error.add_note(f"in metric {name!r}, over the whole evaluation set")
                raise
        return "", done

    def _put(self, name: str, everything: Part) -> None:
        value = self._metrics[name](*cloned((everything.output, everything.batch)))
        self._sums[self._names.index(name)] = torch.tensor(number(name, value), dtype=torch.float64)


def _pairs(values: Tensor, samples: int) -> Tensor:
    """(sum, count) for each value, of means (whose count is NaN) as well."""
    means = values[:, 1].isnan()
    return torch.where(means[:, None], torch.stack([values[:, 0] * samples, means.double() * samples], 1), values)


def _alike(one: Ratios | None, other: Ratios | None) -> bool:
    """Whether one weight joins losses whose averages have these counts: the same kind of count, in the same proportions."""
    if one is None or other is None or len(one) != len(other):
        return one is None and other is None
    return all(math.isclose(*each, rel_tol=_ROUNDING) for each in zip(one, other, strict=True))


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
