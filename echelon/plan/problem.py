"""One reason why a plan cannot be executed, or not as its author may think."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One reason. An `error` cannot be executed; a `warning` can, but not as its author may think."""

    path: str
    value: object
    rule: str
    remedy: str
    severity: Literal["error", "warning"] = "error"
    #: Whether nothing of the model can be cut in this way, so that zero=3 over as many data ranks would do.
    nothing_to_cut: bool = False
    #: Whether data sheets tell what it would take all the same: the engine does not execute it yet.
    not_implemented: bool = False
    #: Fields of the plan, with values that make it executable on the same ranks: where every error has some, the plan falls back by itself.
    plan_changes: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.path}={self.value}: {self.rule}; {self.remedy}"
