"""A mistake planted in every process of a job, which must turn the suite red: restores do not check histories.

Python imports this module at its start if its directory is on PYTHONPATH.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

PATCHED = "zero2all.checkpoint.restore"


class Planter(importlib.abc.MetaPathFinder):
    """Patches one module as soon as it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != PATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        load = spec.loader.exec_module

        def load_and_patch(module: ModuleType) -> None:
            load(module)
            assert callable(module._why_abandoned)
            assert isinstance(module.SlotReport.history, property)
            module.__dict__["_why_abandoned"] = lambda state, run_lineage: None
            module.SlotReport.history = property(lambda self: "the only one")

        spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Planter())
