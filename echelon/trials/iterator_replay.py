"""Iterators that can be rewound: trial calls must not use up what a model or a loss draws from."""

from __future__ import annotations

from collections.abc import Iterator
from io import IOBase
from typing import Any


class ReplayableIterator(Iterator[Any]):
    """Draws from a user's iterator. Copies continue from its position, each on its own."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self.num_drawn = 0
        #: The next item and the node after it; empty until one is drawn. Copies share nodes; a node that all have passed is freed.
        self._next_node: list[Any] = []

    def __next__(self) -> Any:
        if not self._next_node:
            self._next_node.extend((next(self._source), []))
        value, self._next_node = self._next_node
        self.num_drawn += 1
        return value

    def __copy__(self) -> ReplayableIterator:
        duplicate = ReplayableIterator(self._source)
        duplicate.advance_to(self)
        return duplicate

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayableIterator:
        return memo.setdefault(id(self), self.__copy__())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._source, name)  # `send` of a generator, `line_num` of a csv.reader

    def advance_to(self, target: ReplayableIterator | int) -> bool:
        """Continue from the position of another one, or after `target` items in all; returns whether that is possible."""
        if isinstance(target, ReplayableIterator):
            self.num_drawn, self._next_node = target.num_drawn, target._next_node
            return True
        for _ in zip(range(target - self.num_drawn), self, strict=False):
            pass
        return self.num_drawn == target

    @property
    def is_reproducible(self) -> bool:
        """Whether a new one gets to the same position by drawing as many items, as Python's own iterators do."""
        return type(self._source).__module__ in ("builtins", "itertools")


def is_plain_iterator(value: Any) -> bool:
    """Whether a value is an iterator whose position nothing shows: not a file, and not yet a `ReplayableIterator`."""
    return isinstance(value, Iterator) and not isinstance(value, ReplayableIterator | IOBase)
