"""A shard on disk: where its samples stand in the data set, and whether its bytes are as they were written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echelon.data.packed import block_layout
from echelon.data.packed.manifest import RESTORE_SHARD, Column, Manifest, Shard
from echelon.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A shard, its path, the rows per checksum, and the number of its first sample in the data set."""

    path: Path
    shard: Shard
    block: int
    first_sample: int

    @property
    def end_sample(self) -> int:
        """The number after its last sample's."""
        return self.first_sample + self.shard.samples

    def describe(self, start: int = 0, stop: int | None = None, block: int | None = None) -> str:
        """Name rows `start` to `stop` of the file in messages."""
        block_text = "" if block is None else f", block {block}"
        last = (self.end_sample if stop is None else self.first_sample + stop) - 1
        return f"{self.path}{block_text} (samples {self.first_sample + start:,} to {last:,})"

    def find_problem(self) -> str | None:
        """Why the file cannot hold its shard: it is missing, or has another size."""
        try:
            size = self.path.stat().st_size
        except OSError as error:
            return f"{self.describe()} cannot be read: {error.strerror or error}; {RESTORE_SHARD}"
        if size == self.shard.bytes:
            return None
        problem = "is cut off" if size < self.shard.bytes else "is too long"
        return f"{self.describe()} {problem}: it has {size:,} bytes of {self.shard.bytes:,}; {RESTORE_SHARD}"

    def find_block_damage(self, contents: Sequence[np.ndarray], columns: Sequence[Column], block: int) -> str | None:
        """What is wrong with a block, if anything. `contents`: the file's bytes, once per column, which may be mapped separately."""
        start = block * self.block
        stop = min(start + self.block, self.shard.samples)
        actual = block_layout.block_checksum(contents, columns, self.shard, start, stop)
        expected = self.shard.checksums[block]
        if actual == expected:
            return None
        reason = "its offsets point outside of the file"
        if actual is not None:
            reason = f"its checksum is {actual:08x}, not {expected:08x}"
        return f"{self.describe(start, stop, block)} is damaged: {reason}"

    def find_damage(self, columns: Sequence[Column]) -> Iterator[tuple[int, int, str]]:
        """Read everything; yield the first sample and the end of each damaged part, and what is wrong with it."""
        problem = self.find_problem()
        if problem:
            yield self.first_sample, self.end_sample, problem
            return
        contents = [self._map()] * len(columns)
        for block in range(len(self.shard.checksums)):
            problem = self.find_block_damage(contents, columns, block)
            if problem:
                start = self.first_sample + block * self.block
                yield start, min(start + self.block, self.end_sample), problem

    def verify(self, columns: Sequence[Column]) -> Iterator[str]:
        """Read everything; yield each problem, also of Arrow's metadata, which reading samples does not need."""
        for _, _, problem in self.find_damage(columns):
            yield problem
        if self.find_problem():
            return
        if block_layout.frame_checksum(self._map(), columns, self.shard) != self.shard.frame:
            yield f"{self.path}: Arrow's metadata in it is damaged (its samples are not): other programs may fail to read it"

    def _map(self) -> np.ndarray:
        return np.memmap(self.path, np.uint8, "r")


def list_shard_files(folders: Sequence[Path], manifests: Sequence[Manifest]) -> list[ShardFile]:
    """All files of consecutive data sets."""
    files: list[ShardFile] = []
    for folder, manifest in zip(folders, manifests, strict=True):
        for shard in manifest.shards:
            first, path = files[-1].end_sample if files else 0, folder / shard.file
            files.append(ShardFile(path=path, shard=shard, block=manifest.block, first_sample=first))
    if not files[-1].end_sample:
        raise DataError(f"{folders[0]} holds no samples")
    return files
