"""z2a plan"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zero2all.base.console import ProgressTask, progress
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.units import parse_count
from zero2all.cli.conventions import Json, Overrides, Result, command

if TYPE_CHECKING:
    from zero2all.model.hf_weights import HFSummary
    from zero2all.planner.cluster import Cluster
    from zero2all.planner.run_cost import Pauses
    from zero2all.recipe import Recipe

PRESET_BATCH = ("train.batch_tokens=null", "train.micro_batch_tokens=auto")  # by scaling law and by memory
PROGRESS_DELAY = 2.0  # seconds


HERE = "here"
RecipeOrModel = Annotated[
    str,
    typer.Argument(
        help="Name of a preset, a recipe file, or the directory of a run or of a Hugging Face model.",
        metavar="PRESET|RECIPE|HF_DIR",
    ),
]


@dataclass(frozen=True)
class Question:
    """What is asked about the plan of one layout, beside its summary."""

    tokens: int | None
    price: float | None
    pauses: Pauses
    layers: bool
    trace: bool
    svg: Path | None
    against: Path | None


Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        help="Number of GPUs, or several such as 8,64,512 to compare. "
        "Default: 8; with --gpu here as few as the recipe allows; with --try 1.",
    ),
]
GpuKind = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        help="Kind of GPU, such as a800-80g; a file of 'z2a doctor --calibrate'; or here, to time steps on this "
        "machine. Default: h100; with --try this machine.",
    ),
]
Net = Annotated[
    str | None,
    typer.Option("--net", help="Network of one GPU to other nodes, such as 200Gbps. Default: of a usual server."),
]
GpusPerNode = Annotated[
    int | None, typer.Option("--gpus-per-node", min=1, help="GPUs in a node. Default: of a usual server.")
]
Tokens = Annotated[
    str | None, typer.Option("--tokens", help="Tokens to train on, such as 300B. Default: as in the recipe.")
]
Price = Annotated[
    float | None, typer.Option("--price", min=0.0, help="Price of one GPU-hour. Default: no costs are printed.")
]
Stall = Annotated[
    float,
    typer.Option(
        "--stall", min=0.001, help="Seconds that training pauses for each checkpoint, as the log of a run has it."
    ),
]
Recovery = Annotated[
    float, typer.Option("--recovery", min=0, help="Seconds from a failure to the first step after the restart.")
]
Layers = Annotated[
    bool, typer.Option("--layers", help="Also list layers, parameters, FLOPs, kernels and shape advice.")
]
Trace = Annotated[
    bool, typer.Option("--trace", help="Also trace the memory of a rank, one layer of each kind, in some seconds.")
]
Pictures = Annotated[
    Path | None, typer.Option("--svg", help="Directory for pictures of memory, pipeline and roofline. Default: none.")
]
Against = Annotated[
    Path | None,
    typer.Option("--against", help="A run of this recipe: print planned beside measured values. Default: none."),
]
Search = Annotated[
    bool, typer.Option("--search", help="Rank all layouts that fit, instead of planning the recipe's own.")
]
Try = Annotated[
    bool,
    typer.Option("--try", help="Find the fastest settings by trial runs here, and write them to RECIPE.tuned.yaml."),
]


@command
def plan(
    recipe: RecipeOrModel,
    overrides: Overrides = None,
    gpus: Gpus = None,
    gpu: GpuKind = None,
    net: Net = None,
    per_node: GpusPerNode = None,
    tokens: Tokens = None,
    price: Price = None,
    stall: Stall = 5.0,
    recovery: Recovery = 300.0,
    layers: Layers = False,
    trace: Trace = False,
    svg: Pictures = None,
    against: Against = None,
    search: Search = False,
    try_: Try = False,
    json: Json = False,
) -> Result:
    """Plan a run: memory, time, money and layout, without GPUs.

    Everything is computed from the recipe and a table of data sheets; no corpus, tokenizer or GPU is needed. For a
    recipe it also prints batch, epochs and schedule, which need the tokens to be exact.

    --try tunes only what does not change the result: layout, micro-batch, activation checkpointing, kernels,
    compilation. A key on the command line is not tuned. The same command resumes.

    Example: z2a plan recipes/70b-1024.yaml --gpus 1024 --gpu h100 --price 2.1

    Example: z2a plan recipes/25m.yaml --gpu here
    """
    modes = {"--search": search, "--try": try_, "--gpu here": gpu == HERE}
    chosen = [name for name, value in modes.items() if value]
    if len(chosen) > 1:
        raise UsageError(f"give only one of {' and '.join(chosen)}")
    details = {"--layers": layers, "--trace": trace, "--svg": svg, "--against": against}
    if try_:
        _refuse("--try", {**details, "--net": net, "--tokens": tokens, "--price": price})
        return _try(Path(recipe), overrides or [], gpu, gpus)
    from zero2all.planner.run_cost import Pauses

    with progress("planning", delay=PROGRESS_DELAY) as task:  # from here on, since the imports take seconds too
        length = None if tokens is None else _count(tokens)
        if gpu == HERE:
            _refuse("--gpu here", {name: details[name] for name in ("--trace", "--svg", "--against")})
            _refuse("--gpu here", {"--net": net, "--tokens": tokens, "--price": price})
            return _measure(recipe, overrides or [], None if gpus is None else _one_count(gpus), layers=layers)
        counts = _gpu_counts(gpus or "8")
        asked = Question(length, price, Pauses(stall, recovery), layers, trace, svg, against)
        if len(counts) == 1 and not search:
            return _plan(recipe, overrides or [], gpu or "h100", counts[0], net, per_node, asked)
        named = [name for name in details if name != "--svg" and details[name]]
        if named:
            raise UsageError(f"{named[0]} is for one plan: give one number of GPUs, and no --search")
        loaded, clusters = _load(recipe, overrides or [], gpu or "h100", counts, net, per_node)
        if not search:
            return _scale(loaded, clusters, length, price, svg)
        if svg is not None or len(clusters) > 1:
            raise UsageError("--search is for one number of GPUs, and draws nothing")
        return _search(loaded, clusters[0], task)


def _refuse(mode: str, options: dict[str, object]) -> None:
    if given := [name for name, value in options.items() if value]:
        raise UsageError(f"{given[0]} does not go with {mode}")


def _try(recipe: Path, overrides: list[str], gpu: str | None, gpus: str | None) -> Result:
    from zero2all.experiments.tune import TuneOptions, tune_recipe, tune_text

    try:
        report = tune_recipe(recipe, overrides, TuneOptions(_one_count(gpus or "1"), gpu=gpu))
    except KeyboardInterrupt:
        raise Z2aError("interrupted; trials that ended are kept: run the same command again to continue") from None
    return Result(report, tune_text(report))


def _measure(name: str, overrides: list[str], gpus: int | None, *, layers: bool) -> Result:
    from zero2all.base.machine.devices import pick_device, pick_gpu
    from zero2all.model.cost.describe import describe_model, model_text
    from zero2all.train.estimate import estimate_run

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("--gpu here needs no ranks: use 'z2a plan' alone, with --gpus")
    recipe, weights = _open(name, overrides)
    run = estimate_run(recipe, gpus)
    model = describe_model(run.recipe, pick_device(run.recipe.train.device), pick_gpu("")) if layers else None
    lines = [*_weights_lines(weights, recipe), run.text, *(["", model_text(model)] if model else [])]
    return Result({"weights": weights, "training": run.estimate, "model": model}, "\n".join(lines))


def _weights_lines(weights: HFSummary | None, recipe: Recipe) -> list[str]:
    from zero2all.model.cost.describe import weights_lines

    return [] if weights is None else [*weights_lines(weights, recipe.model), ""]


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
    from zero2all.base.charts.svg import line_svg
    from zero2all.planner.plan import CostPlan, plan_run
    from zero2all.planner.scaling import scaling_plot, scaling_rows, scaling_text
    from zero2all.train.hyperparameters import with_hyperparameters
    from zero2all.train.micro_batch import estimate_micro_batch

    def planned(cluster: Cluster) -> CostPlan | UsageError:
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


def _plan(
    name: str, overrides: list[str], gpu: str, gpus: int, net: str | None, per_node: int | None, asked: Question
) -> Result:
    from zero2all.bench.profile.memory_trace import trace_lines, trace_memory
    from zero2all.experiments.planned_run import check_plan, check_text, read_run
    from zero2all.model.cost.describe import describe_model, model_text, with_precision_of
    from zero2all.planner.pipeline import simulate
    from zero2all.planner.plan import plan_run
    from zero2all.planner.plan_svg import plan_svgs
    from zero2all.planner.plan_text import plan_text
    from zero2all.planner.search import cheapest_changes
    from zero2all.planner.workload import GPU, largest_stage
    from zero2all.recipe import PRESETS
    from zero2all.train.estimate import estimate_run
    from zero2all.train.hyperparameters import fill_hyperparameters, with_hyperparameters
    from zero2all.train.micro_batch import estimate_micro_batch

    recipe, weights = _open(name, overrides)
    cluster = _clusters(gpu, [gpus], net, per_node)[0]
    training = None
    if name in PRESETS or weights:  # a shape without training settings
        recipe = with_precision_of(fill_hyperparameters(recipe), cluster.gpu)
        recipe = with_hyperparameters(recipe, estimate_micro_batch(recipe, gpus, cluster.gpu.memory))
    else:
        training = estimate_run(recipe, gpus, cluster.gpu)
        recipe = training.recipe
    known = None if training is None else training.estimate.tokens
    planned = plan_run(recipe, cluster, asked.tokens or known, asked.price, asked.pauses)
    timeline = simulate(recipe.parallel, _pictured(planned.layout["micro_batches"])) if recipe.parallel.pp > 1 else None
    if asked.svg is not None:
        asked.svg.mkdir(parents=True, exist_ok=True)
        for file, picture in plan_svgs(planned, timeline).items():
            (asked.svg / file).write_text(picture, encoding="utf-8")
    changes = [] if planned.fits else cheapest_changes(recipe, cluster)
    if not planned.fits and not changes:
        changes = ["more GPUs, or a smaller model: no single change is enough; --search tries all layouts"]
    checks = [] if asked.against is None else check_plan(planned, read_run(asked.against, recipe))
    traces = trace_memory(recipe, largest_stage(recipe), cluster.gpus) if asked.trace else []
    model = describe_model(recipe, GPU, cluster.gpu) if asked.layers else None
    lines = [
        *_weights_lines(weights, recipe),
        plan_text(planned, timeline, changes, layers=asked.layers),
        *trace_lines(traces),
    ]
    lines += ["", "training:", *training.lines] if training else []
    lines += ["", check_text(checks)] if checks else []
    lines += ["", model_text(model)] if model else []
    data = {
        "weights": weights,
        "plan": planned,
        "changes": changes,
        "checks": checks,
        "traces": traces,
        "training": training and training.estimate,
        "model": model,
    }
    return Result(data, "\n".join(lines))


def _load(
    name: str, overrides: list[str], gpu: str, counts: list[int], net: str | None, per_node: int | None
) -> tuple[Recipe, list[Cluster]]:
    """With every value that the recipe leaves open, but the micro-batch."""
    from zero2all.model.cost.describe import with_precision_of
    from zero2all.train.hyperparameters import fill_hyperparameters

    clusters = _clusters(gpu, counts, net, per_node)
    return with_precision_of(fill_hyperparameters(_open(name, overrides)[0]), clusters[0].gpu), clusters


def _open(name: str, overrides: list[str]) -> tuple[Recipe, HFSummary | None]:
    """The recipe; and of a Hugging Face directory, whether its weights can be used."""
    from zero2all.model.hf_weights import CONFIG, read_hf_config, summarize_hf
    from zero2all.recipe import PRESETS, load_recipe_or_preset, recipe_for_model

    directory = Path(name)
    if (directory / CONFIG).exists():
        recipe = recipe_for_model(read_hf_config(directory), [*PRESET_BATCH, *overrides], name)
        return recipe, summarize_hf(directory)
    batch = PRESET_BATCH if name in PRESETS else ()
    return load_recipe_or_preset(name, [*batch, *overrides]), None


def _clusters(gpu: str, counts: list[int], net: str | None, per_node: int | None) -> list[Cluster]:
    from zero2all.planner.calibrated import check_links, find_entry
    from zero2all.planner.cluster import Cluster

    entry, bandwidth = find_entry(gpu), None if net is None else parse_bandwidth(net)
    clusters = [Cluster.of(entry, gpus, bandwidth, per_node) for gpus in counts]
    for cluster in clusters:
        check_links(entry, cluster, has_network=bandwidth is not None)
    return clusters


def _one_count(text: str) -> int:
    counts = _gpu_counts(text)
    if len(counts) > 1:
        raise UsageError("--gpus: give one number here")
    return counts[0]


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
