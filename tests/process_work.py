"""What the processes of tests/base/test_processes.py do. They import nothing else, so that they start in a moment."""

from __future__ import annotations

import time
from pathlib import Path


def work(directory: str, number: int, busy: bool) -> None:
    Path(directory, f"worker-{number}").touch()
    while busy or len(list(Path(directory).glob("worker-*"))) < 2:  # both workers have started
        time.sleep(0.01)


def spin(directory: str) -> None:
    import torch.distributed as dist

    Path(directory, f"rank-{dist.get_rank()}").touch()
    while True:
        sum(range(10_000))
