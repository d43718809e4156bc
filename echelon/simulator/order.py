"""A pipeline's step event by event: a fixed order on each rank, and the longest path through it.

The order never depends on how long things take, so that nothing gets slower when something gets faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

#: Kinds of work: forward, backward (all of it, or of what was read only), backward of the weights.
F, B, W = 0, 1, 2
#: (rank, kind, stage, micro-batch, begin, end).
Step = tuple[int, int, int, int, float, float]
#: Micro-batches per rank from which on a step is reckoned and not walked.
_LONG = 10


@lru_cache(maxsize=256)
def order(schedule: str, ranks: int, chunks: int, count: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """For each rank its work in order: (kind, stage, micro-batch). Stage `n` is on rank `n % ranks`."""
    found = []
    for rank in range(ranks):
        if schedule == "gpipe" or (chunks > 1 and count % ranks):
            forward = [(F, chunk * ranks + rank, micro) for chunk in range(chunks) for micro in range(count)]
            backward = [(B, chunk * ranks + rank, micro) for chunk in reversed(range(chunks)) for micro in range(count)]
            found.append(tuple(forward + backward))
            continue
        if chunks > 1:
            forward, backward = _interleaved(rank, ranks, chunks, count)
            ahead = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, len(forward))
        else:
            forward = [(F, rank, micro) for micro in range(count)]
            backward = [(B, rank, micro) for micro in range(count)]
            ahead = min(ranks - rank - 1, count)
        steps = forward[:ahead]
        for done, step in enumerate(forward[ahead:]):
            steps += [step, backward[done]]
        steps += backward[len(forward) - ahead :]
        found.append(tuple(_fill(steps, rank) if schedule == "zero-bubble" else steps))
    return tuple(found)


def _interleaved(
    rank: int, ranks: int, chunks: int, count: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Groups of as many micro-batches as ranks go through one chunk after another (Narayanan et al. 2021)."""
    forward, backward = [], []
    for first in range(0, count, ranks):
        for chunk in range(chunks):
            for micro in range(first, first + ranks):
                forward.append((F, chunk * ranks + rank, micro))
                backward.append((B, (chunks - 1 - chunk) * ranks + rank, micro))
    return forward, backward


def _fill(steps: list[tuple[int, int, int]], late: int) -> list[tuple[int, int, int]]:
    """Backward of the weights comes `late` backwards after that of what was read, so that others need not wait for it (Qi et al. 2023)."""
    filled: list[tuple[int, int, int]] = []
    waiting: list[tuple[int, int, int]] = []
    for step in steps:
        filled.append(step)
        if step[0] == B:
            waiting.append((W, step[1], step[2]))
            if len(waiting) > late:
                filled.append(waiting.pop(0))
    return filled + waiting


def length(
    schedule: str, forward: Sequence[float], backward: Sequence[float], *, ranks: int, count: int, weights: float = 0.5
) -> float:
    """Seconds from the first forward to the last backward. `forward`, `backward`: of each stage for one micro-batch, what it sends
    included. `weights`: the part of backward that is the weights', where the schedule parts them.

    Once the pipe is full every further round of micro-batches takes about as long as the last: long steps are reckoned from short ones.
    """
    chunks = len(forward) // ranks
    if count <= _LONG * ranks:
        return _walk(schedule, forward, backward, ranks, chunks, count, weights)
    extra = count % ranks
    few, many = (
        _walk(schedule, forward, backward, ranks, chunks, turns * ranks + extra, weights)
        for turns in (_LONG - 2, _LONG)
    )
    reckoned = many + (count - _LONG * ranks - extra) / (2 * ranks) * (many - few)
    return max(reckoned, least(schedule, forward, backward, ranks=ranks, count=count))


def walk(
    schedule: str, forward: Sequence[float], backward: Sequence[float], *, ranks: int, count: int, weights: float = 0.5
) -> list[Step]:
    """Every step of every rank, with when it begins and ends."""
    events: list[Step] = []
    _walk(schedule, forward, backward, ranks, len(forward) // ranks, count, weights, events)
    return events


def least(schedule: str, forward: Sequence[float], backward: Sequence[float], *, ranks: int, count: int) -> float:
    """What `length` never falls below: a rank does all its work, after the first micro-batch came to it and before the last went back.
    Where the weights' part of backward is done last, nothing waits for it."""
    most = filled = 0.0
    for rank in range(ranks):
        most = max(most, count * (sum(forward[rank::ranks]) + sum(backward[rank::ranks])) + filled)
        filled += forward[rank] + (0.0 if schedule == "zero-bubble" else backward[rank])
    return most


def _walk(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    ranks: int,
    chunks: int,
    count: int,
    weights: float,
    events: list[Step] | None = None,
) -> float:
    steps = order(schedule, ranks, chunks, count)
    last = ranks * chunks - 1
    split = schedule == "zero-bubble"
    took = (
        forward,
        [each * (1 - weights) for each in backward] if split else backward,
        [each * weights for each in backward],
    )
    done: tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]] = ({}, {})
    clock, place = [0.0] * ranks, [0] * ranks
    moving = True
    while moving:
        moving = False
        for rank in range(ranks):
            mine, at, now = steps[rank], place[rank], clock[rank]
            while at < len(mine):
                kind, stage, micro = mine[at]
                if kind == F:
                    ready = done[F].get((stage - 1, micro)) if stage else 0.0
                elif kind == B:
                    ready = done[B].get((stage + 1, micro)) if stage < last else done[F].get((stage, micro))
                else:
                    ready = 0.0
                if ready is None:
                    break
                begin = max(now, ready)
                now = begin + took[kind][stage]
                if events is not None:
                    events.append((rank, kind, stage, micro, begin, now))
                if kind != W:
                    done[kind][stage, micro] = now
                at += 1
                moving = True
            place[rank], clock[rank] = at, now
    assert all(at == len(mine) for at, mine in zip(place, steps, strict=True)), (
        "an order in which ranks wait for each other"
    )
    return max(clock)
