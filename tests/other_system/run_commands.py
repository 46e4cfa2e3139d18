"""Run several z2a commands in one process, which imports torch once: ``run_commands.py JSON``, a list of commands.

Each is a list of words; ``["at step 5", ...]`` in front interrupts it there, as Ctrl-C does. Prints how each ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from zero2all.cli.main import app
from zero2all.train import trainer


def interrupted_at(step: int) -> AbstractContextManager[Any]:
    train_step = trainer.Trainer.train_step

    def interrupted(self: trainer.Trainer, batch: Any) -> trainer.StepResult:
        if batch.step == step:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(self, batch)

    return patch.object(trainer.Trainer, "train_step", interrupted)


def main() -> None:
    for words in json.loads(sys.argv[1]):
        context: AbstractContextManager[Any] = nullcontext()
        if words[0].startswith("at step "):
            context = interrupted_at(int(words.pop(0).removeprefix("at step ")))
        sys.stderr.write(f"$ z2a {' '.join(words)}\n")
        with context:
            status = app(words, standalone_mode=False) or 0
        sys.stderr.write(f"exit status {status}\n")


if __name__ == "__main__":
    main()
