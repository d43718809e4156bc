"""State as JSON and back: a closed list of types, each restored as exactly the type it was.

    None bool int float str                    as they are; nan and infinities by name
    list dict                                  as JSON's; a dict with keys other than str as pairs
    tuple set frozenset deque OrderedDict defaultdict Counter torch.Size complex bytes bytearray
    torch.dtype torch.device torch.Generator numpy scalars and arrays
    Tensor                                     a reference that the caller makes: a name in the checkpoint's index, or the bytes

Anything else raises UnstorableValue: dropping state silently would change the numbers of a resumed run.
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

from echelon.checkpoint_files.tensor_files import dtype_from_name, dtype_to_name, tensor_bytes

#: (path, tensor) -> what stands for the tensor in the JSON, and back.
StoreTensor = Callable[[str, Tensor], Any]
LoadTensor = Callable[[Any], Tensor]
#: Key of an object that stands for a value of another type.
_TYPE_TAG = "$"
_FACTORIES: dict[str, Any] = {"list": list, "dict": dict, "int": int, "float": float, "set": set}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "size", set: "set", frozenset: "frozenset"}
#: Kinds of numpy dtypes that are plain bytes.
_ARRAY_KINDS = "biufcMmSU"
_MAX_INLINE_BYTES = 1 << 20


class UnstorableValue(TypeError):  # noqa: N818 (a kind of value; its base says error)
    """A value that a checkpoint cannot hold, at a path."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


