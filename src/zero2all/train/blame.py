"""``z2a blame``: the documents of a step, rebuilt from the run directory alone, and their loss, recomputed with the
weights of the nearest checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from zero2all.base.errors import UsageError, Z2aError
from zero2all.model import ModelInputs, document_starts
from zero2all.model.cost.flops import flops_per_token
from zero2all.train.run import Run, resolve_model_config

MAX_TEXT_CHARS = 200  # of each document span
QUICK_FLOPS = 1e11


def trace_step(run: Run, step: int) -> dict[str, Any]:
    """Every document with a token in the batch of ``step`` (counted from 0, as in the record)."""
    plan = run.plan()
    if not 0 <= step < plan.total_steps:
        raise UsageError(f"the run has steps 0 to {plan.total_steps - 1}")
    stage = plan.stage_of(step)
    start, stop = stage.sample_range(step)
    return {
        "run": str(run.directory),
        "step": step,
        "stage": stage.name,
        "samples": [start, stop],
        "documents": [asdict(span) for span in stage.dataset.documents(start, stop)],
    }


def trace_text(run: Run, step: int) -> dict[str, Any]:
    """What ``trace_step`` returns, each document span with its first words."""
    traced, tokenizer = trace_step(run, step), run.tokenizer()
    first, last = traced["samples"]
    tokens = run.plan().stage_of(step).dataset.tokens(first, last)
    end, sample = 0, first
    for span in traced["documents"]:
        start, sample = (end if span["sample"] == sample else 0), span["sample"]
        end = start + span["tokens"]
        # A token has a few characters: the start of a long document is enough.
        shown = tokens[sample - first, start : min(end, start + MAX_TEXT_CHARS)]
        span["text"] = tokenizer.decode(shown).strip("\ufffd")[:MAX_TEXT_CHARS]  # whole characters
    return traced


@torch.inference_mode()
def blame_step(run: Run, step: int, *, lowest: bool = False) -> dict[str, Any]:
    """What ``trace_text`` returns, each document span with its mean loss, highest loss first.

    With ``lowest`` the lowest is first: text that the model knows already, such as repeated text.
    """
    checkpoint = _nearest_checkpoint(run, step)
    model = run.load_model(checkpoint)
    traced = trace_text(run, step)
    first, last = traced["samples"]
    samples = run.plan().stage_of(step).dataset.read(first, last)
    batch = torch.from_numpy(samples.tokens)
    starts = None if samples.is_first is None else document_starts(torch.from_numpy(samples.is_first[:, :-1]))
    losses = torch.cat(
        [
            model(
                ModelInputs(
                    sample[:, :-1],
                    targets_BS=sample[:, 1:],
                    doc_starts_BS=None if starts is None else starts[row : row + 1],
                )
            )
            for row, sample in enumerate(torch.split(batch, 1))
        ]
    )
    spans, offset, sample = [], 0, first
    for span in traced["documents"]:
        offset, sample = (offset if span["sample"] == sample else 0), span["sample"]
        end = offset + span["tokens"]
        # Loss j is of token j + 1; the first token of a sample is never a target.
        predicted = losses[sample - first, max(0, offset - 1) : end - 1]
        if len(predicted):
            spans.append({**span, "loss": round(predicted.mean().item(), 4)})
        offset = end
    spans.sort(key=lambda span: span["loss"], reverse=not lowest)
    return {**traced, "checkpoint": checkpoint, "loss": round(losses.mean().item(), 4), "documents": spans}


def _nearest_checkpoint(run: Run, step: int) -> int:
    """The newest checkpoint from before the step's update; else the first after it. Only that one is verified."""
    saved = run.checkpoints.steps()
    nearest_first = [one for one in reversed(saved) if one <= step] + [one for one in saved if one > step]
    why = ""
    for one in nearest_first:
        if (problem := run.checkpoints.problem(one)) is None:
            return one
        why += f"; {run.checkpoints.path(one)}: {problem}"
    raise Z2aError(f"no checkpoint in {run.directory} to compute losses with ('z2a blame --no-loss' needs none){why}")


def is_quick(run: Run, step: int) -> bool:
    """Whether losses take about a second on a CPU, so that nobody need ask for them."""
    stage, has_checkpoint = run.plan().stage_of(step), bool(run.checkpoints.steps())
    start, stop = stage.sample_range(step)
    tokens = (stop - start) * stage.recipe.seq_len
    model = resolve_model_config(run.recipe, run.tokenizer())
    return has_checkpoint and tokens * flops_per_token(model, stage.recipe.seq_len).forward <= QUICK_FLOPS
