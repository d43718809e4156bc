"""What a mistake looks like, in one plain sentence with the remedy where there is one.

What is measured is told as a fact ("it is what rank 0's own samples give"); what only fits is told as a guess ("looks like").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echelon.engine.parallel.shard_layout import shares
from echelon.plan.plan import Plan
from echelon.verifier.compare import BOUND, BROKEN, Bounds, Difference, wide
from echelon.verifier.compare_outputs import listed
from echelon.verifier.first_divergence import CLEAN, Pair, explains, owner, pair, place, proportion, ratio
from echelon.verifier.known_bugs import PER_CALL, Suspect
from echelon.verifier.reference import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The first divergent step in both runs, and what is known beside it."""

    worst: Difference
    differences: Sequence[Difference]
    bounds: Bounds
    plan: Plan
    #: Micro-batches of each data rank.
    turns: int
    mine: Record
    true: Record
    #: The reference before the step: parameters, buffers and optimizer states, by kind.
    before: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    #: Its gradients of the step before.
    previous: Mapping[str, Tensor | None] = field(default_factory=dict)
    suspects: Iterable[Suspect] = ()
    #: Parameter -> how many ranks hold the same part of it, and those of the pipeline axis that do.
    held: Mapping[str, tuple[int, frozenset[int]]] = field(default_factory=dict)
    #: Parameter -> the class of its module.
    kinds: Mapping[str, str] = field(default_factory=dict)
    #: Second name of a tied parameter -> its first.
    aliases: Mapping[str, str] = field(default_factory=dict)
    order: Mapping[str, int] = field(default_factory=dict)
    #: Learning rate -> how often a schedule has to be stepped for it.
    later: Mapping[float, int] = field(default_factory=dict)
    #: Whether the modules' outputs agree; None: not known.
    forward: bool | None = None
    #: What a call of forward changes of the model.
    changed: Sequence[str] = ()
    #: Whether the same samples give another loss when they are computed again.
    moves: Callable[[], bool] = lambda: False

    @property
    def peers(self) -> list[Difference]:
        """All tensors of the worst one's kind."""
        return [each for each in self.differences if each.kind == self.worst.kind]

    @property
    def off(self) -> list[Difference]:
        """Those of them that are over their bound."""
        return [each for each in self.peers if not self.bounds.hold(each)]

    @property
    def pair(self) -> Pair | None:
        """The worst one's two tensors."""
        return pair(self.worst, self.mine, self.true)

    def agrees(self, kind: str) -> bool:
        """Whether everything of a kind is within bounds."""
        return all(self.bounds.hold(each) for each in self.differences if each.kind == kind)


def likely(evidence: Evidence) -> str:
    """What the mistake looks like, with the remedy where there is one; empty where nothing can be said."""
    if evidence.worst.kind == "start":
        return f"{_scope(evidence)}; looks like weights that each rank drew with its own seed: rank 0's have to be sent to all"
    if evidence.worst.kind == "copy":
        return "what the ranks hold as copies comes apart: looks like an update or a reduction that some ranks did not take part in"
    if evidence.worst.kind == "draw":
        return (
            "all agrees with dropout off: looks like masks that differ over tp on what is whole on every rank; its ranks have to draw from "
            "one seed there"
        )
    if evidence.worst.kind == "output":
        return "the loss and every gradient agree: the loss does not use what is off, or not so that it matters"
    if evidence.worst.value == BROKEN or evidence.pair is None:
        return _untied(evidence)
    found = {
        "gradient": _gradient, "loss": _loss, "norm": _norm, "buffer": _buffer, "parameter": _parameter,
        "optimizer": _optimizer,
    }[evidence.worst.kind](evidence, evidence.pair)  # fmt: skip
    return ", ".join(filter(None, (_scope(evidence), found)))


