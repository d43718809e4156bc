"""Text as tokens: bytes, or what a tokenizer file makes of it, in rows of equal length or one row per document."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from echelon.data.packed.locked_tasks import Task, share
from echelon.data.packed.manifest import Column, settle
from echelon.data.packed.packing_source import Origin, Progress, stamp
from echelon.data.packed.temp_dir import Scratch
from echelon.errors import DataError

#: Letters that a tokenizer gets at once, about.
_PIECE = 2**19
_LINES = re.compile(r".*\n(?=\S)", re.DOTALL)
ENDINGS = {".txt", ".text", ".md", ".py", ".rst"}


class Tokens(Origin):
    """The tokens of all files, one behind the other, cut into rows of `length` (a rest that fills no row is left out);
    with `length=None` each file is a row of its own length. `tokens`: "byte", or the path of a tokenizer.json.

    Bytes are read where they are. A tokenizer's work is kept in the folder `kept`, file by file, until the packing is done: `processes`
    share it, also with other commands, and one that comes after a kill goes on with what is there.
    """

    def __init__(
        self, files: Sequence[Path], *, tokens: str, length: int | None, dtype: str = "int64", kept: Path,
        processes: int = 1, progress: Progress = lambda done, total: None,
    ) -> None:  # fmt: skip
        self._texts, self._length, self._dtype = list(files), length, np.dtype(dtype)
        self._item: np.dtype[Any] = np.dtype(np.uint8 if tokens == "byte" else np.int32)
        self._kept = None if tokens == "byte" else Scratch(kept)
        self._encode = partial(_encoded, files, tokens, kept, processes, progress)
        self.columns = (
            Column(name="tokens", dtype=dtype, shape=() if length is None else (length,), ragged=length is None),
        )
        self.sample = "tokens"
        self.provenance = {
            "source": f"{files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else ""), "kind": "text",
            "tokens": tokens if tokens == "byte" else f"{tokens} {_hash(tokens)}", "length": str(length), "stamp": stamp(files),
        }  # fmt: skip

    def prepare(self) -> None:
        self._files = self._texts
        if self._kept is not None:
            self._kept.hold()
            self._files = self._encode()
        sizes = [path.stat().st_size // self._item.itemsize for path in self._files]
        self._ends = np.cumsum([0, *sizes])
        total = int(self._ends[-1])
        self.samples = len(self._files) if self._length is None else total // self._length
        if not self.samples:
            raise DataError(
                f"{total:,} tokens do not fill one row of {self._length}: use a shorter --length, or more text"
            )
        self.row_bytes = max(1.0, total * self._dtype.itemsize / self.samples)
        self.remarks = {"left out": str(0 if self._length is None else total % self._length)}

    def finish(self) -> None:
        if self._kept is not None:
            self._kept.leave()

    @property
    def identity(self) -> str:
        # The number of samples follows from the files, and is not known before they are tokenized.
        return self._identity(self.columns)

    def read(self, start: int, stop: int) -> Sequence[Any]:
        if self._length is None:
            return [[self._between(self._ends[row], self._ends[row + 1]) for row in range(start, stop)]]
        return [self._between(start * self._length, stop * self._length).reshape(stop - start, self._length)]

    def _between(self, start: int, stop: int) -> np.ndarray:
        """The tokens at places `start` to `stop` of all files."""
        parts = []
        number = int(self._ends.searchsorted(start, "right")) - 1
        while start < stop:
            first, end = int(self._ends[number]), min(int(stop), int(self._ends[number + 1]))
            if start < end:
                parts.append(self._part(self._files[number], start - first, end - start))
            start, number = max(start, end), number + 1
        found = np.concatenate([np.empty(0, self._item), *parts])
        largest = int(found.max(initial=0))
        if largest > np.iinfo(self._dtype).max:
            raise DataError(f"token {largest} does not fit into {self._dtype}: use a wider --dtype")
        return found.astype(self._dtype)

    def _part(self, path: Path, start: int, count: int) -> np.ndarray:
        found = np.fromfile(path, self._item, count, offset=start * self._item.itemsize)
        if len(found) < count:
            raise DataError(f"{path} has become shorter since the packing began: run the command again")
        return found


def _encoded(files: Sequence[Path], tokens: str, kept: Path, processes: int, progress: Progress) -> list[Path]:
    """For each file the file of its tokens; what is missing is made."""
    tokenizer = _tokenizer(tokens)  # a bad one is told of before anything is done
    key = _hash(tokens)
    made = {kept / f"{_key(f'{key} {stamp([path])}')}.int32": path for path in files}
    sizes = {target: path.stat().st_size for target, path in made.items()}
    missing = sorted((target for target in made if not target.exists()), key=lambda target: -sizes[target])
    total = sum(sizes.values())
    done = total - sum(sizes[target] for target in missing)
    progress(done, total)
    tasks = [
        Task(makes=target, done=target.exists, make=partial(_encode, made[target], target, tokenizer))
        for target in missing
    ]
    for more in share(tasks, processes):
        done += more
        progress(min(done, total), total)
    return list(made)


def _encode(path: Path, target: Path, tokenizer: Any) -> Iterator[int]:
    """Write the tokens of one file; gives how many more of its bytes are read."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    told, size = 0, path.stat().st_size
    try:
        with path.open("rb") as file, temporary.open("wb") as out:
            text = io.TextIOWrapper(file, encoding="utf-8", newline="")
            for ids in _ids(_pieces(text), tokenizer):
                out.write(np.array(ids, np.int32).tobytes())
                if (place := file.tell()) < size:
                    yield place - told
                    told = place
            out.flush()
            os.fsync(out.fileno())
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8: {error}") from None
    settle(temporary, target)
    yield size - told


def _pieces(text: TextIO) -> Iterator[str]:
    """A small file whole; a large one in pieces, for a tokenizer takes a hundred times the memory of what it is given. They end where a line
    does and the next begins without space, where tokenizers cut by themselves."""
    left = ""
    while len(more := text.read(_PIECE)) == _PIECE:
        left += more
        lines = _LINES.match(left)
        end = lines.end() if lines else len(left)
        yield left[:end]
        left = left[end:]
    yield left + more


def _ids(pieces: Iterator[str], tokenizer: Any) -> Iterator[list[int]]:
    """The tokens of the pieces of one document: what the tokenizer puts before and behind a document stands there once."""
    before = behind = 0
    first = True
    text: str | None = next(pieces)
    while text is not None:
        after = next(pieces, None)
        found = tokenizer.encode(text)
        if first:
            added = found.special_tokens_mask
            before = next((place for place, one in enumerate(added) if not one), len(added))
            behind = next((place for place, one in enumerate(reversed(added)) if not one), 0)
        ids = found.ids
        del found  # a hundred times the text: not to be held beside the next one
        yield ids[0 if first else before : len(ids) if after is None else len(ids) - behind]
        first, text = False, after


def _tokenizer(tokens: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise DataError(
            "a tokenizer file needs the package tokenizers: pip install tokenizers, or --tokens byte"
        ) from None
    try:
        found = Tokenizer.from_file(tokens)
        found.no_truncation()  # some files say how long a model's input may be, and the rest of a text would be gone
        found.no_padding()
        return found
    except Exception as error:
        raise DataError(f"{tokens} cannot be read as a tokenizer file (tokenizer.json): {error}") from None


def _hash(path: str) -> str:
    try:
        return _key(Path(path).read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read as a tokenizer file (tokenizer.json): {error.strerror}") from None


def _key(content: str | bytes) -> str:
    return hashlib.blake2b(content.encode() if isinstance(content, str) else content, digest_size=8).hexdigest()
