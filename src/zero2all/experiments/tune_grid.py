"""What ``z2a plan --try`` may change: keys that decide the speed of a recipe and not its result.

The first choice on every axis is the recipe's, so the point (0, 0, ...) is the recipe as it is.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from zero2all.base.errors import UsageError
from zero2all.base.machine.devices import wants_compile
from zero2all.experiments.tune_search import Point
from zero2all.model.ops import OPS, choose_kernels
from zero2all.planner.cluster import Cluster
from zero2all.planner.rank_plan import plan_memory
from zero2all.planner.search import search_layouts
from zero2all.planner.step_time import plan_step
from zero2all.planner.workload import Layout, Workload, largest_stage
from zero2all.recipe import Recipe
from zero2all.recipe.parallel import parallel_mistakes
from zero2all.recipe.types import Section

Value = int | str | bool
Choice = Mapping[str, Value]
"""Recipe keys and their values."""
AnySection = TypeVar("AnySection", bound=Section)

LAYOUTS = 5  # of the planner's ranking, beside the recipe's own
SEARCHED_LAYOUTS = 60  # several of them differ only in micro-batch
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # samples of a forward pass
CHECKPOINTING = (("none", 1), ("selective", 1), ("full", 1), ("full", 2))  # and how many blocks at once
MODE_KEY, EVERY_KEY = "parallel.activation_checkpointing", "parallel.activation_checkpointing_every"
MICRO_BATCH_KEY, COMPILE_KEY, KERNEL_KEY = "train.micro_batch_tokens", "train.compile", "model.ops."


@dataclass(frozen=True)
class TuneAxis:
    name: str
    choices: list[Choice]


@dataclass(frozen=True)
class TuneCandidate:
    values: Choice
    """Values that differ from the recipe."""
    step: float
    """Planned seconds."""
    memory: int
    """Planned bytes of a rank."""

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={str(value).lower()}" for key, value in self.values.items()]

    @property
    def label(self) -> str:
        return " ".join(word.removeprefix("parallel.").removeprefix("train.") for word in self.overrides) or "recipe"


@dataclass(frozen=True)
class TuneGrid:
    axes: list[TuneAxis]
    """Axes with more than one choice."""
    candidates: dict[Point, TuneCandidate]
    """Candidates that are valid and fit by the plan, and the recipe itself in any case."""
    too_large: int
    """How many are valid and do not fit."""
    held: dict[str, str]
    """Axes that stay as they are, because they would change the result, and why."""

    @property
    def own(self) -> Point:
        return (0,) * len(self.axes)

    @property
    def starts(self) -> list[Point]:
        """Where a search begins: the fastest by the plan, the one with the least memory, the recipe as it is."""
        steps = {point: one.step for point, one in self.candidates.items()}
        memory = {point: one.memory for point, one in self.candidates.items()}
        return [min(steps, key=steps.__getitem__), min(memory, key=memory.__getitem__), self.own]


def build_grid(recipe: Recipe, cluster: Cluster, device: torch.device, fixed: Collection[str]) -> TuneGrid:
    """``fixed`` are keys that the user has set: their axes are left out."""
    held = held_axes(recipe)
    axes = [
        axis
        for axis in _axes(recipe, cluster, device)
        if len(axis.choices) > 1
        and axis.name not in held
        and not any(key in fixed for choice in axis.choices for key in choice)
    ]
    candidates: dict[Point, TuneCandidate] = {}
    too_large = 0
    workload = Workload.of(recipe, largest_stage(recipe))
    by_kernels: dict[str, Workload] = {}  # the plan keeps what it knows of a workload
    for point in itertools.product(*(range(len(axis.choices)) for axis in axes)):
        values: dict[str, Value] = {}
        for axis, choice in zip(axes, point, strict=True):
            values |= {key: value for key, value in axis.choices[choice].items() if _value(recipe, key) != value}
        changed = with_values(recipe, values)
        kernels = changed.model.ops.model_dump_json()
        own = by_kernels.setdefault(kernels, replace(workload, config=changed.model))
        candidate = _plan(changed, values, own, cluster)
        if candidate is None:
            continue
        if candidate.memory > cluster.gpu.memory and any(point):
            too_large += 1
        else:
            candidates[point] = candidate
    return TuneGrid(axes, candidates, too_large, held)


def held_axes(recipe: Recipe) -> dict[str, str]:
    """Axes that would change the result of a recipe beyond rounding, and why."""
    held: dict[str, str] = {}
    if recipe.model.moe is not None and recipe.model.moe.load_balancing == "aux":
        held |= dict.fromkeys(("layout", "micro-batch"), "the balance loss of experts is computed on a micro-batch")
    if recipe.model.has_dropout:
        others = ("layout", "micro-batch", "attention", "compile")
        held |= dict.fromkeys(others, "dropout would draw other numbers")
    return held


def with_values(section: AnySection, values: Choice) -> AnySection:
    """A recipe with values by dotted key; not validated."""
    for key, value in values.items():
        name, _, rest = key.partition(".")
        inner: Any = with_values(getattr(section, name), {rest: value}) if rest else value
        section = section.model_copy(update={name: inner})
    return section


def _value(section: Section, key: str) -> object:
    return functools.reduce(getattr, key.split("."), section)


def _plan(recipe: Recipe, values: Choice, workload: Workload, cluster: Cluster) -> TuneCandidate | None:
    """None if the values contradict each other, or would be another candidate's."""
    parallel, stage = recipe.parallel, largest_stage(recipe)
    if next(itertools.chain(parallel.mistakes(), parallel_mistakes(recipe.model, recipe.train, parallel)), None):
        return None
    try:
        layout = Layout.of(recipe, stage, cluster.gpus)
    except UsageError:
        return None
    if (tokens := values.get(MICRO_BATCH_KEY)) is not None and (
        layout.batch.padding or layout.batch.samples * stage.seq_len != tokens
    ):
        return None
    if layout.batch.micro_batches < layout.dims.pp:
        return None
    return TuneCandidate(values, plan_step(workload, layout, cluster).expected, plan_memory(workload, layout).total)


