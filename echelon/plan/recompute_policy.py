"""What recompute=selective keeps: one answer for the engine and the forecast."""

from __future__ import annotations

#: Products of weights, and attention where it is one operator. Products of activations (`bmm`: written-out attention) are as large as
#: the scores and are computed again.
_SAVED_OPERATORS = frozenset({"mm", "addmm", "_int_mm", "convolution"})


def saves_output(operator: str) -> bool:
    """Whether the output of an operator, by torch's name for it, is kept."""
    is_attention = "scaled_dot_product" in operator and "attention" in operator and "backward" not in operator
    return is_attention or operator.partition(":")[0] in _SAVED_OPERATORS
