"""``z2a bench parity``: a few steps of a small model in every layout, held to the same steps in one process.

Adam divides a gradient by its own size and so hides one of the wrong scale; SGD with momentum does not. Therefore both.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero2all.console import progress
from zero2all.model import document_starts
from zero2all.parallel.layout import Layout, Sizes
from zero2all.parallel.ranks import stream_ranks
from zero2all.parallel.spread import Spread
from zero2all.recipe import ModelConfig, MoeConfig, ParallelRecipe

SAMPLES, LENGTH, VOCAB, END_OF_TEXT, SEED = 16, 32, 250, 0, 7
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 5e-6, 1e-5
TOGETHER = 8  # layouts
CPU = torch.device("cpu")

OptimizerName = Literal["adamw", "sgd"]
Variant = Literal["plain", "checkpointing", "documents"]
OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "sgd")
VARIANTS: tuple[Variant, ...] = ("plain", "checkpointing", "documents")


@dataclass(frozen=True)
class Case:
    """A layout to be tried."""

    name: str
    ranks: int
    parallel: ParallelRecipe
    moe: bool = False
    layers: int = 4
    micro_samples: int | None = None
    """So many at a time; gradients are accumulated over the rest."""


@dataclass(frozen=True)
class Trial:
    """One run: a layout, an optimizer, and what else is on."""

    case: Case
    optimizer: OptimizerName
    variant: Variant
    steps: int


@dataclass(frozen=True)
class Outcome:
    """How far a layout was from one process."""

    layout: str
    ranks: int
    optimizer: str
    variant: str
    loss: float
    """Largest difference of the loss over all steps."""
    gradient: float
    """Largest difference of a parameter's gradient at the first step, relative to its norm."""
    norm: float
    """Largest relative difference of the gradient's norm over all steps."""
    seconds: float

    @property
    def equal(self) -> bool:
        return self.loss <= LOSS_TOLERANCE and self.gradient <= GRADIENT_TOLERANCE


def cases() -> list[Case]:
    """Every layout of the table."""

    def case(name: str, ranks: int, micro_samples: int | None = None, moe: bool = False, **sizes: Any) -> Case:
        recipe = ParallelRecipe(**sizes)
        return Case(name, ranks, recipe, moe, max(4, recipe.pp * recipe.stages_per_rank), micro_samples)

    schedules = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
    return [
        case("one process, accumulated", 1, micro_samples=2),  # what rounding alone does
        *(case(f"DDP {n}", n, dp_replicate=n) for n in (2, 4)),
        case("DDP 2, accumulated", 2, micro_samples=2, dp_replicate=2),
        *(case(f"FSDP {n}, {kind} reshard", n, reshard=kind) for n in (2, 4) for kind in ("always", "never")),
        case("FSDP 4, reshard to 2", 4, reshard=2),
        *(
            case(f"FSDP {n}, accumulated", n, micro_samples=1, reshard=kind)
            for n, kind in ((2, "always"), (4, "never"))
        ),
        case("HSDP 2x2", 4, dp_replicate=2),
        *(case(f"TP {n}", n, tp=n, sp=False, loss_parallel=False) for n in (2, 4)),
        *(case(f"TP {n} + SP", n, tp=n, loss_parallel=False) for n in (2, 4)),
        *(case(f"TP {n} + SP, parallel loss", n, tp=n) for n in (2, 4)),
        case("TP 2, parallel loss", 2, tp=2, sp=False),
        *(case(f"PP {n} {schedule}", n, pp=n, schedule=schedule) for n in (2, 4) for schedule in schedules),
        *(case(f"CP {n} gather", n, cp=n) for n in (2, 4)),
        *(case(f"CP {n} ulysses", n, cp=n, cp_attention="ulysses") for n in (2, 4)),
        *(case(f"EP {n}", n, moe=True, ep=n) for n in (2, 4)),
        case("EP 2 x FSDP 2", 4, moe=True, ep=2),
        case("FSDP 2 x TP 2", 4, tp=2),
        case("HSDP 2x1 x TP 2", 4, tp=2, dp_replicate=2, dp_shard=1),
        case("FSDP 2 x PP 2", 4, pp=2),
        case("FSDP 2 x PP 2 zbv", 4, pp=2, schedule="zbv"),
        case("TP 2 x PP 2", 4, tp=2, pp=2),
        case("CP 2 x TP 2", 4, cp=2, tp=2),
        case("CP 2 x PP 2 interleaved", 4, cp=2, pp=2, schedule="interleaved"),
        case("EP 2 x PP 2", 4, moe=True, ep=2, pp=2),
        case("FSDP 2 x TP 2 x PP 2", 8, tp=2, pp=2),
        case("FSDP 2 x TP 2 x PP 2 interleaved", 8, tp=2, pp=2, schedule="interleaved"),
    ]


def measure(
    chosen: Iterable[Case],
    steps: int = 20,
    optimizers: Sequence[OptimizerName] = OPTIMIZERS,
    variants: Sequence[Variant] = VARIANTS,
    seconds: float = 7200,
    detail: bool = False,
) -> Iterator[Outcome]:
    """Run every layout with every optimizer and variant, and give each outcome as it comes.

    Layouts of as many ranks share their processes, a few at a time: starting them takes seconds, and after dozens of
    layouts in one process torch 2.13 has been seen to break its own memory. Those of few ranks come first.
    """
    trials = [Trial(case, name, variant, steps) for case in chosen for variant in variants for name in optimizers]
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
                # As the rank saw it that was farthest off: pipeline ranks know different parameters.
                yield max(seen, key=lambda outcome: outcome.gradient)
                advance(1)


