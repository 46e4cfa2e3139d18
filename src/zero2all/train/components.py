"""Components of a run: what happens around its steps, one concern in each.

The trainer has a list of them and calls each at these events, in the order of the list. So a component is added by
one line in that list, and knows no other.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero2all.base.charts.terminal import sparkline
from zero2all.base.console import say
from zero2all.base.plugins import bind
from zero2all.base.records import to_json
from zero2all.checkpoint import TrainingState
from zero2all.checkpoint.training_state import LossScaleState, RopeState
from zero2all.cluster.launch.heartbeat import StartupPhase
from zero2all.train.data_loader import Batch
from zero2all.train.job import Evaluator, Progress, TrainingJob
from zero2all.train.plan import StagePlan
from zero2all.train.samples import record_samples
from zero2all.train.step import StepResult, TrainStep
from zero2all.train.step_timer import StepTimer
from zero2all.train.throughput import PER_RANK_METRICS


@dataclass(frozen=True)
class FinishedStep:
    """A step whose metrics are known and whose update is done."""

    batch: Batch
    result: StepResult
    is_last: bool
    stops: bool
    """Whether the run stops here, before its last step."""

    @property
    def done(self) -> int:
        """The number of steps that are trained."""
        return self.batch.step + 1


class Component:
    def before_step(self, batch: Batch) -> None:
        """The step before has set the weights."""

    def before_update(self, batch: Batch, result: StepResult) -> None:
        """The metrics are known, also of a step that is skipped, rolled back or ends the run. With deferred metrics
        the update is done."""

    def after_step(self, step: FinishedStep) -> None:
        """With deferred metrics the next step may have changed the weights, except where ``needs_weights``."""

    def needs_weights(self, done: int) -> bool:
        """Whether ``after_step`` uses the weights of exactly these steps."""
        return False

    def after_seek(self) -> None:
        """Training continues at a different step, after a rollback or an exchange with other islands."""

    def at_end(self) -> None:
        """After the last step."""


def build_callbacks(job: TrainingJob) -> list[Component]:
    """The callbacks of the recipe, after one that every run has."""
    built = []
    for spec in ("garbage-collection", *job.recipe.train.callbacks):
        bound = bind("callback", spec)
        built.append(bound(job))
        bound.guard(built[-1], "before_step", "before_update", "after_step", "needs_weights", "after_seek", "at_end")
    return built


class StageEntry(Component):
    """What a stage changes beside samples and learning rate; the rest stays as in the stage before."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self._stage: StagePlan | None = None

    def before_step(self, batch: Batch) -> None:
        if batch.stage is self._stage:
            return
        self._stage, model = batch.stage, self.job.model
        self.job.recorder.record.event("stage", step=batch.step, name=batch.stage.name)
        rope = self.job.plan.rope(batch.stage)
        if rope != (model.model.config.rope_theta, model.model.config.rope_scaling):
            model.set_rope(*rope)

    def after_seek(self) -> None:
        self._stage = None  # the step to continue at may be in an earlier one


class StepMetrics(Component):
    """Every step goes to the record, and every ``track.log_every`` to the log."""

    def __init__(self, job: TrainingJob, progress: Progress, step: TrainStep) -> None:
        self.job, self.progress, self.timer = job, progress, step.timer

    def before_update(self, batch: Batch, result: StepResult) -> None:
        every = self.job.recipe.track.layer_norms_every
        if self.job.mesh.rank == 0 and every is not None and (batch.step + 1) % every == 0:
            norms = result.layer_norms
            self.job.recorder.record.histogram(batch.step, "gradient norm by layer", norms, range(len(norms) + 1))

    def after_step(self, step: FinishedStep) -> None:
        number, throughput = step.batch.step, self.job.throughput
        throughput.update(number, step.batch.data_wait)
        with self.timer.paused():
            throughput.check_peak(number)
        self.job.hooks.on_step(number, step.result.time)
        with self.timer.part("logging"):
            metrics = self.record(step)
            is_first = number == self.progress.resume_step
            if step.done % self.job.recipe.track.log_every == 0 or step.is_last or is_first:
                throughput.say_step(number, metrics)

    def record(self, step: FinishedStep) -> dict[str, float]:
        job, result, number = self.job, step.result, step.batch.step
        metrics = {
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            **result.metrics,
            **job.throughput.metrics(number),
            **({} if job.islands is None else job.islands.take_metrics()),
        }
        rank = job.mesh.rank
        names = PER_RANK_METRICS if rank > 0 else metrics
        recorded = {name: metrics[name] for name in names if name in metrics}
        job.recorder.record.step(number, **recorded, **result.time.metrics(rank))
        return metrics

    def after_seek(self) -> None:
        self.job.throughput.restart_timer()


