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

from echelon.engine.checkpoint.tensor_storage import dtype_named, name_of_dtype, raw

#: What a tensor at a path becomes, and back.
Put = Callable[[str, Tensor], Any]
Take = Callable[[Any], Tensor]
#: Marks an object that stands for another type.
_TAG = "$"
_FACTORIES: dict[str, Any] = {"list": list, "dict": dict, "int": int, "float": float, "set": set}
_MAPPINGS: dict[str, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_INLINE = 1 << 20


class Unstorable(TypeError):  # noqa: N818 (a kind of value; its base says error)
    """A value of a type that a checkpoint does not hold, at a path."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path, self.why = path, why


def encode(value: Any, path: str, put: Put) -> Any:
    """`value` for JSON; `path` names it in errors and to `put`."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else _tagged("float", repr(value))
    if kind is list:
        return [encode(each, f"{path}/{at}", put) for at, each in enumerate(value)]
    if kind is dict:
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: encode(each, f"{path}/{key}", put) for key, each in value.items()}
        return _tagged("dict", _pairs(value, path, put))
    if isinstance(value, Tensor):
        if kind not in (Tensor, nn.Parameter, nn.Buffer, DTensor):
            raise Unstorable(path, f"a {kind.__name__}, a tensor subclass of its own layout")
        return _tagged("tensor", put(path, value.detach()))
    return _encode_rare(value, path, put)


def _encode_rare(value: Any, path: str, put: Put) -> Any:
    kind = type(value)
    if kind in (tuple, torch.Size, set, frozenset):
        items = [encode(each, f"{path}/{at}", put) for at, each in enumerate(value)]
        if kind in (set, frozenset):
            items.sort(key=lambda each: json.dumps(each, sort_keys=True))
        return _tagged("size" if kind is torch.Size else kind.__name__, items)
    if kind is deque:
        return _tagged("deque", [value.maxlen, [encode(each, f"{path}/{at}", put) for at, each in enumerate(value)]])
    if kind in _MAPPINGS.values():
        return _tagged(next(name for name, each in _MAPPINGS.items() if each is kind), _pairs(value, path, put))
    if kind is defaultdict:
        name = next((name for name, each in _FACTORIES.items() if each is value.default_factory), None)
        if name is None and value.default_factory is not None:
            raise Unstorable(path, "a defaultdict with a factory of its own")
        return _tagged("defaultdict", [name, _pairs(value, path, put)])
    if kind is complex:
        return _tagged("complex", [encode(value.real, path, put), encode(value.imag, path, put)])
    if kind in (bytes, bytearray):
        return _tagged(kind.__name__, base64.b64encode(value).decode())
    if isinstance(value, torch.dtype):
        return _tagged("dtype", name_of_dtype(value))
    if isinstance(value, torch.device):
        return _tagged("device", str(value))
    if isinstance(value, torch.Generator):
        return _tagged("generator", [str(value.device), base64.b64encode(raw(value.get_state())).decode()])
    if isinstance(value, np.generic | np.ndarray) and kind.__module__ == "numpy" and value.dtype.kind in "biufcMmSU":
        whole = np.ascontiguousarray(value)
        how = "array" if kind is np.ndarray else "scalar"
        return _tagged(how, [value.dtype.str, list(np.shape(value)), base64.b64encode(whole.tobytes()).decode()])
    raise Unstorable(path, f"a {kind.__module__}.{kind.__qualname__}")


def _pairs(value: Any, path: str, put: Put) -> list[Any]:
    return [[encode(key, path, put), encode(each, f"{path}/{key}", put)] for key, each in value.items()]


def _tagged(name: str, content: Any) -> dict[str, Any]:
    return {_TAG: name, "v": content}


def decode(plain: Any, take: Take) -> Any:
    """What `encode` was given; raises ValueError, TypeError or KeyError for what it never made."""
    if isinstance(plain, list):
        return [decode(each, take) for each in plain]
    if not isinstance(plain, dict):
        return plain
    if _TAG not in plain:
        return {key: decode(each, take) for key, each in plain.items()}
    name, content = plain[_TAG], plain["v"]
    if name == "tensor":
        return take(content)
    if name in _DECODERS:
        return _DECODERS[name](content)
    items = decode(content if name not in ("deque", "defaultdict") else content[1], take)
    if name in (*_MAPPINGS, "defaultdict"):
        pairs = {_key(key): each for key, each in items}
        if name == "defaultdict":
            return defaultdict(None if content[0] is None else _FACTORIES[content[0]], pairs)
        return _MAPPINGS[name](pairs)
    if name == "deque":
        return deque(items, maxlen=content[0])
    if name in _SEQUENCES:
        return _SEQUENCES[name](items)
    raise ValueError(f"{name!r} is no type of a stored value")


def _key(value: Any) -> Any:
    hash(value)  # a list is no key: TypeError
    return value


def _numpy(content: Any) -> np.ndarray:
    text, shape, data = content
    dtype = np.dtype(text)
    if dtype.kind not in "biufcMmSU":
        raise ValueError(f"an array of {text}")
    return np.frombuffer(base64.b64decode(data, validate=True), dtype).reshape(shape).copy()


def _generator(content: Any) -> torch.Generator:
    device, data = content
    made = torch.Generator(device)
    made.set_state(torch.frombuffer(bytearray(base64.b64decode(data, validate=True)), dtype=torch.uint8))
    return made


_SEQUENCES: dict[str, Any] = {"tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": lambda text: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text],
    "complex": lambda parts: complex(*(decode(part, no_tensor) for part in parts)),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "dtype": lambda text: dtype_named(text),
    "device": lambda text: torch.device(text),
    "array": _numpy,
    "scalar": lambda content: _numpy(content)[()],
    "generator": _generator,
}


def inline(path: str, value: Tensor) -> Any:
    """A small tensor within the JSON itself: a learning rate, betas."""
    if isinstance(value, DTensor) or value.is_meta or value.numel() * value.element_size() > _INLINE:
        raise Unstorable(path, f"a tensor of {tuple(value.shape)}, which is too large or sharded for a setting")
    data = base64.b64encode(raw(value)).decode()
    return [name_of_dtype(value.dtype), list(value.shape), value.device.type, data]


def from_inline(content: Any) -> Tensor:
    """The tensor that `inline` stored."""
    name, shape, device, data = content
    found = torch.frombuffer(bytearray(base64.b64decode(data, validate=True)), dtype=torch.uint8) if data else None
    dtype = dtype_named(name)
    made = torch.empty(shape, dtype=dtype) if found is None else found.view(dtype).reshape(shape)
    return made.to(device) if device == "cpu" or torch.cuda.is_available() else made


def no_tensor(content: Any) -> Tensor:
    """For values that hold no tensors."""
    raise ValueError("a tensor where none can be")


def tensor_refs(plain: Any) -> Iterator[Any]:
    """What `put` gave for each tensor within an encoded value."""
    if isinstance(plain, list):
        for each in plain:
            yield from tensor_refs(each)
    elif isinstance(plain, dict):
        if plain.get(_TAG) == "tensor":
            yield plain["v"]
        else:
            for each in plain.values():
                yield from tensor_refs(each)