def _together(trials: Sequence[Trial]) -> Iterator[tuple[int, list[Trial]]]:
    """Trials that run in the same processes, and how many of those there are."""
    for ranks in sorted({trial.case.ranks for trial in trials}):
        names = list(dict.fromkeys(trial.case.name for trial in trials if trial.case.ranks == ranks))
        for first in range(0, len(names), TOGETHER):
            some = names[first : first + TOGETHER]
            yield ranks, [trial for trial in trials if trial.case.name in some]


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown, a line for each layout: the worst over optimizers and variants."""
    lines = ["| layout | ranks | loss | gradients | equal |", "|---|---|---|---|---|"]
    for case in cases():
        own = [outcome for outcome in outcomes if outcome.layout == case.name]
        if own:
            loss, gradient = max(outcome.loss for outcome in own), max(outcome.gradient for outcome in own)
            equal = "yes" if all(outcome.equal for outcome in own) else "NO"
            lines.append(f"| {case.name} | {case.ranks} | {loss:.1e} | {gradient:.1e} | {equal} |")
    return "\n".join(lines)


def as_data(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [asdict(outcome) | {"equal": outcome.equal} for outcome in outcomes]


@dataclass(frozen=True)
class _Run:
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]


def _config(case: Case) -> ModelConfig:
    """As small as every layout allows: heads for tp 4 with grouped queries, a layer for each stage."""
    moe = MoeConfig(experts=8, top_k=2, expert_intermediate=32, balance="bias") if case.moe else None
    return ModelConfig(
        hidden_size=32,
        intermediate_size=64,
        n_layers=case.layers,
        n_heads=8,
        n_kv_heads=4,
        head_dim=8,
        context=LENGTH,
        vocab_size=VOCAB,
        qk_norm=True,
        init_std=0.05,
        moe=moe,
    )


def _batch(step: int) -> Tensor:
    """Something to learn: sequences that count up, with ends of documents strewn in. [SAMPLES, LENGTH + 1]"""
    generator = torch.Generator().manual_seed(1000 + step)
    first = torch.randint(1, VOCAB, (SAMPLES, 1), generator=generator)
    stride = torch.randint(1, 8, (SAMPLES, 1), generator=generator)
    tokens = 1 + (first + stride * torch.arange(LENGTH + 1)) % (VOCAB - 1)
    ends = torch.rand(tokens.shape, generator=generator) < 0.08
    return torch.where(ends, END_OF_TEXT, tokens)


def _run(trial: Trial) -> _Run:
    case, recipe = trial.case, trial.case.parallel
    if trial.variant == "checkpointing":
        recipe = recipe.model_copy(update={"activation_checkpointing": "full"})
    layout = _layout(Sizes.of(recipe, case.ranks))
    spread = Spread(_config(case), recipe, layout, seed=SEED, micro_samples=case.micro_samples)
    optimizer = _optimizer(trial.optimizer, spread.groups(spread.model.parameters()))
    run = _Run([], [], {})
    first, last = layout.samples(SAMPLES)
    for step in range(trial.steps):
        batch = _batch(step)[first:last]
        tokens, targets = batch[:, :-1], batch[:, 1:]
        starts = document_starts(tokens, END_OF_TEXT) if trial.variant == "documents" else None
        losses = spread.backward(tokens, targets, SAMPLES * LENGTH, starts)
        if step == 0:
            run.gradients.update(
                {name: _whole(p.grad) for name, p in spread.model.named_parameters() if p.grad is not None}
            )
        run.norms.append(spread.clip(1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        spread.even_load()
        run.losses.append(spread.total(losses.sum(dtype=torch.float64)).item() / (SAMPLES * LENGTH))
    return run


@functools.cache
def _layout(sizes: Sizes) -> Layout:
    """Made once in a process: the threads of hundreds of process groups would be all that runs."""
    return Layout(sizes, CPU)


def _optimizer(name: OptimizerName, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if name == "sgd":
        # At 0.3 the small model is chaotic: one process that adds up its samples in another order is 4e-2 off after 20
        # steps. Here it learns as fast and stays within 4e-7.
        return torch.optim.SGD(groups, lr=0.03, momentum=0.9)
    return torch.optim.AdamW(groups, lr=3e-3, fused=True)


def _compare(trials: list[Trial], references: dict[Any, _Run]) -> Iterator[Outcome]:
    """On every rank: each trial against what one process had."""
    # Where FSDP and TP cut the same dimension, gathering a gradient takes two collectives, and torch warns of it.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for trial in trials:
        began = time.perf_counter()
        run, alone = _run(trial), references[_reference_key(trial)]
        yield Outcome(
            trial.case.name,
            trial.case.ranks,
            trial.optimizer,
            trial.variant,
            max(abs(ours - theirs) for ours, theirs in zip(run.losses, alone.losses, strict=True)),
            max(_relative(gradient, alone.gradients[name]) for name, gradient in run.gradients.items()),
            max(abs(ours / theirs - 1) for ours, theirs in zip(run.norms, alone.norms, strict=True)),
            time.perf_counter() - began,
        )


def _in_one_process(trial: Trial) -> Trial:
    case = Case(trial.case.name, 1, ParallelRecipe(), trial.case.moe, trial.case.layers)
    return Trial(case, trial.optimizer, trial.variant if trial.variant == "documents" else "plain", trial.steps)


def _reference_key(trial: Trial) -> tuple[Any, ...]:
    return trial.optimizer, trial.variant == "documents", trial.steps, trial.case.layers, trial.case.moe


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())
