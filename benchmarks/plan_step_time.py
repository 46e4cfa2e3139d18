"""Step time that `z2a plan` predicts with a calibrated entry of this machine against a measured one, on one CPU rank.

    OMP_NUM_THREADS=1 python -m benchmarks plan_step_time --work /somewhere

First the machine is calibrated, as `z2a doctor --calibrate` does it; `--entry` takes an entry that was written before.
Then six recipes are planned with that entry and trained for a few steps on random tokens, eager and in fp32. The
entry knows none of the six but the first, whose step it was calibrated with. With one thread the clock is CPU time, so
that other programs on the machine disturb it less.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.common import benchmark_parser, show

from zero2all.base.charts.table import markdown_table
from zero2all.cli.doctor import write_calibration
from zero2all.model import ModelInputs
from zero2all.optim.optimizer import build_optimizers
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.planner.calibrated import find_entry
from zero2all.planner.cluster import Cluster
from zero2all.planner.plan import plan_run
from zero2all.planner.step_time import PlannedStepTime
from zero2all.recipe import Recipe, load_recipe_or_preset
from zero2all.train.hyperparameters import fill_hyperparameters

CPU = torch.device("cpu")
WIDE = [
    "model.hidden_size=768",
    "model.intermediate_size=2048",
    "model.num_hidden_layers=3",
    "model.num_attention_heads=12",
    "model.num_key_value_heads=12",
]
MOE = [
    "model.moe={num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 448, n_shared_experts: 1}",
    "model.num_hidden_layers=6",
]
LONG = ["train.seq_len=2048", "model.max_position_embeddings=2048"]
FULL = ["parallel.activation_checkpointing=full"]
CASES: dict[str, tuple[str, list[str]]] = {
    "z2all-10m": ("z2all-10m", []),
    "z2all-25m": ("z2all-25m", []),
    "wide and shallow": ("z2all-10m", WIDE),
    "mixture of experts": ("z2all-10m", MOE),
    "long sequence": ("z2all-10m", LONG),
    "full recomputation": ("z2all-10m", FULL),
}


@dataclass(frozen=True)
class Comparison:
    case: str
    tokens: int
    planned: PlannedStepTime
    measured: float

    @property
    def difference(self) -> float:
        return self.planned.expected / self.measured - 1


def case_recipe(case: str) -> Recipe:
    preset, overrides = CASES[case]
    usual = ["train.precision=fp32", "train.compile=false", "train.device=cpu"]
    return fill_hyperparameters(load_recipe_or_preset(preset, [*usual, *overrides]))


def measure(recipe: Recipe, steps: int) -> float:
    """The median of ``steps`` steps after two that warm up, in seconds."""
    options = recipe.train
    mesh = ParallelMesh.init_distributed(recipe.parallel, CPU)
    model = ParallelModel(recipe.model, recipe.parallel, mesh, seed=0, dtype=torch.float32)
    optimizers = build_optimizers(model.model, options.optimizer, model.param_groups)
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch_samples, options.seq_len + 1)
    tokens = torch.randint(0, recipe.model.padded_vocab_size, shape, generator=generator)
    rows = options.effective_micro_batch_tokens // options.seq_len
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = []
    for _ in range(steps + 2):
        begin = clock()
        model.forward_backward(
            ModelInputs(tokens[:, :-1], tokens[:, 1:]), divisor=options.tokens_per_step, micro_batch_size=rows
        )
        model.clip_grad_norm_(options.optimizer.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(clock() - begin)
    return statistics.median(seconds[2:])


def table(found: list[Comparison]) -> str:
    rows = []
    for one in found:
        seconds = f"{one.planned.expected:.3f} s", f"{one.measured:.3f} s"
        rows.append((one.case, f"{one.tokens:,}", *seconds, f"{one.difference:+.1%}"))
    worst = max(found, key=lambda one: abs(one.difference))
    lines = markdown_table(("recipe", "tokens per step", "planned", "measured", "difference"), rows)
    return f"{lines}\n\nworst: {worst.difference:+.1%} ({worst.case})"


def parts_text(found: list[Comparison]) -> str:
    return "\n".join(
        f"{one.case}: " + ", ".join(f"{part.name} {part.seconds:.3f} s" for part in one.planned.parts) for one in found
    )


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a directory for the entry")
    parser.add_argument("--entry", type=Path, help="of 'z2a doctor --calibrate', instead of calibrating now")
    parser.add_argument("--case", choices=list(CASES), help="only this one")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--parts", action="store_true", help="also print the planned seconds of each part")
    options = parser.parse_args()
    path = options.entry
    if path is None:
        path = options.work / "here.json"
        options.work.mkdir(parents=True, exist_ok=True)
        show(write_calibration(path).text + "\n")
    entry, found = find_entry(str(path)), []
    for case in [options.case] if options.case else CASES:
        recipe = case_recipe(case)
        planned = plan_run(recipe, Cluster.of(entry, 1)).step
        found.append(Comparison(case, recipe.train.tokens_per_step, planned, measure(recipe, options.steps)))
    show(table(found))
    if options.parts:
        show("\n" + parts_text(found))
