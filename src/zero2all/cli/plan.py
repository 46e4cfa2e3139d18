"""z2a plan"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zero2all.cli.conventions import Json, Overrides, RecipeOrPreset, Result, command
from zero2all.console import ProgressTask, progress
from zero2all.errors import UsageError
from zero2all.units import parse_count

if TYPE_CHECKING:
    from zero2all.planner.cluster import Cluster
    from zero2all.recipe import Recipe

PRESET_BATCH = ("train.batch_tokens=null", "train.micro_batch_tokens=auto")  # by scaling law and by memory
PROGRESS_DELAY = 2.0  # seconds


@dataclass(frozen=True)
class PlanDetails:
    """What the plan of one layout shows beside its summary."""

    layers: bool
    trace: bool
    svg: Path | None
    against: Path | None


@command
def plan(
    recipe: RecipeOrPreset,
    overrides: Overrides = None,
    gpus: Annotated[str, typer.Option("--gpus", help="Number of GPUs, or several such as 8,64,512 to compare.")] = "8",
    gpu: Annotated[
        str,
        typer.Option("--gpu", help="Kind of GPU, such as h100 or a800-80g, or a file of 'z2a doctor --calibrate'."),
    ] = "h100",
    net: Annotated[
        str | None,
        typer.Option("--net", help="Network of one GPU to other nodes, such as 200Gbps. Default: of a usual server."),
    ] = None,
    per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", min=1, help="GPUs in a node. Default: of a usual server.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="Tokens to train on, such as 300B. Default: as in the recipe.")
    ] = None,
    price: Annotated[float | None, typer.Option("--price", min=0.0, help="Price of one GPU-hour.")] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Rank all layouts that fit, instead of planning the recipe's own.")
    ] = False,
    layers: Annotated[
        bool, typer.Option("--layers", help="Also list the layers and parameters of each pipeline rank.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Also trace the memory of a rank, one layer of each kind, in some seconds.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Directory for pictures of memory, pipeline and roofline.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", help="A run of this recipe: print planned beside measured values.")
    ] = None,
    json: Json = False,
) -> Result:
    """Plan a run: memory, time, money and layout, without GPUs.

    Everything is computed from the recipe and a table of data sheets. No corpus, tokenizer or GPU is needed.

    Example: z2a plan recipes/70b-1024.yaml --gpus 1024 --gpu h100 --price 2.1
    """
    with progress("planning", delay=PROGRESS_DELAY) as task:  # from here on, since the imports take seconds too
        counts, length = _gpu_counts(gpus), None if tokens is None else _count(tokens)
        loaded, clusters = _load(recipe, overrides or [], gpu, counts, net, per_node)
        if not search and len(clusters) == 1:
            return _plan(loaded, clusters[0], length, price, PlanDetails(layers, trace, svg, against))
        for option, value in (("--layers", layers), ("--trace", trace), ("--against", against)):
            if value:
                raise UsageError(f"{option} is for one plan: give one number of GPUs, and no --search")
        if not search:
            return _scale(loaded, clusters, length, price, svg)
        if svg is not None or len(clusters) > 1:
            raise UsageError("--search is for one number of GPUs, and draws nothing")
        return _search(loaded, clusters[0], task)


def _search(recipe: Recipe, cluster: Cluster, task: ProgressTask) -> Result:
    from zero2all.planner.plan_text import search_text
    from zero2all.planner.search import search_layouts

    found = search_layouts(recipe, cluster, task=task)
    if not found.best:
        raise UsageError(f"no layout fits: use more GPUs or a shorter train.seq_len\n{search_text(found)}")
    return Result(found, search_text(found))


def _scale(
    recipe: Recipe, clusters: list[Cluster], tokens: int | None, price: float | None, svg: Path | None
) -> Result:
    from zero2all.charts.svg import line_svg
    from zero2all.planner.plan import Plan, plan_run
    from zero2all.planner.scaling import scaling_plot, scaling_rows, scaling_text
    from zero2all.train.hyperparameters import with_hyperparameters
    from zero2all.train.micro_batch import estimate_micro_batch

    def planned(cluster: Cluster) -> Plan | UsageError:
        try:
            chosen = estimate_micro_batch(recipe, cluster.gpus, cluster.gpu.memory)
            return plan_run(with_hyperparameters(recipe, chosen), cluster, tokens, price)
        except UsageError as error:
            return error

    rows = scaling_rows((cluster.gpus, planned(cluster)) for cluster in clusters)
    if svg is not None and not all(row.problem for row in rows):
        svg.mkdir(parents=True, exist_ok=True)
        (svg / "scaling.svg").write_text(line_svg(scaling_plot(rows)), encoding="utf-8")
    return Result({"scaling": rows}, scaling_text(rows, clusters[0].gpu.memory))


def _plan(recipe: Recipe, cluster: Cluster, tokens: int | None, price: float | None, wanted: PlanDetails) -> Result:
    from zero2all.experiments.planned_run import check_plan, check_text, read_run
    from zero2all.planner.pipeline import simulate
    from zero2all.planner.plan import plan_run
    from zero2all.planner.plan_svg import plan_svgs
    from zero2all.planner.plan_text import plan_text
    from zero2all.planner.search import cheapest_changes
    from zero2all.planner.workload import largest_stage
    from zero2all.profiling.memory_trace import trace_lines, trace_memory
    from zero2all.train.hyperparameters import with_hyperparameters
    from zero2all.train.micro_batch import estimate_micro_batch

    recipe = with_hyperparameters(recipe, estimate_micro_batch(recipe, cluster.gpus, cluster.gpu.memory))
    planned = plan_run(recipe, cluster, tokens, price)
    timeline = simulate(recipe.parallel, _pictured(planned.layout["micro_batches"])) if recipe.parallel.pp > 1 else None
    if wanted.svg is not None:
        wanted.svg.mkdir(parents=True, exist_ok=True)
        for name, picture in plan_svgs(planned, timeline).items():
            (wanted.svg / name).write_text(picture, encoding="utf-8")
    changes = [] if planned.fits else cheapest_changes(recipe, cluster)
    if not planned.fits and not changes:
        changes = ["more GPUs, or a smaller model: no single change is enough; --search tries all layouts"]
    checks = [] if wanted.against is None else check_plan(planned, read_run(wanted.against, recipe))
    traces = trace_memory(recipe, largest_stage(recipe), cluster.gpus) if wanted.trace else []
    lines = [plan_text(planned, timeline, changes, wanted.layers), *trace_lines(traces)]
    lines += ["", check_text(checks)] if checks else []
    return Result({"plan": planned, "changes": changes, "checks": checks, "traces": traces}, "\n".join(lines))


def _load(
    recipe: str, overrides: list[str], gpu: str, counts: list[int], net: str | None, per_node: int | None
) -> tuple[Recipe, list[Cluster]]:
    from zero2all.model.cost.named_gpu import with_precision_of
    from zero2all.planner.calibrated import check_links, find_entry
    from zero2all.planner.cluster import Cluster
    from zero2all.recipe import PRESETS, load_recipe_or_preset
    from zero2all.train.hyperparameters import fill_hyperparameters

    batch = PRESET_BATCH if recipe in PRESETS else ()
    loaded = fill_hyperparameters(load_recipe_or_preset(recipe, [*batch, *overrides]))
    entry, bandwidth = find_entry(gpu), None if net is None else parse_bandwidth(net)
    clusters = [Cluster.of(entry, gpus, bandwidth, per_node) for gpus in counts]
    for cluster in clusters:
        check_links(entry, cluster, bandwidth is not None)
    return with_precision_of(loaded, clusters[0].gpu), clusters


def _gpu_counts(text: str) -> list[int]:
    """``8,64`` -> 8 and 64."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and 0 < int(word) < 10**7 for word in words):
        raise UsageError(f"--gpus: {text!r} is not a number of GPUs, nor several such as 8,64,512")
    return sorted({int(word) for word in words})


def _pictured(micro_batches: int | str) -> int:
    """A timeline of more would only be longer."""
    return min(int(micro_batches), 64)


def _count(tokens: str) -> int:
    try:
        return parse_count(tokens)
    except ValueError as error:
        raise UsageError(f"--tokens: {error}") from None


def parse_bandwidth(text: str) -> float:
    """``200Gbps`` or ``25GB/s`` -> bytes per second."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(Gbps|Gb/s|GB/s)\s*", text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--net: {text!r} is not a bandwidth such as 200Gbps or 25GB/s")
    return float(match[1]) * 1e9 / (1 if match[2] == "GB/s" else 8)
