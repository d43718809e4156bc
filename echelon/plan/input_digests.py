"""Digests of what a job is made from: files, folder listings, environment variables, arguments.

An input has a name, "file /data/config.json", "folder /data/images", "environment LR", "argument --lr", and a digest: the value itself where it is
short and printable, so that messages can show both sides, else a hash. Digests are the same in every process and on every machine.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

#: Files up to this size are hashed whole; of larger ones this many blocks at fixed positions, and their size.
_FULL_HASH_BYTES, _SAMPLED_BLOCKS, _BLOCK_BYTES = 8 << 20, 32, 64 << 10
#: In a folder's listing these are not inputs: training itself writes them.
_OUTPUT_NAMES = frozenset({"runs", "__pycache__"})
_MAX_LITERAL_LENGTH = 48
#: Options that launchers add, different for every rank.
_PER_RANK_OPTIONS = frozenset({"--local_rank", "--local-rank"})
ABSENT = "absent"


def digest_text(text: str) -> str:
    """`text` itself where it is short and printable, else a hash of it."""
    if text and len(text) <= _MAX_LITERAL_LENGTH and text.isprintable():
        return text
    return hash_bytes(text.encode(errors="surrogatepass"))


def hash_bytes(data: bytes) -> str:
    """A short hash."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def digest_file(path: str | Path) -> str:
    """A hash of a file's content; of a large file, of its size and of blocks at fixed positions."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _FULL_HASH_BYTES:
                return hash_bytes(file.read())
            hasher = hashlib.blake2b(str(size).encode(), digest_size=8)
            for block in range(_SAMPLED_BLOCKS):
                file.seek(block * (size - _BLOCK_BYTES) // (_SAMPLED_BLOCKS - 1))
                hasher.update(file.read(_BLOCK_BYTES))
            return hasher.hexdigest()
    except OSError:
        return ABSENT


def digest_folder(path: str | Path) -> str:
    """A hash of the names in a folder, without hidden ones and what training writes."""
    try:
        names = sorted(name for name in os.listdir(path) if not name.startswith(".") and name not in _OUTPUT_NAMES)
    except OSError:
        return ABSENT
    return hash_bytes("\0".join(names).encode(errors="surrogatepass"))


def digest_variable(name: str, environment: Mapping[str, str]) -> str:
    """The value of an environment variable, or its hash."""
    return digest_text(environment[name]) if name in environment else ABSENT


def digest_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Command-line arguments by name: `--lr 0.5 data.csv` is {"argument --lr": "0.5", "argument 1": ...}.

    A word after an option is taken for its value: only the script knows better, and here it only needs a name.
    """
    words_by_name: dict[str, list[str]] = {}
    name, position = "", 0
    for word in arguments:
        if word.startswith("-") and not _is_number(word):
            name, _, value = word.partition("=")
            words_by_name.setdefault(name, []).extend([value] if value else [])
        elif name:
            words_by_name[name].append(word)
        else:
            position += 1
            words_by_name[str(position)] = [word]
    named = {f"argument {name}": words for name, words in words_by_name.items() if name not in _PER_RANK_OPTIONS}
    return {name: digest_text(" ".join(words)) if words else "given" for name, words in named.items()}


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def current_digests(
    inputs: Iterable[str], environment: Mapping[str, str], arguments: Sequence[str] = ()
) -> dict[str, str]:
    """The present digests of these inputs."""
    argument_digests = digest_arguments(arguments)
    digest_functions: dict[str, Callable[[str], str]] = {
        "file": digest_file,
        "folder": digest_folder,
        "environment": lambda name: digest_variable(name, environment),
        "argument": lambda name: argument_digests.get(f"argument {name}", ABSENT),
    }
    parts = {name: name.partition(" ") for name in inputs}
    return {name: digest_functions[kind](rest) for name, (kind, _, rest) in parts.items() if kind in digest_functions}


def describe_differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What changed, both sides named: `argument --lr: 0.01 then, 0.5 now`."""
    pairs = {name: (before.get(name, ABSENT), now.get(name, ABSENT)) for name in sorted({*before, *now})}
    return [f"{name}: {old} then, {new} now" for name, (old, new) in pairs.items() if old != new]
