"""The random generators that a model may draw from: seed, preserve and read them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import torch


def seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def preserve_random_states(*, devices: bool = False) -> Iterator[None]:
    """Restore torch's CPU generator, Python's and NumPy's on exit; with `devices` also those of GPUs."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=None if devices else []):
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def read_host_random_state() -> Any:
    """The state of Python's and NumPy's generators; every draw changes it."""
    name, keys, *rest = numpy.random.get_state(legacy=True)
    return random.getstate(), name, numpy.asarray(keys).tobytes(), rest


def read_torch_random_states(generators: Iterable[torch.Generator] = ()) -> list[bytes]:
    """The states of torch's default generators and of `generators`; every draw changes one."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]
    return [state.numpy().tobytes() for state in (*states, *(generator.get_state() for generator in generators))]
