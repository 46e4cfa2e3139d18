"""A plan for a person: memory bars, the pipeline, the roofline and the costs, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from zero2all.base.charts.terminal import bar_text
from zero2all.base.units import show_bytes, show_count, show_seconds
from zero2all.planner.pipeline import Timeline
from zero2all.planner.plan import CostPlan
from zero2all.planner.rank_plan import HOST_MEMORY, STORED, MemoryPlan, RankLayers
from zero2all.planner.run_cost import TRAINED_BYTES
from zero2all.planner.search import SearchResult
from zero2all.planner.step_time import ComputePart
from zero2all.planner.sync_plan import FAST_ENOUGH, sync_lines
from zero2all.track.step_text import show_rate

BAR = 30  # characters of a bar
MAX_TIMELINE = 110
MARKS = {"forward": "0123456789", "backward": "▒", "input gradient": "▒", "weight gradient": "░"}


def plan_text(plan: CostPlan, timeline: Timeline | None, changes: Sequence[str] = (), *, layers: bool = False) -> str:
    gpu, step, speed = plan.cluster.gpu, plan.step, plan.speed
    mesh = ", ".join(f"{name} {value}" for name, value in plan.layout.items() if name == "zero" or value not in (1, 0))
    lines = [
        f"{plan.recipe}: {show_count(plan.parameters)} parameters on {plan.cluster.gpus} x {gpu.name} ({mesh})",
        "",
        *_plan_memory_lines(plan, changes),
        *_zero_lines(plan),
        *(_layer_lines(plan.layers) if layers else []),
        "",
        f"FLOPs: {show_count(plan.flops_per_token)} a token ({show_count(plan.palm_flops_per_token)} by 6N + 12LHQT)",
        *_compute_lines(step.parts, plan),
        *_traffic_lines(plan),
        *([] if timeline is None else ["", *timeline_lines(timeline, step.bubble)]),
        "",
        f"step: {step.expected:.3g} s expected; {step.shortest:.3g} s if all communication were hidden, "
        f"{step.longest:.3g} s if none",
        *([f"  of that {step.sampling:.3g} s for sampling answers"] if step.sampling else []),
        f"speed: {show_rate(speed.tokens_per_second)}, {speed.tflops:.0f} TFLOP/s per GPU, MFU {speed.mfu:.1%} "
        f"({speed.mfu_by_format:.1%} against the peak of each product's format), "
        f"HFU {speed.hfu:.1%}; by 6N + 12LHQT {speed.palm_tflops:.0f} TFLOP/s, MFU {speed.palm_mfu:.1%}; "
        f"by BLOOM's formula {speed.bloom_tflops:.0f} TFLOP/s",
        *([] if plan.sync is None or plan.sync.recommendation == FAST_ENOUGH else ["", *sync_lines(plan.sync), ""]),
        *_cost_lines(plan),
    ]
    return "\n".join(lines)


def _plan_memory_lines(plan: CostPlan, changes: Sequence[str]) -> list[str]:
    verdict = "fits" if plan.fits else "does not fit"
    first, *rest = memory_lines(plan.memory, plan.cluster.gpu.memory, int(plan.layout["pp"]))
    return [f"{first}, {verdict}", *rest, *_pinned_lines(plan), *(f"  it fits with {change}" for change in changes)]


def _pinned_lines(plan: CostPlan) -> list[str]:
    """Pinned memory is never paged out, so it is missing everywhere else on the node."""
    count = plan.cluster.gpus_per_node
    pinned, there = count * plan.memory.host, round(count * HOST_MEMORY)
    if not pinned:
        return []
    verdict = "more than there is" if pinned > there else f"{pinned / there:.0%} of it"
    return [
        f"  a node pins {show_bytes(pinned)} for that, which no other program can use: {verdict}, "
        f"if it has {show_bytes(there)} for {count} GPUs"
    ]


def memory_lines(memory: MemoryPlan, limit: int | None, pp: int) -> list[str]:
    """A bar for each part, relative to the memory of the device if that is known."""
    where = f" (pipeline rank {memory.pp_rank})" if pp > 1 else ""
    there = "" if limit is None else f" of {show_bytes(limit)}"
    lines = [f"memory of a rank{where}: {show_bytes(memory.total)}{there}"]
    for part in memory.parts:
        share = part.bytes / max(limit or 0, memory.total)
        lines.append(f"  {part.name:<40}{show_bytes(part.bytes):>9} {bar_text(share, BAR)}  {part.note}".rstrip())
    elsewhere = {"on the host": memory.host, "in files": memory.files}
    return lines + [f"  {name}: {show_bytes(size)}" for name, size in elsewhere.items() if size]


def _zero_lines(plan: CostPlan) -> list[str]:
    """The count of the ZeRO paper beside ours, which has fp32 gradients and gathers weights in blocks."""
    paper, memory, parameters = plan.zero_paper, plan.memory, plan.parameters
    three = [show_bytes(size) for size in (paper.weights, paper.gradients, paper.optimizer)]
    sizes = ", ".join(f"{stage}: {show_bytes(size)}" for stage, size in enumerate(paper.stages))
    ours = memory.bytes_of(STORED, "gradients", "optimizer state") + memory.host + memory.files
    gathered = memory.bytes_of("weights in", "unsharded gradients")
    return [
        f"to load the model: {show_bytes(2 * parameters)} in bf16, {show_bytes(6 * parameters)} with fp32 weights "
        f"beside (6 GB per billion parameters); to train it: {show_bytes(TRAINED_BYTES * parameters)} and activations",
        f"states by the ZeRO paper, 2 + 2 + 12 bytes per parameter: weights {three[0]}, gradients {three[1]}, "
        f"optimizer {three[2]}; by stage on {paper.ranks} data-parallel ranks {sizes}",
        f"  here {show_bytes(ours)}, with gradients in the dtype of the weights, and "
        f"{show_bytes(gathered)} of gathered weights and gradients on their way",
    ]


def _layer_lines(ranks: Sequence[RankLayers]) -> list[str]:
    return ["", "layers and parameters of each pipeline rank:"] + [
        f"  rank {one.pp_rank:<3} layers {_ranges(one.layers)}: {show_count(one.parameters)} parameters, "
        f"{show_count(one.on_rank)} on each rank; {show_bytes(one.memory)}"
        for one in ranks
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3, 8-11``"""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(f"{start}-{end}" if end > start else str(start) for start, end in zip(starts, ends, strict=True))


