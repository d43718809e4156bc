"""Initialise modules that take their sizes from the first batch (`nn.LazyLinear`) before anything looks at the model."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from echelon.errors import JobError
from echelon.job import Job, call_model
from echelon.tree import map_tensors
from echelon.trials.example_batch import ExampleBatches
from echelon.trials.random_state import preserve_random_states, seed_all


def is_uninitialised(model: nn.Module) -> bool:
    return any(is_lazy(value) for value in (*model.parameters(), *model.buffers()))


def initialise_lazy(model: nn.Module, job: Job) -> None:
    """Run one small batch of the job's data through a model with lazy modules, seeded by the job: every process gets the same values."""
    if not is_uninitialised(model):
        return
    dtype = next((value.data.dtype for value in model.parameters()), torch.get_default_dtype())
    batch = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, ExampleBatches(job).batch(2))
    training = model.training
    with preserve_random_states(), torch.no_grad():
        # Evaluation leaves running statistics alone; branches that only run in training need the second pass.
        for is_training in (False, True):
            if is_uninitialised(model):
                seed_all(job.seed)
                call_model(job, model.train(is_training), batch)
    model.train(training)
    unreached = next((name for name, value in model.named_parameters() if is_lazy(value)), None)
    if unreached is not None:
        raise JobError(f"{unreached} is lazy and no batch reaches it, so its size is unknown; give its module a size")
