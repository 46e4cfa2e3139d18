"""``z2a eval loss``: the loss of a run, a checkpoint or a Hugging Face directory, with the noise of each metric."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from zero2all.base.charts.table import text_table
from zero2all.base.console import warn
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import MANIFEST
from zero2all.base.records import to_json
from zero2all.evals.scored_text import Array, EvalText, Scoring, Windowed
from zero2all.evals.target import TargetLocation
from zero2all.evals.validation_loss import (
    evaluate_texts,
    packed_scoring,
    texts_of_test_sets,
    unigram_nats,
    validation_texts,
)
from zero2all.model import Z2all
from zero2all.parallel import ParallelModel
from zero2all.recipe import ModelConfig, Recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenShard, TokenStore
from zero2all.tokens.evaluation_set import (
    build_test_sets,
    find_test_sets,
    open_test_set,
    open_test_sets,
    write_test_set,
)
from zero2all.track.eval_record import LossEvaluation, LossMetrics
from zero2all.track.run_view import read_run_view
from zero2all.train.run import TEST_SETS

DEFAULT_WINDOW = 2048  # of a model without a recipe
CONFIDENCE = 1.96  # standard errors on both sides: 95%
MIN_EVALUATIONS, MAX_EVALUATIONS = 4, 6  # at the end of a run, to measure the noise between checkpoints


@dataclass(frozen=True)
class LossOptions:
    """What ``z2a eval loss`` evaluates on."""

    recipe: Recipe | None = None
    """The recipe of the validation set; by default the run's."""
    test_sets: dict[str, str] = field(default_factory=dict)
    """Paths by name, besides the recipe's."""
    window: int | None = None
    """Tokens of the sliding window, with which each document is scored alone."""
    stride: int | None = None


@dataclass(frozen=True)
class NoiseFloor:
    """How much two measurements of bits per byte differ by chance, at 95% confidence."""

    bits_per_byte: float
    evaluations: int | None
    """The last evaluations of the run, from whose spread it is computed; None if it is from the standard error."""


@dataclass(frozen=True)
class LossReport:
    name: str
    step: int | None
    evaluation: LossEvaluation
    noise: dict[str, NoiseFloor]
    """The noise floor by row of the table."""

    def to_json(self) -> dict[str, Any]:
        """The object that ``z2a eval loss --json`` prints: the metrics are beside the rest."""
        noise = {label: to_json(floor) for label, floor in self.noise.items()}
        return {"name": self.name, "step": self.step, **to_json(self.evaluation), "noise": noise}


def report_loss(found: TargetLocation, model: Z2all | ParallelModel, options: LossOptions) -> LossReport:
    """Evaluate a model on the validation set, if there is one, and on all test sets."""
    recipe = options.recipe or (found.run.recipe if found.run is not None else None)
    scoring = _choose_scoring(model.config, recipe, options)
    with tempfile.TemporaryDirectory() as temporary:
        texts, unigram = _find_validation(recipe, found, options, Path(temporary))
        texts += texts_of_test_sets(_find_test_sets(recipe, found, options, Path(temporary) / TEST_SETS))
        evaluation = evaluate_texts(model, found.tokenizer, texts, scoring, unigram)
    if not math.isfinite(evaluation.bits_per_byte):
        raise Z2aError(f"the loss of {found.name} is not finite: its weights are damaged, try another checkpoint")
    is_own_text = found.run is not None and options.recipe is None and bool(evaluation.sources)
    curves = _recorded_curves(found.directory, found.step) if is_own_text else {}
    noise = {label: _noise_floor(metrics, curves.get(label)) for label, metrics in loss_rows(evaluation).items()}
    known = {label: floor for label, floor in noise.items() if floor is not None}
    return LossReport(found.name, found.step, evaluation, known)


