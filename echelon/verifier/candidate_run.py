"""The plan's run as a proof sees it: one step after another, each as a record on rank 0."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from echelon.data.loader import StepBatch
from echelon.engine.grad_clip import gradients
from echelon.engine.parallel.shard_layout import local, regions
from echelon.engine.parallel.vocab_parallel import Logits
from echelon.engine.precision import switch
from echelon.engine.process_groups import Ranks
from echelon.engine.run import Run
from echelon.engine.run_state import optimizer_tensors, piece_of, whole
from echelon.job import Job
from echelon.plan.batch_split import Span, split
from echelon.plan.plan import Plan
from echelon.trials.determinism import UPDATE, Stillness, seed_samples, silence
from echelon.trials.isolation import Isolated
from echelon.trials.trial_context import uncompiled
from echelon.verifier import job_reader
from echelon.verifier.compare_outputs import Given, Outputs, listening, marked, singles
from echelon.verifier.reference import Record
from echelon.verifier.tensor_checksum import Holdings, Mark, Place, mark, weigh

#: How many ranks hold the same part of a parameter, and the ranks of the pipeline axis that do.
Held = tuple[int, frozenset[int]]


class _Heard:
    """The marks of what the model gives for this rank's micro-batches, which come in order. `singly`: sample by sample."""

    def __init__(self, parts: Sequence[Span], *, singly: bool) -> None:
        self._parts, self._singly = parts, singly
        self._calls: list[dict[Given, Mark | None]] = []

    def note(self, tensors: list[Tensor | None]) -> None:
        """Take one output; one without numbers is another stage's."""
        if any(tensor is not None for tensor in tensors):
            place = len(self._calls)
            self._calls.append(self._marked(tensors, self._parts[place]) if place < len(self._parts) else {})

    def _marked(self, tensors: list[Tensor | None], part: Span) -> dict[Given, Mark | None]:
        found: dict[Given, Mark | None] = {}
        for mine in singles(part) if self._singly else [part]:
            found |= marked(tensors, mine, first=mine.start - part.start, of=part.size)
        return found

    @property
    def outputs(self) -> Outputs:
        """All of them; none where the model was not called once for each micro-batch."""
        whole = len(self._calls) == len(self._parts)
        return {given: each for call in self._calls for given, each in call.items()} if whole else {}


def _enter(stack: contextlib.ExitStack, still: Stillness) -> None:
    stack.enter_context(still())


def _whole(value: Tensor) -> Tensor:
    return value.copied() if isinstance(value, Logits) else value


