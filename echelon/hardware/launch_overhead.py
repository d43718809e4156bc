"""The host time that a GPU operator takes to launch: in forward, in backward, and in recomputed blocks.

Timed in half precision on two small networks, whose operators finish before the host has issued the next one. Views, modules and Python count
towards the operators around them.
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
from echelon.plan.recompute_policy import saves_output
from echelon.trials.op_recorder import OpRecorder

#: Blocks of each network, and repetitions per call of `time_all`.
_NUM_BLOCKS, _REPETITIONS = 16, 5


class _TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.projection = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        projected = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (part.view(samples, length, 2, -1).transpose(1, 2) for part in projected)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(F.gelu(self.up(self.feedforward_norm(x))))


class _ConvolutionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(16), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class _SelectiveRecompute(TorchDispatchMode):
    """Saves outputs as selective recomputation does; given `saved_outputs`, replays them instead."""

    def __init__(self, saved_outputs: list[Any] | None = None) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self._saved_outputs = saved_outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_saved = saves_output(func._overloadpacket.__name__)
        if is_saved and self._saved_outputs is not None:
            return self._saved_outputs.pop(0)
        out = func(*args, **(kwargs or {}))
        if is_saved:
            self.outputs.append(tree_map_only(Tensor, Tensor.detach, out))
        return out


class LaunchTimer:
    """Times the host repeatedly: a shared processor has fast and slow minutes."""

    def __init__(self) -> None:
        half_dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        self._cast = partial(torch.autocast, "cuda", dtype=half_dtype)
        self._samples: dict[str, list[float]] = {}
        self._networks = {
            kind: (nn.ModuleList(block_class() for _ in range(_NUM_BLOCKS)).cuda(), torch.ones(shape, device="cuda"))
            for kind, block_class, shape in (
                ("matmul", _TransformerBlock, (2, 8, 32)),
                ("convolution", _ConvolutionBlock, (2, 16, 8, 8)),
            )
        }
        self._op_counts = {kind: self._count_ops(*network) for kind, network in self._networks.items()}

    def time_all(self) -> None:
        """Time both networks a few times."""
        for kind, (blocks, x) in self._networks.items():
            forward_ops, backward_ops = self._op_counts[kind]
            num_parameters = len(list(blocks.parameters()))
            for _ in range(_REPETITIONS):
                forward, backward = self._time_step(blocks, x, "none")
                self._record(f"host forward {kind}", forward / forward_ops)
                self._record(f"host backward {kind}", backward / backward_ops)
                accumulation = self._time_step(blocks, x, "none")[1] - backward
                self._record("host adding", max(accumulation, 0.0) / num_parameters)
                for recompute in ("block", "selective"):
                    blocks.zero_grad()
                    forward, both = self._time_step(blocks, x, recompute)  # recomputation and backward
                    self._record(f"host forward {kind} {recompute}", forward / forward_ops)
                    self._record(f"host again {kind} {recompute}", max(both - backward, 0) / forward_ops)
                blocks.zero_grad()
        torch.cuda.synchronize()

    def compute_medians(self) -> dict[str, float]:
        """Median host seconds by quantity: per operator, or per gradient that is accumulated."""
        return {quantity: max(sorted(samples)[len(samples) // 2], 1e-9) for quantity, samples in self._samples.items()}

    def _record(self, quantity: str, seconds: float) -> None:
        self._samples.setdefault(quantity, []).append(seconds)

    def _count_ops(self, blocks: nn.ModuleList, x: Tensor) -> tuple[int, int]:
        """Operators of forward and of backward; also warms up every variant."""
        for recompute in ("none", "block", "selective"):
            self._time_step(blocks, x, recompute)
            blocks.zero_grad()
        with torch.autograd.set_multithreading_enabled(False), OpRecorder(1) as recorder:
            loss = self._run_forward(blocks, x, "none")
            forward_ops = len(recorder.trace.calls)
            loss.backward()
        blocks.zero_grad()
        return forward_ops, len(recorder.trace.calls) - forward_ops

    def _time_step(self, blocks: nn.ModuleList, x: Tensor, recompute: Recompute) -> tuple[float, float]:
        """Host seconds of forward and of backward. No synchronization: the device finishes first."""
        start = time.perf_counter()
        loss = self._run_forward(blocks, x, recompute)
        middle = time.perf_counter()
        loss.backward()
        return middle - start, time.perf_counter() - middle

    def _run_forward(self, blocks: nn.ModuleList, x: Tensor, recompute: Recompute) -> Tensor:
        with self._cast():
            for block in blocks:
                x = block(x) if recompute == "none" else _checkpoint_block(block, x, recompute)
            return x.float().mean()


def _checkpoint_block(block: nn.Module, x: Tensor, recompute: Recompute) -> Tensor:
    recorder = _SelectiveRecompute()

    def make_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if recompute == "selective":
            return recorder, _SelectiveRecompute(recorder.outputs)
        return nullcontext(), nullcontext()

    checkpoint_call: Callable[..., Any] = checkpoint
    output: Tensor = checkpoint_call(block, x, use_reentrant=False, context_fn=make_contexts)
    return output
