"""What a run does about an outlier: warn, skip the update, or roll back and skip the data."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Literal

from zero2all.base.console import warn
from zero2all.base.errors import Z2aError
from zero2all.train.data_loader import Batch
from zero2all.train.job import Progress, TrainingJob
from zero2all.train.spike_detector import DETECTION_DELAY, format_ranges, lower_lr_hint, report_spike, shown_norms
from zero2all.train.step import StepResult

SpikeAction = Literal["update", "skip", "rollback"]
MAX_SPIKES_IN_A_ROW = 20  # or rollbacks to the same state, before the run stops


class SpikePolicy:
    def __init__(self, job: TrainingJob, progress: Progress) -> None:
        self.job, self.progress = job, progress
        self._consecutive = 0
        self._retried_steps: set[int] = set()  # steps that were repeated with the same data

    @property
    def allows_deferred_metrics(self) -> bool:
        """Whether every step is updated, whatever its metrics are."""
        return self.job.guard.recipe.policy == "warn" and self.job.model.loss_scaler is None

    def decide(self, batch: Batch, result: StepResult) -> SpikeAction:
        """Whether to update, skip the update, or continue at ``resume_step`` after a rollback; all ranks agree."""
        job, step, policy = self.job, batch.step, self.job.guard.recipe.policy
        # The loss of reinforcement learning is near 0 by construction: its changes mean nothing.
        is_around_zero = job.recipe.train.objective.plugin.is_around_zero and math.isfinite(result.loss)
        loss, grad_norm = 0.0 if is_around_zero else result.loss, result.grad_norm
        scale = job.model.loss_scaler
        if scale is not None and math.isfinite(loss) and not (scale.update(grad_norm) or scale.is_exhausted):
            job.recorder.record.event("overflow", step=step, loss_scale=scale.value)  # fp16: the next scale is smaller
            return "skip"
        reason = job.guard.check(step, batch.stage.first_step, loss, grad_norm)
        if reason is None:
            self._consecutive = 0
            return "update"
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if not finite and policy == "warn":
            norms = shown_norms(result.layer_norms)
            job.recorder.record.event(
                "not finite", step=step, loss=str(loss), grad_norm=str(grad_norm), layer_norms=norms
            )
            raise Z2aError(self._not_finite_message(step, loss, grad_norm))
        if job.mesh.rank == 0:  # every rank sees the same spike
            report_spike(batch, reason, policy, result.layer_norms, job.run.directory, job.recorder.record)
        if policy == "warn":
            return "update"
        self._consecutive += 1
        if self._consecutive > MAX_SPIKES_IN_A_ROW:
            raise Z2aError(
                f"{MAX_SPIKES_IN_A_ROW} outlier steps in a row, the last {step} ({reason}): "
                + lower_lr_hint(job.run.directory, step)
            )
        if policy == "rollback" and self._roll_back(step, finite=finite):
            return "rollback"
        return "skip"

    def _roll_back(self, step: int, *, finite: bool) -> bool:
        """Load the last state from before the bad data and skip that data. False if there is no such state."""
        job, progress, record = self.job, self.progress, self.job.recorder.record
        # A non-finite value may be a hardware fault: repeat the step once with the same data, then skip it.
        again = not finite and step not in self._retried_steps
        self._retried_steps.add(step)
        job.model.update_expert_bias()  # resets the expert load counted in this step
        first_bad = step - DETECTION_DELAY
        restored = job.checkpoints.roll_back(step if again else max(0, first_bad))
        if restored is None:
            warn(f"there is no state from before step {step} to roll back to: its update is skipped")
            return False
        # Steps that an earlier rollback skipped stay skipped: the loaded state may not know of them yet.
        bad_steps = [] if again else range(first_bad, first_bad + job.guard.recipe.skip)
        skipped = sorted({*progress.skipped_steps, *bad_steps})
        progress.restore(job, restored.state)
        progress.skipped_steps, progress.resume_step = skipped, restored.step
        record.event("rollback", step=step, to=restored.step, skipped=skipped)
        record.event("resume", step=restored.step, steps=job.plan.total_steps)
        data = f"skipping steps {format_ranges(skipped)}" if skipped else "with the same data"
        warn(f"rolled back to step {restored.step} {restored.location}, {data}")
        return True

    def _not_finite_message(self, step: int, loss: float, grad_norm: float) -> str:
        job = self.job
        with suppress(Z2aError):
            job.checkpoints.wait_until_saved()
        saved = job.run.checkpoints.steps()
        newest = f"; the newest checkpoint is of step {saved[-1]}" if saved else ""
        hint = lower_lr_hint(job.run.directory, step)
        return f"step {step}: loss {loss}, gradient norm {grad_norm}{newest}. {hint[0].upper()}{hint[1:]}"
