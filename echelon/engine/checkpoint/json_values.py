"""State as JSON and back: a closed list of types, each restored as exactly the type that it was.

    None bool int float str                    as they are; nan and infinities by name
    list dict                                  as JSON's own; a dict with other keys than str as pairs
    tuple set frozenset deque OrderedDict defaultdict Counter torch.Size complex bytes bytearray
    torch.dtype torch.device torch.Generator numpy scalars and arrays
    Tensor                                     by what the caller makes of it: a name in the checkpoint's index, or its bytes

Anything else is refused by name: state that is silently dropped trains on to other numbers.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.checkpoint_files.tensor_storage import dtype_from_name, dtype_to_name, tensor_bytes

#: What a tensor at a path becomes, and back.
StoreTensor = Callable[[str, Tensor], Any]
LoadTensor = Callable[[Any], Tensor]
#: Marks an object that stands for another type.
_TYPE_TAG = "$"
_FACTORIES: dict[str, Any] = {"list": list, "dict": dict, "int": int, "float": float, "set": set}
_MAPPINGS: dict[str, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_MAX_INLINE_BYTES = 1 << 20


class UnstorableValue(TypeError):  # noqa: N818 (a kind of value; its base says error)
    """A value of a type that a checkpoint does not hold, at a path."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


def encode(value: Any, path: str, store_tensor: StoreTensor) -> Any:
    """`value` for JSON; `path` names it in errors and to `store_tensor`."""
    value_type = type(value)
    if value is None or value_type in (bool, int, str):
        return value
    if value_type is float:
        return value if math.isfinite(value) else _tag_value("float", repr(value))
    if value_type is list:
        return [encode(item, f"{path}/{index}", store_tensor) for index, item in enumerate(value)]
    if value_type is dict:
        if all(type(key) is str for key in value) and _TYPE_TAG not in value:
            return {key: encode(item, f"{path}/{key}", store_tensor) for key, item in value.items()}
        return _tag_value("dict", _encode_pairs(value, path, store_tensor))
    if isinstance(value, Tensor):
        if value_type not in (Tensor, nn.Parameter, nn.Buffer, DTensor):
            raise UnstorableValue(path, f"a {value_type.__name__}, a tensor subclass of its own layout")
        return _tag_value("tensor", store_tensor(path, value.detach()))
    return _encode_special(value, path, store_tensor)


def _encode_special(value: Any, path: str, store_tensor: StoreTensor) -> Any:
    value_type = type(value)
    if value_type in (tuple, torch.Size, set, frozenset):
        items = [encode(item, f"{path}/{index}", store_tensor) for index, item in enumerate(value)]
        if value_type in (set, frozenset):
            items.sort(key=lambda item: json.dumps(item, sort_keys=True))
        return _tag_value("size" if value_type is torch.Size else value_type.__name__, items)
    if value_type is deque:
        return _tag_value(
            "deque", [value.maxlen, [encode(item, f"{path}/{index}", store_tensor) for index, item in enumerate(value)]]
        )
    if value_type in _MAPPINGS.values():
        return _tag_value(
            next(name for name, item in _MAPPINGS.items() if item is value_type),
            _encode_pairs(value, path, store_tensor),
        )
    if value_type is defaultdict:
        name = next((name for name, item in _FACTORIES.items() if item is value.default_factory), None)
        if name is None and value.default_factory is not None:
            raise UnstorableValue(path, "a defaultdict with a factory of its own")
        return _tag_value("defaultdict", [name, _encode_pairs(value, path, store_tensor)])
    if value_type is complex:
        return _tag_value("complex", [encode(value.real, path, store_tensor), encode(value.imag, path, store_tensor)])
    if value_type in (bytes, bytearray):
        return _tag_value(value_type.__name__, base64.b64encode(value).decode())
    if isinstance(value, torch.dtype):
        return _tag_value("dtype", dtype_to_name(value))
    if isinstance(value, torch.device):
        return _tag_value("device", str(value))
    if isinstance(value, torch.Generator):
        return _tag_value("generator", [str(value.device), base64.b64encode(tensor_bytes(value.get_state())).decode()])
    if (
        isinstance(value, np.generic | np.ndarray)
        and value_type.__module__ == "numpy"
        and value.dtype.kind in "biufcMmSU"
    ):
        contiguous = np.ascontiguousarray(value)
        tag = "array" if value_type is np.ndarray else "scalar"
        return _tag_value(
            tag, [value.dtype.str, list(np.shape(value)), base64.b64encode(contiguous.tobytes()).decode()]
        )
    raise UnstorableValue(path, f"a {value_type.__module__}.{value_type.__qualname__}")


