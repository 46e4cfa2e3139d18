"""Start islands for a test: each a process that trains, all at one rendezvous of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from zero2all.base.environment import ISLAND_VARIABLE, ISLANDS_ENDPOINT_VARIABLE, ISLANDS_SECRET_VARIABLE
from zero2all.cluster.launch.rendezvous_server import RendezvousServer
from zero2all.recipe import Recipe, recipe_yaml

SECRET = "a secret of this test only"
# Kills itself at the start of a step, once the checkpoint of an earlier one is written; argument -1: never.
TRAINER = """
import os, signal, sys, time
from zero2all.recipe import load_recipe
from zero2all.train import Run, TrainerHooks, train
from zero2all.train.diloco import islands

recipe, kill_at, saved, patience, pause = load_recipe(sys.argv[1]), *map(float, sys.argv[2:6])
islands.START_PATIENCE = patience
place = islands.island_place(recipe)
checkpoints = Run(recipe, islands.with_island_run(recipe, place).run_dir).checkpoints

def watch(batch):
    time.sleep(pause)
    if batch.step == kill_at:
        deadline = time.monotonic() + 60
        while saved and not checkpoints.is_valid(int(saved)) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

train(recipe, hooks=TrainerHooks(on_batch=watch))
"""


@dataclass
class IslandProcesses:
    """
    >>> islands.start(recipe, 0); islands.start(recipe, 1)
    >>> islands.wait()
    """

    directory: Path
    endpoint: str
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(
        self,
        recipe: Recipe,
        island: int,
        kill_at: int = -1,
        saved: int = 0,
        patience: float = 60,
        secret: str = SECRET,
        pause: float = 0.0,
    ) -> subprocess.Popen[bytes]:
        path = self.directory / f"island-{island}.yaml"
        path.write_text(recipe_yaml(recipe), encoding="utf-8")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            ISLAND_VARIABLE: str(island),
            ISLANDS_ENDPOINT_VARIABLE: self.endpoint,
            ISLANDS_SECRET_VARIABLE: secret,
        }
        words = [str(path), str(kill_at), str(saved), str(patience), str(pause)]
        with open(self.log(island), "ab") as log:
            process = subprocess.Popen([sys.executable, "-c", TRAINER, *words], env=environment, stdout=log, stderr=log)
        self.processes[island] = process
        return process

    def log(self, island: int) -> Path:
        return self.directory / f"island-{island}.log"

    def wait(self, seconds: float = 200) -> None:
        for island, process in self.processes.items():
            assert process.wait(seconds) == 0, self.log(island).read_text(encoding="utf-8")


@contextmanager
def island_processes(directory: Path) -> Iterator[IslandProcesses]:
    server = RendezvousServer("127.0.0.1", 0, SECRET)
    server.start()
    islands = IslandProcesses(directory, server.endpoint)
    try:
        yield islands
    finally:
        for process in islands.processes.values():
            with suppress(OSError):
                process.kill()
            process.wait()
        server.stop()
