"""A pipeline's step event by event: a fixed order on each rank, and the longest path through it.

The order never depends on how long things take, so that nothing gets slower when something gets faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

#: Kinds of work: forward, backward (all of it, or of what was read only), backward of the weights.
F, B, W = 0, 1, 2
#: Rounds after which nothing of an interleaved order waits any more for what was done before them.
_MEMORY = 5
#: Times that differ by less than this part of themselves are the same.
_EQUAL = 1e-9
#: (rank, kind, stage, micro-batch, begin, end).
Step = tuple[int, int, int, int, float, float]


def executed(schedule: str, ranks: int, chunks: int, count: int) -> str:
    """Micro-batches that do not fill all rounds of an interleaved order go forward all first, then back, as with gpipe."""
    return "gpipe" if chunks > 1 and count % ranks else schedule


@lru_cache(maxsize=256)
def order(schedule: str, ranks: int, chunks: int, count: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """For each rank its work in order: (kind, stage, micro-batch). Stage `n` is on rank `n % ranks`."""
    schedule = executed(schedule, ranks, chunks, count)
    found = []
    for rank in range(ranks):
        if schedule == "gpipe":
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

    Further rounds of micro-batches need not be walked once it is certain what each of them takes (`_settled`).
    """
    chunks, left = len(forward) // ranks, count % ranks
    turns = 1 if chunks == 1 else _MEMORY + 1
    while (turns + 1) * ranks + left < count:
        few, more = (
            _walk(schedule, forward, backward, ranks, chunks, each * ranks + left, weights)
            for each in (turns, turns + 1)
        )
        round_ = _settled(executed(schedule, ranks, chunks, count), forward, backward, ranks, few, more)
        if round_ is not None:
            return max(map(_last, more)) + (count - (turns + 1) * ranks - left) / ranks * round_
        turns *= 2
    return max(map(_last, _walk(schedule, forward, backward, ranks, chunks, count, weights)))


def _settled(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    ranks: int,
    few: list[list[float]],
    more: list[list[float]],
) -> float | None:
    """Seconds that every further round takes; None: not known yet. `few` and `more` have one round more of each other.

    With one stage on each rank, and where all go forward first, no round takes longer than `_pace` says. Once one takes as long, the
    longest path goes through the slowest rank, and every further round puts the same on it. With several stages on each rank: where all
    that is done in the last rounds is done later by the same time on all ranks, the next round starts as this one did.
    """
    took = max(map(_last, more)) - max(map(_last, few))
    if schedule == "gpipe" or len(forward) == ranks:
        pace = ranks * _pace(schedule, forward, backward, ranks)
        return pace if took >= pace * (1 - _EQUAL) else None
    near = _EQUAL * max(map(_last, more))
    for before, after in zip(few, more, strict=True):
        tail = _MEMORY * (len(after) - len(before))
        if any(abs(b - a - took) > near for a, b in zip(before[-tail:], after[-tail:], strict=True)):
            return None
    return took


def _pace(schedule: str, forward: Sequence[float], backward: Sequence[float], ranks: int) -> float:
    """Seconds that each further micro-batch takes at most: all work of the slowest rank; where all go forward first each chunk has a
    slowest rank of its own, there and back."""
    if schedule != "gpipe":
        return max(sum(forward[rank::ranks]) + sum(backward[rank::ranks]) for rank in range(ranks))
    chunks = range(0, len(forward), ranks)
    return sum(max(side[first : first + ranks]) for side in (forward, backward) for first in chunks)


def walk(
    schedule: str, forward: Sequence[float], backward: Sequence[float], *, ranks: int, count: int, weights: float = 0.5
) -> list[Step]:
    """Every step of every rank, with when it begins and ends."""
    events: list[Step] = []
    _walk(schedule, forward, backward, ranks, len(forward) // ranks, count, weights, events)
    return events


@lru_cache(maxsize=4096)
def in_flight(schedule: str, ranks: int, chunks: int, count: int, rank: int) -> float:
    """How many micro-batches a rank keeps at once for their backward, in all that its stages keep of one. What the weights' part of
    backward reads is kept until that is done."""
    if executed(schedule, ranks, chunks, count) == "gpipe":
        return float(count)
    # Once the pipe is full nothing more comes in than goes out.
    few = min(count, 4 * ranks + count % ranks)
    steps = order(schedule, ranks, chunks, few)[rank]
    ends = W if any(kind == W for kind, _, _ in steps) else B
    held = most = 0
    for kind, _, _ in steps:
        held += (kind == F) - (kind == ends)
        most = max(most, held)
    return most / chunks


def least(schedule: str, forward: Sequence[float], backward: Sequence[float], *, ranks: int, count: int) -> float:
    """What `length` never falls below: a rank does all its work, after the first micro-batch came to it and before the last went back.
    Where the weights' part of backward is done last, nothing waits for it."""
    most = filled = 0.0
    for rank in range(ranks):
        most = max(most, count * (sum(forward[rank::ranks]) + sum(backward[rank::ranks])) + filled)
        filled += forward[rank] + (0.0 if schedule == "zero-bubble" else backward[rank])
    return most


def _last(clocks: list[float]) -> float:
    return clocks[-1]


def _walk(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    ranks: int,
    chunks: int,
    count: int,
    weights: float,
    events: list[Step] | None = None,
) -> list[list[float]]:
    """For each rank when it has done each of its steps."""
    steps = order(schedule, ranks, chunks, count)
    last = ranks * chunks - 1
    split = executed(schedule, ranks, chunks, count) == "zero-bubble"
    took = (
        forward,
        [each * (1 - weights) for each in backward] if split else backward,
        [each * weights for each in backward],
    )
    done: tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]] = ({}, {})
    clock: list[list[float]] = [[0.0] for _ in range(ranks)]
    place = [0] * ranks
    moving = True
    while moving:
        moving = False
        for rank in range(ranks):
            mine, at, ends = steps[rank], place[rank], clock[rank]
            now = ends[-1]
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
                ends.append(now)
                at += 1
                moving = True
            place[rank] = at
    assert all(at == len(mine) for at, mine in zip(place, steps, strict=True)), (
        "an order in which ranks wait for each other"
    )
    return clock
