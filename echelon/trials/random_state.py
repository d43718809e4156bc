"""The generators that a model may draw from: set, left as they were, looked at."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch


def seed_all(seed: int) -> None:
    """Every generator that a model may draw from."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def preserve_random_states() -> Iterator[None]:
    """Leaves the generators as they were."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def read_host_random_state() -> Any:
    """Where Python's and NumPy's generators are; another one after each draw."""
    name, keys, *rest = numpy.random.get_state(legacy=True)
    return random.getstate(), name, numpy.asarray(keys).tobytes(), rest
