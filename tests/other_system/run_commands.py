"""Run several z2a commands in one process, which imports torch once: ``run_commands.py JSON``, a list of commands.

Each is a list of words; ``["at step 5", ...]`` in front interrupts it there, as Ctrl-C does. Prints how each ended.
With TEST_SIMULATED_GPU set, training is on ``simulated_gpu``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch


def interrupted_at(step: int) -> AbstractContextManager[Any]:
    from zero2all.train.trainer import Trainer

    train_step = Trainer.train_step

    def interrupted(self: Trainer, batch: Any) -> Any:
        if batch.step == step:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(self, batch)

    return patch.object(Trainer, "train_step", interrupted)


def run(words: list[str]) -> int:
    from zero2all.cli.main import app

    with ExitStack() as stack:
        if words[0].startswith("at step "):
            stack.enter_context(interrupted_at(int(words.pop(0).removeprefix("at step "))))
        sys.stderr.write(f"$ z2a {' '.join(words)}\n")
        return app(words, standalone_mode=False) or 0


def main() -> None:
    with ExitStack() as stack:
        if os.environ.get("TEST_SIMULATED_GPU"):
            from tests.other_system.simulated_gpu import simulated_gpu

            device = stack.enter_context(simulated_gpu())
            stack.enter_context(patch("zero2all.train.setup.pick_device", lambda wanted: device))
            stack.enter_context(patch("zero2all.base.machine.devices.measure_matmul_flops", lambda *args: 1e12))
        for words in json.loads(sys.argv[1]):
            sys.stderr.write(f"exit status {run(words)}\n")


if __name__ == "__main__":
    main()
