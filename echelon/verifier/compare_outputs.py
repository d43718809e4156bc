"""Compare the model's outputs between the plan and the reference, micro-batch by micro-batch.

One device computes the whole batch's output at once. It is cut as the plan splits the samples, along the dim whose size is the number
of samples. A tensor without such a dim, or of another shape there (padding to the longest), is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from echelon.plan.batch_split import SampleRange
from echelon.trials.module_tree import module_hooks
from echelon.verifier.compare import RELATIVE_FLOOR, Difference, has_fractions
from echelon.verifier.tensor_checksum import TensorChecksum, compute_checksum


@dataclass(frozen=True, slots=True)
class OutputSlice:
    tensor_index: int
    sample_range: SampleRange

    def __str__(self) -> str:
        first, last = self.sample_range.start, self.sample_range.stop - 1
        return f"output {self.tensor_index} for {f'samples {first} to {last}' if last > first else f'sample {first}'}"


#: None: it is unknown which part of the tensor belongs to these samples.
OutputChecksums = Mapping[OutputSlice, TensorChecksum | None]


def record_outputs(
    model: nn.Module,
    callback: Callable[[list[Tensor | None]], None],
    unwrap: Callable[[Tensor], Tensor] = lambda value: value,
) -> AbstractContextManager[None]:
    """Call `callback` with the tensors of each output of the model; None: not whole on this rank, or without fractions. `unwrap` gathers
    tensors that are sharded behind a full shape."""

    @torch.no_grad()
    def on_output(path: str, output: Any) -> None:
        if not path:
            values = [unwrap(value) for value in output_tensors(output)]
            callback([value if is_whole(value) and has_fractions(value) else None for value in values])

    return module_hooks(model, after=on_output)


def output_tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of an output of any structure, in order."""
    for leaf in tree_leaves(vars(output) if dataclasses.is_dataclass(output) else output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from output_tensors(leaf)


def is_whole(value: Tensor) -> bool:
    """Whether this rank holds all values of a tensor: another stage's has none, a DTensor is a shard."""
    return not value.is_meta and not isinstance(value, FakeTensor | DTensor)


def checksum_outputs(
    tensors: Sequence[Tensor | None], sample_range: SampleRange, *, first: int = 0, batch_size: int | None = None
) -> dict[OutputSlice, TensorChecksum | None]:
    """The checksums of an output for `sample_range`, whose samples begin at row `first` of the `batch_size` rows."""
    size, checksums = sample_range.size, dict[OutputSlice, TensorChecksum | None]()
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            dim = next((dim for dim, length in enumerate(tensor.shape) if length == batch_size), None)
            if batch_size in (None, size):
                samples: Tensor | None = tensor
            else:
                samples = None if dim is None else tensor.narrow(dim, first, size)
            checksums[OutputSlice(index, sample_range)] = None if samples is None else compute_checksum(samples)
    return checksums


def single_sample_ranges(sample_range: SampleRange) -> list[SampleRange]:
    return [SampleRange(position, position + 1) for position in range(sample_range.start, sample_range.stop)]


def compare_outputs(actual: OutputChecksums, expected: OutputChecksums, step: int) -> list[Difference]:
    norms = [checksum.norm for checksum in expected.values() if checksum is not None and not checksum.has_nan]
    floor = RELATIVE_FLOOR * max(norms, default=0.0)  # for what is zero but for rounding
    differences = []
    for output_slice, b in expected.items():
        a = actual.get(output_slice)
        if a is not None and b is not None and a.shape == b.shape:
            reason, value = "it holds NaN" if a.has_nan else "", a.relative_difference(b, floor)
            differences.append(Difference(kind="output", name=str(output_slice), step=step, value=value, reason=reason))
    return differences


def uncompared_outputs_note(actual: OutputChecksums, expected: OutputChecksums, ranges: Sequence[SampleRange]) -> str:
    """Which outputs are not compared, and why; empty: all are. `ranges`: how the samples are split."""
    indices = sorted({output_slice.tensor_index for output_slice in (*actual, *expected)})
    slices = [OutputSlice(index, sample_range) for index in indices for sample_range in ranges]
    reasons = {output_slice: _uncompared_reason(output_slice, actual, expected) for output_slice in slices}
    uncompared = [f"{output_slice} ({reason})" for output_slice, reason in reasons.items() if reason]
    if not indices:
        return "the model's outputs are not compared: neither run returned one with fractions"
    if len(uncompared) == len(slices):
        return f"the model's outputs are not compared: {', '.join(dict.fromkeys(reasons.values()))}"
    compared = f"outputs of {len(slices) - len(uncompared)} of {len(slices)} micro-batches are compared"
    return f"{compared}, without {format_names(uncompared)}" if uncompared else ""


def _uncompared_reason(output_slice: OutputSlice, actual: OutputChecksums, expected: OutputChecksums) -> str:
    if output_slice not in actual:
        return "the plan's run does not return it once per micro-batch, or not whole"
    if output_slice not in expected:
        return "the reference does not return it"
    a, b = actual[output_slice], expected[output_slice]
    if a is None or b is None:
        return "no dim of samples in " + ("the plan's run" if a is None else "the reference")
    return "" if a.shape == b.shape else f"{a.shape}, in the reference {b.shape}"


def format_names(names: Sequence[str], limit: int = 8) -> str:
    """The first `limit` names, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
