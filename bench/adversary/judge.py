"""The judge: a plain one-process training loop on whole batches, in a process where echelon cannot be imported.

    python -m bench.adversary.judge        serves requests, one JSON object a line, on standard input

It implements the documented order of samples itself (docs/data-internals.md, "The order"): an epoch is the permutation that sorting raw PCG64
bits of (seed, epoch) gives, and steps take consecutive slices of it. Each request runs in a fork, so that no job sees another's globals.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate

from bench.adversary.spec import Spec, load


def permutation(samples: int, seed: int, epoch: int) -> list[int]:
    """The documented order of an epoch."""
    width = np.uint64((samples - 1).bit_length())
    bits = np.random.PCG64([seed % 2**64, epoch]).random_raw(samples)
    keys = np.sort((bits << width) | np.arange(samples, dtype=np.uint64))
    return [int(key) for key in keys & ((np.uint64(1) << width) - np.uint64(1))]


def batches(spec: Spec) -> Iterator[list[Any]]:
    """The samples of each global batch, epoch after epoch."""
    epoch = 0
    while True:
        if isinstance(spec.data, IterableDataset):
            if hasattr(spec.data, "set_epoch"):
                spec.data.set_epoch(epoch)
            stream = iter(spec.data)
            while chunk := list(islice(stream, spec.batch_size)):
                yield chunk
        else:
            order = permutation(len(spec.data), spec.seed, epoch)
            for first in range(0, len(order), spec.batch_size):
                chosen = order[first : first + spec.batch_size]
                if len(chosen) == spec.batch_size or not spec.drop_last:
                    yield [spec.data[index] for index in chosen]
        epoch += 1


def forward(spec: Spec, model: nn.Module, batch: Any) -> Any:
    """How a batch reaches the model: as the documentation of `inputs` says."""
    if spec.inputs is not None:
        arguments, keywords = spec.inputs(batch)
        return model(*arguments, **keywords)
    if isinstance(batch, Mapping):
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        return model(**{key: value for key, value in batch.items() if takes_any or key in parameters})
    if isinstance(batch, tuple | list):
        return model(*batch[:-1])
    return model(batch)


def objective(spec: Spec, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """The batch's loss as one device computes it, and the output."""
    if spec.objective is not None:
        return spec.objective(model, batch), None
    output = forward(spec, model, batch)
    assert spec.loss is not None, "a job with loss=None needs objective="
    found = spec.loss(output, batch)
    return (found[0] / found[1] if isinstance(found, tuple) else found), output


