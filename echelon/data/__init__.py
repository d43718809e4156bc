"""Data: which sample goes where (`Order`), reading it (`open_source`, `Packed`), and each rank's share of it (`Loader`)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "Loader": "loader", "MicroBatch": "loader", "Order": "order", "Packed": "packed.reader", "Source": "source", "StepBatch": "loader",
    "Stream": "stream", "StreamLoader": "stream", "evaluation_batches": "loader", "evaluation_stream": "stream",
    "is_stream": "open_data", "open_source": "open_data", "prepare_dataset": "packed.prepare",
}  # fmt: skip

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    # On demand: `Order` is pure and needs no torch.
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
