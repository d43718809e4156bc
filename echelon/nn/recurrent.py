"""Recurrent layers keep a second list of their weights, and compute with that."""

from __future__ import annotations

from torch import nn


def refresh_flat_weights(module: nn.Module) -> None:
    """After a weight of a recurrent layer was exchanged: have it in the list too."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