def _encode_pairs(value: Any, path: str, store_tensor: StoreTensor) -> list[Any]:
    return [
        [encode(key, path, store_tensor), encode(item, f"{path}/{key}", store_tensor)] for key, item in value.items()
    ]


def _tag_value(tag: str, content: Any) -> dict[str, Any]:
    return {_TYPE_TAG: tag, "v": content}


def decode(encoded: Any, load_tensor: LoadTensor) -> Any:
    """What `encode` was given; raises ValueError, TypeError or KeyError for what it never made."""
    if isinstance(encoded, list):
        return [decode(item, load_tensor) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if _TYPE_TAG not in encoded:
        return {key: decode(item, load_tensor) for key, item in encoded.items()}
    tag, content = encoded[_TYPE_TAG], encoded["v"]
    if tag == "tensor":
        return load_tensor(content)
    if tag in _DECODERS:
        return _DECODERS[tag](content)
    items = decode(content if tag not in ("deque", "defaultdict") else content[1], load_tensor)
    if tag in (*_MAPPINGS, "defaultdict"):
        pairs = {_require_hashable(key): item for key, item in items}
        if tag == "defaultdict":
            return defaultdict(None if content[0] is None else _FACTORIES[content[0]], pairs)
        return _MAPPINGS[tag](pairs)
    if tag == "deque":
        return deque(items, maxlen=content[0])
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](items)
    raise ValueError(f"{tag!r} is no type of a stored value")


def _require_hashable(value: Any) -> Any:
    hash(value)  # a list is no key: TypeError
    return value


def _decode_numpy(content: Any) -> np.ndarray:
    dtype_text, shape, data = content
    dtype = np.dtype(dtype_text)
    if dtype.kind not in "biufcMmSU":
        raise ValueError(f"an array of {dtype_text}")
    return np.frombuffer(base64.b64decode(data, validate=True), dtype).reshape(shape).copy()


def _decode_generator(content: Any) -> torch.Generator:
    device, data = content
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(base64.b64decode(data, validate=True)), dtype=torch.uint8))
    return generator


_SEQUENCES: dict[str, Any] = {"tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": lambda text: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text],
    "complex": lambda parts: complex(*(decode(part, refuse_tensor) for part in parts)),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "dtype": lambda text: dtype_from_name(text),
    "device": lambda text: torch.device(text),
    "array": _decode_numpy,
    "scalar": lambda content: _decode_numpy(content)[()],
    "generator": _decode_generator,
}


def encode_inline(path: str, value: Tensor) -> Any:
    """A small tensor within the JSON itself: a learning rate, betas."""
    if isinstance(value, DTensor) or value.is_meta or value.numel() * value.element_size() > _MAX_INLINE_BYTES:
        raise UnstorableValue(path, f"a tensor of {tuple(value.shape)}, which is too large or sharded for a setting")
    data = base64.b64encode(tensor_bytes(value)).decode()
    return [dtype_to_name(value.dtype), list(value.shape), value.device.type, data]


def decode_inline(content: Any) -> Tensor:
    """The tensor that `encode_inline` stored."""
    dtype_name, shape, device, data = content
    buffer = torch.frombuffer(bytearray(base64.b64decode(data, validate=True)), dtype=torch.uint8) if data else None
    dtype = dtype_from_name(dtype_name)
    tensor = torch.empty(shape, dtype=dtype) if buffer is None else buffer.view(dtype).reshape(shape)
    return tensor.to(device) if device == "cpu" or torch.cuda.is_available() else tensor


def refuse_tensor(content: Any) -> Tensor:
    """For values that hold no tensors."""
    raise ValueError("a tensor where none can be")


def find_tensor_refs(encoded: Any) -> Iterator[Any]:
    """What `put` gave for each tensor within an encoded value."""
    if isinstance(encoded, list):
        for item in encoded:
            yield from find_tensor_refs(item)
    elif isinstance(encoded, dict):
        if encoded.get(_TYPE_TAG) == "tensor":
            yield encoded["v"]
        else:
            for item in encoded.values():
                yield from find_tensor_refs(item)
