"""Reasons why a plan cannot be executed, or does not do what its author may expect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from echelon.errors import PlanError, UnsplittableModelError
from echelon.plan.plan import VALUE_WORDS, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One reason. A plan with an `error` cannot be executed; one with a `warning` can."""

    path: str
    value: object
    rule: str
    remedy: str
    severity: Literal["error", "warning"] = "error"
    nothing_to_cut: bool = False  #: whether the model has nothing to cut along the axis: zero=3 would do
    not_implemented: bool = False  #: whether the engine lacks it so far; it can still be forecast from data sheets
    #: Changes that make the plan executable on the same ranks; if every error has some, echelon falls back to that plan.
    plan_changes: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, plan: Plan, path: str, rule: str, remedy: str, **more: Any) -> Self:
        """The problem with the axis or field `path` of `plan`; shows its value there unless `value` is given."""
        if "value" not in more:
            value: Any = plan.mesh.sizes[path] if path in plan.mesh.sizes else plan.get(VALUE_WORDS.get(path, path))
            if isinstance(value, tuple):
                value = list(value) if all(isinstance(item, int) for item in value) else len(value)
            more["value"] = "none" if value is None else value
        return cls(path=path, rule=rule, remedy=remedy, **more)

    @classmethod
    def warning(cls, plan: Plan, path: str, rule: str, remedy: str, **more: Any) -> Self:
        """A problem that does not keep the plan from being executed."""
        return cls.of(plan, path, rule, remedy, severity="warning", **more)

    def __str__(self) -> str:
        return f"{self.path}={self.value}: {self.rule}; {self.remedy}"


#: (whether the plan breaks it, path, rule, remedy)
Rule = tuple[object, str, str, str]


def broken_rules(plan: Plan, *rules: Rule) -> Iterator[Problem]:
    """An error for each rule that `plan` breaks."""
    return (Problem.of(plan, path, rule, remedy) for is_broken, path, rule, remedy in rules if is_broken)


def raise_on_errors(plan: Plan, problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Raise if one of the problems is an error; return the others."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        error_type = UnsplittableModelError if any(problem.nothing_to_cut for problem in errors) else PlanError
        reasons = "\n".join(f"  {problem}" for problem in errors)
        raise error_type(f'plan "{plan}" cannot be executed:\n{reasons}', errors)
    return tuple(problem for problem in problems if problem.severity == "warning")