def _axes(recipe: Recipe, cluster: Cluster, device: torch.device) -> Iterator[TuneAxis]:
    train, parallel = recipe.train, recipe.parallel
    if cluster.gpus > 1:
        yield TuneAxis("layout", [{}, *_layouts(recipe, cluster)])
    stage = largest_stage(recipe)
    own = stage.micro_batch_tokens or (None if train.micro_batch_tokens == "auto" else stage.batch_tokens)
    sizes = [samples * stage.seq_len for samples in MICRO_BATCHES if samples * stage.seq_len <= stage.batch_tokens]
    yield TuneAxis("micro-batch", [{}, *({MICRO_BATCH_KEY: size} for size in sizes if size != own)])
    own_mode = (parallel.activation_checkpointing, parallel.activation_checkpointing_every)
    modes: list[Choice] = [{MODE_KEY: one[0], EVERY_KEY: one[1]} for one in CHECKPOINTING if one != own_mode]
    yield TuneAxis("activation checkpointing", [{}, *modes])
    chosen = choose_kernels(recipe.model, device)
    for op, kernels in OPS.items():
        if op == "experts" and recipe.model.moe is None:
            continue
        names = [
            name
            for name, kernel in kernels.items()
            if name not in ("reference", chosen[op].form)  # reference is what others are tested against
            and kernel.unavailable_reason(device, recipe.model) is None
        ]
        yield TuneAxis(op, [{}, *({f"{KERNEL_KEY}{op}": name} for name in names)])
    compiles = train.compile is True or wants_compile(train.compile, device)
    if parallel.activation_checkpointing != "budget":  # which only the compiler can keep
        yield TuneAxis("compile", [{}, {COMPILE_KEY: not compiles}])


def _layouts(recipe: Recipe, cluster: Cluster) -> list[Choice]:
    """The best of the planner's search, without what other axes decide."""
    found: dict[tuple[tuple[str, Value], ...], Choice] = {}
    for candidate in search_layouts(recipe, cluster, keep=SEARCHED_LAYOUTS).best:
        values: dict[str, Value] = {}
        for override in candidate.overrides:
            key, _, text = override.partition("=")
            if key not in (MODE_KEY, MICRO_BATCH_KEY):
                values[key] = int(text) if text.isdigit() else text
        if _differs(recipe, values, cluster.gpus):
            found.setdefault(tuple(values.items()), values)
    return list(found.values())[:LAYOUTS]


def _differs(recipe: Recipe, values: Choice, ranks: int) -> bool:
    """Whether a layout differs from the recipe's, which may say auto."""
    stage = largest_stage(recipe)
    own, other = (Layout.of(one, stage, ranks) for one in (recipe, with_values(recipe, values)))
    resolved = {"dp_replicate": own.dims.dp_replicate, "dp_shard": own.dims.dp_shard}
    parallel = own.parallel.model_copy(update=resolved)
    return parallel != other.parallel.model_copy(
        update={"dp_replicate": other.dims.dp_replicate, "dp_shard": other.dims.dp_shard}
    )
