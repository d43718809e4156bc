"""Walks a pipeline's step event by event: each rank has a fixed order of actions, and the critical path sets the time.

The order never depends on durations, so a faster stage never makes a step slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product

#: Kinds of action: forward, backward (of inputs and weights, or of inputs only), backward of weights.
FORWARD, BACKWARD, WEIGHT_BACKWARD = 0, 1, 2
#: Rounds of an interleaved order after which no action waits for one before them.
_SETTLING_ROUNDS = 5
#: Times within this relative difference are equal.
_RELATIVE_TOLERANCE = 1e-9
#: The part of backward that computes weight gradients, where a schedule splits it.
_WEIGHT_FRACTION = 0.5
#: (kind, stage, micro-batch).
Action = tuple[int, int, int]
#: (rank, kind, stage, micro-batch, begin, end).
TimedAction = tuple[int, int, int, int, float, float]


def effective_schedule(schedule: str, ranks: int, chunks: int, micro_batches: int) -> str:
    """Interleaved orders need rounds of `ranks` micro-batches; with others, all forwards run first, as in gpipe."""
    return "gpipe" if chunks > 1 and micro_batches % ranks else schedule


@lru_cache(maxsize=256)
def schedule_actions(schedule: str, ranks: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Each rank's actions in order. Stage `n` is on rank `n % ranks`."""
    schedule = effective_schedule(schedule, ranks, chunks, micro_batches)
    rank_actions = []
    for rank in range(ranks):
        if schedule == "gpipe":
            stages = range(rank, chunks * ranks, ranks)
            forward = [(FORWARD, *each) for each in product(stages, range(micro_batches))]
            backward = [(BACKWARD, *each) for each in product(reversed(stages), range(micro_batches))]
            rank_actions.append((*forward, *backward))
            continue
        if chunks > 1:
            forward, backward = _interleaved_actions(rank, ranks, chunks, micro_batches)
            warmup = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, len(forward))
        else:
            forward = [(FORWARD, rank, micro_batch) for micro_batch in range(micro_batches)]
            backward = [(BACKWARD, rank, micro_batch) for micro_batch in range(micro_batches)]
            warmup = min(ranks - rank - 1, micro_batches)
        actions = forward[:warmup]
        for index, action in enumerate(forward[warmup:]):
            actions += [action, backward[index]]
        actions += backward[len(forward) - warmup :]
        rank_actions.append(tuple(_insert_weight_backwards(actions, rank) if schedule == "zero-bubble" else actions))
    return tuple(rank_actions)


def _interleaved_actions(rank: int, ranks: int, chunks: int, micro_batches: int) -> tuple[list[Action], list[Action]]:
    """Groups of `ranks` micro-batches go through one chunk after another (Narayanan et al. 2021)."""
    forward, backward = [], []
    for first in range(0, micro_batches, ranks):
        for chunk in range(chunks):
            for micro_batch in range(first, first + ranks):
                forward.append((FORWARD, chunk * ranks + rank, micro_batch))
                backward.append((BACKWARD, (chunks - 1 - chunk) * ranks + rank, micro_batch))
    return forward, backward


def _insert_weight_backwards(actions: list[Action], delay: int) -> list[Action]:
    """Compute weight gradients `delay` backwards after input gradients, so that other ranks need not wait for them (Qi et al. 2023)."""
    filled: list[Action] = []
    pending: list[Action] = []
    for action in actions:
        filled.append(action)
        if action[0] == BACKWARD:
            pending.append((WEIGHT_BACKWARD, action[1], action[2]))
            if len(pending) > delay:
                filled.append(pending.pop(0))
    return filled + pending


def makespan(
    schedule: str, forward: Sequence[float], backward: Sequence[float], *, ranks: int, micro_batches: int
) -> float:
    """Seconds from the first forward to the last backward. `forward`, `backward`: of each stage for one micro-batch, with its sends.

    Once it is certain what every further round of micro-batches takes, the rest is extrapolated (`_steady_round_seconds`).
    """
    chunks, remainder = len(forward) // ranks, micro_batches % ranks
    effective = effective_schedule(schedule, ranks, chunks, micro_batches)
    rounds = 1 if chunks == 1 else _SETTLING_ROUNDS + 1
    while (rounds + 1) * ranks + remainder < micro_batches:
        counts = rounds * ranks + remainder, (rounds + 1) * ranks + remainder
        shorter, longer = (_action_end_times(schedule, forward, backward, ranks, count) for count in counts)
        round_seconds = _steady_round_seconds(effective, forward, backward, ranks, shorter, longer)
        if round_seconds is not None:
            return _last_end(longer) + (micro_batches - counts[1]) / ranks * round_seconds
        rounds *= 2
    return _last_end(_action_end_times(schedule, forward, backward, ranks, micro_batches))


