"""A pipeline's step event by event: a fixed order on each rank, and the longest path through it.

The order never depends on how long things take, so that nothing gets slower when something gets faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

#: Kinds of work: forward, backward (all of it, or of what was read only), backward of the weights.
FORWARD, BACKWARD, WEIGHT_BACKWARD = 0, 1, 2
#: Rounds after which nothing of an interleaved order waits any more for what was done before them.
_SETTLING_ROUNDS = 5
#: Times that differ by less than this part of themselves are the same.
_RELATIVE_TOLERANCE = 1e-9
#: (rank, kind, stage, micro-batch, begin, end).
TimedAction = tuple[int, int, int, int, float, float]


def effective_schedule(schedule: str, ranks: int, chunks: int, micro_batch_count: int) -> str:
    """Micro-batches that do not fill all rounds of an interleaved order go forward all first, then back, as with gpipe."""
    return "gpipe" if chunks > 1 and micro_batch_count % ranks else schedule


@lru_cache(maxsize=256)
def schedule_actions(
    schedule: str, ranks: int, chunks: int, micro_batch_count: int
) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """For each rank its work in order: (kind, stage, micro-batch). Stage `n` is on rank `n % ranks`."""
    schedule = effective_schedule(schedule, ranks, chunks, micro_batch_count)
    rank_actions = []
    for rank in range(ranks):
        if schedule == "gpipe":
            forward = [
                (FORWARD, chunk * ranks + rank, micro_batch)
                for chunk in range(chunks)
                for micro_batch in range(micro_batch_count)
            ]
            backward = [
                (BACKWARD, chunk * ranks + rank, micro_batch)
                for chunk in reversed(range(chunks))
                for micro_batch in range(micro_batch_count)
            ]
            rank_actions.append(tuple(forward + backward))
            continue
        if chunks > 1:
            forward, backward = _interleaved_actions(rank, ranks, chunks, micro_batch_count)
            warmup = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, len(forward))
        else:
            forward = [(FORWARD, rank, micro_batch) for micro_batch in range(micro_batch_count)]
            backward = [(BACKWARD, rank, micro_batch) for micro_batch in range(micro_batch_count)]
            warmup = min(ranks - rank - 1, micro_batch_count)
        actions = forward[:warmup]
        for index, action in enumerate(forward[warmup:]):
            actions += [action, backward[index]]
        actions += backward[len(forward) - warmup :]
        rank_actions.append(tuple(_insert_weight_backwards(actions, rank) if schedule == "zero-bubble" else actions))
    return tuple(rank_actions)


def _interleaved_actions(
    rank: int, ranks: int, chunks: int, micro_batch_count: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Groups of as many micro-batches as ranks go through one chunk after another (Narayanan et al. 2021)."""
    forward, backward = [], []
    for first in range(0, micro_batch_count, ranks):
        for chunk in range(chunks):
            for micro_batch in range(first, first + ranks):
                forward.append((FORWARD, chunk * ranks + rank, micro_batch))
                backward.append((BACKWARD, (chunks - 1 - chunk) * ranks + rank, micro_batch))
    return forward, backward


def _insert_weight_backwards(actions: list[tuple[int, int, int]], delay: int) -> list[tuple[int, int, int]]:
    """Backward of the weights comes `delay` backwards after that of what was read, so that others need not wait for it (Qi et al. 2023)."""
    filled: list[tuple[int, int, int]] = []
    pending: list[tuple[int, int, int]] = []
    for action in actions:
        filled.append(action)
        if action[0] == BACKWARD:
            pending.append((WEIGHT_BACKWARD, action[1], action[2]))
            if len(pending) > delay:
                filled.append(pending.pop(0))
    return filled + pending


def makespan(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    ranks: int,
    micro_batch_count: int,
    weight_fraction: float = 0.5,
) -> float:
    """Seconds from the first forward to the last backward. `forward`, `backward`: of each stage for one micro-batch, what it sends
    included. `weight_fraction`: the part of backward that is the weights', where the schedule parts them.

    Further rounds of micro-batches need not be walked once it is certain what each of them takes (`_steady_round_seconds`).
    """
    chunks, remainder = len(forward) // ranks, micro_batch_count % ranks
    rounds = 1 if chunks == 1 else _SETTLING_ROUNDS + 1
    while (rounds + 1) * ranks + remainder < micro_batch_count:
        shorter, longer = (
            _action_end_times(
                schedule, forward, backward, ranks, chunks, round_count * ranks + remainder, weight_fraction
            )
            for round_count in (rounds, rounds + 1)
        )
        round_seconds = _steady_round_seconds(
            effective_schedule(schedule, ranks, chunks, micro_batch_count), forward, backward, ranks, shorter, longer
        )
        if round_seconds is not None:
            return (
                max(map(_end_time, longer))
                + (micro_batch_count - (rounds + 1) * ranks - remainder) / ranks * round_seconds
            )
        rounds *= 2
    return max(
        map(
            _end_time, _action_end_times(schedule, forward, backward, ranks, chunks, micro_batch_count, weight_fraction)
        )
    )


