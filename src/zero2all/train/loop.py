"""``z2a train``: the training loop."""

from __future__ import annotations

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
from zero2all.tokens import Samples
from zero2all.track import Record
from zero2all.train.optimizer import build_optimizer
from zero2all.train.run import Run
from zero2all.train.schedule import learning_rate
from zero2all.units import show_count, show_seconds

OnBatch = Callable[[int, Tensor], None]


def train(recipe: Recipe, on_batch: OnBatch | None = None) -> dict[str, Any]:
    """Train to the recipe's length, taking up where an earlier call was stopped. Returns a summary.

    ``on_batch(step, tokens)`` sees every batch before it is used, as int64 [samples, seq_len + 1].
    """
    options = recipe.train
    device = pick_device(options)
    run = Run.create(recipe, device)
    tokenizer, samples = run.tokenizer(), run.samples()
    if samples.store.tokenizer_fingerprint != tokenizer.fingerprint:
        raise Z2aError(f"{recipe.tokens_dir} was made with another tokenizer: run 'z2a tokens build' again")
    total = options.duration.in_steps(options.batch_tokens, samples.per_epoch * options.seq_len)
    if total < 1:
        raise UsageError(f"{options.duration} is less than one step of {options.batch_tokens} tokens")
    warmup = options.schedule.warmup.in_steps(options.batch_tokens, samples.per_epoch * options.seq_len)
    save_every = max(1, recipe.checkpoint.every.in_steps(options.batch_tokens, samples.per_epoch * options.seq_len))

    with torch.device(device):
        model = Z2all(run.model_config(tokenizer)).init_weights(recipe.seed)
    optimizer = build_optimizer(model, options.optimizer)
    identity = {
        "samples": samples.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "model": model.config.model_dump(mode="json", exclude={"preset"}),
        "batch_samples": options.batch_samples,
    }
    first = _resume(run, model, optimizer, identity)
    if options.compile:
        for layer in model.layers:
            layer.compile()
    _say_plan(recipe, model, samples, device, first, total)
    record = Record(run.record_path)
    record.event("resume" if first else "start", step=first, steps=total)

    clock = Clock(first, total, options.batch_tokens)
    loss = float("nan")
    with stop_requested() as stopping:
        for step in range(first, total):
            batch = torch.from_numpy(samples.tokens(step * options.batch_samples, (step + 1) * options.batch_samples))
            if on_batch is not None:
                on_batch(step, batch)

            # One step: the batch in micro-batches, each loss divided by the tokens of the whole batch.
            lr = learning_rate(step, total, warmup, options.optimizer.lr, options.schedule.final)
            for group in optimizer.param_groups:
                group["lr"] = lr
            targets_in_batch = batch[:, 1:].numel()
            loss_sum = torch.zeros((), device=device)
            for micro in torch.split(batch, options.micro_tokens // options.seq_len):
                micro = micro.to(device, non_blocking=True)
                with autocast(options, device):
                    losses = model(micro[:, :-1], targets_BS=micro[:, 1:])
                micro_loss = losses.sum() / targets_in_batch
                micro_loss.backward()
                loss_sum += micro_loss.detach()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.optimizer.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss = loss_sum.item()

            # Always: the record. Once in a while: a line, a checkpoint.
            clock.tick(step)
            record.step(step, loss=loss, lr=lr, grad_norm=grad_norm.item(), tokens_per_second=round(clock.rate, 1))
            done = step + 1
            if done % recipe.track.print_every == 0 or done == total or step == first:
                say(
                    f"{clock.line(step)}  loss {loss:.6f}  lr {lr:.2e}  grad {grad_norm.item():.3f}  {clock.pace(step)}"
                )
            if done % save_every == 0 or done == total or stopping.is_set():
                run.checkpoints.save(done, model, optimizer, {"sample": done * options.batch_samples, **identity})
                record.event("checkpoint", step=done)
            if stopping.is_set() and done < total:
                record.event("stopped", step=done)
                record.close()
                raise Interrupted(f"stopped after step {done} of {total}; the same command goes on from there")
    record.event("done", step=total)
    record.close()
    return {
        "run": str(run.directory),
        "steps": total,
        "resumed_at": first,
        "loss": None if first == total else loss,
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


def _resume(run: Run, model: Z2all, optimizer: torch.optim.Optimizer, identity: dict[str, Any]) -> int:
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
    run.checkpoints.load(step, model, optimizer)
    return step


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

    def __init__(self, first: int, total: int, tokens_per_step: int) -> None:
        self.total, self.tokens_per_step = total, tokens_per_step
        self.seconds = 0.0
        self._last = time.perf_counter()
        self._ticks = 0

    def tick(self, step: int) -> None:
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
