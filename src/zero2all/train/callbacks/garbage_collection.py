"""Python's garbage collection at the same steps on all ranks."""

from __future__ import annotations

import gc

from zero2all.base.plugins import LAYOUTS, register
from zero2all.train.components import Component, FinishedStep
from zero2all.train.job import TrainingJob

GC_INTERVAL_STEPS = 100


@register("callback", "garbage-collection", supports=LAYOUTS)
class GarbageCollection(Component):
    """Collect garbage on all ranks at the same step."""

    def __init__(self, job: TrainingJob) -> None: ...

    def after_step(self, step: FinishedStep) -> None:
        if step.done % GC_INTERVAL_STEPS == 0:
            gc.collect()
