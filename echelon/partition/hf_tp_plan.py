"""What a model's authors say about cutting it: transformers' `base_model_tp_plan` and `_tp_plan`.

    {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise", "lm_head": "colwise_gather_output"}

A hint only proposes: it is tried as any other pair, and what it says of single layers (to gather) is done without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from echelon.partition.tp_layers import is_matmul_layer
from echelon.partition.tp_layouts import Candidate


def find_hinted_pairs(model: nn.Module) -> Iterator[Candidate]:
    """The pairs that the model's own plan names: of one parent, its columns into its row."""
    styles_by_path = {
        path: style for path, style in _read_tp_styles(model).items() if is_matmul_layer(model.get_submodule(path))
    }
    for row, style in styles_by_path.items():
        if style == "rowwise":
            parent = row.rpartition(".")[0]
            columns = [
                path
                for path, column_style in styles_by_path.items()
                if column_style == "colwise" and path.rpartition(".")[0] == parent
            ]
            if columns:
                yield Candidate(tuple(columns), row, is_hinted=True)


def _read_tp_styles(model: nn.Module) -> dict[str, str]:
    """Module -> how the model's plan cuts it, whichever part of the model the plan belongs to."""
    styles: dict[str, str] = {}
    paths = [path for path, _ in model.named_modules()]
    for prefix, submodule in model.named_modules():
        plan: Any = getattr(submodule, "_tp_plan", None) or getattr(
            getattr(submodule, "config", None), "base_model_tp_plan", None
        )
        for pattern, style in plan.items() if isinstance(plan, dict) else ():
            path_pattern = re.compile(re.escape(f"{prefix}.{pattern}" if prefix else pattern).replace(r"\*", r"[^.]+"))
            styles |= {path: style for path in paths if path_pattern.fullmatch(path)}
    return styles
