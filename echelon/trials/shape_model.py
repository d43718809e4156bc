"""A job's model for a trace: modules and shapes, without computing or allocating values where possible.

Fake tensors have no values, so code that reads values stops a trace. `skip_value_checks` answers such questions of torch's own code
where the answer changes nothing in a profile.
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
from echelon.trials.torch_patches import patch_attribute

#: Modules that factories made and the user's code registered somewhere.
_FACTORY_MODULES: WeakSet[nn.Module] = WeakSet()


def call_factory(factory: Callable[[], nn.Module]) -> nn.Module:
    """Build a model, after removing the modules of an earlier one from the user's lists and dicts: each model registers its own there."""
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
        added = [item for item in find_reachable({"model": factory}).values() if id(item) not in ids_before]
        _FACTORY_MODULES.update(item for item in added if isinstance(item, nn.Module))


def register_copies(memo: Mapping[int, Any]) -> None:
    """Treat copies of modules that factories made like these; `memo`: that of `copy.deepcopy`."""
    _FACTORY_MODULES.update(memo[id(module)] for module in list(_FACTORY_MODULES) if id(module) in memo)


def _is_factory_module(value: Any) -> bool:
    return isinstance(value, nn.Module) and value in _FACTORY_MODULES


def make_model(job: Job) -> nn.Module:
    """A model from the job's factory, or a copy of its module, so that trials leave the training's model alone."""
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
    """The model, built in the active fake mode; on the meta device or for real where its constructor needs that. Fake first: tensors that a
    module holds outside its buffers are then fakes of the same mode."""
    try:
        with patch_attribute(nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **kwargs: tensor):
            return make_model(job)
    except EchelonError:
        raise
    except Exception:  # a constructor that looks at values, or swaps parameters (`.to(memory_format=...)`)
        with unset_fake_temporarily(), preserve_random_states():
            return _build_on_meta(job) or make_model(job)


def _build_on_meta(job: Job) -> nn.Module | None:
    """The model on the meta device, where nothing is allocated either; None where it cannot be built or would not run."""
    try:
        with torch.device("meta"):
            model = make_model(job)
    except Exception:
        return None
    held_tensors = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    return None if any(value.is_meta for value in held_tensors) else model


@contextlib.contextmanager
def skip_value_checks() -> Iterator[None]:
    """Skip torch's own reads of values: distributions check their arguments, `nn.Transformer` asks whether a mask is causal."""

    def is_causal_mask(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    mask_patch = patch_attribute(transformer, "_detect_is_causal_mask", is_causal_mask)
    with patch_attribute(Distribution, "_validate_args", False), mask_patch:
        yield
