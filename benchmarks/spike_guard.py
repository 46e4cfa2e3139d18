"""What the spike guard does on real text: nothing on clean runs, and its work on one with two bad shards.

    OMP_NUM_THREADS=1 python -m benchmarks spike_guard --out runs/first --work /somewhere

``--out`` is a finished quickstart: its tokens are trained on. Five clean runs with seeds of their own must not set the
guard off. Then the first of them again, where three steps read random bytes and three others nothing but newlines, with
the guard rolling back: how many steps it took to fire, and the held-out loss against that of the clean run; and once
more with the guard only warning, to see what the bad data costs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.common import benchmark_parser, show_json
from tests.train.poison import poison

from zero2all.evals import evaluate_bpb
from zero2all.recipe import load_recipe
from zero2all.train import Run, train


def outcome(out: Path, work: Path, tokens: Path, seed: int, policy: str, steps: int) -> dict[str, Any]:
    """Of one run: the steps at which the guard fired, the documents it named, and the held-out loss at the end."""
    changes = [
        f"out={work}", f"tokenizer.dir={out / 'tokenizer'}", f"tokens.dir={tokens}", f"seed={seed}",
        f"train.steps={steps}", f"evals.every={steps} steps", f"train.guard.policy={policy}",
        "checkpoint.flash_every=10 steps", "track.log_every=1000",
    ]  # fmt: skip
    recipe = load_recipe(out / "recipe.yaml", changes)
    if tokens.parent == work:
        shutil.copytree(out / "tokens", tokens)
        poison(recipe, *bad_steps(steps))
    train(recipe, evaluate=evaluate_bpb)
    lines = [json.loads(line) for line in Run.open(recipe.run_dir).record_path.read_text("utf-8").splitlines()]
    spikes = [line for line in lines if line.get("event") == "spike"]
    [held_out] = [line["bits_per_byte"] for line in lines if line.get("event") == "evaluation"]
    named = [len(spike["documents"]) for spike in spikes]
    found = {"seed": seed, "policy": policy, "fired": [spike["step"] for spike in spikes], "documents_named": named}
    return {**found, "bits_per_byte": held_out}


def bad_steps(steps: int) -> tuple[range, range]:
    """Those that read random bytes, and those that read newlines."""
    return range(steps * 3 // 5, steps * 3 // 5 + 3), range(steps * 4 // 5, steps * 4 // 5 + 3)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--clean", type=int, default=5, help="Runs of which none may set the guard off.")
    options = parser.parse_args()
    out, work, steps = options.out, options.work, options.steps
    clean = [
        outcome(out, work / f"clean-{seed}", out / "tokens", seed, "rollback", steps) for seed in range(options.clean)
    ]
    bad = [outcome(out, work / policy, work / policy / "tokens", 0, policy, steps) for policy in ("rollback", "warn")]
    ratios = [run["bits_per_byte"] / clean[0]["bits_per_byte"] for run in bad]
    garbage, newlines = map(list, bad_steps(steps))
    report = {"steps": steps, "garbage": garbage, "newlines": newlines, "clean": clean, "bad": bad}
    show_json({**report, "bad_to_clean": ratios}, indent=2)
