"""The process of a variant: train it, or resume it, then evaluate it.

Training is in a process of its own, so that a crash, or memory that runs out, ends one variant and not the experiment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import IO

from zero2all.base.console import say
from zero2all.base.errors import Z2aError, is_out_of_memory
from zero2all.base.io import write_record
from zero2all.base.processes import process_start_time, stop_on_signals
from zero2all.cluster.launch.launcher import LaunchConfig
from zero2all.evals import evaluate_bpb
from zero2all.experiments.evaluate import EVALUATION_FILE, evaluate
from zero2all.recipe import load_recipe
from zero2all.train import Run, train

# The imports take seconds, in which the runner may be killed: the process is bound to it before.
PROGRAM = (
    "from zero2all.base.processes import end_with_parent; end_with_parent({parent}); "
    "from zero2all.experiments.variant_process import main; main()"
)


def start_variant(recipe: Path, ranks: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the process. Ctrl-C in the terminal does not reach it: the runner stops it."""
    program = [sys.executable, "-c", PROGRAM.format(parent=os.getpid()), str(recipe), str(ranks)]
    return subprocess.Popen(
        program, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def main() -> None:
    """Arguments: the recipe, the number of ranks. It exits with the status of ``z2a train``."""
    stop_on_signals()
    try:
        sys.exit(_run_variant(Path(sys.argv[1]), int(sys.argv[2])))
    except Z2aError as error:
        say(f"error: {error}")
        sys.exit(error.exit_code)
    except Exception as error:
        traceback.print_exc()
        first_line = (str(error).splitlines() or [""])[0]
        say(f"error: {'out of memory: ' if is_out_of_memory(error) else ''}{type(error).__name__}: {first_line}")
        sys.exit(1)
    except KeyboardInterrupt:
        say("error: stopped before the first step")
        sys.exit(1)


def _run_variant(recipe_path: Path, ranks: int) -> int:
    recipe = load_recipe(recipe_path)
    if ranks == 1:
        train(recipe, evaluate=evaluate_bpb, start_time=process_start_time())
    elif status := LaunchConfig(["train", str(recipe_path)], ranks).run():
        return status
    run = Run.open(recipe.run_dir)
    write_record(run.directory / EVALUATION_FILE, evaluate(run))
    return 0
