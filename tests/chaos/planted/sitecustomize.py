"""Mistakes planted in every process of a job, each of which must turn the suite red; the environment chooses one.

Python imports this module at its start if its directory is on PYTHONPATH.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Hashable, Sequence
from types import ModuleType


def ignore_histories(module: ModuleType) -> None:
    """Restores do not check histories."""
    assert callable(module._why_abandoned)
    assert isinstance(module.SlotReport.history, property)
    module.__dict__["_why_abandoned"] = lambda state, run_lineage: None
    module.SlotReport.history = property(lambda self: "the only one")
    state_parts = module.StateParts
    module.__dict__["StateParts"] = lambda state, nodes: state_parts((state[0], "the only one"), nodes)


def keep_replicas_at_home(module: ModuleType) -> None:
    """A replica is on the node of the original, and lost with it."""
    assert callable(module.plan_replicas)

    def plan_replicas(node_of_rank: Sequence[Hashable], copies: int) -> list[tuple[int, ...]]:
        ranks = range(len(node_of_rank))
        return [
            tuple(other for other in ranks if other != rank and node_of_rank[other] == node_of_rank[rank])[:copies]
            for rank in ranks
        ]

    module.__dict__["plan_replicas"] = plan_replicas


MISTAKES: dict[str, tuple[str, Callable[[ModuleType], None]]] = {
    "ignore_histories": ("zero2all.checkpoint.restore", ignore_histories),
    "keep_replicas_at_home": ("zero2all.checkpoint.replicas", keep_replicas_at_home),
}


class Planter(importlib.abc.MetaPathFinder):
    """Patches one module as soon as it is imported."""

    def __init__(self, module: str, patch: Callable[[ModuleType], None]) -> None:
        self._module, self._patch = module, patch

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        load = spec.loader.exec_module

        def load_and_patch(module: ModuleType) -> None:
            load(module)
            self._patch(module)

        spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Planter(*MISTAKES[os.environ["Z2A_TEST_MISTAKE"]]))
