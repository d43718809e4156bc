"""The tensor-parallel plan of a transformers model: `base_model_tp_plan` and `_tp_plan`.

    {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise", "lm_head": "colwise_gather_output"}

Its pairs are only candidates, tested like any others; cuts of single layers need no hint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from echelon.partition.tp_layers import is_matmul_layer
from echelon.partition.tp_layouts import Candidate


def find_hinted_pairs(model: nn.Module) -> Iterator[Candidate]:
    """The pairs in the model's own plan: the columns of one parent into its row."""
    styles = _read_tp_styles(model)
    layers = [path for path in styles if is_matmul_layer(model.get_submodule(path))]
    columns_by_parent: dict[str, list[str]] = {}
    for path in layers:
        if styles[path] == "colwise":
            columns_by_parent.setdefault(path.rpartition(".")[0], []).append(path)
    for row in layers:
        columns = columns_by_parent.get(row.rpartition(".")[0])
        if styles[row] == "rowwise" and columns:
            yield Candidate(tuple(columns), row, is_hinted=True)


def _read_tp_styles(model: nn.Module) -> dict[str, str]:
    styles: dict[str, str] = {}
    paths = [path for path, _ in model.named_modules()]
    for prefix, submodule in model.named_modules():
        config = getattr(submodule, "config", None)
        plan: Any = getattr(submodule, "_tp_plan", None) or getattr(config, "base_model_tp_plan", None)
        for pattern, style in plan.items() if isinstance(plan, dict) else ():
            path_pattern = re.compile(re.escape(f"{prefix}.{pattern}" if prefix else pattern).replace(r"\*", r"[^.]+"))
            styles |= {path: style for path in paths if path_pattern.fullmatch(path)}
    return styles
