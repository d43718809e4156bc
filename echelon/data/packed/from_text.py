"""Text as tokens: bytes, or what a tokenizer file makes of it, in rows of equal length or one row per document."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.data.packed.manifest import Column
from echelon.data.packed.origin import Origin, stamp
from echelon.errors import DataError

ENDINGS = {".txt", ".text", ".md", ".py", ".rst"}


class Tokens(Origin):
    """The tokens of all files, one behind the other, cut into rows of `length` (a rest that fills no row is left out);
    with `length=None` each file is a row of its own length. `tokens`: "byte", or the path of a tokenizer.json."""

    def __init__(self, files: Sequence[Path], *, tokens: str, length: int | None, dtype: str = "int64") -> None:
        # In a file without a name, which needs no memory and is gone with the last process that reads it.
        with tempfile.TemporaryFile() as kept:
            ends = [0]
            largest = 0
            for document in _encoded(files, tokens):
                largest = max(largest, int(document.max(initial=0)))
                kept.write(document.astype(np.int32).tobytes())
                ends.append(ends[-1] + len(document))
            kept.flush()
            self._all = np.memmap(kept, np.int32, "r") if ends[-1] else np.empty(0, np.int32)
        if largest > np.iinfo(dtype).max:
            raise DataError(f"token {largest} does not fit into {dtype}: use a wider --dtype")
        self._ends, self._length = np.array(ends), length
        self.samples = len(files) if length is None else ends[-1] // length
        if not self.samples:
            raise DataError(
                f"{ends[-1]:,} tokens do not fill one row of {length}: use a shorter --length, or more text"
            )
        self.columns = (
            Column(name="tokens", dtype=dtype, shape=() if length is None else (length,), ragged=length is None),
        )
        self.sample = "tokens"
        self.row_bytes = max(1.0, ends[-1] * np.dtype(dtype).itemsize / self.samples)
        named = (
            tokens
            if tokens == "byte"
            else f"{tokens} {hashlib.blake2b(Path(tokens).read_bytes(), digest_size=8).hexdigest()}"
        )
        self.provenance = {
            "source": f"{files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else ""), "kind": "text",
            "tokens": named, "length": str(length), "left out": str(0 if length is None else ends[-1] % length),
            "stamp": stamp(files),
        }  # fmt: skip

    def read(self, start: int, stop: int) -> Sequence[Any]:
        if self._length is not None:
            rows = self._all[start * self._length : stop * self._length]
            return [rows.reshape(stop - start, self._length)]
        return [[self._all[self._ends[row] : self._ends[row + 1]] for row in range(start, stop)]]


def _encoded(files: Sequence[Path], tokens: str) -> Iterator[np.ndarray]:
    if tokens == "byte":
        for path in files:
            yield np.frombuffer(path.read_bytes(), np.uint8)
        return
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise DataError(
            "a tokenizer file needs the package tokenizers: pip install tokenizers, or --tokens byte"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(tokens)
    except Exception as error:
        raise DataError(f"{tokens} cannot be read as a tokenizer file (tokenizer.json): {error}") from None
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not text in UTF-8: {error}") from None
        yield np.array(tokenizer.encode(text).ids, np.int64)
