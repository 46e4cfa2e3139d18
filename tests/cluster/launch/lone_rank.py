"""A rank without a model, for tests of agents: it steps until a file asks it to end, or fails early if BAD is set."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from zero2all.cluster.launch.heartbeat import Heartbeat, StartupPhase
from zero2all.cluster.launch.worker import setup_worker

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    setup_worker()
    heartbeat = Heartbeat.from_environment()
    heartbeat.set_run_directory(directory / "run")
    heartbeat.record_phase(StartupPhase.LOADED, done=0)
    for step in range(1, 100_000):
        if os.environ.get("BAD"):
            sys.exit(7)
        heartbeat(step)
        (directory / f"ranks-{os.environ['WORLD_SIZE']}").touch()
        if (directory / "end").exists():
            sys.exit(0)
        time.sleep(0.05)
