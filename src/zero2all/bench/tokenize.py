"""``z2a bench tokenize``: the speed of a tokenizer on given text, by backend and number of processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import cast

from zero2all.bench.measurements import BenchReport, Measurement, this_machine
from zero2all.console import progress
from zero2all.errors import UsageError, Z2aError
from zero2all.tokenizer import Tokenizer
from zero2all.tokenizer.backends import BackendName
from zero2all.tokenizer.encode_timing import encode_in_process, time_encoding

BACKENDS: tuple[BackendName, ...] = ("gigatoken", "tiktoken", "hf")


def bench_tokenize(tokenizer_dir: Path, files: Sequence[Path], megabytes: float = 20.0, rounds: int = 3) -> BenchReport:
    """MB of UTF-8 per second. Files are read as text, line by line, up to ``megabytes``."""
    texts = _read_texts(files, int(megabytes * 1e6))
    size = sum(len(text.encode()) for text in texts)
    tokens = sum(len(ids) for ids in Tokenizer(tokenizer_dir).encode_batch(texts))
    backends = [name for name in BACKENDS if _is_available(tokenizer_dir, name)]
    fastest = dict.fromkeys(backends, float("inf"))
    with progress("tokenize", rounds * len(backends)) as advance:
        for _ in range(rounds):
            for name in backends:
                fastest[name] = min(fastest[name], time_encoding(tokenizer_dir, texts, name))
                advance(1)
    rows = [Measurement(f"backend {name}", size / 1e6 / seconds, "MB/s") for name, seconds in fastest.items()]
    for processes in _process_counts():
        seconds = min(_time_processes(tokenizer_dir, texts, processes) for _ in range(rounds))
        rows.append(
            Measurement(f"processes {processes}", processes * size / 1e6 / seconds, "MB/s", "each all the text")
        )
    title = f"{size / 1e6:.1f} MB of text, {size / max(1, tokens):.3f} bytes per token, fastest of {rounds} rounds"
    return BenchReport("tokenize", title, this_machine(), rows)


def _read_texts(files: Sequence[Path], limit: int) -> list[str]:
    texts: list[str] = []
    held = 0
    for line in _lines(files):
        texts.append(line)
        held += len(line.encode())
        if held >= limit:
            break
    if not texts:
        raise UsageError(f"no text in {', '.join(map(str, files))}: give files of UTF-8 text")
    return texts


def _lines(files: Sequence[Path]) -> Iterator[str]:
    for path in files:
        with open(path, encoding="utf-8", errors="replace") as stream:
            yield from stream


def _is_available(tokenizer_dir: Path, name: BackendName) -> bool:
    """Whether the backend is installed and encodes as this tokenizer does."""
    try:
        return Tokenizer(tokenizer_dir, backend=name).backend.name == name
    except (Z2aError, ImportError):
        return False


def _process_counts() -> list[int]:
    cores = os.cpu_count() or 1
    return sorted({1, *(1 << power for power in range(1, 10) if 1 << power <= cores), cores})


def _time_processes(tokenizer_dir: Path, texts: Sequence[str], processes: int) -> float:
    """Seconds from the moment that all processes are ready to the end of the last one."""
    context = multiprocessing.get_context("spawn")
    times: SimpleQueue[float]
    barrier, times = context.Barrier(processes, timeout=300), context.SimpleQueue()
    workers = [
        context.Process(target=encode_in_process, args=(tokenizer_dir, list(texts), barrier, times), daemon=True)
        for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    try:
        running = {worker.sentinel: worker for worker in workers}
        while running:
            for sentinel in wait(list(running)):
                if running.pop(cast(int, sentinel)).exitcode:
                    raise Z2aError("a process of the benchmark failed; its message is above")
    finally:
        for worker in workers:
            worker.kill()  # the others would wait at the barrier
            worker.join()
    return max(times.get() for _ in workers)
