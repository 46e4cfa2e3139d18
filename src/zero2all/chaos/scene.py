"""One job of the suite, on one machine or several, with everything that is done to it from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from zero2all.chaos.audit import seen_lines
from zero2all.chaos.machines import Machine
from zero2all.chaos.plants import Plant, write_plants
from zero2all.chaos.world import PROCS, recipe_in
from zero2all.errors import Z2aError
from zero2all.recipe import Recipe, recipe_yaml
from zero2all.train import Run

SLOWEST = 3600.0  # seconds for the undisturbed job; all other limits follow from what it took


class Scene:
    """
    >>> scene = Scene(world, out, plants=[Plant("kill", rank=2, step=11)])
    >>> scene.run()
    0
    """

    def __init__(
        self,
        world: Path,
        directory: Path,
        plants: list[Plant],
        overrides: tuple[str, ...] = (),
        pace: float | None = None,
    ) -> None:
        """``pace`` is how long the undisturbed job took, from its start to its end; None is for that job itself."""
        self.directory = directory
        self.limit = SLOWEST if pace is None else 60 + 12 * pace
        self.hang_after = SLOWEST if pace is None else max(5.0, pace)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self.recipe: Recipe = recipe_in(world, directory, *overrides)
        self.recipe_path = directory / "recipe.yaml"
        self.recipe_path.write_text(recipe_yaml(self.recipe), encoding="utf-8")
        write_plants(directory / "plants.json", plants)
        self.log = directory / "log.txt"
        self.struck_outside: float | None = None
        self.environment: dict[str, str] = {}
        """Of the agents, beside this process's own."""
        self.ended: list[tuple[float, int]] = []
        """When each start ended, and how."""
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def run_directory(self) -> Path:
        return self.recipe.run_dir

    def open(self) -> Run:
        return Run.open(self.run_directory)

    @property
    def memory(self) -> Path:
        """Where the run keeps its states in memory."""
        found = self.open().memory
        assert found is not None
        return found

    def start(self, procs: int = PROCS, machine: Machine | None = None, **options: Any) -> subprocess.Popen[bytes]:
        job = {
            "command": [str(self.recipe_path), str(self.directory)], "procs": procs, "nodes": (1, 1),
            "hang_after": self.hang_after, "grace": 2 * self.hang_after, "patience": 2 * self.hang_after, **options,
        }  # fmt: skip
        words = [sys.executable, "-m", "zero2all.chaos.agent", json.dumps(job)]
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                words if machine is None else machine.command(*words),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            )
        self._processes.append(process)
        return process

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        try:
            status = process.wait(self.limit)
        except subprocess.TimeoutExpired:
            raise Z2aError(f"the job did not end in {self.limit:.0f} s: see {self.log}") from None
        self.ended.append((time.time(), status))
        return status

    def run(self, procs: int = PROCS, machine: Machine | None = None, **options: Any) -> int:
        return self.wait(self.start(procs, machine, **options))

    def until_struck(self, number: int = 0) -> int:
        """Wait for a plant to strike; the pid of its rank."""
        note = self.directory / f"struck-{number}-0.json"
        self.until(note.exists, f"plant {number} has struck")
        return int(json.loads(note.read_text(encoding="utf-8"))["pid"])

    def let_go(self, number: int = 0) -> None:
        (self.directory / f"go-{number}").touch()

    def struck(self) -> float | None:
        """When the fault happened: the first plant, or what was done from outside."""
        notes = [json.loads(path.read_text(encoding="utf-8")) for path in self.directory.glob("struck-*.json")]
        return self.struck_outside or min((note["time"] for note in notes), default=None)

    def strike(self) -> None:
        """What follows is the fault."""
        self.struck_outside = time.time()

    def rank_pids(self) -> dict[int, int]:
        """Of the newest start."""
        lines = seen_lines(self.directory)
        names = [path.stem.split("-") for path in self.directory.glob(f"seen-{lines[-1]['start']}-*.jsonl")]
        return {int(name[-2]): int(name[-1]) for name in names}

    def reports(self) -> list[dict[str, Any]]:
        paths = sorted((self.run_directory / "failures").glob("*.json"))
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.limit / 2
        while not condition():
            if time.monotonic() > deadline:
                raise Z2aError(f"waited {self.limit / 2:.0f} s in vain until {what}")
            time.sleep(0.02)

    def end(self) -> None:
        """No process of this scene is left, whatever happened."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                process.kill()  # its ranks end with it
                process.wait()