def _steady_round_seconds(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    ranks: int,
    shorter: list[list[float]],
    longer: list[list[float]],
) -> float | None:
    """Seconds of every further round; None: not certain yet. `longer` has one round more than `shorter`.

    With one stage per rank, and in gpipe, no round takes longer than `_slowest_rank_seconds` allows. Once one takes as long, the
    critical path goes through the slowest rank, and every further round adds the same to it. With several stages per rank: once the last
    rounds' actions are all delayed by the same time on all ranks, the next round starts as this one did.
    """
    difference = _last_end(longer) - _last_end(shorter)
    if schedule == "gpipe" or len(forward) == ranks:
        limit = ranks * _slowest_rank_seconds(schedule, forward, backward, ranks)
        return limit if difference >= limit * (1 - _RELATIVE_TOLERANCE) else None
    tolerance = _RELATIVE_TOLERANCE * _last_end(longer)
    for short, long in zip(shorter, longer, strict=True):
        tail = _SETTLING_ROUNDS * (len(long) - len(short))
        if any(
            abs(late - early - difference) > tolerance for early, late in zip(short[-tail:], long[-tail:], strict=True)
        ):
            return None
    return difference


def _slowest_rank_seconds(schedule: str, forward: Sequence[float], backward: Sequence[float], ranks: int) -> float:
    """The most that a further micro-batch adds: all work of the slowest rank. In gpipe, the slowest rank of each chunk, there and back."""
    if schedule != "gpipe":
        return max(sum(forward[rank::ranks]) + sum(backward[rank::ranks]) for rank in range(ranks))
    chunks = range(0, len(forward), ranks)
    return sum(max(stage_seconds[first : first + ranks]) for stage_seconds in (forward, backward) for first in chunks)


def makespan_lower_bound(
    schedule: str, forward: Sequence[float], backward: Sequence[float], *, ranks: int, micro_batches: int
) -> float:
    """A lower bound on `makespan`: each rank does all its work after the first micro-batch reaches it and before the last one returns to
    rank 0. Nothing waits for weight gradients that are computed last."""
    bound = warmup = 0.0
    for rank in range(ranks):
        bound = max(bound, micro_batches * (sum(forward[rank::ranks]) + sum(backward[rank::ranks])) + warmup)
        warmup += forward[rank] + (0.0 if schedule == "zero-bubble" else backward[rank])
    return bound


def timed_actions(
    schedule: str, forward: Sequence[float], backward: Sequence[float], *, ranks: int, micro_batches: int
) -> list[TimedAction]:
    """Every action of every rank with its begin and end."""
    actions: list[TimedAction] = []
    _action_end_times(schedule, forward, backward, ranks, micro_batches, actions)
    return actions


@lru_cache(maxsize=4096)
def in_flight_micro_batches(schedule: str, ranks: int, chunks: int, micro_batches: int, rank: int) -> float:
    """Micro-batches whose activations a rank holds at once, counted in activations of all its stages. Weight gradients need them too."""
    if effective_schedule(schedule, ranks, chunks, micro_batches) == "gpipe":
        return float(micro_batches)
    # Once the pipeline is full, as many micro-batches leave as enter.
    actions = schedule_actions(schedule, ranks, chunks, min(micro_batches, 4 * ranks + micro_batches % ranks))[rank]
    releasing_kind = WEIGHT_BACKWARD if any(kind == WEIGHT_BACKWARD for kind, _, _ in actions) else BACKWARD
    changes = ((kind == FORWARD) - (kind == releasing_kind) for kind, _, _ in actions)
    return max(accumulate(changes)) / chunks


def _last_end(end_times: list[list[float]]) -> float:
    return max(ends[-1] for ends in end_times)


def _action_end_times(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    ranks: int,
    micro_batches: int,
    timed: list[TimedAction] | None = None,
) -> list[list[float]]:
    """For each rank, when each of its actions ends."""
    chunks, last_stage = len(forward) // ranks, len(forward) - 1
    actions_by_rank = schedule_actions(schedule, ranks, chunks, micro_batches)
    splits_backward = effective_schedule(schedule, ranks, chunks, micro_batches) == "zero-bubble"
    durations = (
        forward,
        [seconds * (1 - _WEIGHT_FRACTION) for seconds in backward] if splits_backward else backward,
        [seconds * _WEIGHT_FRACTION for seconds in backward],
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
                ready: float | None = 0.0
                if kind == FORWARD and stage:
                    ready = finished[FORWARD].get((stage - 1, micro_batch))
                elif kind == BACKWARD:
                    previous = (BACKWARD, stage + 1) if stage < last_stage else (FORWARD, stage)
                    ready = finished[previous[0]].get((previous[1], micro_batch))
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
    assert positions == [len(actions) for actions in actions_by_rank], "the order of actions deadlocks"
    return end_times_by_rank
