"""What a run on one rank consists of: built once by ``setup``, read by the step and its components."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event

import torch
from torch.optim import Optimizer

from zero2all.checkpoint import CheckpointManager, InitialWeights, RankGroup, RunIdentity, TrainingState
from zero2all.checkpoint.training_state import CheckpointPhase, ignore
from zero2all.cluster.launch.heartbeat import Heartbeat
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.recipe import ModelConfig, Recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenShard
from zero2all.track.eval_record import LossEvaluation
from zero2all.train.data_loader import Batch
from zero2all.train.diloco.islands import Islands
from zero2all.train.diloco.link import IslandPlace
from zero2all.train.objectives.step import StepObjective
from zero2all.train.plan import Plan
from zero2all.train.recording import Recorder
from zero2all.train.resume import restore_state
from zero2all.train.run import Run
from zero2all.train.spike_detector import SpikeDetector
from zero2all.train.step_timer import StepTime
from zero2all.train.throughput import ThroughputMeter

Evaluator = Callable[[ParallelModel, Tokenizer, Recipe, Mapping[str, TokenShard]], LossEvaluation]


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


@dataclass(frozen=True)
class TrainingJob:
    """Nothing in it is replaced while the run trains: weights and optimizer states change, and ``Progress``."""

    recipe: Recipe
    """Resolved: no value is left open."""
    hooks: TrainerHooks
    run: Run
    mesh: ParallelMesh
    ranks: RankGroup
    heartbeat: Heartbeat
    recorder: Recorder
    tokenizer: Tokenizer
    plan: Plan
    config: ModelConfig
    model: ParallelModel
    optimizers: list[Optimizer]
    objective: StepObjective
    guard: SpikeDetector
    throughput: ThroughputMeter
    identity: RunIdentity
    checkpoints: CheckpointManager
    initial_weights: InitialWeights | None
    """None if they are random, or if the run resumes."""
    evaluate: Evaluator | None
    """None if the run is never validated."""
    test_sets: Mapping[str, TokenShard]
    place: IslandPlace | None
    islands: Islands | None = None


@dataclass
class Progress:
    """Where a run is: all that changes from step to step beside tensors."""

    first_step: int = 0
    resume_step: int = 0
    """Where training continues: ``first_step``, until a rollback or the other islands move it."""
    skipped_steps: list[int] = field(default_factory=list)
    """Their data is bad."""
    last_validation: tuple[int, LossEvaluation] | None = None
    """With the number of steps before it."""
    stop_event: Event = field(default_factory=Event)

    def is_stopping(self) -> bool:
        return self.stop_event.is_set()

    def restore(self, job: TrainingJob, state: TrainingState) -> None:
        """Take over what a checkpoint holds beside the tensors."""
        restore_state(state, job.model, job.optimizers, job.recipe.train.optimizer, job.guard)
        self.skipped_steps = list(state.skipped)
        if job.islands is not None:
            job.islands.restore(state.islands)
