"""A job's model for a trace: its modules and shapes, without computing or allocating its values where that can be helped.

Code that looks at values stops a trace, because fake tensors have none. Where it is torch's own and the answer changes nothing
that a profile says, it is answered here, for as long as a trace takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributions import Distribution
from torch.nn.modules import transformer

from echelon.errors import EchelonError, JobError
from echelon.job import Job, disable_sparse_gradients, require_trainable
from echelon.trials.deep_copies import copy_module
from echelon.trials.float64_ops import reset_keras_layer_names
from echelon.trials.lazy_modules import initialise_lazy, is_uninitialised
from echelon.trials.random_state import preserve_random_states
from echelon.trials.reachable import find_reachable

#: Modules that factories made and the user's code registered somewhere.
_FACTORY_MODULES: WeakSet[nn.Module] = WeakSet()


def call_factory(factory: Callable[[], nn.Module]) -> nn.Module:
    """A model of the job's factory. Modules of an earlier one leave the user's lists and dicts first: each model registers its own there."""
    reachable_before = find_reachable({"model": factory})
    for value in reachable_before.values():
        if isinstance(value, list) and any(_is_factory_module(item) for item in value):
            value[:] = [item for item in value if not _is_factory_module(item)]
        elif isinstance(value, dict):
            for key in [key for key, item in value.items() if _is_factory_module(item)]:
                del value[key]
    ids_before = set(map(id, reachable_before.values()))
    try:
        return factory()
    finally:
        reachable = find_reachable({"model": factory}).values()
        _FACTORY_MODULES.update(
            item for item in reachable if isinstance(item, nn.Module) and id(item) not in ids_before
        )


def register_copies(memo: Mapping[int, Any]) -> None:
    """Copies of modules that factories made count as such too; `memo`: that of `copy.deepcopy`."""
    _FACTORY_MODULES.update(memo[id(original)] for original in list(_FACTORY_MODULES) if id(original) in memo)


def _is_factory_module(value: Any) -> bool:
    return isinstance(value, nn.Module) and value in _FACTORY_MODULES


def make_model(job: Job) -> nn.Module:
    """What the job's factory gives, or a copy of its module: what a trial does to it is not seen in the training."""
    if isinstance(job.model, nn.Module):
        with unset_fake_temporarily():
            model = copy_module(job.model)
    else:
        reset_keras_layer_names()
        model = call_factory(job.model)
    if not isinstance(model, nn.Module):
        raise JobError(f"model= gives {type(model).__name__}, not an nn.Module")
    if is_uninitialised(model):
        with unset_fake_temporarily():
            model = model if isinstance(job.model, nn.Module) else call_factory(job.model)
            initialise_lazy(model, job)
    require_trainable(model)
    disable_sparse_gradients(model)
    return model


def build_fake_model(job: Job) -> nn.Module:
    """The model, built within the fake mode that is on; on the meta device or for real where its constructor needs that.

    Fake first: tensors that a module keeps to itself, outside its buffers, are then fakes of the same mode.
    """
    try:
        with _patched_attribute(nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **kwargs: tensor):
            return make_model(job)
    except EchelonError:
        raise
    except Exception:  # a constructor that looks at values, or swaps parameters (`.to(memory_format=...)`)
        with unset_fake_temporarily(), preserve_random_states():
            return _build_on_meta(job) or make_model(job)


def _build_on_meta(job: Job) -> nn.Module | None:
    """The model on the meta device, where nothing is allocated either; None where it cannot be, or would not run."""
    try:
        with torch.device("meta"):
            model = make_model(job)
    except Exception:
        return None
    held_tensors = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    return None if any(value.is_meta for value in held_tensors) else model


@contextlib.contextmanager
def skip_value_checks() -> Iterator[None]:
    """torch's own questions about values are not asked.

    Distributions check their arguments. `nn.Transformer` looks whether a mask is causal: without the answer it counts the mask.
    """
    validated_by_default = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        with _patched_attribute(
            transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: is_causal is True
        ):
            yield
    finally:
        Distribution.set_default_validate_args(validated_by_default)


@contextlib.contextmanager
def _patched_attribute(module: Any, name: str, value: Any) -> Iterator[None]:
    """`module.name` is `value` for a while; another version of torch may not have it, and then nothing happens."""
    original = getattr(module, name, None)
    if original is None:
        yield
        return
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
