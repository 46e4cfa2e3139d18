"""Parameters of deduplication. Plain data, so that tasks can be sent to other processes."""

from __future__ import annotations

from dataclasses import dataclass

from zero2all.errors import UsageError


@dataclass(frozen=True)
class DedupParams:
    source_priority: tuple[str, ...] = ()
    """Sources, best first: of equal documents the one from the best source stays. Unnamed sources come last."""
    partitions: int = 16
    """Parts that a shuffle is split into. One part must fit into the memory of one worker."""
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
        if min(self.partitions, self.bands, self.rows_per_band, self.ngram, self.min_shingles) < 1:
            raise UsageError(
                "partitions, bands, rows_per_band, ngram and min_shingles of deduplication must be at least 1"
            )
        if not 0 < self.threshold <= 1 or not 0 <= self.margin < self.threshold:
            raise UsageError("deduplication needs 0 < threshold <= 1 and 0 <= margin < threshold")

    @property
    def slots(self) -> int:
        return self.bands * self.rows_per_band

    def get_priority(self, data_src: str) -> int:
        return self.source_priority.index(data_src) if data_src in self.source_priority else len(self.source_priority)
