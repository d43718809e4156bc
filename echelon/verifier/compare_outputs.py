"""What the model gave for the samples of a step: marked by both runs, share by share, and compared.

One device gives the whole batch's output at once. It is cut as the plan shares the samples out, along the dim that has as many entries
as there are samples; a tensor that has no such dim, or another shape there (padding up to the longest), is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from echelon.plan.batch_split import SampleRange
from echelon.verifier.compare import RELATIVE_FLOOR, Difference
from echelon.verifier.tensor_checksum import TensorChecksum, compute_checksum


@dataclass(frozen=True, slots=True)
class OutputSlice:
    """Which tensor of an output, for which samples."""

    tensor_index: int
    sample_range: SampleRange

    def __str__(self) -> str:
        first_sample, last_sample = self.sample_range.start, self.sample_range.stop - 1
        return f"output {self.tensor_index} for {f'samples {first_sample} to {last_sample}' if last_sample > first_sample else f'sample {first_sample}'}"


#: None: given, but it cannot be told which part of it is of these samples.
OutputChecksums = Mapping[OutputSlice, TensorChecksum | None]


@contextlib.contextmanager
def record_outputs(
    model: nn.Module,
    callback: Callable[[list[Tensor | None]], None],
    unwrap: Callable[[Tensor], Tensor] = lambda value: value,
) -> Iterator[None]:
    """Call `callback` with the tensors of each output of the model, None for one that is not whole here or has no fractions.

    `unwrap` gives the whole of a tensor that only looks like it.
    """

    @torch.no_grad()
    def on_forward(_: nn.Module, __: Any, output: Any) -> None:
        callback([_comparable_tensor(unwrap(leaf)) for leaf in output_tensors(output)])

    if isinstance(model, torch.jit.ScriptModule):
        yield
        return
    hook = model.register_forward_hook(on_forward)
    try:
        yield
    finally:
        hook.remove()


def hookable_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that take hooks, with their paths: TorchScript's take none."""
    return ((path, module) for path, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule))


def output_tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of an output of any structure, in its own order."""
    for leaf in tree_leaves(vars(output) if dataclasses.is_dataclass(output) else output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from output_tensors(leaf)


def _comparable_tensor(value: Tensor) -> Tensor | None:
    is_local = not value.is_meta and not isinstance(value, FakeTensor | DTensor)
    return value if is_local and (value.is_floating_point() or value.is_complex()) else None


def checksum_outputs(
    tensors: Sequence[Tensor | None], sample_range: SampleRange, *, first: int = 0, batch_size: int | None = None
) -> dict[OutputSlice, TensorChecksum | None]:
    """The marks of an output for the samples `sample_range` of the batch, where it has `batch_size` samples and these are those from `first` on."""
    checksums: dict[OutputSlice, TensorChecksum | None] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            samples = _slice_samples(
                tensor, first, sample_range.size, sample_range.size if batch_size is None else batch_size
            )
            checksums[OutputSlice(index, sample_range)] = None if samples is None else compute_checksum(samples)
    return checksums


def single_sample_ranges(sample_range: SampleRange) -> list[SampleRange]:
    """Its samples one by one."""
    return [SampleRange(position, position + 1) for position in range(sample_range.start, sample_range.stop)]


def _slice_samples(tensor: Tensor, first: int, size: int, batch_size: int) -> Tensor | None:
    if size == batch_size:
        return tensor
    dim = next((dim for dim, length in enumerate(tensor.shape) if length == batch_size), None)
    return None if dim is None else tensor.narrow(dim, first, size)


def compare_outputs(actual: OutputChecksums, expected: OutputChecksums, step: int) -> list[Difference]:
    """How far each share of each tensor is off, where both runs have it in one shape."""
    norms = [checksum.norm for checksum in expected.values() if checksum is not None and not checksum.has_nan]
    floor = RELATIVE_FLOOR * max(norms, default=0.0)  # of what is zero but for rounding
    differences = []
    for output_slice, expected_checksum in expected.items():
        actual_checksum = actual.get(output_slice)
        if (
            actual_checksum is not None
            and expected_checksum is not None
            and actual_checksum.shape == expected_checksum.shape
        ):
            reason = "it holds NaN" if actual_checksum.has_nan else ""
            value = actual_checksum.relative_difference(expected_checksum, floor)
            differences.append(Difference(kind="output", name=str(output_slice), step=step, value=value, reason=reason))
    return differences


def uncompared_outputs_note(
    actual: OutputChecksums, expected: OutputChecksums, sample_ranges: Sequence[SampleRange]
) -> str:
    """What a reader must know of outputs that are not compared; `sample_ranges`: how the samples are shared out. Empty: all are."""
    tensor_indices = sorted({output_slice.tensor_index for output_slice in (*actual, *expected)})
    output_slices = [OutputSlice(index, sample_range) for index in tensor_indices for sample_range in sample_ranges]
    reasons = {output_slice: _uncompared_reason(output_slice, actual, expected) for output_slice in output_slices}
    uncompared = [f"{output_slice} ({reason})" for output_slice, reason in reasons.items() if reason]
    if not tensor_indices:
        return "the model's outputs are not compared: no run tells of any that has fractions"
    if len(uncompared) == len(output_slices):
        return f"the model's outputs are not compared: {', '.join(dict.fromkeys(reasons.values()))}"
    return (
        f"outputs of {len(output_slices) - len(uncompared)} of {len(output_slices)} shares are compared, without {format_names(uncompared)}"
        if uncompared
        else ""
    )


def _uncompared_reason(output_slice: OutputSlice, actual: OutputChecksums, expected: OutputChecksums) -> str:
    if output_slice not in actual:
        return "the plan's run does not give it once for each micro-batch, or not whole"
    if output_slice not in expected:
        return "the reference does not give it"
    actual_checksum, expected_checksum = actual[output_slice], expected[output_slice]
    if actual_checksum is None or expected_checksum is None:
        return "no dim of samples in " + ("the plan's run" if actual_checksum is None else "the reference")
    return (
        ""
        if actual_checksum.shape == expected_checksum.shape
        else f"{actual_checksum.shape}, in the reference {expected_checksum.shape}"
    )


def format_names(names: Sequence[str], limit: int = 8) -> str:
    """Names for a note, the first of them where they are many."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
