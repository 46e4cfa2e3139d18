"""What is done about a step that the spike guard reports."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from zero2all.console import warn
from zero2all.errors import Z2aError
from zero2all.track import RunRecord
from zero2all.train.data_loader import Batch
from zero2all.train.spike_detector import DETECTION_DELAY

if TYPE_CHECKING:
    from zero2all.train.job import TrainState

Action = Literal["update", "skip", "rollback"]
MAX_RECORDED_DOCUMENTS = 50  # in the record; 'z2a blame' lists all by loss
MAX_SAMPLES_READ = 64  # of a batch: each lookup reads a shard's index, some 10 ms while all ranks wait
MAX_PRINTED_DOCUMENTS = 3  # on the terminal
MAX_SPIKES_IN_A_ROW = 20  # or rollbacks to the same state, before the run stops


class SpikeHandler:
    """
    >>> action = spike_handler.choose_action(batch, loss, grad_norm, record)  # before the update; same on every rank
    """

    def __init__(self, job: TrainState) -> None:
        self.job = job
        self._retried_steps: set[int] = set()  # steps that were repeated with the same data
        self._consecutive_spikes = 0

    def choose_action(self, batch: Batch, loss: float, grad_norm: float, record: RunRecord) -> Action:
        """Whether to update, to skip the update, or to resume at ``job.resume_step`` after a rollback."""
        job, step, policy = self.job, batch.step, self.job.guard.recipe.policy
        scale = job.parallel_model.loss_scaler
        if scale is not None and math.isfinite(loss) and not (scale.update(grad_norm) or scale.is_exhausted):
            record.event("overflow", step=step, loss_scale=scale.value)  # of fp16; the next step has a smaller scale
            return "skip"
        reason = job.guard.check(step, batch.stage.first_step, loss, grad_norm)
        if reason is None:
            self._consecutive_spikes = 0
            return "update"
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if not finite and policy == "warn":
            record.event("not finite", step=step, loss=str(loss), grad_norm=str(grad_norm))
            raise Z2aError(self._not_finite_message(step, loss, grad_norm))
        if job.parallel_model.mesh.rank == 0:  # every rank sees the same spike
            self._report(batch, reason, record)
        if policy == "warn":
            return "update"
        self._consecutive_spikes += 1
        if self._consecutive_spikes > MAX_SPIKES_IN_A_ROW:
            raise Z2aError(
                f"{MAX_SPIKES_IN_A_ROW} outlier steps in a row, the last {step} ({reason}): "
                "try a lower learning rate or a longer warmup; "
                f"'z2a tokens trace {job.run.directory} --step {step}' shows its text"
            )
        if policy == "rollback" and self._roll_back(step, finite, record):
            return "rollback"
        return "skip"

    def _report(self, batch: Batch, reason: str, record: RunRecord) -> None:
        documents = batch_documents(batch)
        record.event(
            "spike",
            step=batch.step,
            reason=reason,
            policy=self.job.guard.recipe.policy,
            documents=documents[:MAX_RECORDED_DOCUMENTS],
        )
        first = ", ".join(document["title"] or document["gid"] for document in documents[:MAX_PRINTED_DOCUMENTS])
        warn(
            f"step {batch.step}: {reason}; documents of the batch: {first}, …; 'z2a blame {self.job.run.directory} "
            f"--step {batch.step}' lists all of them by loss"
        )

    def _roll_back(self, step: int, finite: bool, record: RunRecord) -> bool:
        """Load the last state from before the bad data and skip that data. False if there is no such state."""
        job = self.job
        # A non-finite value may be a hardware fault: repeat the step once with the same data, then skip it.
        again = not finite and step not in self._retried_steps
        self._retried_steps.add(step)
        job.parallel_model.update_expert_bias()  # resets the expert load counted in this step
        restored = job.checkpoint_manager.roll_back(step if again else max(0, step - DETECTION_DELAY))
        if restored is None:
            warn(f"there is no state from before step {step} to roll back to: its update is skipped")
            return False
        # Steps that an earlier rollback skipped stay skipped: the loaded state may not know of them yet.
        skipped = {
            *job.skipped_steps,
            *([] if again else range(step - DETECTION_DELAY, step - DETECTION_DELAY + job.guard.recipe.skip)),
        }
        job.restore(restored.state)
        job.skipped_steps, job.resume_step = sorted(skipped), restored.step
        job.throughput.restart_timer()
        record.event("rollback", step=step, to=restored.step, skipped=job.skipped_steps)
        record.event("resume", step=restored.step, steps=job.plan.total_steps)
        data = f"skipping steps {_format_ranges(job.skipped_steps)}" if job.skipped_steps else "with the same data"
        warn(f"rolled back to step {restored.step} {restored.location}, {data}")
        return True

    def _not_finite_message(self, step: int, loss: float, grad_norm: float) -> str:
        with suppress(Z2aError):
            self.job.checkpoint_manager.wait_until_saved()
        saved = self.job.run.checkpoints.steps()
        newest = f"; the newest checkpoint is of step {saved[-1]}" if saved else ""
        return (
            f"step {step}: loss {loss}, gradient norm {grad_norm}{newest}. "
            "Try a lower learning rate or a longer warmup; "
            f"'z2a tokens trace {self.job.run.directory} --step {step}' shows its text"
        )


def batch_documents(batch: Batch) -> list[dict[str, Any]]:
    """Documents of a batch over all ranks, each once, most tokens first; of a large batch, a sample."""
    tokens: dict[str, int] = {}
    documents: dict[str, dict[str, Any]] = {}
    start, stop = batch.sample_range
    count = min(stop - start, MAX_SAMPLES_READ)
    for number in range(count):
        sample = start + number * (stop - start) // count
        for span in batch.stage.dataset.documents(sample, sample + 1):
            tokens[span.gid] = tokens.get(span.gid, 0) + span.tokens
            documents[span.gid] = {"gid": span.gid, "source": span.source, "title": span.title, "shard": span.shard}
    return [documents[gid] for gid in sorted(documents, key=lambda gid: -tokens[gid])]


def _format_ranges(steps: Iterable[int]) -> str:
    """``[3, 4, 5, 9]`` -> ``"3-5, 9"``."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
