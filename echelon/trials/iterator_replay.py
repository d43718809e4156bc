"""Iterators that can be put back: calls that are only tried must not use up what a model or a loss draws from."""

from __future__ import annotations

from collections.abc import Iterator
from io import IOBase
from typing import Any


class ReplayableIterator(Iterator[Any]):
    """Draws from an iterator of the user's. Copies go on from where this one is, each on its own."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        #: How many items were drawn.
        self.num_drawn = 0
        #: The next item and the node after it; empty until somebody draws it. Copies share nodes, and nodes that all have passed are freed.
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
        """Go on from where another one is, or after so many items in all; whether it can."""
        if isinstance(target, ReplayableIterator):
            self.num_drawn, self._next_node = target.num_drawn, target._next_node
            return True
        try:
            while self.num_drawn < target:
                next(self)
        except StopIteration:
            pass
        return self.num_drawn == target

    @property
    def is_reproducible(self) -> bool:
        """Whether a new one comes to the same place by drawing as many items: iterators of Python's own do."""
        return type(self._source).__module__ in ("builtins", "itertools")


def is_plain_iterator(value: Any) -> bool:
    """Whether a value is an iterator whose place nothing shows: not a file, and not yet a `ReplayableIterator`."""
    return isinstance(value, Iterator) and not isinstance(value, ReplayableIterator | IOBase)