def _choose_scoring(config: ModelConfig, recipe: Recipe | None, options: LossOptions) -> Scoring:
    if options.window is None and options.stride is not None:
        raise UsageError("--stride is for a sliding window: give --window too")
    if options.window is None and recipe is not None:
        return packed_scoring(recipe)
    window = options.window or min(DEFAULT_WINDOW, config.max_position_embeddings)
    return Windowed(window, options.stride or max(1, window // 2))


def _find_validation(
    recipe: Recipe | None, found: TargetLocation, options: LossOptions, temporary: Path
) -> tuple[list[EvalText], Array | None]:
    """The validation set in the tokens of the model, and the unigram model if training used the same tokens."""
    if recipe is None:
        return [], None
    if options.recipe is None and options.test_sets and not (recipe.tokens_dir / MANIFEST).exists():
        warn(f"no tokens in {recipe.tokens_dir}: the test sets are evaluated, the validation set is not")
        return [], None
    if TokenStore(recipe.tokens_dir, "valid").tokenizer_fingerprint == found.tokenizer.fingerprint:
        return validation_texts(recipe), unigram_nats(recipe, found.tokenizer)
    return _encode_validation(recipe, found.tokenizer, temporary / "validation"), None


def _encode_validation(recipe: Recipe, tokenizer: Tokenizer, out: Path) -> list[EvalText]:
    """The validation documents that begin in the first ``evals.tokens``, in the tokens of another tokenizer."""
    stored = Tokenizer(recipe.tokenizer_dir)
    if stored.fingerprint != TokenStore(recipe.tokens_dir, "valid").tokenizer_fingerprint:
        raise Z2aError(f"{recipe.tokens_dir} was made with another tokenizer than the one in {recipe.tokenizer_dir}")
    paths = {}
    for number, text in enumerate(validation_texts(recipe)):
        left, rows = text.max_tokens or 0, []
        for shard in text.shards:
            for document, (first, last) in enumerate(
                zip(shard.document_offsets, shard.document_offsets[1:], strict=False)
            ):
                if left <= 0:
                    break
                info = shard.document_info(document)
                content = stored.decode(shard.read(first, last - 1).tolist())
                rows.append({"gid": info.gid, "data_src": info.data_src, "title": info.title, "content": content})
                left -= int(last - first)
        if rows:
            paths[text.name] = out / str(number)
            write_test_set(text.name, "", [pa.RecordBatch.from_pylist(rows)], tokenizer, paths[text.name])
    return [EvalText(name, "source", [open_test_set(path)]) for name, path in paths.items()]


def _find_test_sets(
    recipe: Recipe | None, found: TargetLocation, options: LossOptions, temporary: Path
) -> dict[str, TokenShard]:
    """Test sets of the recipe, as the run has tokenized them if it has, and test sets of the command line."""
    named = dict(recipe.evals.test_sets) if recipe is not None else {}
    ready: Mapping[str, TokenShard] = {}
    if found.run is not None and options.recipe is None:
        ready = find_test_sets(named.keys() - options.test_sets.keys(), found.tokenizer, found.directory / TEST_SETS)
    paths = {name: path for name, path in {**named, **options.test_sets}.items() if name not in ready}
    build_test_sets(paths, found.tokenizer, temporary)
    return {**ready, **open_test_sets(paths, temporary)}


def loss_rows(evaluation: LossEvaluation) -> dict[str, LossMetrics]:
    """The metrics by the names that the record's curves have too."""
    sources = {f"{name} (source)" if name == "all" else name: part for name, part in evaluation.sources.items()}
    tests = {f"{name} (test set)": part for name, part in evaluation.test_sets.items()}
    return {"all": evaluation, **sources, **tests}


def _recorded_curves(directory: Path, step: int | None) -> dict[str, Array]:
    """Bits per byte of the last evaluations up to a step, with their steps: [2, evaluations] by row of the table."""
    view = read_run_view(directory)
    table = view.validation_table(last=math.inf if step is None else step - 1)
    curves = {}
    for name, values in table.mean.items():
        known = np.isfinite(values)
        curves[name.removeprefix("validation/")] = np.stack([table.steps[known], values[known]])[:, -MAX_EVALUATIONS:]
    return curves


def _noise_floor(metrics: LossMetrics, curve: Array | None) -> NoiseFloor | None:
    """The difference between two measurements has twice the variance of one."""
    factor = CONFIDENCE * math.sqrt(2)
    if curve is not None and curve.shape[1] >= MIN_EVALUATIONS:
        return NoiseFloor(round(factor * spread_about_trend(curve[0], curve[1]), 6), curve.shape[1])
    error = metrics.bits_per_byte_error
    return None if error is None else NoiseFloor(round(factor * error, 6), None)


def spread_about_trend(steps: Array, values: Array) -> float:
    """Standard deviation about the straight line through the values: what is left without the progress of training."""
    slope, mean = np.polyfit(steps - steps.mean(), values, 1)
    residuals = values - mean - slope * (steps - steps.mean())
    return math.sqrt(float(residuals @ residuals) / (len(values) - 2))


def format_loss(report: LossReport) -> str:
    """The table, and what its columns mean."""
    evaluation, rows = report.evaluation, loss_rows(report.evaluation)
    has_unigram = evaluation.unigram_bits_per_byte is not None
    unigram = ["unigram"] if has_unigram else []
    lines = [["", "bits per byte", "±", "noise", *unigram, "loss", "±", "perplexity", "tokens"]]
    for label, metrics in rows.items():
        floor = report.noise.get(label)
        lines.append(
            [
                label,
                f"{metrics.bits_per_byte:.4f}",
                _show_error(metrics.bits_per_byte_error),
                "-" if floor is None else f"{floor.bits_per_byte:.4f}",
                *([_show(metrics.unigram_bits_per_byte, 4)] if has_unigram else []),
                _show(metrics.loss, 4),
                _show_error(metrics.loss_error),
                _show(metrics.perplexity, 3),
                f"{metrics.tokens:,}",
            ]
        )
    what = report.name if report.step is None else f"{report.name}, step {report.step}"
    return "\n".join([f"{what}: {evaluation.scoring}", text_table(lines), *_explain(report)])


def _explain(report: LossReport) -> list[str]:
    lines = ["±: 95% confidence over documents: what other text of the same kind would give"]
    floor = report.noise.get("all")
    if floor is None:
        return lines
    measured = f"differences below {floor.bits_per_byte:.4f} bits per byte are noise:"
    if floor.evaluations is None:
        reason = "two models on different text of this kind would differ so by chance; on the same text, by less"
    else:
        reason = f"so much the last {floor.evaluations} evaluations of the run scatter about their trend, on this text"
    return [*lines, f"noise: {measured} {reason}"]


def _show(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _show_error(error: float | None) -> str:
    return "-" if error is None else f"{CONFIDENCE * error:.4f}"
