"""A second look, when the proof failed: the first divergent step once more, with everything watched.

Both runs are made again up to that step. Every rank then says what its modules gave for the first micro-batch and which samples it read;
rank 0 holds the step's tensors against the mistakes that the reference can imitate. None of it is done for a plan that passes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Any, Self

import numpy as np
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from echelon.data.sample_digest import digest
from echelon.engine.process_groups import Ranks
from echelon.plan.batch_split import rounds, split
from echelon.plan.certificate import Finding
from echelon.plan.plan import Plan
from echelon.profiler.sample_coupling import first_line
from echelon.verifier import explain_failure, job_reader, known_bugs
from echelon.verifier.candidate_run import Held, Trial
from echelon.verifier.compare import BROKEN, Difference
from echelon.verifier.compare_outputs import hookable, leaves
from echelon.verifier.context import Referee
from echelon.verifier.reference import Record, Reference
from echelon.verifier.single_device import Case
from echelon.verifier.tensor_checksum import Mark, mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What it told, in words, and how far the outputs are off where any could be compared."""

    remarks: tuple[str, ...]
    outputs: Finding | None


@dataclass(frozen=True, slots=True)
class Output:
    """What one call of a module gave: the marks of its floating tensors, None for one that is not whole here."""

    path: str
    call: int
    marks: tuple[Mark | None, ...]


class Watch:
    """Notes the outputs of a model's modules, in the order in which they are ready."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[Any] = []
        self._calls: dict[str, int] = {}
        self.outputs: list[Output] = []

    def __enter__(self) -> Self:
        self._hooks = [
            module.register_forward_hook(lambda _, __, output, path=path: self._note(path, output))
            for path, module in hookable(self._model)
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, path: str, output: Any) -> None:
        marks = tuple(_mark(leaf) for leaf in leaves(output) if leaf.is_floating_point())
        self._calls[path] = self._calls.get(path, 0) + 1
        self.outputs.append(Output(path, self._calls[path], marks))


def _mark(value: Tensor) -> Mark | None:
    """None: another stage's, which has no numbers here, or a shard."""
    return None if value.is_meta or isinstance(value, FakeTensor | DTensor) else mark(value)


def look(trial: Trial, ranks: Ranks, steps: Sequence[int], case: Case | None, proof: Referee | None) -> Look | None:
    """Called by every rank with a fresh run; `steps` up to the one that diverged. The answer is rank 0's."""
    number = steps[-1]
    for earlier in steps[:-1]:
        trial.step(earlier)
    with ranks.together():
        made = expected_outputs(case.at(number), number) if case is not None else []
    expected: list[Output] = ranks.gather(made)[0]
    read = ranks.gather([digest(micro.batch) for micro in trial.batch(number).micros])
    trial.prepare(number)
    with Watch(trial.run.model) as watch:
        mine = trial.step(number)
    compared = ranks.gather(_apart(watch.outputs, expected) if trial.run.data.rank == 0 else {})
    held = trial.held()
    with ranks.together():
        if case is None or proof is None or mine is None:
            return None
        outputs = _finding(expected, compared, case.bounds.widest("output"))
        try:
            remarks = _remarks(case, proof, mine, held, read, outputs)
        except Exception as error:
            # A model that cannot be run in parts, say. The verdict stands without its cause.
            remarks = [f"what it looks like could not be found out: {type(error).__name__}: {first_line(error)}"]
        return Look(remarks=tuple(filter(None, remarks)), outputs=outputs)


def _remarks(
    case: Case,
    proof: Referee,
    mine: Record,
    held: Mapping[str, Held],
    read: Sequence[Sequence[str]],
    outputs: Finding | None,
) -> list[str]:
    evidence = _evidence(case, proof, mine, held, outputs)
    remarks = [explain_failure.likely(evidence), _data(case, mine.step, read)]
    return [
        *remarks,
        _about_outputs(outputs, case.plan) if evidence.worst.kind in ("gradient", "loss", "output") else "",
    ]


def expected_outputs(reference: Reference, number: int) -> list[Output]:
    """The outputs for rank 0's first micro-batch; nothing where batch norm sees those of other ranks beside it."""
    if reference.coupled and reference.plan.batchnorm == "sync" and reference.plan.mesh.dp > 1:
        return []
    part = split(reference.feed.size(number), reference.plan.mesh.dp, reference.plan.micro, reference.plan.shares)[0][0]
    batch = reference.batch(number, np.arange(part.start, part.stop))
    with Watch(reference.model) as watch, reference.still():
        reference.loss(batch, part.size)
    return watch.outputs