def _scope(evidence: Evidence) -> str:
    """How many are off, and what they have in common."""
    peers, off = evidence.peers, evidence.off
    if len(peers) < 2:
        return ""
    what = {"optimizer": "optimizer states", "start": "tensors", "copy": "tensors"}.get(
        evidence.worst.kind, f"{evidence.worst.kind}s"
    )
    text = f"{len(off)} of {len(peers)} {what} are off"
    names = [owner(each) for each in off]
    common = ""
    if len(off) < len(peers):
        classes = {evidence.kinds.get(name, "") for name in names}
        stages = {owners for _, owners in (evidence.held[name] for name in names if name in evidence.held)}
        if all("norm" in each.lower() for each in classes):
            common = f"all of them in norm layers ({', '.join(sorted(classes))})"
        elif all(name.endswith("bias") for name in names):
            common = "all of them biases"
        elif len(stages) == 1 and len(held := next(iter(stages))) == 1 and evidence.plan.mesh.pp > 1:
            common = f"all of them on rank {min(held)} of the pipeline"
    return f"{text}, {common}" if common and len(off) > 1 else text


def _gradient(evidence: Evidence, pair: Pair) -> str:
    return (
        _untied(evidence)
        or _multiple(evidence, pair)
        or _suspected(evidence, pair)
        or _uncleared(evidence, pair)
        or _share(evidence, pair)
        or _of_sequence(evidence)
        or _backward(evidence)
        or _unknown(evidence)
    )


def _unknown(evidence: Evidence) -> str:
    """By no common factor. A forward that is wrong is told of beside this."""
    if evidence.forward is False:
        return ""
    if evidence.agrees("loss") and evidence.plan.mesh.tp > 1:
        return "by no common factor, and the loss agrees: backward is wrong; looks like a sum over tp that is missing there"
    return (
        "by no common factor: looks like micro-batches or ranks that are weighed wrongly, or samples that are left out"
    )


def _untied(evidence: Evidence) -> str:
    more = [each.name for each in evidence.differences if each.name in evidence.aliases]
    if not more:
        return ""
    return (
        f"an untied weight: the model shares {evidence.aliases[more[0]]} and {more[0]}, the plan's run has two parameters; "
        "tie them again after they are cut"
    )


def _multiple(evidence: Evidence, pair: Pair) -> str:
    """A clean factor, by the numbers of the plan that it equals."""
    factor = ratio(pair)
    if factor is None:
        return ""
    known = _factor(factor, evidence)
    if not known:
        return f"{factor:.6g} times the reference exactly" if pair.true.numel() > 1 else ""
    alike = [_alike_ratio(each, evidence, factor) for each in evidence.off]
    return f"all of these {known}" if len(alike) > 1 and all(alike) else known


def _alike_ratio(difference: Difference, evidence: Evidence, factor: float) -> bool:
    both = pair(difference, evidence.mine, evidence.true)
    found = None if both is None else ratio(both)
    return found is not None and abs(found - factor) <= CLEAN * abs(factor)


def _suspected(evidence: Evidence, pair: Pair) -> str:
    words = next((each.words for each in evidence.suspects if explains(each.value, pair)), "")
    if words != PER_CALL:
        return words
    if evidence.changed or evidence.moves():
        return _per_call(evidence)
    return (
        "it is the sum of the micro-batches, each computed by itself: samples of a batch see each other, and in parts another objective is "
        "trained; keep the batch whole (dp=1 without micro=), or make the loss of each sample its own"
    )


def _per_call(evidence: Evidence) -> str:
    """State that moves with every call, where a plan makes another number of calls than one device."""
    what = listed(evidence.changed) or "something that it keeps"
    who = "forward" if evidence.changed else "the loss, or what forward calls,"
    calls = (
        f"micro-batches call it {evidence.turns} times a step, and one device calls it once: train without micro=, or change it once a step"
        if evidence.turns > 1
        else "each rank changes its own copy: change it from what all ranks hold, once a step"
    )
    return f"{who} changes {what} at each call, and {calls}"


def _uncleared(evidence: Evidence, pair: Pair) -> str:
    previous = evidence.previous.get(evidence.worst.name)
    if previous is None or previous.shape != pair.true.shape:
        return ""
    left = proportion(wide(pair.plan) - wide(pair.true), previous)
    return "" if left is None else "the gradient of the step before is still in it: clear gradients after every step"


def _backward(evidence: Evidence) -> str:
    """Where the gradients go wrong on their way back, if they are right at the end."""
    good = [each for each in evidence.peers if evidence.bounds.hold(each)]
    last = max((place(each.name, evidence.order) for each in evidence.off), default=0)
    later = [each for each in good if place(each.name, evidence.order) > last]
    if not evidence.agrees("loss") or not later or len(evidence.off) < 2:
        return ""
    path = next((path for path, number in evidence.order.items() if number == last), "") or "the model itself"
    axes = [axis for axis in ("tp", "dp", "pp") if getattr(evidence.plan.mesh, axis) > 1]
    return (
        f"the loss agrees, and of the gradients those of all modules after {path}: backward is right until there; looks like a sum over "
        f"{' or '.join(axes)} that is missing where the gradient goes on"
    )