def parts(samples: list[Any], split: Mapping[str, Any]) -> list[list[Any]]:
    """Consecutive slices of a batch, over data ranks and then over micro-batches, whose sizes differ by one at most."""
    shares, micro = split["shares"], split["micro"]
    exact = [len(samples) * share / sum(shares) for share in shares]
    sizes = [int(each) for each in exact]
    for place in sorted(range(len(shares)), key=lambda each: sizes[each] - exact[each])[: len(samples) - sum(sizes)]:
        sizes[place] += 1
    rounds = min(-(-max(sizes) // micro), min(sizes)) if micro else 1
    found, first = [], 0
    for size in sizes:
        for turn in range(rounds):
            last = first + size // rounds + (turn < size % rounds)
            found.append(samples[first:last])
            first = last
    return found


def run(spec: Spec, splits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Train from start to end; losses, metrics and every tensor of the model. `splits`: how batches are divided, each from a step on."""
    torch.manual_seed(spec.seed)
    model = spec.model if isinstance(spec.model, nn.Module) else spec.model()
    collate = spec.collate or default_collate
    model.train()
    _make_lazy_layers(spec, model, collate)
    given = list(model.named_parameters() if spec.named else model.parameters())
    made = spec.optimizer(given)
    optimizers = list(made) if isinstance(made, list | tuple) else [made]
    total = _steps(spec)
    schedules = [_schedule(spec, each, total) for each in optimizers] if spec.lr_schedule else []
    losses: list[float] = []
    epoch = None if isinstance(spec.data, IterableDataset) else _steps_of_epoch(spec)
    for step, samples in enumerate(islice(batches(spec), total), 1):
        for each in optimizers:
            each.zero_grad(set_to_none=True)
        value = 0.0
        split = next(each for each in reversed(splits) if each.get("from", 0) < step)
        if spec.restart is not None and step > 1 and split.get("from") == step - 1:
            spec.restart()
        for part in parts(samples, split) if spec.splits else [samples]:
            loss, _ = objective(spec, model, collate(part))
            share = len(part) / len(samples)
            (loss * share).backward()
            value += float(loss.detach()) * share
        losses.append(value)
        if spec.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), spec.clip_norm)
        for each in optimizers:
            each.step()
        for schedule in schedules:
            if not isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                schedule.step()
            elif epoch and (step % epoch == 0 or step == total):
                schedule.step(evaluate(spec, model)["loss"])
                model.train()
    return {"losses": losses, "metrics": evaluate(spec, model), **tensors(model)}


def _make_lazy_layers(spec: Spec, model: nn.Module, collate: Any) -> None:
    if any(nn.parameter.is_lazy(each) for each in model.parameters()):
        with torch.no_grad():
            forward(spec, model, collate(next(iter(batches(spec)))))


def _steps(spec: Spec) -> int:
    if spec.total is not None:
        return spec.total
    return (spec.epochs or 0) * _steps_of_epoch(spec)


def _steps_of_epoch(spec: Spec) -> int:
    full, rest = divmod(len(spec.data), spec.batch_size)
    return full + bool(rest and not spec.drop_last)


def _schedule(spec: Spec, optimizer: Any, total: int) -> Any:
    assert spec.lr_schedule is not None
    count = sum(each.default is each.empty for each in inspect.signature(spec.lr_schedule).parameters.values())
    return spec.lr_schedule(optimizer, total) if count > 1 else spec.lr_schedule(optimizer)


@torch.no_grad()
def evaluate(spec: Spec, model: nn.Module) -> dict[str, float]:
    """The loss and the metrics over the whole evaluation set."""
    if spec.eval_data is None:
        return {}
    model.eval()
    samples = [spec.eval_data[index] for index in range(len(spec.eval_data))]
    if spec.whole_metrics is not None:
        return dict(spec.whole_metrics(model, samples))
    batch = (spec.collate or default_collate)(samples)
    loss, output = objective(spec, model, batch)
    found = {"loss": float(loss)}
    for name, metric in spec.metrics.items():
        value = metric(output, batch)
        found[name] = float(value[0] / value[1] if isinstance(value, tuple) else value)
    return found


def tensors(model: nn.Module) -> dict[str, Any]:
    """Every tensor of the model's state, and the names of its parameters, each once."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return {"state": state, "parameters": [name for name, _ in model.named_parameters()]}


def restored(spec: Spec, weights: str) -> dict[str, Any]:
    """Metrics of saved weights."""
    from safetensors.torch import load_file

    torch.manual_seed(spec.seed)
    model = spec.model if isinstance(spec.model, nn.Module) else spec.model()
    _make_lazy_layers(spec, model, spec.collate or default_collate)
    model.load_state_dict(load_file(weights), strict=False)
    return {"metrics": evaluate(spec, model)}


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """What a request asks for; an error as text."""
    try:
        torch.set_num_threads(1)
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        spec = load(request["job"])
        if "weights" in request:
            return restored(spec, request["weights"])
        return run(spec, request["splits"])
    except Exception:
        return {"error": traceback.format_exc()}


def main(lines: Sequence[str] | Any = sys.stdin) -> None:
    """Answer each request in a fork of this process, which has imported torch once."""
    sys.modules["echelon"] = None  # type: ignore[assignment]  # importing it raises ImportError from here on
    _import_lazy_parts()
    for line in lines:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a job prints must not reach whoever reads the answers
            torch.save(answer(request), request["out"])
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"status": status}), flush=True)


def _import_lazy_parts() -> None:
    """What torch imports on first use takes seconds: once here instead of in every fork."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    import safetensors.torch  # noqa: F401

    import bench.adversary.kit  # noqa: F401


if __name__ == "__main__":
    main()
