"""What the host of a GPU takes to issue an operator: in forward, in backward, and where blocks are computed again.

Timed on two small networks of our own, in half precision, whose operators are over before the host has issued the next one. Views,
modules and Python count with the operators that they lie between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from echelon.plan.plan import Recompute
from echelon.plan.recompute_policy import keeps
from echelon.trials.op_recorder import Recorder

#: Blocks of each network, and how often one look times it.
_BLOCKS, _TURNS = 16, 5


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


class Hosts:
    """Times the host again and again: a processor that others use too has fast and slow minutes."""

    def __init__(self) -> None:
        half = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        self._cast = partial(torch.autocast, "cuda", dtype=half)
        self._found: dict[str, list[float]] = {}
        self._nets = {
            kind: (nn.ModuleList(make() for _ in range(_BLOCKS)).cuda(), torch.ones(shape, device="cuda"))
            for kind, make, shape in (("matmul", _Attending, (2, 8, 32)), ("convolution", _Convolving, (2, 16, 8, 8)))
        }
        self._calls = {kind: self._count(*each) for kind, each in self._nets.items()}

    def look(self) -> None:
        """Time everything a few times."""
        for kind, (blocks, x) in self._nets.items():
            forward, backward = self._calls[kind]
            tensors = sum(1 for _ in blocks.parameters())
            for _ in range(_TURNS):
                first, second = self._seconds(blocks, x, "none")
                self._note(f"host forward {kind}", first / forward)
                self._note(f"host backward {kind}", second / backward)
                added = self._seconds(blocks, x, "none")[1] - second
                self._note("host adding", max(added, 0.0) / tensors)
                for what in ("block", "selective"):
                    blocks.zero_grad()
                    again = self._seconds(blocks, x, what)
                    self._note(f"host forward {kind} {what}", again[0] / forward)
                    self._note(f"host again {kind} {what}", max(again[1] - second, 0.0) / forward)
                blocks.zero_grad()
        torch.cuda.synchronize()

    def seconds(self) -> dict[str, float]:
        """What the host takes: per operator, or per gradient that is added to one that is there. The median of all looks."""
        return {what: max(sorted(each)[len(each) // 2], 1e-9) for what, each in self._found.items()}

    def _note(self, what: str, seconds: float) -> None:
        self._found.setdefault(what, []).append(seconds)

    def _count(self, blocks: nn.ModuleList, x: Tensor) -> tuple[int, int]:
        """Operators of forward and of backward; afterwards everything has run once."""
        for what in ("none", "block", "selective"):
            self._seconds(blocks, x, what)
            blocks.zero_grad()
        with torch.autograd.set_multithreading_enabled(False), Recorder(1) as recorder:
            loss = self._forward(blocks, x, "none")
            forward = len(recorder.trace.calls)
            loss.backward()
        blocks.zero_grad()
        return forward, len(recorder.trace.calls) - forward

    def _seconds(self, blocks: nn.ModuleList, x: Tensor, what: Recompute) -> tuple[float, float]:
        """Of forward and of backward. The device is not waited for: it has long been done."""
        start = time.perf_counter()
        loss = self._forward(blocks, x, what)
        middle = time.perf_counter()
        loss.backward()
        return middle - start, time.perf_counter() - middle

    def _forward(self, blocks: nn.ModuleList, x: Tensor, what: Recompute) -> Tensor:
        with self._cast():
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
