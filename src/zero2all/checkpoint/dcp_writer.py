"""Writes the shards of all ranks as torch DCP does, with plans that pass through a ``RankGroup``.

DCP itself gathers the plans of all ranks on rank 0 at every save: minutes of Python at a thousand ranks. They are a
function of shapes and sharding alone, so after the first save the ranks only agree that none has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from zero2all.checkpoint.rank_group import RankGroup


@dataclass(frozen=True)
class _Plans:
    local: SavePlan
    final: SavePlan
    """What this rank writes: of tensors that several ranks hold, one writes each."""
    metadata: Metadata | None
    """Of all ranks; on rank 0 only."""


class ShardWriter:
    """
    >>> names = ShardWriter().write(tensors, directory, RankGroup())  # on every rank
    """

    def __init__(self) -> None:
        self._plans: _Plans | None = None

    def write(self, tensors: dict[str, Any], directory: Path, rank_group: RankGroup) -> list[str]:
        """Each rank writes its own files, whose names it returns, and rank 0 the metadata. If one fails, all do."""
        writer, planner = FileSystemWriter(directory), DefaultSavePlanner()
        is_first = rank_group.rank == 0

        def plan_locally() -> SavePlan:
            planner.set_up_planner(tensors, writer.storage_meta(), is_first)
            writer.set_up_storage_writer(is_first, rank=rank_group.rank, use_collectives=True)
            return writer.prepare_local_plan(planner.create_local_plan())

        plans = self._plans = self._plan(plan_locally, writer, planner, rank_group)
        names: set[str] = set()

        def write() -> list[WriteResult]:
            future = writer.write_data(planner.finish_plan(plans.final), planner)
            future.wait()
            results: list[WriteResult] = future.value()
            names.update(result.storage_data.relative_path for result in results)
            return results

        def finish(results: list[list[WriteResult]]) -> list[None]:
            assert plans.metadata is not None
            writer.finish(plans.metadata, results)
            return [None] * rank_group.world_size

        rank_group.reduce_scatter(write, finish)
        return sorted(names)

    def _plan(
        self,
        plan_locally: Callable[[], SavePlan],
        writer: FileSystemWriter,
        planner: DefaultSavePlanner,
        rank_group: RankGroup,
    ) -> _Plans:
        """Those of the last save, if no rank's has changed."""
        local: list[SavePlan] = []

        def is_unchanged() -> bool:
            local.append(plan_locally())
            return self._plans is not None and self._plans.local == local[0]

        if all(rank_group.on_all_ranks(is_unchanged)):
            assert self._plans is not None
            return self._plans
        metadata: list[Metadata] = []

        def plan_globally(plans: list[SavePlan]) -> list[SavePlan]:
            plans, found = planner.create_global_plan(plans)
            metadata.append(found)
            return writer.prepare_global_plan(plans)

        final = rank_group.reduce_scatter(lambda: local[0], plan_globally)
        return _Plans(local[0], final, metadata[0] if metadata else None)