class Validation(Component):
    """Loss on the validation set and the test sets, and samples, every ``evals.every``."""

    def __init__(self, job: TrainingJob, progress: Progress, step: TrainStep) -> None:
        self.job, self.progress, self.step = job, progress, step
        self._curve: list[float] = []  # bits per byte since this start

    def needs_weights(self, done: int) -> bool:
        return self.job.plan.is_due(self.job.recipe.evals.every, done)

    def after_step(self, step: FinishedStep) -> None:
        if self.job.evaluate is not None and self.needs_weights(step.done):
            with self.step.timer.paused():
                self._validate(step.batch.step, self.job.evaluate)

    def _validate(self, step: int, evaluate: Evaluator) -> None:
        job, record = self.job, self.job.recorder.record
        validation = evaluate(job.model, job.tokenizer, job.recipe, job.test_sets)
        self.progress.last_validation = (step + 1, validation)
        if metrics := self.step.objective.validate(job.model):
            record.step(step, **{f"valid/{name}": value for name, value in metrics.items()})
            say("validation: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        record.event("evaluation", step=step, **to_json(validation))
        self._curve.append(validation.bits_per_byte)
        tests = "".join(f", {name} {part.bits_per_byte:.4f}" for name, part in validation.test_sets.items())
        say(
            f"validation after step {step + 1}: {validation.bits_per_byte:.4f} bits per byte{tests}  "
            f"{sparkline(self._curve)}"
        )
        if job.mesh.rank == 0:
            record_samples(record, step, job.model, job.tokenizer, job.recipe)


class Checkpointing(Component):
    """Saves at the intervals of the recipe, before a stop, and after the last step."""

    def __init__(self, job: TrainingJob, progress: Progress, timer: StepTimer) -> None:
        self.job, self.progress, self.timer = job, progress, timer
        self._flash_due_at: int | None = None  # the step of a state in memory that waits for an exchange

    def needs_weights(self, done: int) -> bool:
        options, plan = self.job.recipe.checkpoint, self.job.plan
        return plan.is_due(options.every, done) or plan.is_due(options.flash_every, done)

    def after_seek(self) -> None:
        self._flash_due_at = None  # the state at that step is gone

    def after_step(self, step: FinishedStep) -> None:
        with self.timer.paused():
            if step.stops or step.is_last:
                # The last checkpoint is waited for, which may take longer than a step.
                self.job.heartbeat.record_phase(StartupPhase.ENDING)
            if not step.is_last and (stall := self.save(step.done, wait=step.stops)) is not None:
                self.job.recorder.record.step(step.batch.step, checkpoint_stall=round(stall, 6))

    def at_end(self) -> None:
        """Save the final checkpoint to durable storage, unless a valid one is there."""
        total = self.job.plan.total_steps
        self.job.checkpoints.finish_pending_write()  # the rank group may be busy writing
        if not self.job.ranks.on_rank0(lambda: self.job.run.checkpoints.is_valid(total)):
            self.save(total, wait=True)

    def save(self, done: int, *, wait: bool = False) -> float | None:
        """Save a checkpoint after ``done`` steps if one is due; returns the seconds that training stalled.

        With ``wait`` it is due in any case, and on durable storage when this returns.
        """
        options, plan, islands = self.job.recipe.checkpoint, self.job.plan, self.job.islands
        if self._flash_due_at is None and plan.is_due(options.flash_every, done):
            self._flash_due_at = done
        is_durable = wait or plan.is_due(options.every, done)
        # To wait for an outstanding exchange would undo its overlap, so a state in memory waits until it is merged.
        is_exchanging = islands is not None and islands.has_outstanding_exchange
        if not is_durable and (self._flash_due_at is None or is_exchanging):
            return None
        self._flash_due_at = None
        stall = self.job.checkpoints.save(done, self._state(done), durable=is_durable)
        if wait:
            self.job.checkpoints.wait_until_saved()
        return stall

    def _state(self, done: int) -> TrainingState:
        job, validation, scaler = self.job, self.progress.last_validation, self.job.model.loss_scaler
        theta, scaling = job.plan.rope(job.plan.stage_of(done - 1))
        return TrainingState(
            **vars(job.identity),
            rope=RopeState(theta, None if scaling is None else scaling.model_dump(mode="json")),
            guard=job.guard.state(),
            loss_scale=None if scaler is None else LossScaleState(scaler.value, scaler.good_steps),
            skipped=self.progress.skipped_steps,
            islands=None if job.islands is None else job.islands.state(),
            permanent=job.plan.is_due(job.recipe.checkpoint.keep_every, done),
            bits_per_byte=validation[1].bits_per_byte if validation is not None and validation[0] == done else None,
        )

    def needs_exchange(self, done: int) -> bool:
        """Whether a checkpoint follows that must not wait until the outstanding exchange is merged; a state in memory
        that has waited for one exchange does not wait for the next."""
        due_at, overlap = self._flash_due_at, self.job.recipe.parallel.sync.overlap
        return self.job.plan.is_due(self.job.recipe.checkpoint.every, done) or (
            due_at is not None and done - due_at >= max(overlap, 1)
        )
