"""Iterators that can be put back: calls that are only tried must not use up what a model or a loss draws from."""

from __future__ import annotations

from collections.abc import Iterator
from io import IOBase
from typing import Any


class Replay(Iterator[Any]):
    """Draws from an iterator of the user's. Copies go on from where this one is, each on its own."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        #: How many items were drawn.
        self.count = 0
        #: The next item and the node after it; empty until somebody draws it. Copies share nodes, and nodes that all have passed are freed.
        self._node: list[Any] = []

    def __next__(self) -> Any:
        if not self._node:
            self._node.extend((next(self._source), []))
        value, self._node = self._node
        self.count += 1
        return value

    def __copy__(self) -> Replay:
        other = Replay(self._source)
        other.refill(self)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Replay:
        return memo.setdefault(id(self), self.__copy__())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._source, name)  # `send` of a generator, `line_num` of a csv.reader

    def refill(self, other: Replay | int) -> bool:
        """Go on from where another one is, or after so many items in all; whether it can."""
        if isinstance(other, Replay):
            self.count, self._node = other.count, other._node
            return True
        try:
            while self.count < other:
                next(self)
        except StopIteration:
            pass
        return self.count == other

    @property
    def is_stored(self) -> bool:
        """Whether a new one comes to the same place by drawing as many items: iterators of Python's own do."""
        return type(self._source).__module__ in ("builtins", "itertools")


def is_plain_iterator(value: Any) -> bool:
    """Whether a value is an iterator whose place nothing shows: not a file, and not yet a `Replay`."""
    return isinstance(value, Iterator) and not isinstance(value, Replay | IOBase)
