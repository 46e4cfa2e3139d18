"""Train on one rank, resume on two, and compare the losses with those of an uninterrupted run.

    python examples/resume_on_other_ranks.py --out runs/examples/resume

Up to the checkpoint both runs are on one rank, and their losses are bitwise equal. On two ranks (FSDP) gradients are
summed in another order, so losses differ by fp32 rounding: at most by TOLERANCE, that of ``z2a bench parity``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tiny_run import argument_parser, prepare
from zero2all.recipe import load_recipe
from zero2all.track import read_steps
from zero2all.train import Run, train

RESUME_STEP, STEPS = 20, 40  # the learning rate is constant after warmup, so it does not depend on the length
TOLERANCE = 5e-6


def train_on_one_rank(recipe: Path, out: Path, steps: int) -> None:
    train(load_recipe(recipe, [f"out={out}", f"train.steps={steps}"]))


def resume_on_two_ranks(recipe: Path, out: Path, steps: int) -> None:
    """The same command that would start the run; it resumes from the newest checkpoint."""
    command = ["launch", "--nproc-per-node", "2", "--", "train", str(recipe), f"out={out}", f"train.steps={steps}"]
    subprocess.run([sys.executable, "-m", "zero2all.cli", *command], check=True, stdout=sys.stderr)


def losses(run: Run) -> list[float]:
    return [metrics["loss"] for metrics in read_steps(run.record_path).values()]


def main() -> int:
    out = argument_parser(__doc__).parse_args().out
    recipe = prepare(out)
    train_on_one_rank(recipe, out / "uninterrupted", STEPS)
    train_on_one_rank(recipe, out / "resumed", RESUME_STEP)
    resume_on_two_ranks(recipe, out / "resumed", STEPS)

    run = Run.open(out / "resumed")
    second_rank = read_steps(run.record_path.with_name("record.rank1.jsonl"))  # each rank has a record of its own
    uninterrupted, resumed = losses(Run.open(out / "uninterrupted")), losses(run)
    differences = [abs(one - other) for one, other in zip(uninterrupted, resumed, strict=True)]
    print("step  ranks  uninterrupted  resumed   difference")
    for step in (0, RESUME_STEP - 1, RESUME_STEP, STEPS - 1):
        ranks = 2 if step in second_rank else 1
        print(f"{step:>4}  {ranks:>5}  {uninterrupted[step]:>13.6f}  {resumed[step]:.6f}  {differences[step]:.1e}")
    before, after = max(differences[:RESUME_STEP]), max(differences[RESUME_STEP:])
    print(f"largest difference: {before:.1e} on one rank, {after:.1e} on two ranks (tolerance {TOLERANCE:.0e})")
    return 0 if before == 0 and after <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
