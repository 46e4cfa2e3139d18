"""Time a tokenizer, also in a process of its own, which does not load torch as the benchmark does."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

from zero2all.processes import watch_parent
from zero2all.tokenizer.backends import BackendName
from zero2all.tokenizer.tokenizer import Tokenizer

BATCH_CHARACTERS = 1 << 20


def time_encoding(
    directory: Path, texts: Sequence[str], backend: BackendName = "auto", barrier: Barrier | None = None
) -> float:
    """Seconds to encode all texts, in batches. With ``barrier`` all processes begin together."""
    tokenizer = Tokenizer(directory, backend=backend)
    tokenizer.encode_batch(texts[:1])  # loads the backend
    if barrier is not None:
        barrier.wait()
    begin = time.perf_counter()
    for batch in _batches(texts):
        tokenizer.encode_batch(batch)
    return time.perf_counter() - begin


def encode_in_process(directory: Path, texts: list[str], barrier: Barrier, times: SimpleQueue[float]) -> None:
    watch_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are counted, not threads
    times.put(time_encoding(directory, texts, barrier=barrier))


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held >= BATCH_CHARACTERS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
