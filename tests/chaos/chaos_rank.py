"""``python -m tests.chaos.chaos_rank RECIPE DIRECTORY``: a rank that trains and has faults injected."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from tests.chaos.shifted_clock import shift_clock
from zero2all.base.processes import AGENT_PID, end_with_agent

shift_clock()
if AGENT_PID in os.environ:
    end_with_agent()  # before the next import, which takes seconds

from zero2all.cluster.launch.worker import record_exception, run_worker, setup_worker  # noqa: E402

setup_worker()

from tests.chaos.injections import LOCK_PATIENCE_VARIABLE, FaultInjector, read_injections  # noqa: E402
from tests.chaos.restore_audit import RestoreMarker  # noqa: E402
from tests.chaos.sample_audit import SeenSamples, sample_hash  # noqa: E402
from zero2all.base.console import say  # noqa: E402
from zero2all.base.errors import Z2aError  # noqa: E402
from zero2all.base.processes import process_start_time  # noqa: E402
from zero2all.checkpoint import lock  # noqa: E402
from zero2all.checkpoint.training_state import CheckpointPhase  # noqa: E402
from zero2all.recipe import load_recipe  # noqa: E402
from zero2all.train import train  # noqa: E402
from zero2all.train.data_loader import PADDING_SOURCE, Batch  # noqa: E402


def main(recipe: str, directory: Path) -> int:
    rank = int(os.environ["RANK"])
    # Ranks of one start share the port of their store.
    start = f"{os.environ['MASTER_ADDR']}-{os.environ['MASTER_PORT']}"
    marker = RestoreMarker(start, rank, directory)
    injector = FaultInjector(read_injections(directory / "injections.json"), rank, directory)
    seen = open(directory / f"seen-{start}-{rank}-{os.getpid()}.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def record_seen(batch: Batch) -> None:
        rows = [row for row, source in zip(batch.inputs, batch.sources, strict=True) if source != PADDING_SOURCE]
        line = SeenSamples(time.monotonic(), start, rank, batch.step, [sample_hash(row) for row in rows])
        seen.write(json.dumps(asdict(line)) + "\n")
        seen.flush()
        marker.on_batch(batch.step)
        injector.before_step(batch)

    def on_checkpoint(phase: CheckpointPhase) -> None:
        injector.trigger(phase)
        if phase == "restore":
            marker.on_restore()

    if LOCK_PATIENCE_VARIABLE in os.environ:
        lock.AGENT_LOCK_PATIENCE = float(os.environ[LOCK_PATIENCE_VARIABLE])
    try:
        hooks = replace(injector.hooks(), on_batch=record_seen, on_checkpoint=on_checkpoint)
        train(load_recipe(Path(recipe)), hooks, start_time=process_start_time())
    except Exception as error:
        say(f"error: {error}")
        record_exception(error)
        return error.exit_code if isinstance(error, Z2aError) else 1
    return 0


if __name__ == "__main__":
    run_worker(lambda: main(sys.argv[1], Path(sys.argv[2])))
