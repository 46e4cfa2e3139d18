"""The training loop: one batch per step, in a fixed sample order, resumable at any step.

>>> from zero2all.recipe import load_recipe
>>> summary = train(load_recipe("recipes/quickstart.yaml"))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time when they are used: a recipe is validated with modules of this package, without torch
    from zero2all.train.blame import blame_step, trace_step
    from zero2all.train.extension import ScheduleChangedError
    from zero2all.train.initial_weights import find_weights, open_weights
    from zero2all.train.job import TrainerHooks
    from zero2all.train.run import Run
    from zero2all.train.trainer import Trainer, TrainSummary, train

__all__ = [
    "Run",
    "ScheduleChangedError",
    "TrainSummary",
    "Trainer",
    "TrainerHooks",
    "blame_step",
    "find_weights",
    "open_weights",
    "trace_step",
    "train",
]
_MODULES = {
    "blame_step": "blame", "find_weights": "initial_weights", "open_weights": "initial_weights", "Run": "run",
    "ScheduleChangedError": "extension", "trace_step": "blame", "TrainerHooks": "job",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'trainer')}"), name)
