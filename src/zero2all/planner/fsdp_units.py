"""What FSDP gathers together, and the buffers that it needs for that."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

FP32_BYTES = 4


@dataclass(frozen=True)
class FsdpUnits:
    """Unsharded elements of what FSDP gathers together, in a model or a pipeline stage, in the order of forward."""

    first: int
    """The embedding; 0 if it is with the rest."""
    blocks: list[int]
    last: int
    """Last norm and head; 0 if they are with the rest."""
    rest: int
    """What the root holds, gathered for all of forward and backward."""

    @property
    def total(self) -> int:
        return self.first + sum(self.blocks) + self.last + self.rest

    def gathered_elements(self, frees: bool | int) -> int:
        """At the worst moment of forward and backward, with the buffers of all-gathers.

        ``frees`` is what FSDP does after forward (``reshard_after_forward``).
        """
        if frees is False:
            return self.total
        # A unit is copied out of the buffer of its all-gather while that of the unit before is still there. The last
        # block stays gathered for its backward pass.
        units = [unit for unit in (self.first, *self.blocks, self.last) if unit]
        peak = max((before + 2 * unit for before, unit in pairwise([0, *units])), default=0)
        peak = max(peak, 2 * (self.blocks[-1] + self.last)) if self.last and self.blocks else peak
        freed = max(0, self.total - self.rest - peak)
        return self.rest + peak + (0 if frees is True else freed // frees)

    def gradient_buffers(self, itemsize: int) -> int:
        """Bytes of gradients on their way: one unit is reduce-scattered from a buffer in fp32 while backward computes
        the gradient of the next. Those of the root wait for the end."""
        in_order = [self.last, *reversed(self.blocks), self.first, 0]
        moving = [FP32_BYTES * reduced + itemsize * max(reduced, computed) for reduced, computed in pairwise(in_order)]
        return max(max(moving) + itemsize * self.rest, (FP32_BYTES + itemsize) * self.rest)
