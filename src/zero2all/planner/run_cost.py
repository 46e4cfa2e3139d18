"""What a run costs in time, money and failures, and what its model costs afterwards."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zero2all.checkpoint.checkpoint_interval import DAY, FAILURE_RATES, FailureModel
from zero2all.model.cost.model_size import kv_cache_bytes_per_token, weight_dtype
from zero2all.planner.cluster import Cluster
from zero2all.planner.workload import Workload
from zero2all.recipe import ModelConfig

PLANNED_RATE = "0.27% a card and day"
FAILURES_PER_GPU_DAY = FAILURE_RATES[PLANNED_RATE]
SERVED_BATCH = 8
TRAINED_BYTES = 18  # per parameter: fp32 and bf16 weights, fp32 gradients, two moments of AdamW
INFERENCE_BYTES = {"fp32 and bf16": 6, "fp32": 4, "bf16": 2, "int8": 1}
"""For each parameter, by precision of the weights."""
TOKENS_PER_PARAMETER = 20  # compute-optimal, https://arxiv.org/abs/2203.15556


@dataclass(frozen=True)
class Pauses:
    """Seconds in which a run does not train."""

    stall: float = 5.0
    """For each checkpoint: the copy to host memory; writing goes on beside training."""
    recovery: float = 300.0
    """From a failure to the next step: detection, rendezvous, loading."""


@dataclass(frozen=True)
class FailureCost:
    """The cost of a published rate of failures on these GPUs."""

    rate: str
    between: float
    """Seconds between two failures, on average."""
    young: float
    """Seconds between checkpoints, by Young."""
    daly: float
    goodput: float
    """Expected share of the time that advances training, with Daly's interval."""


def failure_costs(gpus: int, pauses: Pauses) -> list[FailureCost]:
    found = []
    for rate, each in FAILURE_RATES.items():
        model = FailureModel(DAY / (each * gpus), pauses.stall, pauses.recovery)
        goodput = model.goodput(model.daly_interval)
        found.append(FailureCost(rate, model.mtbf, model.young_interval, model.daly_interval, goodput))
    return found


def failure_probability(each: float, count: int) -> float:
    """The probability that at least one of ``count`` fails: 1 - (1 - p)^n.

    >>> round(failure_probability(0.01, 128), 4)
    0.7237
    """
    return float(1 - (1 - each) ** count)


@dataclass(frozen=True)
class RunCost:
    """From the first step to the last."""

    tokens: int
    steps: int
    flops: float
    """FLOPs of the matrix products."""
    hours: float
    gpu_hours: float
    """Without failures."""
    price: float | None
    """The price of one GPU and hour."""
    money: float | None
    """With the time that failures cost."""
    failures: float
    """Expected number, at 0.27% for each GPU and day."""
    failure_a_day: float
    """Probability of at least one on a day."""
    checkpoint_bytes: int
    checkpoint_interval: float
    """Seconds between checkpoints at which goodput is highest (Daly)."""
    goodput: float
    """Expected share of the time that advances training."""
    rates: list[FailureCost]
    """The same for each published rate of failures."""


def run_cost(
    workload: Workload,
    cluster: Cluster,
    step_seconds: float,
    tokens: int,
    price: float | None,
    pauses: Pauses = Pauses(),
) -> RunCost:
    steps = math.ceil(tokens / workload.batch_tokens)
    hours = steps * step_seconds / 3600
    failures_a_day = FAILURES_PER_GPU_DAY * cluster.gpus
    rates = failure_costs(cluster.gpus, pauses)
    usual = next(one for one in rates if one.rate == PLANNED_RATE)
    goodput, parts = usual.goodput, workload.parts
    return RunCost(
        tokens=tokens,
        steps=steps,
        flops=float(tokens) * workload.flops.model,
        hours=hours / goodput,
        gpu_hours=hours * cluster.gpus,
        price=price,
        money=None if price is None else price * hours * cluster.gpus / goodput,
        failures=failures_a_day * hours / goodput / 24,
        failure_a_day=failure_probability(FAILURES_PER_GPU_DAY, cluster.gpus),
        checkpoint_bytes=round(weight_dtype(workload.optimizer).itemsize * parts.total + parts.all.state.total),
        checkpoint_interval=usual.daly,
        goodput=goodput,
        rates=rates,
    )


@dataclass(frozen=True)
class InferenceCost:
    """The cost of serving the model."""

    weights: dict[str, int]
    """Bytes by precision."""
    kv_cache: int
    """Bytes in bf16 for ``batch`` sequences of ``length`` tokens."""
    batch: int
    length: int
    intermediate: int
    """Bytes of one layer's activations for the same."""
    flops_per_token: int
    gpus: int
    """The number of GPUs that hold bf16 weights and the cache."""
    tokens_per_second: float
    """The rate of one sequence on these GPUs, at most: every token reads all weights that it goes through."""


def inference_cost(workload: Workload, cluster: Cluster, batch: int = SERVED_BATCH) -> InferenceCost:
    config, length, parameters = workload.config, workload.config.max_position_embeddings, workload.parts.total
    cache = full_kv_cache(config, batch, length)
    gpus = math.ceil((2 * parameters + cache) / (0.9 * cluster.gpu.memory))
    active = workload.flops.forward - workload.flops.scores  # two for each parameter that a token is multiplied with
    return InferenceCost(
        weights={name: each * parameters for name, each in INFERENCE_BYTES.items()},
        kv_cache=cache,
        batch=batch,
        length=length,
        intermediate=batch * length * config.hidden_size * 2,
        flops_per_token=active,
        gpus=gpus,
        tokens_per_second=gpus * cluster.gpu.memory_bandwidth / active,
    )


def full_kv_cache(config: ModelConfig, batch: int, length: int) -> int:
    return kv_cache_bytes_per_token(config) * batch * length
