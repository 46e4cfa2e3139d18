"""One job of the suite, on one node or several, and everything that is done to it from outside."""

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

from tests.chaos.injections import Injection, write_injections
from tests.chaos.sample_audit import read_seen_samples
from tests.chaos.simulated_nodes import SimulatedNode
from tests.chaos.workspace import NUM_RANKS, workspace_recipe
from zero2all.base.errors import Z2aError
from zero2all.recipe import Recipe, recipe_yaml
from zero2all.train import Run

DIRECTORY_PLACEHOLDER = "DIRECTORY"  # in an override: the directory of the scenario
ROOT = Path(__file__).parents[2]
MAX_SECONDS = 3600.0  # limit of the baseline job; all other timeouts derive from its duration


class Scenario:
    """
    >>> scenario = Scenario(workspace, out, injections=[Injection("kill", rank=2, step=11)])
    >>> scenario.run()
    0
    """

    num_ranks = NUM_RANKS

    def __init__(
        self,
        workspace: Path,
        directory: Path,
        injections: list[Injection],
        overrides: tuple[str, ...] = (),
        baseline_seconds: float | None = None,
    ) -> None:
        """``baseline_seconds`` is the duration of the job without faults; None for that job itself."""
        self.directory = directory
        self.timeout = MAX_SECONDS if baseline_seconds is None else 60 + 12 * baseline_seconds
        self.hang_after = MAX_SECONDS if baseline_seconds is None else max(5.0, baseline_seconds)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        overrides = tuple(change.replace(DIRECTORY_PLACEHOLDER, str(directory)) for change in overrides)
        self.recipe: Recipe = workspace_recipe(workspace, directory, *overrides)
        self.recipe_path = directory / "recipe.yaml"
        self.recipe_path.write_text(recipe_yaml(self.recipe), encoding="utf-8")
        write_injections(directory / "injections.json", injections)
        self.log_path = directory / "log.txt"
        self.external_trigger_time: float | None = None
        self.environment: dict[str, str] = {}
        """Variables of the agents, on top of this process's own."""
        self.exits: list[tuple[float, int]] = []
        """Time and exit status of each start."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_terminated = False

    @property
    def run_dir(self) -> Path:
        return self.recipe.run_dir

    def open_run(self) -> Run:
        return Run.open(self.run_dir)

    @property
    def flash_dir(self) -> Path:
        """Where the run keeps its flash checkpoints."""
        directory = self.open_run().flash_dir
        assert directory is not None
        return directory

    def start(
        self, num_ranks: int | None = None, node: SimulatedNode | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """``num_ranks`` of all nodes or of this one; by default those of the class."""
        self._require_open()
        launch_options = {
            "command": [str(self.recipe_path), str(self.directory)], "nodes": (1, 1),
            "procs": self.num_ranks if num_ranks is None else num_ranks,
            "hang_after": self.hang_after, "grace": 2 * self.hang_after, "patience": 2 * self.hang_after, **options,
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.chaos.chaos_agent", json.dumps(launch_options)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # a node starts in /
        with open(self.log_path, "ab") as log:
            process = subprocess.Popen(
                command if node is None else node.command(*command),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    **self.environment,
                    "PYTHONPATH": path,
                    "OMP_NUM_THREADS": "1",
                    "TORCH_CPP_LOG_LEVEL": "ERROR",
                },
            )
        self._processes.append(process)
        return process

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        try:
            status = process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            raise Z2aError(f"the job did not end in {self.timeout:.0f} s: see {self.log_path}") from None
        self.exits.append((time.time(), status))
        return status

    def run(self, num_ranks: int | None = None, node: SimulatedNode | None = None, **options: Any) -> int:
        return self.wait(self.start(num_ranks, node, **options))

    def run_broken(
        self,
        break_down: Callable[[], object],
        repair: Callable[[], object] | None = None,
        last: int = 1,
        **options: Any,
    ) -> None:
        """Something is broken from the first held step on, until it is repaired at the ``last``."""
        process = self.start(**options)
        self.wait_until_triggered(0)
        break_down()
        self.mark_trigger()
        self.release(0)
        if repair is not None:
            self.wait_until_triggered(last)
            repair()
            self.release(last)
        expect_status(self.wait(process), 0)

    def is_triggered(self, number: int) -> bool:
        return self._trigger_file(number).exists()

    def wait_until_triggered(self, number: int = 0) -> int:
        """Wait until an injection triggers; returns the pid of its rank."""
        self.wait_until(lambda: self.is_triggered(number), f"injection {number} is triggered")
        return int(json.loads(self._trigger_file(number).read_text(encoding="utf-8"))["pid"])

    def _trigger_file(self, number: int) -> Path:
        return self.directory / f"triggered-{number}-0.json"

    def wait_for_message(self, message: str, times: int = 1) -> None:
        """Until the log contains a message, or contains it ``times`` times."""
        self.wait_until(lambda: self.log_text().count(message) >= times, f"the log says '{message}'")

    def release(self, number: int = 0) -> None:
        (self.directory / f"go-{number}").touch()

    def trigger_time(self) -> float | None:
        """When the fault occurred: an action from outside, or the first injection."""
        triggers = [json.loads(path.read_text(encoding="utf-8")) for path in self.directory.glob("triggered-*.json")]
        return self.external_trigger_time or min((trigger["time"] for trigger in triggers), default=None)

    def mark_trigger(self) -> None:
        """The fault occurs now."""
        self.external_trigger_time = time.time()

    def rank_pids(self) -> dict[int, int]:
        """Pids of the latest start, by rank."""
        lines = read_seen_samples(self.directory)
        names = [path.stem.split("-") for path in self.directory.glob(f"seen-{lines[-1].start}-*.jsonl")]
        return {int(name[-2]): int(name[-1]) for name in names}

    def reports(self) -> list[dict[str, Any]]:
        paths = sorted((self.run_dir / "failures").glob("*.json"))
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    def log_text(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def wait_for_checkpoint(self) -> None:
        """Until a durable checkpoint is complete: it is written in the background."""
        checkpoints = self.open_run().checkpoints
        self.wait_until(lambda: checkpoints.newest_valid() is not None, "there is a checkpoint")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.timeout / 2
        while not condition():
            self._require_open()
            if time.monotonic() > deadline:
                raise Z2aError(f"timed out after {self.timeout / 2:.0f} s waiting until {what}")
            time.sleep(0.02)

    def _require_open(self) -> None:
        if self._is_terminated:
            raise Z2aError("the suite was ended")

    def terminate(self) -> None:
        """Leave no process of this scenario behind, whatever happened, and start no other."""
        self._is_terminated = True
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                process.kill()  # its ranks end with it
                process.wait()


def expect_status(status: int, wanted: int) -> None:
    if status != wanted:
        raise Z2aError(f"the job ended with status {status}, not {wanted}")
