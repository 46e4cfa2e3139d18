"""What is done about a step that the guard finds odd."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from zero2all.console import warn
from zero2all.errors import Z2aError
from zero2all.resilience.guard import LATE
from zero2all.track import Record
from zero2all.train.batches import Batch

if TYPE_CHECKING:
    from zero2all.train.job import Job

Action = Literal["update", "skip", "back"]
SHOWN = 50  # documents in the record; 'z2a blame' has all, by their loss
SAMPLES_READ = 64  # of a batch: naming a document is a read of a shard's index, some 10 ms each while all ranks wait
NAMED = 3  # documents on the terminal
MOST = 20  # odd steps in a row, or rollbacks to the same state, after which a person has to look


class Spikes:
    """
    >>> action = spikes.judge(batch, loss, grad_norm, record)  # before the update; the same on every rank
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._tried: set[int] = set()  # steps that were done again with the same data
        self._in_a_row = 0

    def judge(self, batch: Batch, loss: float, grad_norm: float, record: Record) -> Action:
        """Whether to update, to leave the update out, or that an earlier state is back and ``job.at`` says where."""
        job, step, policy = self.job, batch.step, self.job.guard.recipe.policy
        scale = job.spread.scale
        if scale is not None and math.isfinite(loss) and not (scale.fits(grad_norm) or scale.is_exhausted):
            record.event("overflow", step=step, loss_scale=scale.value)  # of fp16; the next step has a smaller scale
            return "skip"
        reason = job.guard.look(step, batch.stage.first_step, loss, grad_norm)
        if reason is None:
            self._in_a_row = 0
            return "update"
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if not finite and policy == "warn":
            record.event("not finite", step=step, loss=str(loss), grad_norm=str(grad_norm))
            raise Z2aError(self._not_finite(step, loss, grad_norm))
        if job.spread.layout.rank == 0:  # every rank sees the same spike
            self._report(batch, reason, record)
        if policy == "warn":
            return "update"
        self._in_a_row += 1
        if self._in_a_row > MOST:
            raise Z2aError(
                f"{MOST} odd steps in a row, the last {step} ({reason}): try a lower learning rate or a longer warmup; "
                f"'z2a tokens trace {job.run.directory} --step {step}' shows its text"
            )
        if policy == "rollback" and self._roll_back(step, finite, record):
            return "back"
        return "skip"

    def _report(self, batch: Batch, reason: str, record: Record) -> None:
        documents = named_documents(batch)
        record.event(
            "spike", step=batch.step, reason=reason, policy=self.job.guard.recipe.policy, documents=documents[:SHOWN]
        )
        first = ", ".join(document["title"] or document["gid"] for document in documents[:NAMED])
        warn(
            f"step {batch.step}: {reason}; documents of the batch: {first}, …; 'z2a blame {self.job.run.directory} "
            f"--step {batch.step}' lists all of them by loss"
        )

    def _roll_back(self, step: int, finite: bool, record: Record) -> bool:
        """Load the last state from before the bad data, and pass over that. Not if there is no such state."""
        job = self.job
        # What is not finite may be the machine's fault: once more with the same data, and only then without it.
        again = not finite and step not in self._tried
        self._tried.add(step)
        job.spread.even_load()  # what experts counted in this step is forgotten with it
        found = job.keeper.roll_back(step if again else max(0, step - LATE))
        if found is None:
            warn(f"there is no state from before step {step} to go back to: its update is left out")
            return False
        # Steps that an earlier rollback passed over stay so: the state that is loaded may not know of them yet.
        skipped = {*job.skipped, *([] if again else range(step - LATE, step - LATE + job.guard.recipe.skip))}
        job.restore(found.state)
        job.skipped, job.at = sorted(skipped), found.step
        job.clock.rest()
        record.event("rollback", step=step, to=found.step, skipped=job.skipped)
        record.event("resume", step=found.step, steps=job.plan.total)
        passed = f"passing over steps {_ranges(job.skipped)}" if job.skipped else "with the same data"
        warn(f"back to the state of step {found.step} {found.where}, {passed}")
        return True

    def _not_finite(self, step: int, loss: float, grad_norm: float) -> str:
        with suppress(Z2aError):
            self.job.keeper.wait()
        kept = self.job.run.checkpoints.steps()
        last = f"; the newest checkpoint is of step {kept[-1]}" if kept else ""
        return (
            f"step {step}: loss {loss}, gradient norm {grad_norm}{last}. Try a lower learning rate or a longer warmup; "
            f"'z2a tokens trace {self.job.run.directory} --step {step}' shows its text"
        )


def named_documents(batch: Batch) -> list[dict[str, Any]]:
    """Documents of a batch over all ranks, each once, those with most tokens first; of a large batch, a sample."""
    tokens: dict[str, int] = {}
    documents: dict[str, dict[str, Any]] = {}
    start, stop = batch.samples
    count = min(stop - start, SAMPLES_READ)
    for number in range(count):
        sample = start + number * (stop - start) // count
        for part in batch.stage.samples.documents(sample, sample + 1):
            tokens[part.gid] = tokens.get(part.gid, 0) + part.tokens
            documents[part.gid] = {"gid": part.gid, "source": part.source, "title": part.title, "shard": part.shard}
    return [documents[gid] for gid in sorted(documents, key=lambda gid: -tokens[gid])]


def _ranges(steps: Iterable[int]) -> str:
    """``[3, 4, 5, 9]`` -> ``"3-5, 9"``."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
