"""What the host of a GPU takes to issue an operator: in forward, in backward, and where blocks are computed again.

Timed on two small networks of our own whose operators are over before the host has issued the next one. Views, modules and Python
count with the operators that they lie between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from echelon.plan.again import keeps
from echelon.plan.plan import Recompute
from echelon.profiler.trace import Recorder

_BLOCKS, _TURNS = 8, 15


class _Attending(nn.Module):
    """Norms, products and attention: operators of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
        self.many, self.one = nn.Linear(32, 96), nn.Linear(32, 32)
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = (
            each.view(samples, length, 2, -1).transpose(1, 2) for each in self.many(self.first(x)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.one(seen.transpose(1, 2).reshape(samples, length, width))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class _Convolving(nn.Module):
    """Convolutions, batch norms and ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.other = nn.BatchNorm2d(16), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.other(self.second(F.relu(self.norm(self.first(x))))))


class _Watching(TorchDispatchMode):
    """Sees every operator of a block, as selective recomputation must; `kept`: takes what that keeps from there."""

    def __init__(self, kept: list[Any] | None = None) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._kept is not None and keeps(func._overloadpacket.__name__):
            return self._kept.pop(0)
        out = func(*args, **(kwargs or {}))
        if self._kept is None and keeps(func._overloadpacket.__name__):
            self.outputs.append(tree_map_only(Tensor, Tensor.detach, out))
        return out


def host_rates() -> Iterator[tuple[str, str, float]]:
    """(what, type, operators per second) on the GPU that is current."""
    for kind, make, shape in (("matmul", _Attending, (2, 8, 32)), ("convolution", _Convolving, (2, 16, 8, 8))):
        for dtype in (torch.float32, torch.bfloat16):
            blocks = nn.ModuleList(make() for _ in range(_BLOCKS)).cuda()
            x = torch.ones(shape, device="cuda")
            name = str(dtype).removeprefix("torch.")
            calls = _calls(blocks, x, dtype)
            plain = _seconds(blocks, x, dtype, "none")
            yield f"host forward {kind}", name, calls[0] / plain[0]
            yield f"host backward {kind}", name, calls[1] / plain[1]
            for what in ("block", "selective"):
                forward, backward = _seconds(blocks, x, dtype, what)
                yield f"host forward {kind} {what}", name, calls[0] / forward
                yield f"host again {kind} {what}", name, calls[0] / max(backward - plain[1], 1e-6)


def _calls(blocks: nn.ModuleList, x: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Operators of forward and of backward."""
    with torch.autograd.set_multithreading_enabled(False), Recorder(1) as recorder:
        loss = _forward(blocks, x, dtype, "none")
        forward = len(recorder.trace.calls)
        loss.backward()
    blocks.zero_grad()
    return forward, len(recorder.trace.calls) - forward


def _seconds(blocks: nn.ModuleList, x: Tensor, dtype: torch.dtype, what: Recompute) -> tuple[float, float]:
    """Seconds of the host in forward and in backward: the medians, since a host is as often disturbed in training."""
    found = []
    for _ in range(_TURNS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = _forward(blocks, x, dtype, what)
        middle = time.perf_counter()
        loss.backward()
        found.append((middle - start, time.perf_counter() - middle))
        blocks.zero_grad()
    torch.cuda.synchronize()
    forward, backward = (sorted(each)[_TURNS // 2] for each in zip(*found[2:], strict=True))
    return forward, backward


def _forward(blocks: nn.ModuleList, x: Tensor, dtype: torch.dtype, what: Recompute) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        for block in blocks:
            x = block(x) if what == "none" else _again(block, x, what)
        return x.float().mean()


def _again(block: nn.Module, x: Tensor, what: Recompute) -> Tensor:
    first = _Watching()

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return (first, _Watching(first.outputs)) if what == "selective" else (nullcontext(), nullcontext())

    call: Callable[..., Any] = checkpoint
    given: Tensor = call(block, x, use_reentrant=False, context_fn=contexts)
    return given
