"""Stragglers: a slow rank delays all others in every collective. Torch's flight recorder shows which.

It records when each rank enters each collective. On GPUs that is when the host launches it, so a slow host shows here,
and a slow card in ``z2a doctor``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero2all.elastic.flight_recorder import read_collectives, read_groups
from zero2all.elastic.worker import collectives_path

CHECK_INTERVAL = 60.0  # seconds between two checks
STRAGGLER_THRESHOLD = 0.1  # share of the time that the others wait for a rank
MIN_COLLECTIVES = 20  # with fewer it may be noise


def read_arrival_times(directory: Path, local_rank: int) -> dict[Any, float]:
    """When a rank entered each of its recent collectives, in seconds."""
    try:
        dump = collectives_path(directory, local_rank).read_text(encoding="utf-8")
    except OSError:
        return {}
    groups = read_groups(dump)  # those of one mesh dimension may have one name
    return {
        (one.process_group[0], *groups.get(one.process_group[0], ()), one.profiling_name, one.number): (
            one.time_created_ns / 1e9
        )
        for one in read_collectives(dump)
    }


def wait_share_by_rank(arrivals: dict[int, dict[Any, float]]) -> dict[int, float]:
    """For each rank the share of the time that the others waited for it alone."""
    known = list(arrivals.values())
    common = set.intersection(*map(set, known)) if len(known) > 1 else set()
    if len(common) < MIN_COLLECTIVES:
        return {}
    times = [when for times_by_key in known for key, when in times_by_key.items() if key in common]
    waited = dict.fromkeys(arrivals, 0.0)
    for key in common:
        ordered = sorted((times_by_key[key], rank) for rank, times_by_key in arrivals.items())
        waited[ordered[-1][1]] += ordered[-1][0] - ordered[-2][0]
    return {rank: seconds / (max(times) - min(times)) for rank, seconds in waited.items()}


def find_straggler(arrivals: dict[int, dict[Any, float]]) -> tuple[int, float] | None:
    """The one rank that delays the others, and its share of the time; None if none or several do."""
    slow = {rank: share for rank, share in wait_share_by_rank(arrivals).items() if share > STRAGGLER_THRESHOLD}
    return next(iter(slow.items())) if len(slow) == 1 else None
