"""Refuse schedules and optimizers that read Python state which the loss or `inputs` changes, where these see parts of a batch.

A schedule that reads a running mean which the loss updates once per call would set another rate than on one device. So the state that both reach
(reachable.py) is compared before and after the calls of steps 1, 2, 4, 8, ... of a run, and a change raises DivergenceError before the update.
Not seen: attributes of imported modules (`import state; state.mean`), and state that begins to change between two comparisons, until the later one.
"""

from __future__ import annotations

import dis
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from echelon.engine.checkpoint.function_state import FunctionState
from echelon.engine.checkpoint.reachable_state import iterate_user_objects
from echelon.engine.run_state import RunState
from echelon.errors import DivergenceError
from echelon.trials.reachable import find_reachable, get_slots

#: Functions and attributes by which code reads attributes dynamically.
_DYNAMIC_READS = {"getattr", "vars", "__dict__", "asdict", "astuple", "attrgetter"}
_GLOBAL_READS = ("LOAD_GLOBAL", "LOAD_NAME")
#: Instructions that read by name, also by an argument of `getattr`.
_NAME_READS = (*_GLOBAL_READS, "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_CONST")


class SharedStateCheck:
    """Compares the state that one run's loss shares with its schedules and optimizers."""

    def __init__(self, run: RunState, functions: FunctionState) -> None:
        self._run, self._functions = run, functions
        self._has_stages = run.plan.mesh.pp > 1
        self._step_count = 0
        self._before: dict[str, dict[str, bytes]] | None = None

    def begin_step(self, *, is_split: bool) -> None:
        """Before a step's first call of the loss. `is_split`: it is called with parts of the batch."""
        self._step_count += 1
        is_due = self._step_count & (self._step_count - 1) == 0
        self._before = self._shared_digests() if is_due and (is_split or self._has_stages) else None

    def require_unchanged(self, step: int) -> None:
        """After the step's last call: raise on every rank where one has changed what a schedule or an optimizer reads."""
        before, self._before = self._before, None
        if before is None:
            return
        with nullcontext() if self._run.plan.asynchronous else self._run.ranks.raise_on_all_ranks():
            self._compare(before, step)

    def _compare(self, before: dict[str, dict[str, bytes]], step: int) -> None:
        for reader, digests in self._shared_digests().items():
            for name in (name for name, digest in digests.items() if before[reader].get(name) != digest):
                changer = "inputs" if name.startswith("inputs") else "loss"
                path = name.removeprefix(changer).replace(":", ".").lstrip(".") or changer
                raise DivergenceError(
                    f"step {step + 1}: {reader}= reads {path}, which {changer}= changes: under this plan {changer}= is called with parts of a batch or on some ranks "
                    f"only, so {path} differs from its value on one device; use a plan that calls it once with the whole batch (dp=1 without micro), or "
                    f"let {reader}= follow from the step alone",
                    cause="state that the loss shares with a schedule or an optimizer",
                )

    def _shared_digests(self) -> dict[str, dict[str, bytes]]:
        readers = {"lr_schedule": self._run.schedules, "optimizer": self._run.optimizers}
        return {name: self._digests_shared_with(objects) for name, objects in readers.items()}

    def _digests_shared_with(self, objects: Sequence[Any]) -> dict[str, bytes]:
        roots = list(iterate_user_objects(objects, set()))
        if not roots:
            return {}
        nodes = list(find_reachable({str(index): root for index, root in enumerate(roots)}).values())
        codes = {id(node): node.__code__ for node in nodes if isinstance(node, FunctionType)}
        names_read = {name for code in codes.values() for _, name in _names_loaded(code)}
        reads_dynamically = not names_read.isdisjoint(_DYNAMIC_READS)
        locations = set()
        for node in nodes:
            loaded = _names_loaded(codes[id(node)]) if id(node) in codes else ()
            globals_read = {name for opcode, name in loaded if opcode in _GLOBAL_READS}
            for label, slot in get_slots(node).items():
                is_global = label.startswith(":")
                is_read = slot.key in globals_read if is_global else reads_dynamically or slot.key in names_read
                if is_read or slot.key == "cell_contents":
                    locations.add((id(slot.owner), slot.key))
        return self._functions.digest_shared({id(node) for node in nodes}, locations)


@cache
def _names_loaded(code: CodeType) -> set[tuple[str, str]]:
    """The instructions by which code reads globals and attributes, with their names."""
    reads = [i for i in dis.get_instructions(code) if i.opname in _NAME_READS and isinstance(i.argval, str)]
    names = {(read.opname, read.argval) for read in reads}
    return names.union(*(_names_loaded(item) for item in code.co_consts if isinstance(item, CodeType)))
