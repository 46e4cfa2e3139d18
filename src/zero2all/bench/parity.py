"""``z2a bench parity``: a few steps of a small model in every parallel layout, compared with one process."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import computed_field
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero2all.base.charts.table import markdown_table
from zero2all.base.console import progress
from zero2all.base.torch_private import silence_redistribute_warning
from zero2all.bench.parity_cases import (
    GRADIENT_TOLERANCE,
    LENGTH,
    SAMPLES,
    TRAINING_SETUPS,
    VOCAB,
    ParityCase,
    TrainingSetup,
    cases,
)
from zero2all.bench.rank_harness import stream_jobs
from zero2all.model import ModelInputs, document_starts
from zero2all.optim.optimizer import build_optimizers, set_learning_rate
from zero2all.parallel.mesh import ParallelDims, ParallelMesh
from zero2all.parallel.parallel_model import ParallelModel
from zero2all.recipe import ParallelRecipe

END_OF_TEXT, SEED = 0, 7
LAYOUTS_PER_PROCESS = 8
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trial:
    """One run: a layout and a training setup."""

    case: ParityCase
    setup: TrainingSetup
    steps: int


@dataclass(frozen=True)
class ParityResult:
    """How far a layout was from one process."""

    layout: str
    ranks: int
    kind: str
    loss: float
    """Largest difference of the loss over all steps."""
    gradient: float
    """Largest difference of a parameter's gradient at the first step, relative to its norm."""
    norm: float
    """Largest relative difference of the gradient's norm over all steps."""
    seconds: float
    loss_tolerance: float
    differs_by_design: bool = False
    """The layout trains something else on purpose; its gradients are not compared."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def equal(self) -> bool:
        return self.loss <= self.loss_tolerance and (self.differs_by_design or self.gradient <= GRADIENT_TOLERANCE)


@dataclass(frozen=True)
class ParityReport:
    """The results of all layouts that were compared."""

    steps: int
    outcomes: list[ParityResult]


@dataclass(frozen=True)
class RankComparison:
    """A trial as one rank saw it, and the parameters whose gradients it compared."""

    trial: Trial
    result: ParityResult
    parameters: tuple[str, ...]


def measure_parity(
    selected: Iterable[ParityCase],
    steps: int = 20,
    setups: Sequence[TrainingSetup] = TRAINING_SETUPS,
    seconds: float = 7200,
    *,
    detail: bool = False,
) -> Iterator[ParityResult]:
    """Train every layout with every setup it supports, and yield each result as it comes.

    Layouts of the same world size share their processes, a few at a time: starting them takes seconds, and after
    dozens of layouts in one process, torch 2.13 is known to break its own memory. Layouts of few ranks come first.
    """
    trials = [Trial(case, setup, steps) for case in selected for setup in setups if setup.supports(case)]
    alone = {_reference_key(trial): trial for trial in trials}
    with progress(f"{len(trials)} runs against one process", total=len(trials) + len(alone)) as advance:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        references = {}
        for key, trial in alone.items():
            references[key] = _run(_single_process_trial(trial))
            advance(1)
        torch.set_num_threads(threads)
        for ranks, own in _group_by_ranks(trials):
            needed = {key: references[key] for key in map(_reference_key, own)}
            for seen in stream_jobs(ranks, _compare, own, needed, seconds=seconds, detail=detail):
                yield _merge_ranks(seen, needed)
                advance(1)


def _merge_ranks(seen: Sequence[RankComparison], references: dict[Any, _RunMetrics]) -> ParityResult:
    """The result of the rank farthest off: pipeline ranks know different parameters. Each must have a gradient."""
    farthest = max((compared.result for compared in seen), key=lambda result: result.gradient)
    names = {name for compared in seen for name in compared.parameters}
    if names != references[_reference_key(seen[0].trial)].gradients.keys():
        return replace(farthest, gradient=math.inf)
    return farthest


def _group_by_ranks(trials: Sequence[Trial]) -> Iterator[tuple[int, list[Trial]]]:
    """Trials that run in the same processes, and how many of those there are."""
    for ranks in sorted({trial.case.ranks for trial in trials}):
        names = list(dict.fromkeys(trial.case.name for trial in trials if trial.case.ranks == ranks))
        for first in range(0, len(names), LAYOUTS_PER_PROCESS):
            some = names[first : first + LAYOUTS_PER_PROCESS]
            yield ranks, [trial for trial in trials if trial.case.name in some]


SEPARATE_COLUMNS = (
    *("tied", "muP", "Muon", "Muon in fp32"),
    *("balance loss", "LoRA", "MTP", "windows", "soft-cap", "dropout"),
)


def parity_markdown(results: Sequence[ParityResult]) -> str:
    """Markdown, a line for each layout: the worst of the plain ways to train, then the loss of the others."""
    rows = []
    for case in cases():
        own = [result for result in results if result.layout == case.name]
        if own:
            plain = [result.loss for result in own if result.kind not in SEPARATE_COLUMNS]
            apart = [[result.loss for result in own if result.kind == kind] for kind in SEPARATE_COLUMNS]
            gradients = [result.gradient for result in own if not result.differs_by_design]
            cells = [f"{max(values):.1e}" if values else "-" for values in (plain, gradients, *apart)]
            different = [result.kind for result in own if result.differs_by_design]
            equal = f"yes, but not {', '.join(different)}" if different else "yes"
            equal = equal if all(result.equal for result in own) else "NO"
            rows.append((case.name, case.ranks, *cells, equal))
    return markdown_table(("layout", "ranks", "loss", "gradients", *SEPARATE_COLUMNS, "equal"), rows)


@dataclass(frozen=True)
class _RunMetrics:
    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, Tensor]


def _synthetic_batch(step: int) -> tuple[Tensor, Tensor]:
    """Something to learn: sequences that count up, with random document ends. [SAMPLES, LENGTH + 1]"""
    generator = torch.Generator().manual_seed(1000 + step)
    first = torch.randint(1, VOCAB, (SAMPLES, 1), generator=generator)
    stride = torch.randint(1, 8, (SAMPLES, 1), generator=generator)
    tokens = 1 + (first + stride * torch.arange(LENGTH + 1)) % (VOCAB - 1)
    ends = torch.rand(tokens.shape, generator=generator) < 0.08
    return torch.where(ends, END_OF_TEXT, tokens), ends


def _run(trial: Trial) -> _RunMetrics:
    case, setup = trial.case, trial.setup
    recipe = case.parallel.model_copy(update={"activation_checkpointing": setup.checkpointing})
    mesh, config, optimizer_recipe = (
        _cached_mesh(ParallelDims.from_recipe(recipe, case.ranks)),
        setup.model_config(case),
        setup.optimizer_recipe(),
    )
    parallel_model = ParallelModel(config, recipe, mesh, seed=SEED)
    optimizers = build_optimizers(
        parallel_model.model,
        optimizer_recipe,
        parallel_model.param_groups,
        config.mup_width_mult,
        parallel_model.ddp_group,
    )
    set_learning_rate(optimizers, optimizer_recipe, lr_multiplier=1.0)
    run = _RunMetrics([], [], {})
    first, last = mesh.sample_range(SAMPLES)
    for step in range(trial.steps):
        batch, ends = (rows[first:last] for rows in _synthetic_batch(step))
        tokens, targets = batch[:, :-1], batch[:, 1:]
        starts = document_starts(ends[:, :-1]) if setup.document_mask else None
        inputs = ModelInputs(tokens, targets, doc_starts_BS=starts)
        losses = parallel_model.forward_backward(
            inputs, SAMPLES * LENGTH, micro_batch_size=case.micro_batch_size, dropout_seed=step
        )
        if step == 0:
            trained = ((name, p.grad) for name, p in parallel_model.model.named_parameters() if p.grad is not None)
            run.gradients.update({name: _full_tensor(gradient) for name, gradient in trained})
        run.grad_norms.append(parallel_model.clip_grad_norm_(1.0).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        parallel_model.update_expert_bias()
        run.losses.append(parallel_model.all_reduce_sum(losses.sum(dtype=torch.float64)).item() / (SAMPLES * LENGTH))
    return run


@functools.cache
def _cached_mesh(dims: ParallelDims) -> ParallelMesh:
    """Made once in a process: the threads of hundreds of process groups would be all that runs."""
    return ParallelMesh(dims, CPU)


def _compare(trials: list[Trial], references: dict[Any, _RunMetrics]) -> Iterator[RankComparison]:
    """On every rank: each trial against what one process had."""
    silence_redistribute_warning()
    for trial in trials:
        began = time.perf_counter()
        run, alone = _run(trial), references[_reference_key(trial)]
        result = ParityResult(
            trial.case.name,
            trial.case.ranks,
            trial.setup.name,
            max_difference(abs(ours - theirs) for ours, theirs in zip(run.losses, alone.losses, strict=True)),
            max_difference(
                _relative_difference(gradient, alone.gradients[name]) for name, gradient in run.gradients.items()
            ),
            max_difference(
                abs(ours / theirs - 1) for ours, theirs in zip(run.grad_norms, alone.grad_norms, strict=True)
            ),
            time.perf_counter() - began,
            trial.setup.loss_tolerance(trial.case),
            trial.setup.differs_by_design(trial.case),
        )
        yield RankComparison(trial, result, tuple(run.gradients))


def max_difference(differences: Iterable[float]) -> float:
    """Python's ``max`` ignores a NaN unless it comes first; here what is not finite is farther off than anything."""
    return max((value if math.isfinite(value) else math.inf for value in differences), default=0.0)


def _single_process_trial(trial: Trial) -> Trial:
    case = ParityCase(
        trial.case.name, 1, ParallelRecipe(), trial.case.moe, trial.case.layers, _reference_micro_batch(trial)
    )
    return Trial(case, replace(trial.setup, checkpointing="none"), trial.steps)


def _reference_key(trial: Trial) -> tuple[Any, ...]:
    """What one process trains: the setup without checkpointing, which changes no value."""
    setup, case = replace(trial.setup, name="", checkpointing="none"), trial.case
    return setup, trial.steps, case.layers, case.moe, _reference_micro_batch(trial)


def _reference_micro_batch(trial: Trial) -> int | None:
    """All samples at once, where that makes no difference but rounding."""
    return trial.case.samples_per_micro_batch if trial.setup.depends_on_micro_batches else None


def _full_tensor(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def _relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Where it must be zero, as in the first step of the first matrices of adapters, anything else is far off."""
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
