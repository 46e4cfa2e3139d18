"""How the samples of a step are split over data-parallel ranks and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from zero2all.parallel.mesh import ParallelDims
from zero2all.recipe import ParallelRecipe, ResolvedStage


@dataclass(frozen=True)
class BatchSplit:
    """The samples of a step: ``micro_batches`` x ``ranks`` x ``samples``, some of them padding."""

    micro_batches: int
    """Forward passes of a rank in one step (gradient accumulation)."""
    ranks: int
    """Data-parallel ranks."""
    samples: int
    """Samples in one forward pass of a rank."""
    padding: int
    """Samples without valid targets: every rank runs the same number of full micro-batches."""


def split_batch(batch_samples: int, ranks: int, micro_batch_size: int | None, pipeline_stages: int = 1) -> BatchSplit:
    """Without a micro-batch size, a rank has one micro-batch, or in a pipeline at most two for each stage.

    >>> split_batch(batch_samples=20, ranks=2, micro_batch_size=4)
    BatchSplit(micro_batches=3, ranks=2, samples=4, padding=4)
    """
    rows = -(-batch_samples // ranks)
    if micro_batch_size is not None:
        samples = min(micro_batch_size, rows)
    else:
        samples = even_micro_batch_size(rows, 2 * pipeline_stages) if pipeline_stages > 1 else rows
    micro_batches = -(-rows // samples)
    return BatchSplit(micro_batches, ranks, samples, micro_batches * ranks * samples - batch_samples)


def even_micro_batch_size(samples: int, wanted: int) -> int:
    """Samples in a micro-batch, so that there are ``wanted`` of them, or the next smaller even split."""
    return next(samples // count for count in range(min(wanted, samples), 0, -1) if samples % count == 0)


def split_stage(stage: ResolvedStage, parallel: ParallelRecipe, parallel_dims: ParallelDims) -> BatchSplit:
    """How a step of a training stage is split, after any batch ramp."""
    micro = stage.micro_batch_tokens and stage.micro_batch_tokens // stage.seq_len
    pipeline_stages = parallel.pp * parallel.stages_per_rank
    return split_batch(stage.batch_tokens // stage.seq_len, parallel_dims.dp * parallel.islands, micro, pipeline_stages)
