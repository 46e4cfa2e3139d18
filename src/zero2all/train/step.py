"""One training step, from a batch to new weights. Its two halves are apart since a spike policy may look at the loss
before the weights change, and since on a GPU the metrics are read when the next step is already running."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zero2all.base.console import warn
from zero2all.cluster.launch.heartbeat import DEVICE_WATCH
from zero2all.model import ModelInputs
from zero2all.model.z2all import derive_seed
from zero2all.optim.optimizer import set_learning_rate
from zero2all.train.data_loader import Batch, BatchCopier, HostCopy
from zero2all.train.job import Progress, TrainingJob
from zero2all.train.step_timer import StepMarks, StepTime, StepTimer


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device may still be computing."""

    batch: Batch
    metrics: HostCopy
    """Sums of the objective, stop flags and gradient norm as rows, then the norm of each layer."""
    marks: StepMarks
    """Complete when the metrics are."""


@dataclass(frozen=True)
class StepResult:
    """What a step computed; the same on every rank but for its time."""

    loss: float
    grad_norm: float
    layer_norms: list[float]
    lr: float
    metrics: dict[str, float]
    """Metrics of the objective, such as the loss of each source."""
    stop_requested: bool
    """On any rank."""
    time: StepTime
    """The time on this rank."""


class TrainStep:
    """
    >>> launched = step.compute_gradients(batch)
    >>> step.update_weights(batch)
    >>> result = step.read_result(launched)  # the host waits for the device here, and nowhere else
    """

    def __init__(self, job: TrainingJob, progress: Progress, timer: StepTimer, copier: BatchCopier) -> None:
        self.job, self.progress, self.timer, self.copier = job, progress, timer, copier
        self.objective = job.objective
        self._island_seed = () if job.place is None else (job.place.island,)  # islands draw other dropout masks
        self._was_idle = False  # whether a step without anything to learn has been reported

    def compute_gradients(self, batch: Batch) -> LaunchedStep:
        job, model, timer = self.job, self.job.model, self.timer
        DEVICE_WATCH.begin_step(batch.step)  # a report of a hang names the step

        # 1. What is minimized: the mean loss of tokens, pairs, ratings or sampled completions. GRPO replaces the
        #    prompts of the batch by the completions that the model gives to them.
        step_loss = self.objective.begin(model, batch)
        batch = step_loss.batch or batch

        # 2. Data: this rank's rows, usually on the device already, copied while the step before was computed.
        with timer.part("data"):
            tensors = batch.on_device or self.copier.copy(
                batch.inputs, batch.targets, batch.doc_starts, batch.micro_batch_size
            )
            tensors.wait()

        # 3. Forward and backward, one micro-batch after another: gradients add up (``BatchRunner``). The divisor counts
        #    the global batch, so the sum over micro-batches and ranks is the gradient of the mean.
        with timer.part("backward"):  # forward passes and losses are found by hooks of the model
            losses_BS = model.forward_backward(
                ModelInputs(tensors.inputs, tensors.targets, tensors.doc_starts, tensors.cu_seqlens_MN, step_loss.soft),
                step_loss.divisor,
                batch.micro_batch_size,
                step_loss.objective,
                dropout_seed=derive_seed(job.recipe.seed, batch.step, *self._island_seed),
            )
        job.hooks.on_gradients(model)

        # 4. Clipping, by the norm over all parameters of all ranks.
        with timer.part("optimizer"):
            grad_norm = model.clip_grad_norm_(job.recipe.train.optimizer.max_grad_norm)

        # 5. Metrics: one all-reduce for all of them and the stop flag, then a copy that the host does not wait for.
        with timer.part("logging"):
            sums = self.objective.sums(model, losses_BS, batch)
            sums = model.all_reduce_sum(sums, stop_requested=self.progress.is_stopping())
            norms = grad_norm.to(sums).expand(1, sums.shape[1])
            marks = timer.finish_step()  # before the copy, so that they are complete when it is
            return LaunchedStep(batch, HostCopy(torch.cat([sums, norms]), model.gradient_norms.by_layer), marks)

    def update_weights(self, batch: Batch, *, skip: bool = False) -> None:
        """6. The learning rate of the schedule, then the optimizers."""
        with self.timer.part("optimizer"):
            multiplier = batch.stage.lr_multiplier(batch.step)
            set_learning_rate(self.job.optimizers, self.job.recipe.train.optimizer, multiplier)
            for optimizer in self.job.optimizers:
                if not skip:
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.job.model.update_expert_bias()

    def read_result(self, launched: LaunchedStep) -> StepResult:
        """Wait for the device, and read what it computed."""
        batch, recipe = launched.batch, self.job.recipe
        with self.timer.part("logging"):
            (*rows, stop_flags, (norm, *_)), layer_norms = launched.metrics.tolist()
            step_time = launched.marks.read()
        metrics = dict(self.objective.metrics(rows))
        if self.job.mesh.dims.world_size > 1:
            metrics["sync_bytes"] = float(self.job.model.runner.sync_bytes)
        if not self._was_idle and (reason := self.objective.idle_reason(batch, metrics)) is not None:
            self._was_idle = True  # once: training goes on, and would look as if it learned
            warn(f"step {batch.step + 1} learns nothing: {reason}")
        return StepResult(
            loss=self.objective.loss(rows, batch),
            grad_norm=norm,
            layer_norms=layer_norms,
            lr=recipe.train.optimizer.peak_lr * batch.stage.lr_multiplier(batch.step),
            metrics=metrics,
            stop_requested=any(stop_flags),
            time=step_time,
        )
