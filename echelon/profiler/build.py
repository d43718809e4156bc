"""A job's model for a trace: its modules and shapes, without computing or allocating its values where that can be helped.

Code that looks at values stops a trace, because fake tensors have none. Where it is torch's own and the answer changes nothing
that a profile says, it is answered here, for as long as a trace takes.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributions import Distribution
from torch.nn.modules import transformer

from echelon.errors import EchelonError, JobError
from echelon.job import Job, make_dense, require_trainable
from echelon.profiler.lazy import initialise_lazy, is_uninitialised
from echelon.profiler.random_state import random_states
from echelon.profiler.wide_ops import restart_names


def copy_module(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy with the hooks of its parameters, which `copy.deepcopy` drops."""
    copied: nn.Module = copy.deepcopy(model, memo)
    if isinstance(model, torch.jit.ScriptModule):
        return copied
    for mine, theirs in zip(model.parameters(), copied.parameters(), strict=True):
        if theirs is not mine and mine._backward_hooks:
            theirs._backward_hooks = OrderedDict(mine._backward_hooks)
        for hook in (getattr(mine, "_post_accumulate_grad_hooks", None) or {}).values() if theirs is not mine else ():
            theirs.register_post_accumulate_grad_hook(hook)
    return copied


def made(job: Job) -> nn.Module:
    """What the job's factory gives, or a copy of its module: what a trial does to it is not seen in the training."""
    if isinstance(job.model, nn.Module):
        with unset_fake_temporarily():
            model = copy_module(job.model)
    else:
        restart_names()
        model = job.model()
    if not isinstance(model, nn.Module):
        raise JobError(f"model= gives {type(model).__name__}, not an nn.Module")
    if is_uninitialised(model):
        with unset_fake_temporarily():
            model = model if isinstance(job.model, nn.Module) else job.model()
            initialise_lazy(model, job)
    require_trainable(model)
    make_dense(model)
    return model


def built(job: Job) -> nn.Module:
    """The model, built within the fake mode that is on; on the meta device or for real where its constructor needs that.

    Fake first: tensors that a module keeps to itself, outside its buffers, are then fakes of the same mode.
    """
    try:
        with _replaced(nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **kwargs: tensor):
            return made(job)
    except EchelonError:
        raise
    except Exception:  # a constructor that looks at values, or swaps parameters (`.to(memory_format=...)`)
        with unset_fake_temporarily(), random_states():
            return _on_meta(job) or made(job)


def _on_meta(job: Job) -> nn.Module | None:
    """The model on the meta device, where nothing is allocated either; None where it cannot be, or would not run."""
    try:
        with torch.device("meta"):
            model = made(job)
    except Exception:
        return None
    own = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    return None if any(value.is_meta for value in own) else model


@contextlib.contextmanager
def unquestioned() -> Iterator[None]:
    """torch's own questions about values are not asked.

    Distributions check their arguments. `nn.Transformer` looks whether a mask is causal: without the answer it counts the mask.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        with _replaced(
            transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: is_causal is True
        ):
            yield
    finally:
        Distribution.set_default_validate_args(before)


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """`module.name` is `value` for a while; another version of torch may not have it, and then nothing happens."""
    before = getattr(module, name, None)
    if before is None:
        yield
        return
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
