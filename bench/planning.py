"""How long planning takes: profiles and searches of large models on large clusters, and how both grow.

    python -m bench.planning [--only 175B] [--growth] [--json OUT]

Limits (on 2 cores): GPT-175B on 1,024 devices within 5 s, Llama-405B on 16,384 within 15 s, an MLP of ten layers on 8 within 0.3 s, all
below 1 GiB; profiling the 405B within 20 s. A search is timed once everything is imported: the second of two.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from bench.common import Row, publish
from bench.published.profiles import job as language
from echelon.job import Job
from echelon.plan import catalogue
from echelon.plan.profile import Profile
from echelon.planner import search
from echelon.profiler import profile
from echelon.testing.models import MLP

GPT = {
    "arch": "gpt", "hidden": 12288, "heads": 96, "kv_heads": 96, "head_dim": 128, "ffn": 49152, "vocab": 51200, "seq_len": 2048,
    "gated_mlp": False, "tied_embeddings": True,
}  # fmt: skip
LLAMA = {
    "arch": "llama", "hidden": 16384, "heads": 128, "kv_heads": 8, "head_dim": 128, "ffn": 53248, "vocab": 128256, "seq_len": 8192,
    "gated_mlp": True, "tied_embeddings": False,
}  # fmt: skip
MEMORY = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job on a cluster, and how long search and profile may take."""

    job: Callable[[], Job]
    cluster: str
    search: float
    profile: float | None = None


class Same(Dataset[Any]):
    """A sample again and again."""

    def __init__(self, samples: int, *sample: torch.Tensor) -> None:
        self._samples, self._sample = samples, sample

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, place: int) -> tuple[torch.Tensor, ...]:
        return self._sample


def text(model: dict[str, Any], layers: int, batch: int) -> Job:
    """A language model in bf16."""
    made = language(model, "flash", torch.bfloat16, layers=layers, fused_norm=True)
    tokens = torch.zeros(model["seq_len"], dtype=torch.long)
    return Job(
        model=made.model, loss=made.loss, optimizer=made.optimizer, data=Same(4 * batch, tokens, tokens), batch_size=batch, steps=1,
        name=f"{model['arch']} x {layers}",
    )  # fmt: skip


def mlp() -> Job:
    """Ten layers."""
    width, batch = 4096, 512
    data = Same(4 * batch, torch.zeros(width), torch.tensor(0))
    return Job(
        model=lambda: MLP(width=width, layers=10, classes=10),
        loss=lambda output, batch: F.cross_entropy(output, batch[-1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        data=data,
        batch_size=batch,
        steps=1,
        name="MLP x 10",
    )


CASES = {
    "GPT-175B": Case(job=partial(text, GPT, 96, 1536), cluster="128x8xA100-80GB", search=5.0),
    "Llama-405B": Case(job=partial(text, LLAMA, 126, 2048), cluster="2048x8xH100-80GB", search=15.0, profile=20.0),
    "MLP": Case(job=mlp, cluster="8xA100-80GB", search=0.3),
}


def profiled(make: Callable[..., Job], *given: Any) -> tuple[float, Profile]:
    """Seconds of a profile, and the profile; in a process of its own, so that what it holds is not counted with the search."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_profiled, make, *given).result()


def _profiled(make: Callable[..., Job], *given: Any) -> tuple[float, Profile]:
    job = make(*given)
    begun = time.perf_counter()
    found = profile(job, device="cpu")
    return time.perf_counter() - begun, found


def timed(profile: Profile, cluster: str) -> tuple[float, str]:
    """Seconds of the second search, and what it found."""
    machines = catalogue.parse_cluster(cluster)
    search(profile, machines)
    begun = time.perf_counter()
    found = search(profile, machines)
    return time.perf_counter() - begun, str(found[0].plan)


def main() -> int:
    """Exit 1 where a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.planning", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="cases whose name holds this")
    parser.add_argument("--growth", action="store_true", help="also how the time grows with devices and layers")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    rows = []
    for name, case in CASES.items():
        if options.only and options.only not in name:
            continue
        took, known = profiled(case.job)
        rows.append(_row(name, case.cluster, "profile", took, case.profile, ""))
        took, plan = timed(known, case.cluster)
        rows.append(_row(name, case.cluster, "search", took, case.search, plan))
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        rows.append(
            Row(what={"model": name, "cluster": case.cluster, "of": "memory", "plan": ""}, value=held, text=f"{held / 1e6:.0f} MB", limit=float(MEMORY))
        )  # fmt: skip
    if options.growth:
        rows += growth()
    return publish("Planning", rows, json_path=options.json)


def growth() -> list[Row]:
    """Profiles and searches with one of devices and layers doubled again and again."""
    rows, known = [], {}
    for layers, nodes in [(96, n) for n in (8, 32, 128, 512, 2048)] + [(n, 128) for n in (12, 24, 48, 192)]:
        cluster = f"{nodes}x8xA100-80GB"
        if layers not in known:
            took, known[layers] = profiled(text, GPT, layers, 1536)
            rows.append(_row(f"gpt x {layers}", "", "profile", took, None, ""))
        took, plan = timed(known[layers], cluster)
        rows.append(_row(f"gpt x {layers}", cluster, "search", took, None, plan))
    return rows


def _row(name: str, cluster: str, of: str, took: float, limit: float | None, plan: str) -> Row:
    return Row(
        what={"model": name, "cluster": cluster, "of": of, "plan": plan}, value=took, text=f"{took:.2f} s", limit=limit
    )


if __name__ == "__main__":
    sys.exit(main())
