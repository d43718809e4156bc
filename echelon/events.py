"""Events of a training, one line each. The engine emits them and the observer listens; neither imports the other.

Kinds and their `data`:

    start       job, plan (text), ranks, batch, steps (total), steps_per_epoch, epochs, samples (data set), parameters,
                resumed_from (step or 0), device, run (folder), file (of the job, or None), seed, versions
    step        epoch, loss, rate (learning rate that the first group used), norm (gradient norm before clipping, or None),
                samples (in this step), seconds (of this step), waited (of it, for data), skipped (fp16 overflow)
    evaluation  epoch, metrics: {"loss": ..., "accuracy": ...}, samples, seconds
    checkpoint  path, seconds, bytes, best (whether it is the best so far)
    memory      peak (bytes, of the largest rank), held (parameters, gradients, optimizer of the largest rank)
    verified    message: the gate's verdict before the first step, seconds (0: from the cache)
    checked     count and seconds of the steps that were recomputed on one device, left_out (why there were no more, or empty)
    warning     message
    end         reason: "finished" | "interrupted" | "failed", seconds, message
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Refuses NaN: replacing it costs three times the encoding, so only lines that have one pay for it.
_encode = json.JSONEncoder(allow_nan=False).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened at a step, on a rank."""

    kind: str
    step: int = 0
    rank: int = 0
    time: float = field(default_factory=time.time)
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_line(self) -> str:
        """One line of JSON, with null for NaN and infinity."""
        line = {"kind": self.kind, "step": self.step, "rank": self.rank, "time": round(self.time, 3), **self.data}
        try:
            return _encode(line)
        except ValueError:
            return _encode(_replace_non_finite(line))

    @classmethod
    def from_line(cls, line: str) -> Event:
        fields = json.loads(line)
        header = {name: fields.pop(name) for name in ("kind", "step", "rank", "time")}
        return cls(**header, data=fields)


Listener = Callable[[Event], None]


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return value
