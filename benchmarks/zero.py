"""Step time of ZeRO stages and offload on two gloo ranks of this machine, in rounds that take turns.

    python -m benchmarks zero --work /tmp/zero

On a CPU, collectives are copies between processes and offload moves nothing, so this is the cost of the method's own
work: gathers and reductions of a step, and files against memory. On GPUs their transfer is on top.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.common import benchmark_parser, median_ratio, show, take_turns

from zero2all.base.charts.table import markdown_table
from zero2all.bench.rank_harness import run_ranks
from zero2all.model import ModelInputs
from zero2all.optim.optimizer import build_optimizers, map_optimizer_state, set_learning_rate
from zero2all.parallel import ParallelDims, ParallelMesh, ParallelModel
from zero2all.recipe import ModelConfig, OptimizerRecipe, ParallelRecipe

RANKS, MICROS, LENGTH, VOCAB = 2, 4, 64, 4096
CONFIG = ModelConfig(
    hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
    max_position_embeddings=LENGTH, vocab_size=VOCAB,
)  # fmt: skip
OPTIMIZER = OptimizerRecipe(lr=1e-3)


class Run:
    """A model of one method, with its optimizers."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        recipe = ParallelRecipe(**sizes)
        mesh = ParallelMesh(ParallelDims.from_recipe(recipe, RANKS), torch.device("cpu"))
        self.model = ParallelModel(CONFIG, recipe, mesh, seed=0)
        self.optimizers = build_optimizers(self.model.model, OPTIMIZER, self.model.param_groups)
        set_learning_rate(self.optimizers, OPTIMIZER, lr_multiplier=1.0)
        if recipe.offload_dir is not None:
            map_optimizer_state(self.optimizers, recipe.offload_dir)

    def step(self, tokens: torch.Tensor) -> float:
        dist.barrier()
        begin = time.perf_counter()
        self.model.forward_backward(
            ModelInputs(tokens[:, :-1], tokens[:, 1:]), divisor=tokens.numel(), micro_batch_size=1
        )
        self.model.clip_grad_norm_(1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - begin


def measure(methods: dict[str, dict[str, Any]], rounds: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    runs = {name: Run(sizes) for name, sizes in methods.items()}
    tokens = torch.randint(0, VOCAB, (MICROS, LENGTH + 1), generator=torch.Generator().manual_seed(dist.get_rank()))
    # The first step builds buffers.
    return take_turns({name: partial(run.step, tokens) for name, run in runs.items()}, rounds, warm_up=1)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="directory of the files of parallel.offload")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    methods: dict[str, dict[str, Any]] = {f"zero {stage}": {"zero": stage} for stage in (3, 2, 1)}
    methods["zero 2, offload cpu"] = {"zero": 2, "offload": "cpu"}
    methods["zero 2, offload to files"] = {"zero": 2, "offload": options.work}
    seconds = run_ranks(RANKS, measure, methods, options.rounds, seconds=600)[0]
    rows = [
        (name, f"{1000 * statistics.median(found):.0f}", f"{median_ratio(found, seconds['zero 3']):.2f}")
        for name, found in seconds.items()
    ]
    show(markdown_table(("method", "ms a step (median)", "against zero 3 (median of rounds)"), rows))
