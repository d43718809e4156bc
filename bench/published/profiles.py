"""Profiles of the rows' models, made as users make them: a Job, traced by echelon.profiler.profile on fake tensors.

A transformer is traced with two blocks and deepened to as many as it has: its blocks are alike, so that every figure is a fixed part
plus as many times one block's (tests/bench/test_published.py holds that against a whole trace).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from bench.published.models import CONVNETS, Transformer, package_loss, word_loss
from echelon.job import Job
from echelon.plan.profile import ModuleProfile, PipelineUnit, Profile, fold_path
from echelon.profiler import profile as trace
from echelon.simulator.model_summary import ModelSummary
from echelon.simulator.summarize_profile import summarize_profile

#: Blocks that are traced.
TRACED = 2
_FIELDS = ("arch", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq_len", "gated_mlp", "tied_embeddings")
#: Pixels along each side.
_SIDES = {"resnet50": 224, "resnet101": 224, "vgg16": 224, "inception_v3": 299}
Key = tuple[Any, ...]


def key_of(model: dict[str, Any], *, core: str, half: bool, fused_norm: bool) -> Key:
    """What decides a profile, the number of blocks aside. The model's name is no part of it."""
    shape = tuple(model.get(field) for field in _FIELDS)
    return (shape, core, half, fused_norm) if model["arch"] not in CONVNETS else (shape[:1], "", half, False)


@cache
def shallow(key: Key) -> Profile:
    """The profile of a model of two blocks."""
    shape, core, half, fused_norm = key
    dtype = torch.bfloat16 if half else torch.float32
    model = dict(zip(_FIELDS, shape, strict=False))
    return trace(job(model, core, dtype, layers=TRACED, fused_norm=fused_norm), device="cpu")


def job(model: dict[str, Any], core: str, dtype: torch.dtype, *, layers: int, fused_norm: bool) -> Job:
    """The training of a row's model, with few samples of the right shape."""
    arch = model["arch"]
    if arch in CONVNETS:
        side = _SIDES[arch]
        images, classes = torch.zeros(2, 3, side, side, dtype=dtype), torch.zeros(2, dtype=torch.long)
        return _job(
            lambda: CONVNETS[arch]().to(dtype),
            lambda output, batch: F.cross_entropy(output.float(), batch[-1]),
            images,
            classes,
        )
    tokens = torch.zeros(2, model["seq_len"], dtype=torch.long)
    loss = package_loss if core == "package" else word_loss
    return _job(lambda: Transformer(model, core, layers=layers, fused_norm=fused_norm).to(dtype), loss, tokens, tokens)


def _job(model: Any, loss: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Job:
    return Job(
        model=model, loss=loss, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4), data=TensorDataset(inputs, targets),
        batch_size=1, steps=1,
    )  # fmt: skip


@cache
def work(key: Key, layers: int) -> ModelSummary:
    """What the simulator needs of a model with so many blocks."""
    shape = key[0]
    return summarize_profile(shallow(key) if shape[0] in CONVNETS else deepen(shallow(key), layers))


def deepen(profile: Profile, layers: int) -> Profile:
    """The profile of a model whose two blocks alike are followed by more of them."""
    first, *_ = profile.fsdp_units
    folded = fold_path(first)
    more = layers - len(profile.fsdp_units)

    def path(number: int) -> str:
        return folded.replace("*", str(number), 1)

    def times(count: int) -> int:
        # What does not divide belongs to the model's ends: backward of what comes before the blocks is noted with the first of them.
        each, once = divmod(count, len(profile.fsdp_units))
        return each * layers + once

    def grown(outer: ModuleProfile) -> ModuleProfile:
        block = next(m for m in profile.modules if m.path == folded)
        return replace(
            outer,
            **{name: getattr(outer, name) + getattr(block, name) * more for name in ("flops", "moved", "saved")},
        )

    def repeated(name: str) -> bool:
        return name == folded or name.startswith(folded + ".")

    one = [each for each in profile.parameters if each.name.startswith(path(0) + ".")]
    kept = sum(m.saved.per_sample for m in profile.modules if fold_path(m.path) == folded)
    fixed = sum(m.saved.fixed for m in profile.modules if fold_path(m.path) == folded)
    before = [each for each in profile.parameters if not repeated(fold_path(each.name))]
    parameters = [
        *before,
        *(replace(each, name=each.name.replace(path(0), path(n), 1)) for n in range(layers) for each in one),
    ]
    elements = sum(each.elements for each in parameters)
    return replace(
        profile,
        parameters=tuple(parameters),
        modules=tuple(
            replace(m, count=times(m.count))
            if repeated(m.path)
            else grown(m)
            if not m.path or folded.startswith(m.path + ".")
            else m
            for m in profile.modules
        ),
        operators=tuple(replace(o, count=times(o.count)) if repeated(o.module) else o for o in profile.operators),
        moments=tuple(
            replace(
                moment,
                alive=replace(moment.alive, fixed=moment.alive.fixed + more * fixed, per_sample=moment.alive.per_sample + more * kept),
                saved=replace(moment.saved, fixed=moment.saved.fixed + more * fixed, per_sample=moment.saved.per_sample + more * kept),
            )
            for moment in profile.moments
        ),
        optimizers=tuple(
            replace(rule, state_bytes=round(rule.state_bytes * elements / profile.elements), trainable_elements=elements) for rule in profile.optimizers
        ),
        fsdp_units=tuple(path(n) for n in range(layers)),
        fsdp_unit_bytes=profile.fsdp_unit_bytes[:1] * layers,
        pipeline_units=_visits(profile, path, layers),
    )  # fmt: skip


def _visits(profile: Profile, path: Callable[[int], str], layers: int) -> tuple[PipelineUnit, ...]:
    """The calls of a deeper model: what comes before the blocks, as many blocks, what comes after them."""
    blocks = [visit for visit in profile.pipeline_units if visit.path in profile.fsdp_units]
    if not blocks:
        return ()
    first, last = profile.pipeline_units.index(blocks[0]), profile.pipeline_units.index(blocks[-1])
    more = tuple(replace(blocks[min(n, len(blocks) - 1)], path=path(n)) for n in range(layers))
    return (*profile.pipeline_units[:first], *more, *profile.pipeline_units[last + 1 :])
