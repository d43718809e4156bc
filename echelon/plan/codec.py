"""Documents to JSON and back: versioned, strict, hashed.

A document is a frozen dataclass of plain values, tuples and other such dataclasses. Its annotations are its schema.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, Union

from echelon.errors import DocumentError
from echelon.files import atomic_write

T = TypeVar("T")


class Document:
    """Mixin of the top-level nouns: a kind and a version, text form and content hash."""

    __slots__ = ()
    KIND: ClassVar[str]
    VERSION: ClassVar[int] = 1
    HASH_REQUIRED: ClassVar[bool] = False  #: people edit plans, nobody edits a proof

    def to_json(self, *, indent: int | None = 2) -> str:
        """This document as JSON text."""
        header = {"kind": self.KIND, "version": self.VERSION, "hash": self.digest}
        return json.dumps(header | to_plain(self), indent=indent)

    @classmethod
    def from_json(cls, text: str, *, source: str = "document") -> Self:
        """The document that `text` holds; `source` names it in errors."""
        try:
            plain = json.loads(text)
        except ValueError as error:
            raise DocumentError(f"{source}: not JSON ({error}); was the file cut short?") from error
        if not isinstance(plain, dict):
            raise DocumentError(f"{source}: expected an object of kind {cls.KIND!r}, found {type(plain).__name__}")
        kind, version, digest = plain.pop("kind", None), plain.pop("version", None), plain.pop("hash", None)
        if kind != cls.KIND:
            raise DocumentError(f"{source}: expected kind {cls.KIND!r}, found {kind!r}")
        if version != cls.VERSION:
            versions = f"{cls.KIND} of version {version!r}, this echelon reads version {cls.VERSION}"
            raise DocumentError(f"{source}: {versions}; make it again")
        document = from_plain(cls, plain, source)
        if digest is None and cls.HASH_REQUIRED:
            raise DocumentError(f"{source}: a {cls.KIND} without its hash was edited by hand; make it again")
        if digest is not None and digest != document.digest:
            remedy = "make it again" if cls.HASH_REQUIRED else 'delete the "hash" line to accept the edit'
            hashes = f"content hashes to {document.digest[:12]} but the file says {str(digest)[:12]}"
            raise DocumentError(f"{source}: {hashes}: it was edited by hand or damaged; {remedy}")
        return document

    def save(self, path: str | Path) -> None:
        """Write to `path` atomically; creates its folder."""
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, self.to_json() + "\n")
        except OSError as error:
            raise DocumentError(f"{path}: the {self.KIND} cannot be written ({error}); give another path") from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The document in the file `path`."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DocumentError(f"{path}: cannot be read as a {cls.KIND} ({error})") from error
        return cls.from_json(text, source=str(path))

    @property
    def digest(self) -> str:
        """SHA-256 of the content: equal documents have equal digests on every machine."""
        content = _normalize_numbers(to_plain(self))
        plain = json.dumps([self.KIND, self.VERSION, content], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(plain.encode()).hexdigest()


def to_plain(value: Any) -> Any:
    """`value` as JSON types, including fields at their default: people read these files."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise DocumentError(f"{value} cannot be stored in a document")
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"{type(value).__name__} cannot be stored in a document")


def _normalize_numbers(plain: Any) -> Any:
    """Turn 4096.0 into 4096: a float field that holds an int reads back as a float, and the two documents are equal."""
    if isinstance(plain, dict):
        return {key: _normalize_numbers(item) for key, item in plain.items()}
    if isinstance(plain, list):
        return [_normalize_numbers(item) for item in plain]
    return int(plain) if isinstance(plain, float) and plain.is_integer() else plain


@cache
def _schema(cls: type) -> dict[str, tuple[Any, bool]]:
    """Field name -> (annotation, required)."""
    hints = typing.get_type_hints(cls)

    def is_required(field: dataclasses.Field[Any]) -> bool:
        return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING

    return {field.name: (hints[field.name], is_required(field)) for field in dataclasses.fields(cls)}


def from_plain(target_type: type[T], plain: Any, path: str) -> T:
    """The `target_type` that `plain` describes; `path` names it in errors."""
    value: T = _decode(target_type, plain, path)
    return value


def _decode(annotation: Any, plain: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        if plain is None and type(None) in arguments:
            return None
        (option,) = (option for option in arguments if option is not type(None))  # a union is "or nothing" here
        return _decode(option, plain, path)
    if origin is typing.Literal:
        if plain in arguments and type(plain) in {type(argument) for argument in arguments}:
            return plain
        raise DocumentError(f"{path}: {plain!r} is not one of {', '.join(map(repr, arguments))}")
    if dataclasses.is_dataclass(annotation):
        return _decode_dataclass(annotation, plain, path)
    if origin is tuple:
        if not isinstance(plain, list):
            raise DocumentError(f"{path}: expected a list, found {plain!r}")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_decode(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(plain))
        if len(plain) != len(arguments):
            raise DocumentError(f"{path}: expected {len(arguments)} items, found {len(plain)}")
        return tuple(_decode(a, item, f"{path}[{i}]") for i, (a, item) in enumerate(zip(arguments, plain, strict=True)))
    if origin is dict:
        if not isinstance(plain, dict):
            raise DocumentError(f"{path}: expected an object, found {plain!r}")
        return {key: _decode(arguments[1], item, f"{path}.{key}") for key, item in plain.items()}
    if annotation is float and type(plain) is int:
        return float(plain)
    if type(plain) is not annotation or (annotation is float and not math.isfinite(plain)):
        raise DocumentError(f"{path}: expected {_type_name(annotation)}, found {plain!r}")
    return plain


def _decode_dataclass(dataclass_type: Any, plain: Any, path: str) -> Any:
    if not isinstance(plain, dict):
        raise DocumentError(f"{path}: expected an object, found {plain!r}")
    schema = _schema(dataclass_type)
    unknown = sorted(set(plain) - set(schema))
    if unknown:
        known = f"{_type_name(dataclass_type)} has {', '.join(schema)}"
        raise DocumentError(f"{path}: unknown field {', '.join(unknown)}; {known}")
    missing = [name for name, (_, required) in schema.items() if required and name not in plain]
    if missing:
        raise DocumentError(f"{path}: missing field {', '.join(missing)}")
    values = {name: _decode(schema[name][0], item, f"{path}.{name}") for name, item in plain.items()}
    try:
        return dataclass_type(**values)
    except ValueError as error:
        raise DocumentError(f"{path}: {error}") from error


def _type_name(annotation: Any) -> str:
    return getattr(annotation, "__name__", str(annotation))
