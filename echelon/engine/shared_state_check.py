"""Refuse schedules and optimizers that read Python state which the loss or `inputs` changes, where these see parts of a batch.

A loss that keeps a running mean of its values updates it once per call: one device calls it once a step with the whole batch, a plan with micro-batches,
data ranks or stages calls it on parts, or on some ranks only. A schedule that reads that mean would set another rate. So what both reach (reach.py) is
compared before and after the calls of steps 1, 2, 4, 8, ... of a run, and a change raises DivergenceError before the update. What both only read, and what a
schedule changes for the loss to read, is fine.

Not seen: attributes of imported modules (`import state; state.mean`), and state that begins to change between two comparisons, until the later one.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from echelon.errors import DivergenceError
from echelon.trials.reachable import reachable, slots_of

if TYPE_CHECKING:
    from echelon.engine.run import Run

#: Attributes of torch's optimizers and schedules that lead to parameters.
_PARAMETERS = ("optimizer", "param_groups", "state", "defaults")
#: Names by which code reads attributes without naming them.
_DYNAMIC = {"getattr", "vars", "__dict__", "asdict", "astuple", "attrgetter"}
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
#: Instructions that read by name, also by a text that `getattr` is given.
_READS = (*_GLOBALS, "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_CONST")


class SharedState:
    """Compares what one run's loss shares with its schedules and optimizers."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._stages = run.plan.mesh.pp > 1
        self._steps = 0
        self._before: dict[str, dict[str, bytes]] | None = None

    def begin(self, *, parts: bool) -> None:
        """Before a step's first call of the loss. `parts`: it is called with parts of the batch."""
        self._steps += 1
        due = self._steps & (self._steps - 1) == 0
        self._before = self._shared() if due and (parts or self._stages) else None

    def require_unchanged(self, step: int) -> None:
        """After the step's last call: raise on every rank where one has changed what a schedule or an optimizer reads."""
        before, self._before = self._before, None
        if before is None:
            return
        with nullcontext() if self._run.plan.free else self._run.ranks.together():
            self._compare(before, step)

    def _compare(self, before: dict[str, dict[str, bytes]], step: int) -> None:
        for reader, now in self._shared().items():
            for name in (name for name, digest in now.items() if before[reader].get(name) != digest):
                root = "inputs" if name.startswith("inputs") else "loss"
                what = name.removeprefix(root).replace(":", ".").lstrip(".") or root
                raise DivergenceError(
                    f"step {step + 1}: {reader}= reads {what}, which {root}= changes: under this plan {root}= is called with parts of a batch or on some ranks "
                    f"only, so that {what} is not what it is on one device; use a plan that calls it once with the whole batch (dp=1 without micro), or "
                    f"let {reader}= follow from the step alone",
                    cause="state that the loss shares with a schedule or an optimizer",
                )

    def _shared(self) -> dict[str, dict[str, bytes]]:
        readers = {"schedule": self._run.schedules, "optimizer": self._run.optimizers}
        return {name: self._shared_with(list(opened(live, set()))) for name, live in readers.items()}

    def _shared_with(self, roots: list[Any]) -> dict[str, bytes]:
        if not roots:
            return {}
        nodes = list(reachable({str(place): root for place, root in enumerate(roots)}).values())
        codes = [node.__code__ for node in nodes if isinstance(node, FunctionType)]
        mentioned = {name for code in codes for _, name in _loads(code)}
        every = not mentioned.isdisjoint(_DYNAMIC)
        places = set()
        for node in nodes:
            named = (
                {name for kind, name in _loads(node.__code__) if kind in _GLOBALS}
                if isinstance(node, FunctionType)
                else set()
            )
            for label, slot in slots_of(node).items():
                read = slot.key in named if label.startswith(":") else every or slot.key in mentioned
                if read or slot.key == "cell_contents":
                    places.add((id(slot.holder), slot.key))
        return self._run.attributes.functions.shared({id(node) for node in nodes}, places)


def opened(value: Any, seen: set[int]) -> Iterator[Any]:
    """An object of the user's, and what torch's own schedules and optimizers hold: functions, hooks, other schedules."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, LRScheduler | Optimizer):
        yield value
        for key, each in vars(value).items():
            if key not in _PARAMETERS:
                yield from opened(each, seen)
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from opened(each, seen)
    elif callable(value) or hasattr(value, "__dict__"):
        yield value


@cache
def _loads(code: CodeType) -> set[tuple[str, str]]:
    """The instructions by which code reads globals and attributes, with the names."""
    found = {
        (each.opname, each.argval)
        for each in dis.get_instructions(code)
        if each.opname in _READS and isinstance(each.argval, str)
    }
    return found.union(*(_loads(each) for each in code.co_consts if isinstance(each, CodeType)))
