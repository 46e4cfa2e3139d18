"""The trainer: one run on one rank, from its first step or its newest checkpoint to its last step."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from zero2all.base.errors import Interrupted
from zero2all.base.machine.cpus import rank_binding
from zero2all.base.machine.devices import MPS
from zero2all.cluster.launch.heartbeat import StartupPhase
from zero2all.model.cost.model_size import count_parameters
from zero2all.recipe import ExtendMode, Recipe
from zero2all.train.components import (
    Checkpointing,
    FinishedStep,
    StageEntry,
    StepMetrics,
    Validation,
    build_callbacks,
)
from zero2all.train.data_loader import Batch, BatchCopier, DataLoader
from zero2all.train.job import Evaluator, Progress, TrainerHooks
from zero2all.train.objectives.step import TokenObjective
from zero2all.train.recording import automatic_gc_disabled
from zero2all.train.setup import set_up
from zero2all.train.signals import stop_requested
from zero2all.train.spike_policy import SpikeAction, SpikePolicy
from zero2all.train.step import LaunchedStep, StepResult, TrainStep
from zero2all.train.step_timer import StepTimer

DEFERRING_DEVICES = ("cuda",)  # whose host would wait for the step: a CPU computes it itself


def train(
    recipe: Recipe,
    hooks: TrainerHooks | None = None,
    evaluate: Evaluator | None = None,
    start_time: float | None = None,
    extend: ExtendMode | None = None,
) -> TrainSummary:
    """Train for the recipe's duration, resuming where an earlier call stopped.

    ``evaluate`` is called every ``evals.every`` with the model and the test sets of the recipe; what it returns goes to
    the record. Time counts as start-up from ``start_time`` on: now, if not given. ``extend`` says how
    the learning rate continues if the schedule of a stage that has begun was changed.
    """
    with Trainer(recipe, hooks, evaluate, start_time, extend) as trainer:
        summary = trainer.train()
    del trainer
    gc.collect()  # its callbacks refer to it, so its model would stay in memory until the next collection
    return summary


@dataclass(frozen=True)
class TrainSummary:
    """The result of ``train``."""

    run: str
    steps: int
    resumed_at: int
    loss: float | None
    """Loss of the last step; None if all steps had been trained before."""
    tokens: int
    parameters: int
    goodput: float | None


class Trainer:
    """Trains a recipe, from scratch or resumed from the newest checkpoint.

    >>> with Trainer(load_recipe("recipes/quickstart.yaml")) as trainer:
    ...     summary = trainer.train()

    ``job`` is what the run consists of, ``progress`` where it is, ``step`` computes a step, and ``components`` do the
    rest. ``train`` is the loop.
    """

    loader: DataLoader

    def __init__(
        self,
        recipe: Recipe,
        hooks: TrainerHooks | None = None,
        evaluate: Evaluator | None = None,
        start_time: float | None = None,
        extend: ExtendMode | None = None,
    ) -> None:
        """Join the other ranks, build model and optimizers, load the newest checkpoint."""
        self._start_time, self.progress = start_time or time.time(), Progress()
        with ExitStack() as stack:
            self.job = job = set_up(recipe, hooks or TrainerHooks(), evaluate, extend, self.progress, stack)
            self._exit_stack = stack.pop_all()  # holds the run lock
        self.timer = StepTimer.for_device(job.mesh.device)
        self.copier = BatchCopier(job.mesh.device, job.model.runner.micro_batch_rows)
        self.step = TrainStep(job, self.progress, self.timer, self.copier)
        self.spike_policy = SpikePolicy(job, self.progress)
        self.checkpointing = Checkpointing(job, self.progress, self.timer)
        self.components = (  # called in this order at each event
            StageEntry(job),
            StepMetrics(job, self.progress, self.step),
            *build_callbacks(job),
            Validation(job, self.progress, self.step),
            self.checkpointing,
        )
        self._deferred: LaunchedStep | None = None  # whose metrics are not read yet
        self._stop_seen = False  # by all ranks: their own stop events are set at different steps

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._exit_stack:
            self.job.heartbeat.record_phase(StartupPhase.ENDING)
            outcome: Literal["finished", "stopped", "failed"] = "finished"
            if error is not None:
                outcome = "stopped" if isinstance(error, Interrupted) else "failed"
            self.job.checkpoints.close(outcome)
            if outcome != "failed":  # after a failure other ranks may be gone, and torch would wait for them
                self.job.mesh.close()

    def train(self) -> TrainSummary:
        """Train from the first step, or the one after the newest checkpoint, to the last."""
        job, loss = self.job, None
        with self._running():
            for batch in self.timer.waits(self.loader):
                job.hooks.on_batch(batch)
                may_defer = self._may_defer_metrics(batch)
                if not may_defer or (self._deferred is not None and self._deferred.batch.stage is not batch.stage):
                    self._finish_deferred_step()
                for component in self.components:
                    component.before_step(batch)
                if may_defer:
                    self._train_step_deferred(batch)
                    continue
                moved, result = self.train_step(batch)
                loss = result.loss
                if moved:
                    self._seek()
                else:
                    self._after_step(batch, result)
            self._finish_deferred_step()
            for component in self.components:
                component.at_end()
            goodput = job.recorder.log_goodput(job.plan.total_steps)
            job.recorder.record.event("done", step=job.plan.total_steps)
        return TrainSummary(
            run=str(job.run.directory),
            steps=job.plan.total_steps,
            resumed_at=self.progress.first_step,
            loss=loss,
            tokens=job.plan.tokens_before(job.plan.total_steps),
            parameters=count_parameters(job.config).total,
            goodput=goodput,
        )

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Signals, record, islands, data loader and clock of a run, in this order."""
        job, progress, mesh = self.job, self.progress, self.job.mesh
        copier = None if mesh.device.type == MPS else self.copier  # a Mac's GPU is used by one thread
        island = (0, 1) if job.place is None else (job.place.island, job.place.islands)
        with ExitStack() as stack:
            progress.stop_event = stack.enter_context(stop_requested())
            stack.enter_context(job.recorder.open())
            record = job.recorder.record
            if job.islands is not None:  # wait for the others, and for the step to start with
                step = stack.enter_context(job.islands.session(record.event, progress.first_step))
                progress.first_step = progress.resume_step = step
            self.loader = stack.enter_context(
                DataLoader(
                    job.plan, progress.first_step, mesh.dp_rank, mesh.dims.dp, copier, progress.skipped_steps, island
                )
            )
            stack.enter_context(automatic_gc_disabled())
            stack.enter_context(self.timer.watching(job.model))
            startup = round(time.time() - self._start_time, 3)
            kind = "resume" if progress.first_step else "start"
            record.event(kind, step=progress.first_step, steps=job.plan.total_steps, startup=startup)
            if (bound := rank_binding()).problem:
                record.event("CPU binding", step=progress.first_step, problem=bound.problem)
            if (init := job.initial_weights) is not None:
                record.event("initial weights", step=0, path=init.path, fingerprint=init.fingerprint)
            self.timer.restart()
            yield

    # A step

    def train_step(self, batch: Batch) -> tuple[bool, StepResult]:
        """Compute a step and what follows from it for the weights; whether training continues at a different step."""
        launched = self.step.compute_gradients(batch)
        result = self.step.read_result(launched)
        action = self._decide(launched, result)
        if action == "rollback":
            return True, result
        self.step.update_weights(batch, skip=action == "skip")
        return self._exchange_with_islands(batch, result), result

    def _decide(self, launched: LaunchedStep, result: StepResult) -> SpikeAction:
        """Before the update, which a spike may prevent."""
        for component in self.components:
            component.before_update(launched.batch, result)
        return self.spike_policy.decide(launched.batch, result)

    def _exchange_with_islands(self, batch: Batch, result: StepResult) -> bool:
        """Whether this island was behind the others, and continues at their step (``resume_step``)."""
        islands, done = self.job.islands, batch.step + 1
        if islands is None:
            return False
        with self.timer.part("communication"):
            moved_to = islands.after_update(
                done, complete=result.stop_requested or self.checkpointing.needs_exchange(done)
            )
        if moved_to is None:
            return False
        self.progress.resume_step = moved_to
        self.job.recorder.record.event("resume", step=moved_to, steps=self.job.plan.total_steps)
        return True

    def _seek(self) -> None:
        """Continue at ``resume_step``."""
        self.loader.seek(self.progress.resume_step, self.progress.skipped_steps)
        for component in self.components:
            component.after_seek()
        self.timer.restart()

    def _after_step(self, batch: Batch, result: StepResult, *, is_deferred: bool = False) -> None:
        """Tell the components. Stop here if it was requested."""
        job, done = self.job, batch.step + 1
        is_last = done == job.plan.total_steps
        stops = result.stop_requested and not is_last and not is_deferred
        step = FinishedStep(batch, result, is_last, stops)
        for component in self.components:
            component.after_step(step)
        if stops:
            job.recorder.record.event("stopped", step=done)
            raise Interrupted(
                f"stopped after step {done} of {job.plan.total_steps}; the same command resumes from there"
            )
        job.throughput.restart_timer()  # validation and checkpoints are not training
        job.heartbeat(done)

    # Deferred metrics: on a GPU the metrics of a step are read while the device computes the next one

    def _may_defer_metrics(self, batch: Batch) -> bool:
        """Not before anything that needs the weights of exactly this step, and not where its update may be skipped."""
        job, done, islands = self.job, batch.step + 1, self.job.islands
        return not (
            job.mesh.device.type not in DEFERRING_DEVICES
            or self._stop_seen
            or type(self.step.objective) is not TokenObjective
            or not self.spike_policy.allows_deferred_metrics
            or (islands is not None and islands.is_due(done))
            or done >= job.plan.total_steps
            or any(component.needs_weights(done) for component in self.components)
        )

    def _train_step_deferred(self, batch: Batch) -> None:
        """Launch a step with its update, then read the metrics of the one before."""
        launched = self.step.compute_gradients(batch)
        self.step.update_weights(batch)
        self._finish_deferred_step()
        self._deferred = launched

    def _finish_deferred_step(self) -> None:
        launched, self._deferred = self._deferred, None
        if launched is not None:
            result = self.step.read_result(launched)
            self._decide(launched, result)
            # A later step has changed the weights, so the next one is not deferred, and the run stops after it.
            self._stop_seen = result.stop_requested
            self._after_step(launched.batch, result, is_deferred=True)
