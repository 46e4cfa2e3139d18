"""``z2a train``: the training loop."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from zero2all.console import say
from zero2all.elastic.heartbeat import StartupPhase
from zero2all.errors import Interrupted
from zero2all.model.cost.model_size import count_parameters
from zero2all.recipe import Recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenStore
from zero2all.train.data_loader import Batch, DataLoader
from zero2all.train.job import TrainState, prepare
from zero2all.train.optimizer import set_learning_rate
from zero2all.train.signals import stop_requested
from zero2all.train.source_losses import LOSS
from zero2all.train.spikes import SpikeHandler
from zero2all.train.throughput import PER_RANK_METRICS

LossFunction = Callable[..., Tensor]
Evaluator = Callable[[LossFunction, Tokenizer, Recipe], dict[str, Any]]
GC_INTERVAL_STEPS = 100


def train(
    recipe: Recipe,
    on_batch: Callable[[Batch], None] | None = None,
    evaluate: Evaluator | None = None,
    start_time: float | None = None,
) -> dict[str, Any]:
    """Train for the recipe's duration, resuming where an earlier call stopped. Returns a summary.

    ``on_batch`` sees every batch before it is used. ``evaluate`` is called every ``evals.every`` with a function that
    computes the losses of inputs and targets; what it returns goes to the record. Time counts as start-up from
    ``start_time`` on: now, if not given.
    """
    if evaluate is not None and recipe.evals.every is not None:  # fail now, not after hours of training
        TokenStore(recipe.tokens_dir, "valid").require_full_sequence(recipe.train.seq_len)
    with prepare(recipe, start_time or time.time()) as job:
        return _train(job, on_batch, evaluate)


def _train(job: TrainState, on_batch: Callable[[Batch], None] | None, evaluate: Evaluator | None) -> dict[str, Any]:
    recipe, plan, parallel_model, mesh = job.run.recipe, job.plan, job.parallel_model, job.parallel_model.mesh
    optimizer_recipe = recipe.train.optimizer
    loss: float | None = None
    current_stage, spike_handler, pin = None, SpikeHandler(job), mesh.device.type == "cuda"
    with (
        stop_requested() as stop_event,
        job.open_record() as record,
        DataLoader(plan, job.first_step, mesh.dp_rank, mesh.dims.dp, pin, job.skipped_steps) as loader,
        collected_at_set_steps(),
    ):
        # A resume begins after that step, so the record must be written up to it.
        job.checkpoint_manager.before_commit = lambda: not record.has_unwritten_lines()
        job.checkpoint_manager.on_saved = lambda done, seconds: record.event(
            "checkpoint", step=done, seconds=round(seconds, 3)
        )
        startup = round(time.time() - job.start_time, 3)
        record.event(
            "resume" if job.first_step else "start", step=job.first_step, steps=plan.total_steps, startup=startup
        )
        for batch in loader:
            step, stage = batch.step, batch.stage
            if on_batch is not None:
                on_batch(batch)
            if stage is not current_stage:
                record.event("stage", step=step, name=stage.name)
                job.enter_stage(stage)
                current_stage = stage

            # One step: forward and backward, each loss divided by the valid targets of the global batch; then one
            # all-reduce for all metrics, which come off the device at once.
            losses = parallel_model.forward_backward(
                batch.inputs,
                batch.targets,
                batch.global_valid_tokens,
                job.doc_starts(batch.inputs),
                batch.micro_batch_size,
            )
            norm = parallel_model.clip_grad_norm_(optimizer_recipe.max_grad_norm)
            sums = job.source_losses.sums(losses, parallel_model.local_targets(batch.targets), batch.sources)
            *by_source, stop_flags = parallel_model.all_reduce_sum(sums, stop_requested=stop_event.is_set()).tolist()
            loss, grad_norm = sum(row[LOSS] for row in by_source) / batch.global_valid_tokens, norm.item()
            action = spike_handler.choose_action(batch, loss, grad_norm, record)
            if action == "rollback":
                loader.seek(job.resume_step, job.skipped_steps)
                current_stage = None
                continue
            set_learning_rate(job.optimizers, optimizer_recipe, stage.lr_multiplier(step))
            for optimizer in job.optimizers:
                if action == "update":
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            parallel_model.update_expert_bias()

            # Every step: the record. At intervals: a log line, an evaluation, a checkpoint.
            job.throughput.update(step, loader.data_wait_seconds)
            done, lr = step + 1, optimizer_recipe.lr * stage.lr_multiplier(step)
            source_metrics = job.source_losses.metrics(by_source)
            metrics = {"loss": loss, "lr": lr, "grad_norm": grad_norm, **source_metrics, **job.throughput.metrics(step)}
            if mesh.rank > 0:
                metrics = {name: metrics[name] for name in PER_RANK_METRICS}
            record.step(step, **metrics)
            if done % recipe.track.log_every == 0 or done == plan.total_steps or step == job.resume_step:
                say(job.throughput.step_line(step, loss, lr, grad_norm, source_metrics))
            if done % GC_INTERVAL_STEPS == 0:
                gc.collect()
            if evaluate is not None and plan.is_due(recipe.evals.every, done):
                validation = evaluate(parallel_model.eval_losses, job.tokenizer, recipe)
                job.last_validation = {"step": done, **validation}
                record.event("evaluation", step=step, **validation)
                say(f"validation after step {done}: {validation['bits_per_byte']:.4f} bits per byte")
            stop_now = any(stop_flags) and done < plan.total_steps
            if stop_now or done == plan.total_steps:
                # The last checkpoint is waited for, which may take longer than a step.
                job.heartbeat.record_phase(StartupPhase.ENDING)
            if done < plan.total_steps and (stall := job.save(done, last=stop_now)) is not None:
                record.step(step, checkpoint_stall=round(stall, 6))
            if stop_now:
                record.event("stopped", step=done)
                raise Interrupted(
                    f"stopped after step {done} of {plan.total_steps}; the same command resumes from there"
                )
            job.throughput.restart_timer()
            job.heartbeat(done)
        job.save_last()
        goodput = job.log_goodput(record)
        record.event("done", step=plan.total_steps)
    return {
        "run": str(job.run.directory),
        "steps": plan.total_steps,
        "resumed_at": job.first_step,
        "loss": loss,
        "tokens": plan.tokens_before(plan.total_steps),
        "parameters": count_parameters(parallel_model.config).total,
        "goodput": goodput,
    }


@contextmanager
def collected_at_set_steps() -> Iterator[None]:
    """Disable automatic garbage collection: it would stall one rank at a time while all others wait."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
