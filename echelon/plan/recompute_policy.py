"""What recompute=selective saves for backward, for the engine and the simulator."""

from __future__ import annotations

#: Products with weights. Products of activations (`bmm`: written-out attention) are as large as the scores and are recomputed.
_SAVED_OPERATORS = frozenset({"mm", "addmm", "_int_mm", "convolution"})


def saves_output(operator: str, *, is_random: bool = False) -> bool:
    """Whether the output of an operator, by torch's name, is saved. A random one must run again, or the draws that follow would differ."""
    is_attention = "scaled_dot_product" in operator and "attention" in operator and "backward" not in operator
    return not is_random and (is_attention or operator.partition(":")[0] in _SAVED_OPERATORS)
