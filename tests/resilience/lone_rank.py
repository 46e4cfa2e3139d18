"""A rank without a model, for tests of agents: it steps by itself until told to end, or fails early if it is BAD."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from zero2all.resilience.beat import Beat, Mark
from zero2all.resilience.rank import attend

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    attend()
    beat = Beat.of_this_rank()
    beat.tell(directory / "run")
    beat.mark(Mark.LOADED, done=0)
    for step in range(1, 100_000):
        if os.environ.get("BAD"):
            sys.exit(7)
        beat(step)
        (directory / f"ranks-{os.environ['WORLD_SIZE']}").touch()
        if (directory / "end").exists():
            sys.exit(0)
        time.sleep(0.05)
