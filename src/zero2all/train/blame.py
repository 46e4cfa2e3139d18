"""``z2a blame``: the documents of a step by their loss, recomputed with the weights of the nearest checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from zero2all.errors import Z2aError
from zero2all.model import document_starts
from zero2all.train.run import Run
from zero2all.train.trace import trace_step

MAX_TEXT_CHARS = 200  # of each document span


@torch.inference_mode()
def blame_step(run: Run, step: int, lowest: bool = False) -> dict[str, Any]:
    """What ``trace_step`` returns, each document span with its mean loss and its first words, highest loss first.

    With ``lowest`` the lowest is first: text that the model knows already, such as repeated text.
    """
    checkpoint = _nearest_checkpoint(run, step)
    model, tokenizer = run.load_model(checkpoint), run.tokenizer()
    traced = trace_step(run, step)
    first, last = traced["samples"]
    samples = run.plan().stage_of(step).dataset.read(first, last)
    batch = torch.from_numpy(samples.tokens)
    starts = None if samples.is_first is None else document_starts(torch.from_numpy(samples.is_first[:, :-1]))
    losses = torch.cat(
        [
            model(
                sample[:, :-1],
                targets_BS=sample[:, 1:],
                doc_starts_BS=None if starts is None else starts[row : row + 1],
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
            text = tokenizer.decode(batch[sample - first, offset:end].numpy())[:MAX_TEXT_CHARS]
            spans.append({**span, "loss": round(predicted.mean().item(), 4), "text": text})
        offset = end
    spans.sort(key=lambda span: span["loss"], reverse=not lowest)
    return {**traced, "checkpoint": checkpoint, "loss": round(losses.mean().item(), 4), "documents": spans}


def _nearest_checkpoint(run: Run, step: int) -> int:
    """The newest checkpoint from before the step's update; else the first after it."""
    problems = {saved: run.checkpoints.problem(saved) for saved in run.checkpoints.steps()}
    valid = [saved for saved, problem in problems.items() if problem is None]
    if not valid:
        why = "".join(f"; {run.checkpoints.path(saved)}: {problem}" for saved, problem in problems.items())
        raise Z2aError(f"no checkpoint in {run.directory} to compute losses with ('z2a tokens trace' needs none){why}")
    before = [saved for saved in valid if saved <= step]
    return before[-1] if before else valid[0]
