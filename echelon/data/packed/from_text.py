"""Text as tokens, bytes or those of a tokenizer file, in rows of equal length or one row per document."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from echelon.data.packed.locked_tasks import Task, run_tasks
from echelon.data.packed.manifest import Column
from echelon.data.packed.packing_source import PackingSource, ProgressCallback, digest_file_stats
from echelon.errors import DataError
from echelon.files import acquire_lock, atomic_writer, release_lock, try_lock

#: Approximate number of characters per call of a tokenizer.
_CHUNK_CHARS = 2**19
_UP_TO_LAST_LINE = re.compile(r".*\n(?=\S)", re.DOTALL)
TEXT_SUFFIXES = {".txt", ".text", ".md", ".py", ".rst"}


class TokenPackingSource(PackingSource):
    """The concatenated tokens of all files, cut into rows of `length`, without an incomplete last row; with `length=None` each file is
    a row. `tokens`: "byte", or the path of a tokenizer.json.

    Bytes are read in place. The tokens of each file are kept in `work_folder` until packing is done: `processes` share the work, also
    with other commands, and a command after a kill continues with what is there.
    """

    def __init__(
        self, files: Sequence[Path], *, tokens: str, length: int | None, dtype: str = "int64", work_folder: Path,
        processes: int = 1, progress: ProgressCallback = lambda done, total: None,
    ) -> None:  # fmt: skip
        self._text_files, self._length, self._dtype = list(files), length, np.dtype(dtype)
        self._token_dtype: np.dtype[Any] = np.dtype(np.uint8 if tokens == "byte" else np.int32)
        self._work_folder = None if tokens == "byte" else _SharedTempDir(work_folder)
        self._tokenize = partial(_tokenize_files, files, tokens, work_folder, processes, progress)
        shape = () if length is None else (length,)
        self.columns = (Column(name="tokens", dtype=dtype, shape=shape, ragged=length is None),)
        self.sample = "tokens"
        self.provenance = {
            "source": f"{files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else ""), "kind": "text",
            "tokens": tokens if tokens == "byte" else f"{tokens} {_hash_file(tokens)}", "length": str(length), "stamp": digest_file_stats(files),
        }  # fmt: skip

    def prepare(self) -> None:
        self._token_files = self._text_files
        if self._work_folder is not None:
            self._work_folder.acquire()
            self._token_files = self._tokenize()
        sizes = [path.stat().st_size // self._token_dtype.itemsize for path in self._token_files]
        self._file_ends = np.cumsum([0, *sizes])
        total = int(self._file_ends[-1])
        self.samples = len(self._token_files) if self._length is None else total // self._length
        if not self.samples:
            problem = f"{total:,} tokens do not fill a row of {self._length}"
            raise DataError(f"{problem}: use a shorter --length or more text")
        self.row_bytes = max(1.0, total * self._dtype.itemsize / self.samples)
        self.remarks = {"left out": str(0 if self._length is None else total % self._length)}

    def finish(self) -> None:
        if self._work_folder is not None:
            self._work_folder.remove_if_unused()

    @property
    def identity(self) -> str:
        # The number of samples follows from the files, but is known only after tokenizing.
        return self._digest_identity(self.columns)

    def read(self, start: int, stop: int) -> Sequence[Any]:
        if self._length is None:
            return [[self._read_tokens(self._file_ends[row], self._file_ends[row + 1]) for row in range(start, stop)]]
        return [self._read_tokens(start * self._length, stop * self._length).reshape(stop - start, self._length)]

    def _read_tokens(self, start: int, stop: int) -> np.ndarray:
        parts = []
        file_index = int(self._file_ends.searchsorted(start, "right")) - 1
        while start < stop:
            first, end = int(self._file_ends[file_index]), min(int(stop), int(self._file_ends[file_index + 1]))
            if start < end:
                path, item_bytes = self._token_files[file_index], self._token_dtype.itemsize
                part = np.fromfile(path, self._token_dtype, end - start, offset=(start - first) * item_bytes)
                if len(part) < end - start:
                    raise DataError(f"{path} became shorter since the packing began: run the command again")
                parts.append(part)
            start, file_index = max(start, end), file_index + 1
        tokens = np.concatenate([np.empty(0, self._token_dtype), *parts])
        largest = int(tokens.max(initial=0))
        if largest > np.iinfo(self._dtype).max:
            raise DataError(f"token {largest} does not fit into {self._dtype}: use a wider --dtype")
        return tokens.astype(self._dtype)


def _tokenize_files(
    files: Sequence[Path], tokens: str, work_folder: Path, processes: int, progress: ProgressCallback
) -> list[Path]:
    """Make the missing token files; returns one per text file."""
    tokenizer = _load_tokenizer(tokens)  # refuse a bad one before doing anything
    tokenizer_hash = _hash_file(tokens)
    hashes = {_short_hash(f"{tokenizer_hash} {digest_file_stats([path])}"): path for path in files}
    targets = {work_folder / f"{name}.int32": path for name, path in hashes.items()}
    sizes = {target: path.stat().st_size for target, path in targets.items()}
    missing = sorted((target for target in targets if not target.exists()), key=lambda target: -sizes[target])
    total_bytes = sum(sizes.values())
    done_bytes = total_bytes - sum(sizes[target] for target in missing)
    progress(done_bytes, total_bytes)
    runs = {target: partial(_tokenize_file, targets[target], target, tokenizer) for target in missing}
    tasks = [Task(target=target, is_done=target.exists, run=run) for target, run in runs.items()]
    for new_bytes in run_tasks(tasks, processes):
        done_bytes += new_bytes
        progress(min(done_bytes, total_bytes), total_bytes)
    return list(targets)


def _tokenize_file(path: Path, target: Path, tokenizer: Any) -> Iterator[int]:
    """Write the tokens of one file; yields the bytes read since the last time."""
    reported, size = 0, path.stat().st_size
    try:
        with path.open("rb") as file, atomic_writer(target) as out:
            text_stream = io.TextIOWrapper(file, encoding="utf-8", newline="")
            for ids in _encode_chunks(_split_text(text_stream), tokenizer):
                out.write(np.array(ids, np.int32).tobytes())
                if (position := file.tell()) < size:
                    yield position - reported
                    reported = position
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from None
    yield size - reported


def _split_text(text: TextIO) -> Iterator[str]:
    """Split a large file into pieces, because a tokenizer takes a hundred times the memory of its input. Pieces end at line ends before
    a line that starts without space, where tokenizers cut anyway."""
    buffered = ""
    while len(chunk := text.read(_CHUNK_CHARS)) == _CHUNK_CHARS:
        buffered += chunk
        line_match = _UP_TO_LAST_LINE.match(buffered)
        end = line_match.end() if line_match else len(buffered)
        yield buffered[:end]
        buffered = buffered[end:]
    yield buffered + chunk


def _encode_chunks(chunks: Iterator[str], tokenizer: Any) -> Iterator[list[int]]:
    """Tokenize the pieces of one document, with the special tokens that start and end a document only once."""
    prefix_tokens = suffix_tokens = 0
    is_first = True
    text: str | None = next(chunks)
    while text is not None:
        next_text = next(chunks, None)
        encoding = tokenizer.encode(text)
        if is_first:
            plain = [position for position, special in enumerate(encoding.special_tokens_mask) if not special]
            token_count = len(encoding.special_tokens_mask)
            prefix_tokens, suffix_tokens = (plain[0], token_count - 1 - plain[-1]) if plain else (token_count, 0)
        ids = encoding.ids
        del encoding  # a hundred times the text
        yield ids[0 if is_first else prefix_tokens : len(ids) if next_text is None else len(ids) - suffix_tokens]
        is_first, text = False, next_text


def _load_tokenizer(tokens: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise DataError("a tokenizer file needs tokenizers: pip install tokenizers, or use --tokens byte") from None
    try:
        tokenizer = Tokenizer.from_file(tokens)
        tokenizer.no_truncation()  # some files limit the input to what their model takes
        tokenizer.no_padding()
        return tokenizer
    except Exception as error:
        raise DataError(f"{tokens} cannot be read as a tokenizer file (tokenizer.json): {error}") from None


def _hash_file(path: str) -> str:
    try:
        return _short_hash(Path(path).read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read as a tokenizer file (tokenizer.json): {error.strerror}") from None


def _short_hash(content: str | bytes) -> str:
    return hashlib.blake2b(content.encode() if isinstance(content, str) else content, digest_size=8).hexdigest()


class _SharedTempDir:
    """A folder of intermediate files that processes share; the last one that is done with it deletes it. `acquire` creates it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock_path, self._lock = folder, folder / ".lock", -1

    def acquire(self) -> None:
        while self._lock < 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # deleted between the two calls
                lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o644)
                if try_lock(lock, shared=True) and os.fstat(lock).st_nlink:
                    self._lock = lock
                    return
                release_lock(lock)
            time.sleep(0.01)

    def remove_if_unused(self) -> None:
        """Delete the folder unless another process has acquired it."""
        if self._lock >= 0:
            release_lock(self._lock)
            self._lock = -1
        with suppress(TimeoutError, FileNotFoundError), acquire_lock(self._lock_path):
            shutil.rmtree(self._folder, ignore_errors=True)
