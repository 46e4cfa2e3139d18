"""``z2a blame``: the documents of a step by their loss, recomputed with the weights of the nearest checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from zero2all.errors import Z2aError
from zero2all.model import document_starts
from zero2all.model.cost.flops import flops_per_token
from zero2all.train.run import Run, resolve_model_config
from zero2all.train.trace import trace_text

QUICK_FLOPS = 1e11


@torch.inference_mode()
def blame_step(run: Run, step: int, lowest: bool = False) -> dict[str, Any]:
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
