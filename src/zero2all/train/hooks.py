"""Named points of the trainer at which other code is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zero2all.checkpoint.training_state import CheckpointPhase, ignore
from zero2all.parallel import ParallelModel
from zero2all.recipe import ModelConfig
from zero2all.train.data_loader import Batch
from zero2all.train.run import Run
from zero2all.train.step_timer import StepTime


@dataclass(frozen=True)
class TrainerHooks:
    """Functions called on every rank: to observe a run, or to inject faults.

    >>> train(recipe, TrainerHooks(on_batch=lambda batch: print(batch.step, batch.sample_range)))
    """

    on_start: Callable[[], None] = ignore
    """Called when the process group is up, before the first collective."""
    on_run: Callable[[Run, ModelConfig, torch.device, int], None] = ignore
    """Called on the first rank when the run's directory holds its metadata, with the shape of the model (the recipe may
    leave the vocabulary to the tokenizer), the device and the number of ranks."""
    on_batch: Callable[[Batch], None] = ignore
    """Called with every batch before it is used."""
    on_gradients: Callable[[ParallelModel], None] = ignore
    """Called after the backward pass, before the gradients are clipped."""
    on_step: Callable[[int, StepTime], None] = ignore
    """Called with the number of a step and the time of its parts when its metrics are read."""
    on_checkpoint: Callable[[CheckpointPhase], None] = ignore
    """Called at each phase of saving, also from background threads, and before a state is loaded."""
