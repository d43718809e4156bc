"""How tensors lie on disk: raw bytes in one file per rank, located by a JSON index. No pickle.

    rank-00000.bin ...   the bytes of tensor parts, one after another
    tensors.json         {name: {"dtype", "shape", "parts": [{"start", "shape", "file", "offset"}]}}

torch's distributed checkpoint decides which rank writes and reads which part, so any plan reads what any plan wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.errors import CheckpointError, DocumentError

INDEX_FILE = "tensors.json"
_DTYPES_BY_NAME: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
}


@dataclass(frozen=True, slots=True)
class FileLocation:
    """Where the bytes of a part begin."""

    file: str
    offset: int


class PlainStorage:
    """What torch's storage readers and writers must define, where there is nothing to do."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Called before each save and load."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """This rank's plan."""
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        """All ranks' plans."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path."""
        return True


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes in row-major order, without a copy where it is contiguous on the CPU."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"a {tensor.layout} tensor of {tensor.dtype}: only dense tensors can be stored")
    host_tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return host_tensor.view(torch.uint8).numpy().data if host_tensor.numel() else memoryview(b"")


def dtype_to_name(dtype: torch.dtype) -> str:
    """`float32`; raises CheckpointError for a dtype that cannot be stored."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES_BY_NAME:
        raise CheckpointError(f"tensors of {dtype} cannot be stored")
    return name


def dtype_from_name(name: str) -> torch.dtype:
    """The dtype called `name`; raises ValueError if there is none."""
    if name not in _DTYPES_BY_NAME:
        raise ValueError(f"no dtype {name!r}")
    return _DTYPES_BY_NAME[name]


def damaged(path: Path, reason: object) -> CheckpointError:
    """The error for a file that is not as it was written, because of `reason`: a text, or an error from reading it."""
    if isinstance(reason, DocumentError):  # names the file itself
        return CheckpointError(f"{reason}; use an older checkpoint")
    text = reason.strerror if isinstance(reason, OSError) and reason.strerror else reason
    return CheckpointError(f"{path}: {text}; use an older checkpoint")