class TensorRecorder:
    """Collects the tensors in encoded values, by path; [path, device type] stands for each."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, path: str, tensor: Tensor) -> list[str]:
        while path in self.tensors:
            path += "'"  # keys may contain slashes
        self.tensors[path] = tensor
        return [path, tensor.device.type]


def encode(value: Any, path: str, store_tensor: StoreTensor) -> Any:
    """`value` as JSON. `path` names it in errors and to `store_tensor`."""
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
            raise UnstorableValue(path, f"a {value_type.__name__}, a tensor subclass with its own layout")
        return _tag_value("tensor", store_tensor(path, value.detach()))
    return _encode_special(value, path, store_tensor)


def _encode_special(value: Any, path: str, store_tensor: StoreTensor) -> Any:
    value_type = type(value)
    if value_type in _CODECS:
        tag, encode_content, _ = _CODECS[value_type]
        return _tag_value(tag, encode_content(value))
    if value_type in _SEQUENCES:
        items = encode(list(value), path, store_tensor)
        if value_type in (set, frozenset):
            items.sort(key=lambda item: json.dumps(item, sort_keys=True))
        return _tag_value(_SEQUENCES[value_type], items)
    if value_type is deque:
        return _tag_value("deque", [value.maxlen, encode(list(value), path, store_tensor)])
    if value_type in _MAPPINGS:
        return _tag_value(_MAPPINGS[value_type], _encode_pairs(value, path, store_tensor))
    if value_type is defaultdict:
        name = next((name for name, factory in _FACTORIES.items() if factory is value.default_factory), None)
        if name is None and value.default_factory is not None:
            raise UnstorableValue(path, "a defaultdict with a custom factory")
        return _tag_value("defaultdict", [name, _encode_pairs(value, path, store_tensor)])
    is_numpy = isinstance(value, np.generic | np.ndarray) and value_type.__module__ == "numpy"
    if is_numpy and value.dtype.kind in _ARRAY_KINDS:
        data = _to_base64(np.ascontiguousarray(value).tobytes())
        tag = "array" if value_type is np.ndarray else "scalar"
        return _tag_value(tag, [value.dtype.str, list(np.shape(value)), data])
    raise UnstorableValue(path, f"a {value_type.__module__}.{value_type.__qualname__}")


def _encode_pairs(value: Any, path: str, store_tensor: StoreTensor) -> list[Any]:
    return [[encode(k, path, store_tensor), encode(item, f"{path}/{k}", store_tensor)] for k, item in value.items()]


def _tag_value(tag: str, content: Any) -> dict[str, Any]:
    return {_TYPE_TAG: tag, "v": content}


def decode(encoded: Any, load_tensor: LoadTensor) -> Any:
    """The value that `encode` was called with; raises ValueError, TypeError or KeyError for anything that it does not produce."""
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
    if tag == "deque":
        return deque(decode(content[1], load_tensor), maxlen=content[0])
    if tag == "defaultdict":
        factory = None if content[0] is None else _FACTORIES[content[0]]
        return defaultdict(factory, _decode_pairs(content[1], load_tensor))
    for value_type, name in (_MAPPINGS | _SEQUENCES).items():
        if tag == name:
            return value_type((_decode_pairs if value_type in _MAPPINGS else decode)(content, load_tensor))
    raise ValueError(f"no stored type {tag!r}")


def _decode_pairs(encoded: Any, load_tensor: LoadTensor) -> dict[Any, Any]:
    return {key: item for key, item in decode(encoded, load_tensor)}  # noqa: C416 (refuses what is not a pair)


def _to_base64(data: Any) -> str:
    return base64.b64encode(data).decode()


def _from_base64(text: str) -> bytearray:
    return bytearray(base64.b64decode(text, validate=True))


def _decode_array(content: Any) -> np.ndarray:
    dtype_text, shape, data = content
    dtype = np.dtype(dtype_text)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"an array of {dtype_text}")
    return np.frombuffer(_from_base64(data), dtype).reshape(shape).copy()


def _decode_generator(content: Any) -> torch.Generator:
    generator = torch.Generator(content[0])
    generator.set_state(torch.frombuffer(_from_base64(content[1]), dtype=torch.uint8))
    return generator


#: Types whose content is not nested: tag, content for JSON, and back.
_CODECS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    complex: ("complex", lambda value: encode([value.real, value.imag], "", encode_inline), lambda parts: complex(*decode(parts, decode_inline))),
    bytes: ("bytes", _to_base64, lambda text: bytes(_from_base64(text))),
    bytearray: ("bytearray", _to_base64, _from_base64),
    torch.dtype: ("dtype", dtype_to_name, dtype_from_name),
    torch.device: ("device", str, torch.device),
    torch.Generator: ("generator", lambda value: [str(value.device), _to_base64(tensor_bytes(value.get_state()))], _decode_generator),
}  # fmt: skip
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__,
    "array": _decode_array,
    "scalar": lambda content: _decode_array(content)[()],
    **{tag: decode_content for tag, _, decode_content in _CODECS.values()},
}


def encode_inline(path: str, value: Tensor) -> Any:
    """A small tensor inside the JSON: a learning rate, betas."""
    if isinstance(value, DTensor) or value.is_meta or value.numel() * value.element_size() > _MAX_INLINE_BYTES:
        raise UnstorableValue(path, f"a tensor of {tuple(value.shape)}, which is too large or sharded for a setting")
    return [dtype_to_name(value.dtype), list(value.shape), value.device.type, _to_base64(tensor_bytes(value))]


def decode_inline(content: Any) -> Tensor:
    """The tensor that `encode_inline` stored."""
    dtype_name, shape, device, data = content
    tensor = torch.empty(shape, dtype=dtype_from_name(dtype_name))
    if data:
        tensor = torch.frombuffer(_from_base64(data), dtype=torch.uint8).view(tensor.dtype).reshape(shape)
    return tensor.to(device) if device == "cpu" or torch.cuda.is_available() else tensor


def find_tensor_refs(encoded: Any) -> Iterator[Any]:
    """What stands for each tensor in an encoded value."""
    if isinstance(encoded, dict) and encoded.get(_TYPE_TAG) == "tensor":
        yield encoded["v"]
    elif isinstance(encoded, dict | list):
        for item in encoded.values() if isinstance(encoded, dict) else encoded:
            yield from find_tensor_refs(item)
