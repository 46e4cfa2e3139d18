"""``z2a blame``: the documents of a step by their loss, recomputed with the weights of the nearest checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from zero2all.errors import Z2aError
from zero2all.model import document_starts
from zero2all.train.run import Run
from zero2all.train.trace import trace_step

SHOWN = 200  # characters of a document's part


@torch.inference_mode()
def blame_step(run: Run, step: int) -> dict[str, Any]:
    """What ``trace_step`` gives, each part of a document with its mean loss and its first words, worst first."""
    checkpoint = _nearest_checkpoint(run, step)
    model, tokenizer = run.load_model(checkpoint), run.tokenizer()
    traced = trace_step(run, step)
    first, last = traced["samples"]
    batch = torch.from_numpy(run.plan().at(step).samples.tokens(first, last))
    starts = document_starts(batch[:, :-1], tokenizer.end_of_text) if run.recipe.train.document_mask else None
    losses = torch.cat(
        [
            model(sample[:, :-1], targets_BS=sample[:, 1:], starts_BS=None if starts is None else starts[row : row + 1])
            for row, sample in enumerate(torch.split(batch, 1))
        ]
    )
    found, at, sample = [], 0, first
    for part in traced["documents"]:
        at, sample = (at if part["sample"] == sample else 0), part["sample"]
        after = at + part["tokens"]
        # Loss j is of token j + 1; the very first token of a sample is only read, never predicted.
        predicted = losses[sample - first, max(0, at - 1) : after - 1]
        if len(predicted):
            text = tokenizer.decode(batch[sample - first, at:after].numpy())[:SHOWN]
            found.append({**part, "loss": round(predicted.mean().item(), 4), "text": text})
        at = after
    found.sort(key=lambda part: -part["loss"])
    return {**traced, "checkpoint": checkpoint, "loss": round(losses.mean().item(), 4), "documents": found}


def _nearest_checkpoint(run: Run, step: int) -> int:
    """The newest one from before the step saw its batch; else the first after it."""
    problems = {number: run.checkpoints.problem(number) for number in run.checkpoints.steps()}
    kept = [number for number, problem in problems.items() if problem is None]
    if not kept:
        why = "".join(f"; {run.checkpoints.path(number)}: {problem}" for number, problem in problems.items())
        raise Z2aError(f"no checkpoint in {run.directory} to compute losses with ('z2a tokens trace' needs none){why}")
    before = [number for number in kept if number <= step]
    return before[-1] if before else kept[0]