def _of_sequence(evidence: Evidence) -> str:
    """Only those are off that add up from the parts of a sequence."""
    partial = {name for segment in evidence.plan.segments for name in segment.partial}
    if not all(each.name in partial for each in evidence.off):
        return ""
    return "each rank of tp uses them on its part of the sequence: the sum of their gradients over tp is missing"


def _share(evidence: Evidence, pair: Pair) -> str:
    """What is off is just what one rank holds."""
    found = part_of_rank(pair, evidence.plan)
    return "" if found is None else f"only {found} is off"


def _loss(evidence: Evidence, pair: Pair) -> str:
    said = _multiple(evidence, pair) or _suspected(evidence, pair)
    if not evidence.agrees("gradient"):
        return said
    agree = "the gradients agree: only the value that is reported is off"
    return f"{agree}; {said}" if said else agree


def _norm(evidence: Evidence, pair: Pair) -> str:
    norm = float(wide(pair.plan))
    squares = {
        name: float(torch.linalg.vector_norm(wide(grad))) ** 2
        for name, grad in evidence.true.gradients.items()
        if grad is not None
    }
    copied = sum(square * evidence.held.get(name, (1, frozenset()))[0] for name, square in squares.items()) ** 0.5
    own = None if evidence.mine.own is None else float(evidence.mine.own)
    if own and abs(norm / own - 1) < CLEAN:
        return "the gradients agree: the norm is that of what rank 0 holds alone; add up the squares over the ranks before the root"
    known = _multiple(evidence, pair)
    if copied and abs(norm / copied - 1) < CLEAN:
        counted = "the gradients agree: the norm counts every rank's copy of parameters that are not cut; divide each square by its copies"
        return f"{known.partition(':')[0]}; {counted}" if known else counted
    return known or "the gradients agree: looks like a norm over some of them, or over some of them twice"


def _buffer(evidence: Evidence, pair: Pair) -> str:
    old = evidence.before.get("buffer", {}).get(evidence.worst.name)
    if old is not None and explains(wide(old), pair):
        return "the gradients agree: a stale buffer, as it was before the step"
    copies = [each for each in evidence.differences if (each.kind, each.name) == ("copy", evidence.worst.name)]
    if any(not evidence.bounds.hold(each) for each in copies):
        return "the gradients agree: each rank has another value of it; reduce it over dp"
    if evidence.worst.name in evidence.changed:
        return f"the gradients agree: {_per_call(evidence)}"
    return (
        "the gradients agree: looks like a buffer that is updated another number of times: once for each micro-batch here and once for the "
        "batch on one device, or the other way round; without micro= it is the same"
    )


def _parameter(evidence: Evidence, pair: Pair) -> str:
    agree = "the gradients agree"
    if evidence.worst.name in evidence.changed:
        return f"{agree}: {_per_call(evidence)}"
    mine, true = evidence.mine.rates, evidence.true.rates
    wrong = [(a, b) for a, b in zip(mine, true, strict=False) if abs(a - b) > CLEAN * abs(b)]
    if wrong:
        a, b = wrong[0]
        after = next((times for rate, times in evidence.later.items() if abs(rate - a) <= CLEAN * abs(a)), None)
        stepped = (
            "looks like a schedule that is stepped another number of times"
            if after is None
            else f"the schedule gives that after {after} steps: it is stepped once per micro-batch"
        )
        return f"{agree}, the learning rate does not: {a:.6g}, the reference has {b:.6g}; {stepped}"
    share = part_of_rank(pair, evidence.plan)
    old = evidence.before.get("parameter", {}).get(evidence.worst.name)
    apart = (wide(pair.plan) - wide(pair.true)).abs() > BOUND * max(float(wide(pair.true).abs().max()), 1e-30)
    still = old is not None and bool(torch.equal(wide(pair.plan)[apart], wide(old)[apart]))
    if still or share is not None:
        where = f"{share} is off" if share else "some of it is off"
        return f"{agree}: {where}{', as it was before the step: it was not updated' if still else ''}"
    moved = None if old is None else ratio(Pair(plan=wide(pair.plan) - wide(old), true=wide(pair.true) - wide(old)))
    if moved is not None:
        return f"{agree}: the step is {moved:.6g} times the reference's: looks like clipping or the learning rate"
    return f"{agree}: looks like clipping, the learning rate or the optimizer"


