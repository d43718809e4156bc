"""Search over plans; why this one, and why not another."""

from echelon.planner.candidate import Candidate
from echelon.planner.explain import explain, why_not
from echelon.planner.goal import Goal
from echelon.planner.search import search

__all__ = ["Candidate", "Goal", "explain", "search", "why_not"]
