"""``z2a train``: the training loop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from zero2all.console import say
from zero2all.errors import Interrupted, UsageError, Z2aError
from zero2all.model import Z2all
from zero2all.recipe import Recipe, TrainRecipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import Samples
from zero2all.track import Record, open_sinks
from zero2all.train.optimizer import apply_settings, build_optimizers, set_learning_rate
from zero2all.train.run import Run, model_config, training_samples
from zero2all.train.schedule import share_of_peak
from zero2all.units import show_count, show_seconds

OnBatch = Callable[[int, Tensor], None]


def train(recipe: Recipe, on_batch: OnBatch | None = None) -> dict[str, Any]:
    """Train to the recipe's length, taking up where an earlier call was stopped. Returns a summary.

    ``on_batch(step, tokens)`` sees every batch before it is used, as int64 [samples, seq_len + 1].
    """
    options = recipe.train
    device = pick_device(options)
    run = Run(recipe, recipe.run_dir)
    tokenizer, samples = Tokenizer(recipe.tokenizer_dir), training_samples(recipe)
    if samples.store.tokenizer_fingerprint != tokenizer.fingerprint:
        raise Z2aError(f"{recipe.tokens_dir} was made with another tokenizer: run 'z2a tokens build' again")
    tokens_per_epoch = samples.per_epoch * options.seq_len
    total = options.duration.in_steps(options.batch_tokens, tokens_per_epoch)
    if total < 1:
        raise UsageError(f"{options.duration} is less than one step of {options.batch_tokens} tokens")
    warmup = options.schedule.warmup.in_steps(options.batch_tokens, tokens_per_epoch)
    save_every = max(1, recipe.checkpoint.every.in_steps(options.batch_tokens, tokens_per_epoch))

    with torch.device(device):
        model = Z2all(model_config(recipe, tokenizer)).init_weights(recipe.seed)
    optimizers = build_optimizers(model, options.optimizer)
    identity = {
        "samples": samples.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "model": model.config.model_dump(mode="json", exclude={"preset"}),
        "optimizer": options.optimizer.name,
        "batch_samples": options.batch_samples,
    }
    first = _resume(run, model, optimizers, identity)
    if first > total:
        raise UsageError(f"the run in {run.directory} is at step {first} already, past the {total} asked for")
    apply_settings(optimizers, options.optimizer)
    run.write_down(identity, tokenizer, device)
    if options.compile:
        for layer in model.layers:
            layer.compile()
    _say_plan(recipe, model, samples, device, first, total)
    clock = Clock(total, options.batch_tokens)
    loss: float | None = None
    sinks = open_sinks(recipe.track.sinks, run.directory)
    with (
        stop_requested() as stopping,
        Record(run.record_path, sinks=sinks, system_every=recipe.track.system_every) as record,
    ):
        record.event("resume" if first else "start", step=first, steps=total)
        for step in range(first, total):
            batch = torch.from_numpy(samples.tokens(step * options.batch_samples, (step + 1) * options.batch_samples))
            if on_batch is not None:
                on_batch(step, batch)

            # One step: the batch in micro-batches, each loss divided by the tokens of the whole batch.
            targets_in_batch = batch[:, 1:].numel()
            loss_sum = torch.zeros((), device=device)
            for micro in torch.split(batch, options.micro_tokens // options.seq_len):
                micro = micro.to(device, non_blocking=True)
                with autocast(options, device):
                    losses = model(micro[:, :-1], targets_BS=micro[:, 1:])
                micro_loss = losses.sum() / targets_in_batch
                micro_loss.backward()
                loss_sum += micro_loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.optimizer.clip)
            loss, grad_norm = loss_sum.item(), norm.item()
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                record.event("not finite", step=step, loss=str(loss), grad_norm=str(grad_norm))
                raise Z2aError(_not_finite(run, step, loss, grad_norm))
            share = share_of_peak(step, total, warmup, options.schedule.final)
            set_learning_rate(optimizers, options.optimizer, share)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            # Always: the record. Once in a while: a line, a checkpoint.
            clock.tick()
            lr = options.optimizer.lr * share
            record.step(step, loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_second=round(clock.rate, 1))
            done = step + 1
            if done % recipe.track.print_every == 0 or done == total or step == first:
                say(f"{clock.line(step)}  loss {loss:.6f}  lr {lr:.2e}  grad {grad_norm:.3f}  {clock.pace(step)}")
            stop_now = stopping.is_set() and done < total
            if done % save_every == 0 or done == total or stop_now:
                record.flush()  # a resume begins after this step: what comes before must be on disk
                run.checkpoints.save(done, model, optimizers, {"sample": done * options.batch_samples, **identity})
                record.event("checkpoint", step=done)
            if stop_now:
                record.event("stopped", step=done)
                raise Interrupted(f"stopped after step {done} of {total}; the same command goes on from there")
        record.event("done", step=total)
    return {
        "run": str(run.directory),
        "steps": total,
        "resumed_at": first,
        "loss": loss,
        "tokens": total * options.batch_tokens,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def pick_device(options: TrainRecipe) -> torch.device:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("train.device is cuda, but torch sees no GPU here; use train.device=auto")
    wanted = "cuda" if options.device == "auto" and torch.cuda.is_available() else options.device
    return torch.device("cpu" if wanted == "auto" else wanted)


def autocast(options: TrainRecipe, device: torch.device) -> torch.autocast:
    """bf16 matrices over fp32 weights, where asked for or where the device computes bf16 natively."""
    native = torch.cuda.is_bf16_supported() if device.type == "cuda" else torch.cpu._is_amx_tile_supported()
    enabled = options.precision == "bf16" or (options.precision == "auto" and native)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def _resume(run: Run, model: Z2all, optimizers: list[torch.optim.Optimizer], identity: dict[str, Any]) -> int:
    """Load the newest whole checkpoint if there is one. A run that is not the same run is refused."""
    step = run.checkpoints.newest()
    if step is None:
        return 0
    saved = run.checkpoints.state(step)
    changed = [name for name, value in identity.items() if saved.get(name) != value]
    if changed:
        raise UsageError(
            f"the run in {run.directory} was trained with another {' and '.join(changed)}; "
            "give this one a new place (out=DIR), or remove that directory"
        )
    run.checkpoints.load(step, model, optimizers)
    return step


def _not_finite(run: Run, step: int, loss: float, grad_norm: float) -> str:
    kept = run.checkpoints.steps()
    last = f"; the newest checkpoint is of step {kept[-1]}" if kept else ""
    return (
        f"step {step}: loss {loss}, gradient norm {grad_norm}{last}. "
        f"Try a lower learning rate or a longer warmup; 'z2a tokens trace {run.directory} --step {step}' shows its text"
    )


def _say_plan(recipe: Recipe, model: Z2all, samples: Samples, device: torch.device, first: int, total: int) -> None:
    options = recipe.train
    parameters = sum(parameter.numel() for parameter in model.parameters())
    precision = "bf16" if autocast(options, device)._enabled else "fp32"
    say(
        f"{show_count(parameters)} parameters on {device.type} in {precision}: {total} steps of "
        f"{show_count(options.batch_tokens)} tokens ({options.batch_samples} samples of {options.seq_len}), "
        f"{show_count(total * options.batch_tokens)} tokens in all"
    )
    passes = samples.order.epochs_at(total * options.batch_samples)
    say("passes over each source: " + ", ".join(f"{name} {count:.2f}" for name, count in passes.items()))
    if first:
        say(f"resuming after step {first}")


class Clock:
    """Speed and time left, over the recent steps: one slow first step does not spoil the figure."""

    def __init__(self, total: int, tokens_per_step: int) -> None:
        self.total, self.tokens_per_step = total, tokens_per_step
        self.seconds = 0.0
        self._last = time.perf_counter()
        self._ticks = 0

    def tick(self) -> None:
        now = time.perf_counter()
        took, self._last = now - self._last, now
        self._ticks += 1
        # The first step includes warming up; from then on the average forgets over about ten steps.
        self.seconds = took if self._ticks <= 2 else 0.9 * self.seconds + 0.1 * took

    @property
    def rate(self) -> float:
        return self.tokens_per_step / self.seconds

    def line(self, step: int) -> str:
        return f"step {step + 1}/{self.total} {100 * (step + 1) / self.total:5.1f}%"

    def pace(self, step: int) -> str:
        return f"{show_count(self.rate)} tok/s  left {show_seconds((self.total - step - 1) * self.seconds)}"


@contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """Set by Ctrl-C or SIGTERM: the step in hand is finished and saved first. A second Ctrl-C stops at once."""
    stopping = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopping  # in a notebook's worker thread the signals are not ours
        return

    def request(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()
        say("stopping after this step; the state will be saved")

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