def _steady_round_seconds(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    ranks: int,
    shorter: list[list[float]],
    longer: list[list[float]],
) -> float | None:
    """Seconds that every further round takes; None: not known yet. `shorter` and `longer` have one round more of each other.

    With one stage on each rank, and where all go forward first, no round takes longer than `_micro_batch_seconds_limit` says. Once one takes as long, the
    longest path goes through the slowest rank, and every further round puts the same on it. With several stages on each rank: where all
    that is done in the last rounds is done later by the same time on all ranks, the next round starts as this one did.
    """
    difference = max(map(_end_time, longer)) - max(map(_end_time, shorter))
    if schedule == "gpipe" or len(forward) == ranks:
        round_limit = ranks * _micro_batch_seconds_limit(schedule, forward, backward, ranks)
        return round_limit if difference >= round_limit * (1 - _RELATIVE_TOLERANCE) else None
    tolerance = _RELATIVE_TOLERANCE * max(map(_end_time, longer))
    for shorter_times, longer_times in zip(shorter, longer, strict=True):
        tail = _SETTLING_ROUNDS * (len(longer_times) - len(shorter_times))
        if any(
            abs(longer_time - shorter_time - difference) > tolerance
            for shorter_time, longer_time in zip(shorter_times[-tail:], longer_times[-tail:], strict=True)
        ):
            return None
    return difference


def _micro_batch_seconds_limit(schedule: str, forward: Sequence[float], backward: Sequence[float], ranks: int) -> float:
    """Seconds that each further micro-batch takes at most: all work of the slowest rank; where all go forward first each chunk has a
    slowest rank of its own, there and back."""
    if schedule != "gpipe":
        return max(sum(forward[rank::ranks]) + sum(backward[rank::ranks]) for rank in range(ranks))
    chunks = range(0, len(forward), ranks)
    return sum(max(stage_seconds[first : first + ranks]) for stage_seconds in (forward, backward) for first in chunks)


def timed_actions(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    ranks: int,
    micro_batch_count: int,
    weight_fraction: float = 0.5,
) -> list[TimedAction]:
    """Every step of every rank, with when it begins and ends."""
    actions: list[TimedAction] = []
    _action_end_times(
        schedule, forward, backward, ranks, len(forward) // ranks, micro_batch_count, weight_fraction, actions
    )
    return actions


@lru_cache(maxsize=4096)
def in_flight_micro_batches(schedule: str, ranks: int, chunks: int, micro_batch_count: int, rank: int) -> float:
    """How many micro-batches a rank keeps at once for their backward, in all that its stages keep of one. What the weights' part of
    backward reads is kept until that is done."""
    if effective_schedule(schedule, ranks, chunks, micro_batch_count) == "gpipe":
        return float(micro_batch_count)
    # Once the pipe is full nothing more comes in than goes out.
    simulated_count = min(micro_batch_count, 4 * ranks + micro_batch_count % ranks)
    actions = schedule_actions(schedule, ranks, chunks, simulated_count)[rank]
    releasing_kind = WEIGHT_BACKWARD if any(kind == WEIGHT_BACKWARD for kind, _, _ in actions) else BACKWARD
    in_flight_stages = peak = 0
    for kind, _, _ in actions:
        in_flight_stages += (kind == FORWARD) - (kind == releasing_kind)
        peak = max(peak, in_flight_stages)
    return peak / chunks


def makespan_lower_bound(
    schedule: str, forward: Sequence[float], backward: Sequence[float], *, ranks: int, micro_batch_count: int
) -> float:
    """What `makespan` never falls below: a rank does all its work, after the first micro-batch came to it and before the last went back.
    Where the weights' part of backward is done last, nothing waits for it."""
    bound = warmup_seconds = 0.0
    for rank in range(ranks):
        bound = max(
            bound, micro_batch_count * (sum(forward[rank::ranks]) + sum(backward[rank::ranks])) + warmup_seconds
        )
        warmup_seconds += forward[rank] + (0.0 if schedule == "zero-bubble" else backward[rank])
    return bound


def _end_time(end_times: list[float]) -> float:
    return end_times[-1]


def _action_end_times(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    ranks: int,
    chunks: int,
    micro_batch_count: int,
    weight_fraction: float,
    timed: list[TimedAction] | None = None,
) -> list[list[float]]:
    """For each rank when it has done each of its steps."""
    actions_by_rank = schedule_actions(schedule, ranks, chunks, micro_batch_count)
    last_stage = ranks * chunks - 1
    splits_backward = effective_schedule(schedule, ranks, chunks, micro_batch_count) == "zero-bubble"
    durations = (
        forward,
        [seconds * (1 - weight_fraction) for seconds in backward] if splits_backward else backward,
        [seconds * weight_fraction for seconds in backward],
    )
    finished: tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]] = ({}, {})
    end_times_by_rank: list[list[float]] = [[0.0] for _ in range(ranks)]
    positions = [0] * ranks
    progressed = True
    while progressed:
        progressed = False
        for rank in range(ranks):
            actions, position, end_times = actions_by_rank[rank], positions[rank], end_times_by_rank[rank]
            now = end_times[-1]
            while position < len(actions):
                kind, stage, micro_batch = actions[position]
                if kind == FORWARD:
                    ready = finished[FORWARD].get((stage - 1, micro_batch)) if stage else 0.0
                elif kind == BACKWARD:
                    ready = (
                        finished[BACKWARD].get((stage + 1, micro_batch))
                        if stage < last_stage
                        else finished[FORWARD].get((stage, micro_batch))
                    )
                else:
                    ready = 0.0
                if ready is None:
                    break
                begin = max(now, ready)
                now = begin + durations[kind][stage]
                if timed is not None:
                    timed.append((rank, kind, stage, micro_batch, begin, now))
                if kind != WEIGHT_BACKWARD:
                    finished[kind][stage, micro_batch] = now
                end_times.append(now)
                position += 1
                progressed = True
            positions[rank] = position
    assert all(position == len(actions) for position, actions in zip(positions, actions_by_rank, strict=True)), (
        "an order in which ranks wait for each other"
    )
    return end_times_by_rank
