"""``python -m zero2all.chaos.rank RECIPE DIRECTORY``: a rank that trains, writes down what it reads, and has plants."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from zero2all.processes import AGENT_PID, end_with_agent

if AGENT_PID in os.environ:
    end_with_agent()  # the next import takes seconds

from zero2all.resilience.rank import attend, leave_word, run_rank

attend()

from zero2all.chaos.audit import row_name  # noqa: E402
from zero2all.chaos.plants import Planted, read_plants  # noqa: E402
from zero2all.console import say  # noqa: E402
from zero2all.errors import Z2aError  # noqa: E402
from zero2all.recipe import load_recipe  # noqa: E402
from zero2all.resilience.goodput import process_started  # noqa: E402
from zero2all.train import train  # noqa: E402
from zero2all.train.batches import PADDING, Batch  # noqa: E402


def main(recipe: str, directory: Path) -> int:
    rank = int(os.environ["RANK"])
    # Ranks of one start share the port of their store.
    start = f"{os.environ['MASTER_ADDR']}-{os.environ['MASTER_PORT']}"
    planted = Planted(read_plants(directory / "plants.json"), rank, directory)
    planted.install()
    seen = open(directory / f"seen-{start}-{rank}-{os.getpid()}.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def look(batch: Batch) -> None:
        rows = [row for row, source in zip(batch.inputs, batch.sources, strict=True) if source != PADDING]
        line = {
            "time": time.time(),
            "start": start,
            "rank": rank,
            "step": batch.step,
            "rows": [row_name(row) for row in rows],
        }
        seen.write(json.dumps(line) + "\n")
        seen.flush()
        planted.at_step(batch)

    try:
        train(load_recipe(Path(recipe)), on_batch=look, began=process_started())
    except Exception as error:
        say(f"error: {error}")
        leave_word(error)
        return error.exit_code if isinstance(error, Z2aError) else 1
    return 0


if __name__ == "__main__":
    run_rank(lambda: main(sys.argv[1], Path(sys.argv[2])))
