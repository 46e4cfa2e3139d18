"""``z2a bench parity``: a few steps of a small model in every layout, compared with the same steps in one process."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero2all.bench.parity_cases import GRADIENT_TOLERANCE, KINDS, LENGTH, SAMPLES, VOCAB, Case, Kind, cases
from zero2all.console import progress
from zero2all.model import document_starts
from zero2all.parallel.layout import Layout, Sizes
from zero2all.parallel.ranks import stream_ranks
from zero2all.parallel.spread import Spread
from zero2all.recipe import ParallelRecipe
from zero2all.train.optimizer import build_optimizers, set_learning_rate

END_OF_TEXT, SEED = 0, 7
TOGETHER = 8  # layouts
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trial:
    """One run: a layout and a way to train."""

    case: Case
    kind: Kind
    steps: int


@dataclass(frozen=True)
class Outcome:
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

    @property
    def equal(self) -> bool:
        return self.loss <= self.loss_tolerance and self.gradient <= GRADIENT_TOLERANCE


@dataclass(frozen=True)
class Compared:
    """A trial as one rank saw it, and the parameters whose gradients it compared."""

    trial: Trial
    outcome: Outcome
    parameters: tuple[str, ...]


def measure(
    chosen: Iterable[Case],
    steps: int = 20,
    kinds: Sequence[Kind] = KINDS,
    seconds: float = 7200,
    detail: bool = False,
) -> Iterator[Outcome]:
    """Train in every layout in every way that suits it, and give each outcome as it comes.

    Layouts of as many ranks share their processes, a few at a time: starting them takes seconds, and after dozens of
    layouts in one process torch 2.13 has been seen to break its own memory. Those of few ranks come first.
    """
    trials = [Trial(case, kind, steps) for case in chosen for kind in kinds if kind.suits(case)]
    alone = {_reference_key(trial): trial for trial in trials}
    with progress(f"{len(trials)} runs against one process", total=len(trials) + len(alone)) as advance:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        references = {}
        for key, trial in alone.items():
            references[key] = _run(_in_one_process(trial))
            advance(1)
        torch.set_num_threads(threads)
        for ranks, own in _together(trials):
            needed = {key: references[key] for key in map(_reference_key, own)}
            for seen in stream_ranks(ranks, _compare, own, needed, seconds=seconds, detail=detail):
                yield _of_all_ranks(seen, needed)
                advance(1)


def _of_all_ranks(seen: Sequence[Compared], references: dict[Any, _Run]) -> Outcome:
    """As the rank saw it that was farthest off: pipeline ranks know different parameters. Each must have a gradient."""
    farthest = max((compared.outcome for compared in seen), key=lambda outcome: outcome.gradient)
    names = {name for compared in seen for name in compared.parameters}
    if names != references[_reference_key(seen[0].trial)].gradients.keys():
        return replace(farthest, gradient=math.inf)
    return farthest


def _together(trials: Sequence[Trial]) -> Iterator[tuple[int, list[Trial]]]:
    """Trials that run in the same processes, and how many of those there are."""
    for ranks in sorted({trial.case.ranks for trial in trials}):
        names = list(dict.fromkeys(trial.case.name for trial in trials if trial.case.ranks == ranks))
        for first in range(0, len(names), TOGETHER):
            some = names[first : first + TOGETHER]
            yield ranks, [trial for trial in trials if trial.case.name in some]


APART = ("tied", "muP", "Muon")


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown, a line for each layout: the worst of the plain ways to train, then the loss of the others."""
    lines = [
        f"| layout | ranks | loss | gradients | {' | '.join(APART)} | equal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in cases():
        own = [outcome for outcome in outcomes if outcome.layout == case.name]
        if own:
            plain = [outcome.loss for outcome in own if outcome.kind not in APART]
            apart = [[outcome.loss for outcome in own if outcome.kind == kind] for kind in APART]
            cells = [
                f"{max(losses):.1e}" if losses else "-"
                for losses in (plain, [outcome.gradient for outcome in own], *apart)
            ]
            equal = "yes" if all(outcome.equal for outcome in own) else "NO"
            lines.append(f"| {case.name} | {case.ranks} | {' | '.join(cells)} | {equal} |")
    return "\n".join(lines)


def as_data(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [asdict(outcome) | {"equal": outcome.equal} for outcome in outcomes]


@dataclass(frozen=True)
class _Run:
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]


def _batch(step: int) -> Tensor:
    """Something to learn: sequences that count up, with ends of documents strewn in. [SAMPLES, LENGTH + 1]"""
    generator = torch.Generator().manual_seed(1000 + step)
    first = torch.randint(1, VOCAB, (SAMPLES, 1), generator=generator)
    stride = torch.randint(1, 8, (SAMPLES, 1), generator=generator)
    tokens = 1 + (first + stride * torch.arange(LENGTH + 1)) % (VOCAB - 1)
    ends = torch.rand(tokens.shape, generator=generator) < 0.08
    return torch.where(ends, END_OF_TEXT, tokens)


def _run(trial: Trial) -> _Run:
    case, kind = trial.case, trial.kind
    recipe = case.parallel.model_copy(update={"activation_checkpointing": kind.checkpointing})
    layout, config, optimizer_recipe = _layout(Sizes.of(recipe, case.ranks)), kind.config(case), kind.recipe()
    spread = Spread(config, recipe, layout, seed=SEED, micro_samples=case.micro_samples)
    optimizers = build_optimizers(spread.model, optimizer_recipe, spread.groups, config.narrower)
    set_learning_rate(optimizers, optimizer_recipe, share=1.0)
    run = _Run([], [], {})
    first, last = layout.samples(SAMPLES)
    for step in range(trial.steps):
        batch = _batch(step)[first:last]
        tokens, targets = batch[:, :-1], batch[:, 1:]
        starts = document_starts(tokens, END_OF_TEXT) if kind.documents else None
        losses = spread.backward(tokens, targets, SAMPLES * LENGTH, starts)
        if step == 0:
            run.gradients.update(
                {name: _whole(p.grad) for name, p in spread.model.named_parameters() if p.grad is not None}
            )
        run.norms.append(spread.clip(1.0).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        spread.even_load()
        run.losses.append(spread.total(losses.sum(dtype=torch.float64)).item() / (SAMPLES * LENGTH))
    return run


@functools.cache
def _layout(sizes: Sizes) -> Layout:
    """Made once in a process: the threads of hundreds of process groups would be all that runs."""
    return Layout(sizes, CPU)


def _compare(trials: list[Trial], references: dict[Any, _Run]) -> Iterator[Compared]:
    """On every rank: each trial against what one process had."""
    # Where FSDP and TP cut the same dimension, gathering a gradient takes two collectives, and torch warns of it.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for trial in trials:
        began = time.perf_counter()
        run, alone = _run(trial), references[_reference_key(trial)]
        outcome = Outcome(
            trial.case.name,
            trial.case.ranks,
            trial.kind.name,
            largest(abs(ours - theirs) for ours, theirs in zip(run.losses, alone.losses, strict=True)),
            largest(_relative(gradient, alone.gradients[name]) for name, gradient in run.gradients.items()),
            largest(abs(ours / theirs - 1) for ours, theirs in zip(run.norms, alone.norms, strict=True)),
            time.perf_counter() - began,
            trial.kind.loss_tolerance(trial.case),
        )
        yield Compared(trial, outcome, tuple(run.gradients))


def largest(differences: Iterable[float]) -> float:
    """Python's ``max`` ignores a NaN unless it comes first; here what is not finite is farther off than anything."""
    return max((value if math.isfinite(value) else math.inf for value in differences), default=0.0)


def _in_one_process(trial: Trial) -> Trial:
    case = Case(trial.case.name, 1, ParallelRecipe(), trial.case.moe, trial.case.layers)
    return Trial(case, replace(trial.kind, checkpointing="none"), trial.steps)


def _reference_key(trial: Trial) -> tuple[Any, ...]:
    kind = trial.kind
    return kind.optimizer, kind.model, kind.documents, trial.steps, trial.case.layers, trial.case.moe


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())
