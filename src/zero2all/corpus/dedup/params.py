"""Parameters of deduplication. Plain data, so that tasks can be sent to other processes."""

from __future__ import annotations

from dataclasses import dataclass

from zero2all.errors import UsageError

SORT_COPIES = 4  # of its rows that a task holds at once: read, order and sorted copies
TASK_OVERHEAD_BYTES = 256 << 20  # the interpreter and its libraries


@dataclass(frozen=True)
class DedupParams:
    source_priority: tuple[str, ...] = ()
    """Sources, best first: of equal documents the one from the best source stays. Unnamed sources come last."""
    partitions: int = 16
    """Parts that a shuffle is split into, at least. There are more where a part would not fit into the memory."""
    task_bytes: int = 2 << 30
    """Memory that one task may take, about."""
    bands: int = 14
    rows_per_band: int = 8
    """Signature values in a band. 14 x 8 finds a pair at Jaccard 0.8 with probability 0.92, at 0.85 with 0.99."""
    ngram: int = 5
    min_shingles: int = 5
    """A document with fewer shingles is only compared exactly."""
    threshold: float = 0.8
    margin: float = 0.04
    """How far an estimate may lie below the threshold: one standard deviation of it, with 112 slots at Jaccard 0.8.
    A wider margin finds a few more pairs and drops more that are not similar: tests/corpus/test_dedup.py has both."""
    seed: int = 1

    def __post_init__(self) -> None:
        if min(self.partitions, self.task_bytes, self.bands, self.rows_per_band, self.ngram, self.min_shingles) < 1:
            raise UsageError(
                "partitions, task_bytes, bands, rows_per_band, ngram and min_shingles of deduplication must be "
                "at least 1"
            )
        if not 0 < self.threshold <= 1 or not 0 <= self.margin < self.threshold:
            raise UsageError("deduplication needs 0 < threshold <= 1 and 0 <= margin < threshold")

    def partitions_for(self, rows: int, row_bytes: int, at_least: int | None = None) -> int:
        """Into how many parts rows are split so that a task can sort one of them in memory."""
        needed = -(-rows * row_bytes * SORT_COPIES // max(1, self.task_bytes - TASK_OVERHEAD_BYTES))
        return max(1, self.partitions if at_least is None else at_least, needed)

    @property
    def slots(self) -> int:
        return self.bands * self.rows_per_band

    def get_priority(self, data_src: str) -> int:
        return self.source_priority.index(data_src) if data_src in self.source_priority else len(self.source_priority)