def _compute_lines(parts: Sequence[ComputePart], plan: CostPlan) -> list[str]:
    ridge = ridge_intensity(plan)
    lines = [
        f"computation of a rank in a step: {plan.step.compute:.3g} s (the roofline bends at {ridge:.0f} FLOPs per byte)"
    ]
    for part in parts:
        share = part.seconds / plan.step.compute
        intensity = f"{part.intensity:,.{int(part.intensity < 10)}f}" if part.flops else "-"
        time = f"{part.seconds:>8.3g}s {bar_text(share, BAR)}"
        lines.append(f"  {part.name:<40}{time} {intensity:>6} FLOPs per byte, {part.bound}-bound")
    return lines


def ridge_intensity(plan: CostPlan) -> float:
    """FLOPs for each byte above which the GPU is limited by computation."""
    return plan.cluster.gpu.flops / plan.cluster.gpu.memory_bandwidth


def _traffic_lines(plan: CostPlan) -> list[str]:
    if not plan.step.traffic:
        return []
    sent = plan.traffic
    lines = [
        f"communication of a rank in a step: {plan.step.communication:.3g} s; "
        f"all GPUs send {show_bytes(round(sent.sent))}",
        f"  the fp32 gradients of {sent.replicas} replicas are {show_bytes(sent.gradients)}",
    ]
    for one in plan.step.traffic:
        name = f"{one.dimension}: {one.what}"
        how = "hidden" if one.overlaps else "exposed"
        link = f"{show_bytes(one.bytes)} to {one.ranks - 1} ranks over {one.link}"
        lines.append(f"  {name:<56}{one.seconds:>8.3g}s  {link}, {how}")
    return lines


def timeline_lines(timeline: Timeline, bubble: float) -> list[str]:
    """A row for each pipeline rank: digits are forward passes, ▒ and ░ backward ones, dots idle time."""
    shown = min(timeline.length, MAX_TIMELINE)
    rows = [["·"] * timeline.length for _ in range(timeline.ranks)]
    for one in timeline.passes:
        mark = MARKS[one.done.action]
        mark = mark[one.done.micro_batch % 10] if len(mark) > 1 else mark
        rows[one.rank][one.start : one.end] = [mark] * (one.end - one.start)
    lines = [f"pipeline: the bubble is {bubble:.1%} of the busy time (digits forward, ▒░ backward, · idle)"]
    return lines + [f"  rank {rank:<3} {''.join(row[:shown])}" for rank, row in enumerate(rows)]


def _cost_lines(plan: CostPlan) -> list[str]:
    run, served = plan.run, plan.inference
    money = f", {run.money:,.0f} at {run.price:g} a GPU-hour" if run.money is not None else ""
    weights = ", ".join(f"{name} {show_bytes(size)}" for name, size in served.weights.items())
    return [
        f"run: {show_count(run.tokens)} tokens in {run.steps:,} steps, {show_flops(run.flops)}, "
        f"{show_seconds(run.hours * 3600)}, {run.gpu_hours:,.0f} GPU-hours without failures, "
        f"{run.gpu_hours / run.goodput:,.0f} with them{money}",
        f"failures: {run.failures:.1f} expected, {run.failure_a_day:.1%} chance of one on a day; a checkpoint of "
        f"{show_bytes(run.checkpoint_bytes)} every {show_seconds(run.checkpoint_interval)}; goodput {run.goodput:.1%}",
        *(
            f"  {one.rate}: one in {show_seconds(one.between)}; a checkpoint every {show_seconds(one.daly)} "
            f"(Daly; Young {show_seconds(one.young)}); goodput {one.goodput:.2%}"
            for one in run.rates
        ),
        f"inference: {weights}; KV cache {show_bytes(served.kv_cache)} for {served.batch} x {served.length:,} tokens; "
        f"{show_count(served.flops_per_token)} FLOPs per token; {served.gpus} GPU(s), at most "
        f"{served.tokens_per_second:,.0f} tok/s for one sequence",
    ]


def show_flops(flops: float) -> str:
    """
    >>> show_flops(3.14e23)
    '314 ZFLOP'
    """
    for letter, size in (("Y", 1e24), ("Z", 1e21), ("E", 1e18), ("P", 1e15)):
        if flops >= size:
            return f"{flops / size:.3g} {letter}FLOP"
    return f"{flops / 1e12:.3g} TFLOP"


def search_text(result: SearchResult) -> str:
    lines = [f"{result.tried:,} layouts tried, {result.fitting:,} fit"]
    for number, one in enumerate(result.best, 1):
        lines += [
            f"{number:>2}. {one.step:.3g} s per step, {show_rate(one.tokens_per_second)}, MFU {one.mfu:.1%}, "
            f"{show_bytes(one.memory)} a rank: {one.why}",
            f"    {' '.join(one.overrides)}",
        ]
    lines += ["why the others fail:"] if result.rejected else []
    lines += [f"  {count:>6,}  {reason}" for reason, count in result.rejected.items()]
    lines += map(str, result.tips)
    return "\n".join(lines)
