"""``z2a train``: the training loop."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from zero2all.console import say
from zero2all.errors import Interrupted
from zero2all.model.anatomy import count_parameters
from zero2all.recipe import Recipe
from zero2all.resilience.beat import Mark
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenStore
from zero2all.train.batches import Batch, Loader
from zero2all.train.channels import LOSS
from zero2all.train.clock import OF_EACH_RANK
from zero2all.train.job import Job, prepare
from zero2all.train.optimizer import set_learning_rate
from zero2all.train.signals import stop_requested
from zero2all.train.spikes import Spikes

LossesOf = Callable[..., Tensor]
Evaluate = Callable[[LossesOf, Tokenizer, Recipe], dict[str, Any]]
COLLECT_EVERY = 100  # steps


def train(
    recipe: Recipe,
    on_batch: Callable[[Batch], None] | None = None,
    evaluate: Evaluate | None = None,
    began: float | None = None,
) -> dict[str, Any]:
    """Train to the recipe's length, taking up where an earlier call was stopped. Returns a summary.

    ``on_batch`` sees every batch before it is used. ``evaluate`` is called every ``evals.every`` with a function that
    gives the losses of inputs and targets; what it returns goes to the record. ``began`` is since when time counts as
    start-up: now, if not given.
    """
    if evaluate is not None and recipe.evals.every is not None:  # not after hours of training
        TokenStore(recipe.tokens_dir, "valid").need_a_sample(recipe.train.seq_len)
    with prepare(recipe, began or time.time()) as job:
        return _train(job, on_batch, evaluate)


def _train(job: Job, on_batch: Callable[[Batch], None] | None, evaluate: Evaluate | None) -> dict[str, Any]:
    recipe, plan, spread, layout = job.run.recipe, job.plan, job.spread, job.spread.layout
    options = recipe.train.optimizer
    loss: float | None = None
    entered, spikes, pin = None, Spikes(job), layout.device.type == "cuda"
    with (
        stop_requested() as stopping,
        job.open_record() as record,
        Loader(plan, job.first, layout.dp_rank, layout.sizes.dp, pin, job.skipped) as loader,
        collected_at_set_steps(),
    ):
        job.keeper.before_commit = lambda: (
            not record.lags()
        )  # a resume begins after that step: what comes before must be written
        job.keeper.on_saved = lambda done, seconds: record.event("checkpoint", step=done, seconds=round(seconds, 3))
        startup = round(time.time() - job.began, 3)
        record.event("resume" if job.first else "start", step=job.first, steps=plan.total, startup=startup)
        for batch in loader:
            step, stage = batch.step, batch.stage
            if on_batch is not None:
                on_batch(batch)
            if stage is not entered:
                record.event("stage", step=step, name=stage.name)
                job.enter(stage)
                entered = stage

            # One step: forward and backward, each loss divided by the targets of the whole batch over all ranks;
            # then all that people look at is added up over ranks and comes off the device at once.
            spread.micro_samples = batch.micro_samples
            losses = spread.backward(batch.inputs, batch.targets, batch.targets_in_all, job.starts(batch.inputs))
            norm = spread.clip(options.clip)
            sums = job.channels.sums(losses, spread.own(batch.targets), batch.sources)
            *by_source, stop_wishes = spread.total(sums, wish=stopping.is_set()).tolist()
            loss, grad_norm = sum(row[LOSS] for row in by_source) / batch.targets_in_all, norm.item()
            action = spikes.judge(batch, loss, grad_norm, record)
            if action == "back":
                loader.go_to(job.at, job.skipped)
                entered = None
                continue
            set_learning_rate(job.optimizers, options, stage.share(step))
            for optimizer in job.optimizers:
                if action == "update":
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            spread.even_load()

            # Always: the record. Once in a while: a line, an evaluation, a checkpoint.
            job.clock.tick(step, loader.waited)
            done, lr = step + 1, options.lr * stage.share(step)
            channels = job.channels.figures(by_source)
            figures = {"loss": loss, "lr": lr, "grad_norm": grad_norm, **channels, **job.clock.figures(step)}
            if layout.rank > 0:
                figures = {name: figures[name] for name in OF_EACH_RANK}
            record.step(step, **figures)
            if done % recipe.track.print_every == 0 or done == plan.total or step == job.at:
                say(job.clock.line(step, loss, lr, grad_norm, channels))
            if done % COLLECT_EVERY == 0:
                gc.collect()
            if evaluate is not None and plan.is_due(recipe.evals.every, done):
                quality = evaluate(spread.losses, job.tokenizer, recipe)
                job.quality = {"step": done, **quality}
                record.event("evaluation", step=step, **quality)
                say(f"held out after step {done}: {quality['bits_per_byte']:.4f} bits per byte")
            stop_now = any(stop_wishes) and done < plan.total
            if stop_now or done == plan.total:
                job.beat.mark(Mark.ENDING)  # the last state is waited for, and that may take longer than a step
            if done < plan.total and (stall := job.save(done, last=stop_now)) is not None:
                record.step(step, checkpoint_stall=round(stall, 6))
            if stop_now:
                record.event("stopped", step=done)
                raise Interrupted(f"stopped after step {done} of {plan.total}; the same command goes on from there")
            job.clock.rest()
            job.beat(done)
        job.save_last()
        share = job.tell_goodput(record)
        record.event("done", step=plan.total)
    return {
        "run": str(job.run.directory),
        "steps": plan.total,
        "resumed_at": job.first,
        "loss": loss,
        "tokens": plan.tokens_before(plan.total),
        "parameters": count_parameters(spread.config).total,
        "goodput": share,
    }


@contextmanager
def collected_at_set_steps() -> Iterator[None]:
    """Python's collector off: left alone, it would stall one rank at a time while all the others wait for it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
