"""The manifest of a packed data set: its columns, its files, the checksums of their blocks, where the data came from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from echelon.errors import CorruptDataError, DataError
from echelon.files import atomic_write

FILE_NAME = "manifest.json"
FORMAT, VERSION = "echelon packed data", 1

#: Bytes of a number of each dtype that can be packed.
ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2, "uint32": 4, "int32": 4,
    "float32": 4, "uint64": 8, "int64": 8, "float64": 8,
}  # fmt: skip
_COLUMN_KINDS = ("array", "text", "bytes", "image")
#: Names of shards. A name from a manifest becomes a path, which must not leave the folder.
SHARD_FILE_NAME = re.compile(r"shard-[0-9]{5,9}\.arrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One part of every sample. `ragged`: the first dimension differs between samples, and `shape` is that of its items."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    ragged: bool = False
    #: array: numbers; text; bytes; image: encoded, decoded by reading.
    kind: str = "array"

    @property
    def item_bytes(self) -> int:
        """Bytes of a row, or of an item where the number of items differs."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        if self.kind != "array":
            return self.kind
        sizes = ("any",) * self.ragged + self.shape
        return f"{self.dtype}[{', '.join(map(str, sizes))}]" if sizes else self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file. `buffers`: for each column the offset of its rows, or those of its offsets and values and the values' bytes."""

    file: str
    samples: int
    bytes: int
    buffers: tuple[tuple[int, ...], ...]
    #: One per block of rows, over its columns in turn (shard_file.py).
    checksums: tuple[int, ...]
    #: Checksum of the bytes that belong to no column: Arrow's metadata.
    frame: int
    #: Checksum of the offsets of ragged columns: lengths are read without the content.
    offsets: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A packed data set. `sample`: the structure of a sample over the columns. `block`: rows per checksum."""

    columns: tuple[Column, ...]
    sample: Any
    block: int
    shards: tuple[Shard, ...]
    #: Where the data comes from, and which version packed it.
    provenance: Mapping[str, str] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def save(self, folder: Path) -> None:
        """Write the manifest atomically: its presence means that the packing is done."""
        document = _to_document(self)
        text = json.dumps({**document, "hash": hash_document(document)}, separators=(",", ":"))
        atomic_write(folder / FILE_NAME, text)


def load_manifest(folder: Path) -> Manifest:
    path = folder / FILE_NAME
    try:
        return parse_manifest(path.read_bytes(), str(path))
    except FileNotFoundError:
        problem = f"not a packed data set (it has no {FILE_NAME}); `echelon pack SRC DST` makes one"
        if not folder.is_dir():
            problem = "there is no such folder; `echelon pack SRC DST` makes a packed data set"
        elif (folder / "packing.json").exists():
            problem = "its packing was not finished; run the same `echelon pack` again, which resumes it"
        raise DataError(f"{folder}: {problem}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def parse_manifest(text: bytes, source_name: str) -> Manifest:
    """Parse the manifest in `text`; `source_name` names it in messages."""
    try:
        document = json.loads(text)
        stored_hash = document.pop("hash")
        if document["format"] != FORMAT:
            raise DataError(f"{source_name} is not a packed data set's manifest: its format is {document['format']!r}")
        if document["version"] != VERSION:
            versions = f"version {document['version']!r}, this echelon reads {VERSION}"
            raise DataError(f"{source_name} has {versions}: pack the data again, or use the echelon that packed it")
        if stored_hash != hash_document(document):
            raise CorruptDataError(f"{source_name} is damaged: its hash is not that of its content; {_RESTORE}")
        return _parse_document(document)
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptDataError(f"{source_name} is damaged ({type(error).__name__}: {error}); {_RESTORE}") from None


_RESTORE = "restore it from a copy, or delete the folder and pack the data again"
#: What to do about a damaged shard.
RESTORE_SHARD = "restore this file from a copy, or delete it and pack the data again, which writes what is missing"


def _to_document(manifest: Manifest) -> dict[str, Any]:
    return json.loads(json.dumps({"format": FORMAT, "version": VERSION, **asdict(manifest)}))


def hash_document(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def content_identity(manifests: Sequence[Manifest]) -> str:
    """A digest of what consecutive data sets hold, wherever it came from."""
    return " ".join(hash_document({**_to_document(manifest), "provenance": {}}) for manifest in manifests)


def _parse_document(document: Mapping[str, Any]) -> Manifest:
    """Check everything: nothing may point outside of a shard or of the folder."""
    columns = tuple(Column(**{**column, "shape": tuple(column["shape"])}) for column in document["columns"])
    for column in columns:
        _check_column(column)
    block, provenance = document["block"], document["provenance"]
    if type(block) is not int or not 1 <= block < 2**63:
        raise ValueError(f"block {block!r}")
    if not isinstance(provenance, dict) or not all(isinstance(text, str) for text in provenance.values()):
        raise ValueError("provenance")
    shards = tuple(parse_shard(shard, columns, block) for shard in document["shards"])
    if not shards or len({shard.file for shard in shards}) < len(shards):
        raise ValueError("it names no file, or one twice")
    names = [column.name for column in columns]
    if not names or len({*names}) < len(names) or list_column_names(document["sample"]) != names:
        raise ValueError("sample does not name each column once")
    return Manifest(columns=columns, sample=document["sample"], block=block, shards=shards, provenance=provenance)


def _check_column(column: Column) -> None:
    is_typed = type(column.name) is str and type(column.ragged) is bool and column.dtype in ITEM_BYTES
    is_byte_string = column.dtype == "uint8" and column.ragged and not column.shape
    has_kind = column.kind == "array" or (column.kind in _COLUMN_KINDS and is_byte_string)
    if not (is_typed and has_kind and all(type(size) is int and size > 0 for size in column.shape)):
        raise ValueError(f"column {column.name!r}")


def parse_shard(values: Mapping[str, Any], columns: tuple[Column, ...], block: int) -> Shard:
    buffers = tuple(map(tuple, values["buffers"]))
    shard = Shard(**{**values, "buffers": buffers, "checksums": tuple(values["checksums"])})
    numbers = [shard.samples, shard.bytes, shard.frame, shard.offsets, *shard.checksums, *chain(*buffers)]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"a number of {shard.file!r}")
    if not SHARD_FILE_NAME.fullmatch(shard.file):
        raise ValueError(f"file name {shard.file!r}")
    if len(buffers) != len(columns) or len(shard.checksums) != -(-shard.samples // block):
        raise ValueError(f"counts of {shard.file}")
    for column, column_buffers in zip(columns, buffers, strict=True):
        if len(column_buffers) != (3 if column.ragged else 1):
            raise ValueError(f"column {column.name!r} of {shard.file}")
        regions = [(column_buffers[0], shard.samples * column.item_bytes, ITEM_BYTES[column.dtype])]
        if column.ragged:
            offsets, first, size = column_buffers
            regions = [(offsets, 8 * (shard.samples + 1), 8), (first, size, ITEM_BYTES[column.dtype])]
        # A column of unaligned numbers would be copied as a whole before one is read.
        if any(first + size > shard.bytes or first % alignment for first, size, alignment in regions):
            raise ValueError(f"column {column.name!r} of {shard.file}")
    return shard


def list_column_names(sample: Any) -> list[str]:
    if isinstance(sample, str):
        return [sample]
    ((container, parts),) = sample.items()
    if (container, type(parts)) not in (("dict", dict), ("tuple", list), ("list", list)):
        raise ValueError(f"a sample of {container!r}")
    return [name for part in (parts.values() if isinstance(parts, dict) else parts) for name in list_column_names(part)]
