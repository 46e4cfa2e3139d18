"""Evaluation of a trained run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zero2all.base.errors import Z2aError
from zero2all.base.io import MANIFEST, fingerprint, read_record
from zero2all.base.manifest import read_manifest
from zero2all.base.records import parse_record
from zero2all.checkpoint.training_state import read_lineage
from zero2all.evals import evaluate_bpb
from zero2all.tokens.manifest import StoreManifest
from zero2all.track.eval_record import LossEvaluation
from zero2all.track.experiment_record import BITS_PER_BYTE, VariantResult
from zero2all.track.goodput import compute_run_goodput
from zero2all.track.run_view import read_run_view
from zero2all.train import Run

EVALUATION_FILE = "evaluation.json"  # in the directory of a run


@dataclass(frozen=True)
class CheckpointEvaluation:
    """``evaluation.json``: metrics of a checkpoint, and what they were measured on."""

    step: int
    metrics: dict[str, float]
    validation_set: str
    """Fingerprint of the validation text, whatever the tokenizer."""
    validation_bytes: int
    """How much of it was used."""
    tokenizer: str


def evaluate(run: Run) -> CheckpointEvaluation:
    """Metrics of the newest checkpoint: ``bits_per_byte`` of the validation set, in total and by source."""
    step = newest_step(run)
    return to_evaluation(run, step or 0, evaluate_bpb(run.load_model(step), run.tokenizer(), run.recipe))


def to_evaluation(run: Run, step: int, validation: LossEvaluation) -> CheckpointEvaluation:
    by_source = {f"{BITS_PER_BYTE}/{name}": part.bits_per_byte for name, part in validation.sources.items()}
    return CheckpointEvaluation(
        step=step,
        metrics={BITS_PER_BYTE: validation.bits_per_byte, **by_source},
        validation_set=validation_set(run.recipe.tokens_dir),
        validation_bytes=validation.bytes,
        tokenizer=run.identity().tokenizer,
    )


def saved_evaluation(run: Run) -> CheckpointEvaluation | None:
    """The evaluation of the newest checkpoint, if it was saved."""
    path = run.directory / EVALUATION_FILE
    saved = read_record(CheckpointEvaluation, path) if path.exists() else None
    return saved if saved is not None and saved.step == newest_step(run) else None


def newest_step(run: Run) -> int | None:
    return run.checkpoints.newest_valid(read_lineage(run.directory))


def validation_set(tokens_dir: Path) -> str:
    """Fingerprint of the validation text by source. It does not depend on the tokenizer, so that bits per byte of two
    tokenizers can be compared."""
    content = read_manifest(tokens_dir, "tokens", "z2a tokens build RECIPE")
    sources = parse_record(StoreManifest, content, tokens_dir / MANIFEST).splits.get("valid", {})
    return fingerprint({name: [source.documents, source.bytes] for name, source in sources.items()})


def run_result(run: Run, evaluation: CheckpointEvaluation) -> VariantResult:
    """The evaluation with what the record says about the run."""
    view = read_run_view(run.directory)
    final = evaluation.metrics[BITS_PER_BYTE]
    if not math.isfinite(final):
        raise Z2aError(f"the bits per byte of {run.directory} are not finite")
    measured = [(final, evaluation.step)]
    validation = view.validation_table()
    if "validation/all" in validation.mean:
        steps = (validation.steps + 1).astype(int).tolist()
        measured += zip(validation.mean["validation/all"].tolist(), steps, strict=True)
    best, best_step = min((value, step) for value, step in measured if math.isfinite(value))
    rates = view.finite_values("tokens_per_second")
    return VariantResult(
        steps=evaluation.step,
        tokens=run.plan().tokens_before(evaluation.step),
        seconds=compute_run_goodput(run.directory).seconds,
        tokens_per_second=float(np.median(rates)) if len(rates) else 0.0,
        metrics={name: value for name, value in evaluation.metrics.items() if math.isfinite(value)},
        best_bits_per_byte=best,
        best_step=best_step,
        validation_set=evaluation.validation_set,
        validation_bytes=evaluation.validation_bytes,
        tokenizer=evaluation.tokenizer,
    )
