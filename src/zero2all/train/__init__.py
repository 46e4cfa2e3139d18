"""The training loop: one batch per step, in a fixed sample order, resumable at any step.

>>> from zero2all.recipe import load_recipe
>>> summary = train(load_recipe("recipes/quickstart.yaml"))
"""

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
