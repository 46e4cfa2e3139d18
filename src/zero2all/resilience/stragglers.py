"""A rank that is slow holds up all others, who wait for it in every collective. Torch's flight recorder says who.

It notes when each rank comes to each collective. On GPUs that is when the host asks for it, so a slow host shows here,
and a slow card in ``z2a doctor``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zero2all.resilience.rank import collectives_path

EVERY = 60.0  # seconds between two looks
HOLDS_UP = 0.1  # share of the time that the others wait for a rank
FEWEST = 20  # collectives, below which it may be chance


def read_arrivals(directory: Path, local_rank: int) -> dict[Any, float]:
    """When a rank came to each of its recent collectives, in seconds."""
    try:
        entries = json.loads(collectives_path(directory, local_rank).read_text(encoding="utf-8")).get("entries", [])
    except (OSError, ValueError):
        return {}
    return {
        (entry["process_group"][0], entry["profiling_name"], entry["collective_seq_id"]): entry["time_created_ns"] / 1e9
        for entry in entries
    }


def held_up(arrivals: dict[int, dict[Any, float]]) -> dict[int, float]:
    """For each rank the share of the time in which the others waited for it and for nobody else."""
    known = list(arrivals.values())
    common = set.intersection(*map(set, known)) if len(known) > 1 else set()
    if len(common) < FEWEST:
        return {}
    times = [when for found in known for key, when in found.items() if key in common]
    waited = dict.fromkeys(arrivals, 0.0)
    for key in common:
        ordered = sorted((found[key], rank) for rank, found in arrivals.items())
        waited[ordered[-1][1]] += ordered[-1][0] - ordered[-2][0]
    return {rank: seconds / (max(times) - min(times)) for rank, seconds in waited.items()}


def straggler(arrivals: dict[int, dict[Any, float]]) -> tuple[int, float] | None:
    """The one rank that holds the others up, and for what share of the time; None if none or several do."""
    slow = {rank: share for rank, share in held_up(arrivals).items() if share > HOLDS_UP}
    return next(iter(slow.items())) if len(slow) == 1 else None