class Trial:
    """A job under a plan on this rank, held still. Every rank makes the same calls in the same order."""

    def __init__(
        self, job: Job, plan: Plan, ranks: Ranks, still: Stillness, dtype: torch.dtype | None, *,
        singly: bool = False, silent: bool = True,
    ) -> None:  # fmt: skip
        """`singly`: outputs are told sample by sample, to compare with a run that shares the samples out in another way. `silent`:
        dropout is off."""
        #: What the job compiles itself is no part of the proof; what the plan compiles is.
        self._compiler = contextlib.nullcontext if plan.compile else uncompiled
        self._isolated = Isolated(job, dtype)  # a proof must not train the user's own
        self._ranks, self._still, self._singly = ranks, still, singly
        with self._compiler(), self._isolated.active():
            self.run = Run(self._isolated.job, plan, ranks.world, device=ranks.device, dtype=dtype, watch=False)
        #: Paths of the modules whose dropout is off.
        self.silenced = silence(self.run.model) if silent else []
        #: Steps that a loss scale made the run skip.
        self.skipped = 0
        #: Whether the next step's outputs are noted. Compiled modules do not tell what they give.
        self._listens = dtype is not None and not plan.compile
        self._rough = dtype is None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run.close()

    def batch(self, number: int) -> StepBatch:
        """What this rank reads for a step."""
        with self._isolated.active():
            (batch,) = self.run.loader.steps(number, number + 1)
        return batch

    def start(self) -> dict[str, Tensor]:
        """Parameters and buffers before the first step, whole on rank 0."""
        held = whole(self.run, dict(self._parameters()) | dict(self.run.model.named_buffers()))
        return held if self.run.hub is None else held | self.run.hub.whole()

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Those that ranks hold: of a server's tables they have none."""
        served = self.run.hub.names if self.run.hub is not None else frozenset()
        return [(name, value) for name, value in self.run.model.named_parameters() if name not in served]

    def step(self, number: int) -> Record | None:
        """One step; the record is rank 0's."""
        with self.switched():
            return self._step(number)

    def repeat(self, number: int) -> list[Tensor]:
        """Forward and backward of a step without an update: its loss, and the gradients that this rank holds."""
        run, batch = self.run, self.batch(number)
        trained = [*run.model.parameters(), *run.loss_parameters.values()]
        for value in trained:
            value.grad = None
        parts = split(batch.samples, run.plan.mesh.dp, run.plan.micro, run.plan.shares)[run.data.rank]
        with self._still(), self._seeded(number, parts):
            loss = run.backward(batch)
        grads = [local(value.grad) for value in trained if value.grad is not None]
        dense = [grad if grad.layout == torch.strided else grad.to_dense() for grad in grads]
        return [loss.detach().clone(), *(grad.detach().clone() for grad in dense)]

    @contextlib.contextmanager
    def switched(self) -> Iterator[None]:
        """torch's switches for float32 are the process's, and other runs live there too, which must not share this one's state."""
        restore = switch(self.run.precision)
        try:
            with self._compiler(), self._isolated.active():
                yield
        finally:
            restore()

    def _step(self, number: int) -> Record | None:
        run, batch = self.run, self.batch(number)
        parts = split(batch.samples, run.plan.mesh.dp, run.plan.micro, run.plan.shares)[run.data.rank]
        heard = _Heard(parts, singly=self._singly)
        with self._still():
            run.prepare(batch)  # it calls the model, which must not be taken for the step's own calls
        listens = listening(run.model, heard.note, _whole) if self._listens else contextlib.nullcontext()
        with self._still(), listens, self._seeded(number, parts):
            loss = run.backward(batch)
        told = self._ranks.gather(heard.outputs if run.tells else {}) if self._listens else []
        self._listens = False
        named, hub = dict(self._parameters()), run.hub
        found = self._gathered({name: value.grad for name, value in named.items() if value.grad is not None})
        if hub is not None:
            found |= hub.gradients()
        size = self._norm()
        others = job_reader.loss_parameters(run.model, run.optimizers) if run.loss_parameters else {}
        found |= self._gathered({name: value.grad for name, value in others.items() if value.grad is not None})
        norms = [torch.linalg.vector_norm(local(grad)) for grad in gradients(named.values())]
        with self._held_updates():
            step = run.update(loss, batch.samples)
        self.skipped += step.skipped
        parameters, buffers, optimizer = (
            self._gathered(each) for each in (named | others, dict(run.model.named_buffers()), self._moments())
        )
        parameters |= {} if hub is None else hub.whole()
        if not run.world.main:
            return None
        return Record(
            step=number,
            loss=step.loss,
            norm=size if step.norm is None else step.norm,
            gradients={
                name: found.get(name)
                for name in (*(name for name, _ in run.model.named_parameters() if name in run.shapes), *others)
            },
            parameters=parameters,
            buffers=buffers,
            optimizer=optimizer,
            rates=tuple(map(float, step.rates)),
            own=torch.linalg.vector_norm(torch.stack(norms)) if norms else None,
            outputs={given: each for outputs in told for given, each in outputs.items()},
            untold=frozenset() if hub is None else hub.trained,
        )

    def _moments(self) -> dict[str, Tensor]:
        """What the optimizers keep for the model's parameters."""
        others = tuple(
            f"{place}/{name}/" for place in range(len(self.run.optimizers)) for name in self.run.loss_parameters
        )
        return {name: value for name, value in optimizer_tensors(self.run).items() if not name.startswith(others)}

    @contextlib.contextmanager
    def _seeded(self, number: int, parts: Sequence[Span]) -> Iterator[None]:
        """Where something draws that cannot be held: this rank's micro-batches each start from a seed of their own."""
        if not self._still.seeded:
            yield
            return
        starts = iter(part.start for part in parts)

        def seed(*_: Any) -> None:
            start = next(starts, None)
            if start is not None:
                seed_samples(self.run.job.seed, number, start)

        hook = self.run.model.register_forward_pre_hook(seed)
        try:
            yield
        finally:
            hook.remove()

    @contextlib.contextmanager
    def _held_updates(self) -> Iterator[None]:
        """The optimizers' steps are held still as the reference's are; what else an update does is the engine's own."""
        update = dataclasses.replace(UPDATE, narrow=not self._rough)
        with contextlib.ExitStack() as hooks, contextlib.ExitStack() as held:
            for optimizer in self.run.optimizers:
                hooks.callback(optimizer.register_step_pre_hook(lambda *_: _enter(held, update)).remove)
                hooks.callback(optimizer.register_step_post_hook(lambda *_: held.close()).remove)
            yield

    def _gathered(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole on rank 0. A tensor without elements has no part that a rank could send."""
        found = whole(self.run, values)
        empty = {name: local(value).detach().cpu() for name, value in values.items() if not value.numel()}
        return (
            found | {name: value for name, value in empty.items() if name not in found}
            if self.run.world.main
            else found
        )

    def _norm(self) -> Tensor | None:
        """The gradient norm where a training would not ask for it; None where it does, or where rounding would decide."""
        return None if self._rough or self.run.job.clip is not None else self.run.norm()

    def prepare(self, number: int) -> None:
        """Have the run call the model as it does before its first step, so that later calls are the step's own."""
        with self.switched(), self._still():
            self.run.prepare(self.batch(number))

    def holdings(self) -> Holdings:
        """What each rank holds of the parameters and the buffers."""
        return self._marks([*self._parameters(), *self.run.model.named_buffers()])

    def drawn(self, number: int) -> Holdings:
        """What each rank holds of the gradients and the buffers after forward and backward of a step. Gradients tell more than the
        parameters they change: a learning rate may be zero."""
        with self.switched(), self._still():
            self.run.backward(self.batch(number))
        grads = [(name, value.grad) for name, value in self.run.model.named_parameters() if value.grad is not None]
        dense = [(name, grad if grad.layout == torch.strided else grad.to_dense()) for name, grad in grads]
        return self._marks([*dense, *self.run.model.named_buffers()])

    def _marks(self, named: Sequence[tuple[str, Tensor]]) -> Holdings:
        held = [
            (Place(name, region.start, tuple(region.values.shape)), region.values)
            for name, value in named
            if not value.is_meta and not value.is_quantized
            for region in regions(value, piece_of(self.run, name, value))
        ]
        most = max((values.numel() * (1 + values.is_complex()) for _, values in held), default=0)
        weights = weigh(most, self._ranks.device)
        mine = {place: mark(values, weights.to(values.device)) for place, values in held}
        return self._ranks.gather(mine)

    def held(self) -> dict[str, Held]:
        """By parameter."""
        run = self.run
        mine = {
            name: (run.assembly.held_by(name, value), run.assembly.owners(name))
            for name, value in run.model.named_parameters()
            if not value.is_meta
        }
        return {name: found for each in reversed(self._ranks.gather(mine)) for name, found in each.items()}
