"""Where each rank can have a part of the sequence only (plan/sequence_segment.py), found by trying.

A chain is a run of repeated blocks of which each is given the very hidden states of the one before, and nobody else reads those. The
model runs once as it is, with its gradients. Then it runs as one rank would: a chain gets that rank's part of the hidden states, modules
that need the whole sequence are given what they were given before (of which exactly this rank's part must have reached them), rows give
this rank's part of what they gave. Every block's hidden states and their gradients must be this rank's part of what they were, and every
buffer what it was.

Gradients of parameters tell where they are used: they are the whole on each rank, or add up over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from echelon.partition.block_chains import JOINING, Chain, chains
from echelon.partition.reference_pass import Record, WrongError, draws, total_of
from echelon.partition.sequence_trial import RankTrial, kind_of
from echelon.partition.trial_values import at_each
from echelon.plan.placement import Placement
from echelon.plan.profile import units
from echelon.plan.sequence_segment import Gather, Segment
from echelon.profiler.sample_coupling import first_line
from echelon.trials.module_tree import module_tree
from echelon.trials.trial_run import alike, calling, deciding, equal, mode, rehearsing, same

_OPENING = ("column", "attention")  #: cuts that need the whole of their input


@dataclass(frozen=True, slots=True)
class Segments:
    """What was found: the segments, how modules are cut for them, and why there are none where that is so."""

    segments: tuple[Segment, ...]
    placements: tuple[Placement, ...]
    why: str = ""


def find_segments(model: nn.Module, step: Callable[[], Any], ways: int, placements: Sequence[Placement]) -> Segments:
    """The segments of `model` (real numbers), cut by `placements` over `ways` ranks; `step()` computes its loss."""
    drawn, decides = draws(model, step, units(module_tree(model))), deciding(model, step)
    with rehearsing(model):
        return _found(model, alike(model, step), ways, placements, drawn, decides)


def _found(
    model: nn.Module,
    step: Callable[[], Any],
    ways: int,
    placements: Sequence[Placement],
    drawn: Mapping[str, list[int]],
    decides: Container[str],
) -> Segments:
    runs = list(chains(model, step, placements))
    why = "" if runs else "it has no repeated blocks that hand on hidden states of samples, positions and channels"
    found: list[Segment] = []
    for chain in runs:
        try:
            if any(unit in decides for unit in chain.units):
                raise WrongError("it looks at numbers, and for others it may compute what no part of a sequence can")
            segment, parted = _tried(model, step, ways, placements, chain, drawn)
            found.append(segment)
            placements = parted
        except WrongError as error:
            why = f"{chain.units[0]}: {error}"
    return Segments(tuple(found), tuple(placements), "" if found else why)


def _tried(
    model: nn.Module,
    step: Callable[[], Any],
    ways: int,
    placements: Sequence[Placement],
    chain: Chain,
    drawn: Mapping[str, list[int]],
) -> tuple[Segment, Sequence[Placement]]:
    """The segment that a chain is, at all parameter values and in evaluation."""
    found: tuple[_Rehearsal, Segment, Sequence[Placement]] | None = None
    for number, name in enumerate(at_each(model, step)):
        if found is not None and name == "initial":
            continue
        try:
            trial = _Rehearsal(model, step, ways, placements, chain, drawn)
        except WrongError:
            raise
        except Exception:  # a model that does not take such parameters; the next are others
            if name == "initial":
                raise
            continue
        if not math.isfinite(trial.record.total) and name != "initial":
            continue
        if found is not None:
            trial.repeat(found[0], found[1], rank=(ways - 1) * (number % 2))
            continue
        found = trial, *trial.segment()
        with mode(model, training=False):
            again = _Rehearsal(model, step, ways, placements, chain, drawn) if _evaluates(step) else None
            if again is not None and again.segment() != found[1:]:
                raise WrongError("it works on a part of the sequence in training, and otherwise when it is evaluated")
    if found is None:
        raise WrongError("its loss is not a number")
    return found[1:]


def _evaluates(step: Callable[[], Any]) -> bool:
    """Whether the model has a loss when it does not train."""
    try:
        loss, _ = step()
        return total_of(loss).requires_grad
    except Exception:
        return False


class _Rehearsal:
    def __init__(
        self,
        model: nn.Module,
        step: Callable[[], Any],
        ways: int,
        placements: Sequence[Placement],
        chain: Chain,
        drawn: Mapping[str, list[int]],
    ) -> None:
        self.model, self.step, self.ways, self.placements, self.chain = model, step, ways, placements, chain
        inside = [each for each in placements if any(each.path.startswith(unit + ".") for unit in chain.units)]
        self.rows = [each.path for each in inside if each.cut in JOINING]
        self.columns = [each.path for each in inside if each.cut in _OPENING]
        #: Modules without a part in a pair.
        self.others = [
            path
            for unit in chain.units
            for path, module in model.get_submodule(unit).named_modules(prefix=unit)
            if path != unit and not any(f"{each}.".startswith(f"{path}.") for each in (*self.rows, *self.columns))
        ]
        self.record = Record(model, step, chain, (*self.rows, *self.columns), self.others)
        self.parameters = self.record.parameters
        self.dim = 0 if self.record.mixes(0) and not self.record.mixes(1) else 1
        self.length = self.record.hidden(chain.units[0]).shape[self.dim]
        if self.length < 2 * ways:
            raise WrongError(f"samples of {self.length} positions are too short to try it with {ways} ranks")
        sizes = [size for unit in chain.units for size in drawn[unit]]
        if any(size % self.length for size in sizes):
            raise WrongError("it draws random numbers for samples as a whole, of which each part would draw its own")
        self.draws = bool(sizes)
        #: Row -> the modules that may be given the whole sequence for it: its columns, or one that holds them.
        self.choices = self._choices()
        self.level = dict.fromkeys(map(kind_of, self.rows), 0)
        #: Kinds of modules that work on the whole sequence only.
        self.again: set[str] = set()

    def segment(self) -> tuple[Segment, Sequence[Placement]]:
        """The segment, and how modules are cut for it."""
        gathers = self._gathers()
        grads = [self._run(rank, slopes=True).grads for rank in range(self.ways)]
        placements = {each.path: each for each in self.placements}
        names = {f"{each.path}.{part.name}": each for each in self.placements for part in each.slices}
        partial: list[str] = []
        for name in self.parameters:
            holder = names.get(name)
            if holder is not None and holder.cut in ("column", "between", "row", "attention"):
                continue
            joins = {name.removesuffix(".bias"), name.removesuffix(".out_proj.bias")} & set(self.rows)
            if joins or self._partial(name, [each.get(name) for each in grads]):
                partial.append(name)
                if holder is not None:
                    placements[holder.path] = _at_rest(holder, self.record.unit(name))
        tidy = tuple(
            Gather(path=path, arguments=tuple(sorted(names)), again=kind_of(path) in self.again)
            for path, names in gathers.items()
        )
        segment = Segment(
            units=self.chain.units,
            argument=self.chain.argument,
            dim=self.dim,
            gathers=tidy,
            draws=self.draws,
            partial=tuple(partial),
        )
        return segment, tuple(placements.values())

    def repeat(self, other: _Rehearsal, segment: Segment, rank: int) -> None:
        """Try what was found at `other` parameter values on one rank."""
        if self.dim != other.dim:
            raise WrongError("which dimension holds the positions depends on its weights")
        self.level, self.again = other.level, other.again
        trial = self._run(rank, slopes=True)
        known = {each.path: set(each.arguments) for each in segment.gathers}
        if any(names - known.get(path, set()) for path, names in trial.gathers.items()):
            raise WrongError("which modules need the whole sequence depends on its weights")

    def _partial(self, name: str, parts: Sequence[Tensor | None]) -> bool:
        true = self.record.grads.get(name)
        if true is None or all(part is None for part in parts):
            if true is None and all(part is None for part in parts):
                return False  # nothing learns there
            raise WrongError(f"the gradient of {name} is another one on a part of the sequence")
        held = [torch.zeros_like(true) if part is None else part for part in parts]
        most = max((float(grad.abs().max()) for grad in self.record.grads.values() if grad.numel()), default=0.0)
        if self._within(name) and equal(torch.stack(held).sum(0), true, most):
            return True
        if all(equal(part, true, most) for part in held):
            return False
        raise WrongError(f"the gradient of {name} does not add up from those on parts of the sequence")

    def _within(self, name: str) -> bool:
        return any(name.startswith(unit + ".") for unit in self.chain.units)

    def _choices(self) -> dict[str, list[list[str]]]:
        found: dict[str, list[list[str]]] = {}
        order = [path for path in self.record.args if path in {*self.rows, *self.columns}]  # as they were called
        columns: list[str] = []
        for path in order:
            columns += [path] if path in self.columns else []
            if path in self.rows:
                shared = set.intersection(*(set(self.record.around(each)) for each in columns or [path]))
                around = sorted((each for each in shared if each in self.record.args), key=len, reverse=True)
                found[path] = [columns, *([each] for each in around)]
                columns = []
        return found

    def _gathers(self) -> dict[str, set[str]]:
        """Modules that are given the whole sequence, with the arguments that are parts before that."""
        while True:
            try:
                gathers: dict[str, set[str]] = {}
                for rank in {0, self.ways - 1}:
                    for path, names in self._run(rank).gathers.items():
                        gathers.setdefault(path, set()).update(names)
                return gathers
            except WrongError as error:
                if error.module and kind_of(error.module) not in self.again:
                    self.again.add(kind_of(error.module))
                    continue
                kind = kind_of(error.row)
                more = max((len(ways) for row, ways in self.choices.items() if kind_of(row) == kind), default=0)
                if not error.row or self.level[kind] + 1 >= more:
                    raise
                self.level[kind] += 1

    def _run(self, rank: int, *, slopes: bool = False) -> RankTrial:
        trial = RankTrial(self, rank)
        with ExitStack() as stack, torch.set_grad_enabled(True):
            for module, forward in trial.forwards():
                stack.enter_context(calling(module, forward))
            try:
                loss, buffers = self.step()
                total = total_of(loss)
            except WrongError:
                raise
            except Exception as error:  # whatever the code says to a part of the sequence, it does not work on one
                where = f"{trial.open}: " if trial.open else ""
                raise WrongError(
                    f"{where}{type(error).__name__} on a part of the sequence: {first_line(error)}", row=trial.open
                ) from error
            if not equal(total.detach(), torch.tensor(self.record.total, dtype=total.dtype)):
                raise WrongError("the loss is another one")
            off = next((name for name, true in self.record.buffers.items() if not same(buffers.get(name), true)), None)
            if off is not None:
                holder = off.rpartition(".")[0]
                raise WrongError(f"{off} is another one", module=holder if holder in self.others else "")
            if slopes:
                found = torch.autograd.grad(total, list(self.parameters.values()), allow_unused=True)
                trial.grads = {n: g for n, g in zip(self.parameters, found, strict=True) if g is not None}
                if trial.off:
                    raise WrongError(
                        f"the gradient of what goes into {trial.off[0] or self.chain.units[0]} is another one"
                    )
        return trial


def _at_rest(placement: Placement, unit: str) -> Placement:
    """Ranks that have different parts of a sequence cannot share the outputs of a layer: its weight is put together instead, for as long
    as the block runs. Not only while the layer does: which positions call it may be another matter on each rank."""
    return replace(placement, cut="stored", within=unit)
