"""What is reported about an outlier step: the documents of its batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from zero2all.console import warn
from zero2all.track import RunRecord
from zero2all.train.data_loader import Batch

MAX_RECORDED_DOCUMENTS = 50  # in the record; 'z2a blame' lists all by loss
MAX_PRINTED_DOCUMENTS = 3  # on the terminal
MAX_SAMPLES_READ = 64  # of a batch: each lookup reads a shard's index, some 10 ms while all ranks wait


@dataclass(frozen=True)
class BatchDocument:
    gid: str
    source: str
    title: str
    shard: str


def batch_documents(batch: Batch) -> list[BatchDocument]:
    """Documents of a batch over all ranks, each once, most tokens first; of a large batch, a sample."""
    tokens: dict[str, int] = {}
    documents: dict[str, BatchDocument] = {}
    start, stop = batch.sample_range
    count = min(stop - start, MAX_SAMPLES_READ)
    for number in range(count):
        sample = start + number * (stop - start) // count
        for span in batch.stage.dataset.documents(sample, sample + 1):
            tokens[span.gid] = tokens.get(span.gid, 0) + span.tokens
            documents[span.gid] = BatchDocument(span.gid, span.source, span.title, span.shard)
    return [documents[gid] for gid in sorted(documents, key=lambda gid: -tokens[gid])]


def shown_norms(layer_norms: Iterable[float]) -> list[float | None]:
    """For the record, which has no NaN in an event."""
    return [float(f"{norm:.4g}") if math.isfinite(norm) else None for norm in layer_norms]


def report_spike(
    batch: Batch, reason: str, policy: str, layer_norms: Iterable[float], run_directory: Path, record: RunRecord
) -> None:
    documents = batch_documents(batch)
    recorded = [asdict(document) for document in documents[:MAX_RECORDED_DOCUMENTS]]
    norms = shown_norms(layer_norms)
    record.event("spike", step=batch.step, reason=reason, policy=policy, layer_norms=norms, documents=recorded)
    first = ", ".join(document.title or document.gid for document in documents[:MAX_PRINTED_DOCUMENTS])
    warn(
        f"step {batch.step}: {reason}; documents of the batch: {first}, …; 'z2a blame {run_directory} "
        f"--step {batch.step}' lists all of them by loss"
    )


def lower_lr_hint(run_directory: Path, step: int) -> str:
    command = f"z2a blame {run_directory} --step {step} --no-loss"
    return f"try a lower learning rate or a longer warmup; '{command}' shows its text"


def format_ranges(steps: Iterable[int]) -> str:
    """
    >>> format_ranges([3, 4, 5, 9])
    '3-5, 9'
    """
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
