"""What all ranks of a run settle together: one that fails must not leave the others waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from zero2all.errors import Z2aError

T = TypeVar("T")
PATIENCE = timedelta(hours=1)  # a checkpoint on slow storage takes its time


class Team:
    """The ranks of a run, with a group of their own: a thread may use it while training uses another.

    >>> team = Team()
    >>> free = min(team.together(lambda: shutil.disk_usage("/").free))
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE) if dist.is_initialized() else None
        self.rank = dist.get_rank() if self.group is not None else 0
        self.world = dist.get_world_size() if self.group is not None else 1

    def together(self, function: Callable[[], T]) -> list[T]:
        """What ``function`` gives on every rank; where it fails on one, it fails on all with that one's reason."""
        if self.group is None:
            return [function()]
        mine: tuple[Any, str | None]
        try:
            mine = (function(), None)
        except Exception as error:
            mine = (None, str(error) or type(error).__name__)
            kept: Exception | None = error
        else:
            kept = None
        found: list[tuple[Any, str | None]] = [(None, None)] * self.world
        dist.all_gather_object(found, mine, group=self.group)
        if kept is not None:
            raise kept
        for rank, (_, reason) in enumerate(found):
            if reason is not None:
                raise Z2aError(f"{reason} (on rank {rank})")
        return [value for value, _ in found]

    def first(self, function: Callable[[], T]) -> T:
        """What ``function`` gives on the first rank, the only one that calls it."""
        found: list[Any] = self.together(lambda: function() if self.rank == 0 else None)
        value: T = found[0]
        return value
