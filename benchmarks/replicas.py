"""What replicas of in-memory checkpoints cost, and what they save when a node is lost.

    python -m benchmarks replicas --out bench

Four ranks on two simulated nodes whose link is shaped to 1 Gb/s, with a model of the quickstart's size: steps per
second with replicas and without, in turns, so that a machine that is busy for a while is busy for both. Then a node
loses power and a fresh one takes its place: the recovery from replicas beside that from durable storage. Needs root
and iproute2.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.common import benchmark_parser
from tests.chaos.faults import Fault, hold_rank
from tests.chaos.node_faults import SimulatedCluster, replace_node, simulated_cluster
from tests.chaos.scenario import Scenario
from tests.chaos.suite import FaultResult, run_baseline, run_fault
from tests.chaos.workspace import build_workspace

from zero2all.base.console import say
from zero2all.bench.measurements import write_report
from zero2all.track.record_lines import EventLine, StepLine
from zero2all.track.run_record import read_record_lines

MODEL = (
    "model.hidden_size=256", "model.intermediate_size=1024", "model.num_hidden_layers=2",
    "model.num_attention_heads=4", "model.num_key_value_heads=4", "model.max_position_embeddings=128",
    "train.seq_len=128", "train.batch_tokens=4096",
)  # fmt: skip
WARM_UP = 12  # steps: the slots are allocated at the first checkpoint
RATE = "1gbit"


@dataclass(frozen=True)
class Speed:
    steps_per_second: float
    replicas: int
    """That rank 0 sent."""
    bytes: int
    seconds: float
    """Median of a replica."""
    lag: int
    load: float
    """Average number of processes that wanted a core."""


@dataclass(frozen=True)
class Report:
    speeds: dict[int, list[Speed]]
    recoveries: dict[int, FaultResult]
    """By number of replicas."""
    ratio: float


def shape_links(cluster: SimulatedCluster) -> None:
    for node in cluster.nodes:
        node.run("tc", *f"qdisc replace dev cable root tbf rate {RATE} burst 512kb latency 50ms".split())


def measure_speed(out: Path, name: str, replicas: int, steps: int, every: int) -> Speed:
    overrides = (f"train.steps={steps}", f"checkpoint.replicas={replicas}", f"checkpoint.flash_every={every} steps")
    scenario = Scenario(out / "workspace", out / name, [], (*MODEL, *overrides, f"checkpoint.every={steps} steps"))
    try:
        with simulated_cluster(scenario) as cluster:
            shape_links(cluster)
            cluster.start_rendezvous()
            cluster.expect_success(*(cluster.start(number, nodes=(2, 2)) for number in range(2)))
    finally:
        scenario.terminate()
    lines = list(read_record_lines(scenario.run_dir / "record.jsonl"))
    times = {line.step: line.time for line in lines if isinstance(line, StepLine) and "loss" in line.metrics}
    first, last = times[WARM_UP], times[max(times)]
    assert first is not None
    assert last is not None
    sent = [line.details for line in lines if isinstance(line, EventLine) and line.event == "replica"]
    return Speed(
        steps_per_second=(max(times) - WARM_UP) / (last - first),
        replicas=len(sent),
        bytes=sum(details["bytes"] for details in sent),
        seconds=statistics.median(details["seconds"] for details in sent) if sent else 0.0,
        lag=max((details["lag"] for details in sent), default=0),
        load=os.getloadavg()[0],
    )


def measure_recovery(out: Path, replicas: int) -> FaultResult:
    """``steps_again``, ``recovered`` and the parts of ``cost`` are those of the chaos suite."""
    overrides = (f"checkpoint.replicas={replicas}", "checkpoint.every=8 steps", "checkpoint.flash_every=4 steps")
    fault = Fault(
        f"recovery with {replicas} replicas",
        hold_rank(rank=1),
        partial(replace_node, replicas=replicas > 0),
        (*MODEL, *overrides),
        expected_kind="cut off",
    )
    return run_fault(out, fault, run_baseline(out, MODEL), seed=0)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the report")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=112)
    parser.add_argument("--every", type=int, default=10, help="steps between two in-memory checkpoints")
    options = parser.parse_args()
    out = options.out.absolute()
    build_workspace(out / "workspace", seed=0)
    speeds: dict[int, list[Speed]] = {0: [], 1: []}
    for number in range(options.rounds):
        for replicas in (0, 1) if number % 2 == 0 else (1, 0):
            speed = measure_speed(out, f"speed-{number}-{replicas}", replicas, options.steps, options.every)
            speeds[replicas].append(speed)
            say(f"round {number}, {replicas} replicas: {speed}")
    without, with_replicas = (statistics.median(run.steps_per_second for run in speeds[copies]) for copies in (0, 1))
    ratio = with_replicas / without
    lines = [f"steps per second: {with_replicas:.3f} with replicas, {without:.3f} without, ratio {ratio:.3f}"]
    recoveries = {replicas: measure_recovery(out, replicas) for replicas in (1, 0)}
    for replicas, row in recoveries.items():
        source = "replicas" if replicas else "durable storage"
        lines.append(f"from {source}: {row.recovered} s, {row.steps_again} steps again, {row.cost}, {row.problems}")
    say("\n".join(lines))
    write_report(out, "replicas", Report(speeds, recoveries, ratio), "\n\n".join(lines) + "\n")