def _optimizer(evidence: Evidence, pair: Pair) -> str:
    agree = "gradients and parameters agree"
    for axis, dim, ways in _ways(pair.true, evidence.plan):
        sizes = shares(pair.true.shape[dim], ways)
        mine, true = wide(pair.plan).split(sizes, dim), wide(pair.true).split(sizes, dim)
        for rank, part in enumerate(mine):
            for other, theirs in enumerate(true):
                if other != rank and part.shape == theirs.shape and explains(theirs, Pair(plan=part, true=true[rank])):
                    return f"{agree}: rank {rank} of {axis} has what belongs to rank {other}: state in the wrong order of shards"
    share = part_of_rank(pair, evidence.plan)
    return f"{agree}: {f'only {share} is off' if share else 'looks like state that is out of place'}"


def part_of_rank(pair: Pair, plan: Plan) -> str | None:
    """The rank whose part of a tensor is what is off, in words; None where it is another part, or all."""
    apart = (wide(pair.plan) - wide(pair.true)).abs() > BOUND * max(float(wide(pair.true).abs().max()), 1e-30)
    for axis, dim, ways in _ways(pair.true, plan):
        lines = apart.movedim(dim, 0).reshape(apart.shape[dim], -1).any(1).nonzero().flatten().tolist()
        start = 0
        for rank, size in enumerate(shares(pair.true.shape[dim], ways)):
            if lines and start <= lines[0] and lines[-1] < start + size:
                return f"what rank {rank} of {axis} holds ({start} to {start + size - 1} of {pair.true.shape[dim]} along dim {dim})"
            start += size
    return None


def _ways(true: Tensor, plan: Plan) -> list[tuple[str, int, int]]:
    """(axis, dim, ranks) in which a tensor may be cut."""
    found = [("dp", 0, plan.mesh.dp)] if plan.zero else []
    found += [("tp", dim, plan.mesh.tp) for dim in range(true.ndim)]
    return [(axis, dim, ways) for axis, dim, ways in found if ways > 1 and true.ndim > dim and true.shape[dim] >= ways]


def _factor(factor: float, evidence: Evidence) -> str:
    """A factor in words, by the number of the plan that it equals; empty where it equals none."""
    mesh, turns = evidence.plan.mesh, evidence.turns
    meanings = {
        "dp": (mesh.dp, "a sum over the data ranks where a mean was due", "a mean over the data ranks that is taken twice"),
        "tp": (mesh.tp, "a loss that every rank of the tensor axis adds whole", "a division by tp too many"),
        "pp": (mesh.pp, "a loss that every rank of the pipeline adds whole", "a division by pp too many"),
        "micro-batches": (turns, "a sum over micro-batches where a mean was due", "a mean over micro-batches that is taken twice"),
        "dp x micro-batches": (mesh.dp * turns, "a sum over all micro-batches where a mean was due", "a mean over all micro-batches that is taken twice"),
    }  # fmt: skip
    if mesh.dp == 1 or turns == 1:
        del meanings["dp x micro-batches"]
    if evidence.worst.kind == "norm":
        meanings |= {
            f"sqrt({axis})": (
                getattr(mesh, axis) ** 0.5,
                "a norm that counts every rank's copy",
                "a norm that is divided by the ranks",
            )
            for axis in ("dp", "tp", "pp")
        }
    if abs(factor) < CLEAN:
        return "it is zero"
    if abs(factor + 1) < CLEAN:
        return "the sign is wrong"
    fits = []
    for name, (value, over, under) in meanings.items():
        if value > 1 and abs(factor / value - 1) < CLEAN:
            fits.append(f"{name} = {value:g} times the reference: looks like {over}")
        if value > 1 and abs(factor * value - 1) < CLEAN:
            fits.append(f"1/{name} = 1/{value:g} of the reference: looks like {under}")
    return " or ".join(fits)
