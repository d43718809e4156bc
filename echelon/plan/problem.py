"""One reason why a plan cannot be executed, or does not do what its author may think."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from echelon.errors import PlanError, UnsplittableModelError
from echelon.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One reason. A plan with an `error` cannot be executed; one with a `warning` can."""

    path: str
    value: object
    rule: str
    remedy: str
    severity: Literal["error", "warning"] = "error"
    #: Whether this model has nothing to cut along the axis, so that zero=3 over as many data ranks would do.
    nothing_to_cut: bool = False
    #: Whether the engine lacks it so far; data sheets can forecast it all the same.
    not_implemented: bool = False
    #: Changes that make the plan executable on the same ranks; if every error has some, echelon falls back to that plan.
    plan_changes: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, plan: Plan, path: str, rule: str, remedy: str, **more: Any) -> Self:
        """The problem with the axis or field `path` of `plan`; shows its value there unless `value` is given."""
        if "value" not in more:
            value: Any = plan.mesh.sizes[path] if path in plan.mesh.sizes else plan.get(path)
            if isinstance(value, tuple):
                value = list(value) if all(isinstance(item, int) for item in value) else len(value)
            more["value"] = value
        return cls(path=path, rule=rule, remedy=remedy, **more)

    @classmethod
    def warning(cls, plan: Plan, path: str, rule: str, remedy: str, **more: Any) -> Self:
        """The same, of a plan that can be executed."""
        return cls.of(plan, path, rule, remedy, severity="warning", **more)

    def __str__(self) -> str:
        return f"{self.path}={self.value}: {self.rule}; {self.remedy}"


def raise_on_errors(plan: Plan, problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Raise if one of the problems is an error; return the others."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        error_type = UnsplittableModelError if any(problem.nothing_to_cut for problem in errors) else PlanError
        reasons = "\n".join(f"  {problem}" for problem in errors)
        raise error_type(f'plan "{plan}" cannot be executed:\n{reasons}', errors)
    return tuple(problem for problem in problems if problem.severity == "warning")