def _apart(mine: Sequence[Output], expected: Sequence[Output]) -> dict[int, float]:
    """Number of an expected output -> how far this rank's is off; none for those that are not whole here."""
    here = {(output.path, output.call): output.marks for output in mine}
    found = {}
    for number, output in enumerate(expected):
        both = list(zip(here.get((output.path, output.call), ()), output.marks, strict=False))
        whole = [(a, b) for a, b in both if a is not None and b is not None and a.shape == b.shape]
        if whole and len(whole) == len(output.marks):
            found[number] = max(a.apart(b) for a, b in whole)
    return found


def _finding(expected: Sequence[Output], compared: Sequence[Mapping[int, float]], bound: float) -> Finding | None:
    """The first output that is off or, where none is, the one that is nearest to it. `bound`: of what the model gives in the end."""
    worst: dict[int, float] = {}
    for number, value in chain.from_iterable(each.items() for each in compared):
        worst[number] = max(value, worst.get(number, 0.0))
    if not worst:
        return None
    off = [number for number in sorted(worst) if worst[number] > bound]
    chosen = off[0] if off else max(worst, key=lambda number: worst[number])
    where = expected[chosen].path or "the model itself"
    return Finding(kind="output", tensors=len(worst), worst=worst[chosen], where=where, bound=bound)


def _about_outputs(finding: Finding | None, plan: Plan) -> str:
    if finding is None:
        return ""
    if finding.good:
        return f"forward looks right: the outputs of {finding.tensors} modules agree on data rank 0"
    size = "is not finite" if finding.worst == BROKEN else f"is off by {finding.worst:.1e}"
    cut = next((f" (cut over tp: {each.cut})" for each in plan.placements if each.path == finding.where), "")
    likely = {"row": "; looks like a sum over tp that is missing, or a bias that every rank adds"}
    hint = next((words for kind, words in likely.items() if f": {kind})" in cut), "")
    return f"forward is wrong: the first output that is off is that of {finding.where}{cut}, which {size}{hint}"


def _data(case: Case, number: int, read: Sequence[Sequence[str]]) -> str:
    """Which rank read other samples than the batch has for it."""
    plan, feed = case.plan, case.feed
    for rank, digests in enumerate(read):
        mine = plan.mesh.coordinate(rank)["dp"]
        for turn, part in enumerate(split(feed.size(number), plan.mesh.dp, plan.micro, plan.shares)[mine]):
            positions = np.arange(part.start, part.stop)
            first, again = (digest(feed.take(number, positions)) for _ in range(2))
            if first == again and turn < len(digests) and digests[turn] != first:
                return (
                    f"rank {rank} read other samples than those at {part.start} to {part.stop - 1} of the batch: looks like an order of the "
                    "data that each rank drew with its own seed"
                )
    return ""


def _evidence(
    case: Case, proof: Referee, mine: Record, held: Mapping[str, Held], outputs: Finding | None
) -> explain_failure.Evidence:
    assert proof.worst is not None
    worst = proof.worst
    old = case.at(worst.step)
    turns = rounds(case.feed.size(worst.step), case.plan.mesh.dp, case.plan.micro, case.plan.shares)
    named = dict(old.model.named_parameters())
    return explain_failure.Evidence(
        worst=worst,
        differences=[each for each in proof.differences if each.step == worst.step],
        bounds=case.bounds,
        plan=case.plan,
        turns=turns,
        mine=mine,
        true=case.at(worst.step).step(worst.step),
        before={
            "parameter": {name: value.detach() for name, value in named.items()},
            "buffer": {name: value.clone() for name, value in old.model.named_buffers()},
        },
        previous={} if old.last is None else old.last.gradients,
        suspects=_suspects(case.at(worst.step), worst),
        moves=lambda: known_bugs.moves(case.at(worst.step), worst.step),
        changed=known_bugs.changed_by_forward(case.at(worst.step), worst.step),
        held=held,
        kinds={name: type(old.model.get_submodule(name.rpartition(".")[0])).__name__ for name in named},
        aliases={each: name for name in named for each in known_bugs.names_of(old.model, name) if each != name},
        order=proof.order,
        later=_later(case.reference(), turns * worst.step) if worst.kind == "parameter" and turns > 1 else {},
        forward=None if outputs is None else outputs.good,
    )


def _later(fresh: Reference, steps: int) -> dict[float, int]:
    """The learning rates that the schedules give when they are stepped so often."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedules that are stepped without their optimizers say so
        for schedule in fresh.schedules:
            for _ in range(0 if job_reader.wants_loss(schedule) else steps):
                schedule.step()
    return {float(group["lr"]): steps for each in fresh.optimizers for group in each.param_groups}


def _suspects(reference: Reference, worst: Difference) -> Iterator[known_bugs.Suspect]:
    """One after another, as they are asked for: each costs a pass over the batch."""
    name = worst.name if worst.kind == "gradient" else ""
    if name:
        yield from known_bugs.uses(reference, worst.step, name)
    yield from known_bugs.weighings(known_bugs.parts(reference, worst.step, name))
