"""Recipe keys that trade memory for time, as a plan reads them and a search sets them."""

from __future__ import annotations

from zero2all.parallel.fsdp import reshard_after_forward
from zero2all.recipe import ParallelRecipe

ZERO_KEYS: tuple[dict[str, object], ...] = tuple(
    {"zero": stage, "reshard_after_forward": "auto"} for stage in (1, 2, 3)
)
"""Keys of ``parallel`` for ZeRO 1, 2 and 3; the others are reset to their defaults."""
OFFLOADS: tuple[dict[str, object], ...] = ({"offload": "none"}, {"offload": "cpu"})
"""Keys of ``parallel`` for each kind of offload, the fastest first."""


def zero_stage(parallel: ParallelRecipe) -> int:
    """What the ranks of dp_shard share: 1 is optimizer state and master weights, 2 also gradients, 3 also weights.

    A pipeline keeps its weights, and so does ``reshard_after_forward: never``: a lower stage than ``zero`` says.
    """
    if parallel.zero == 1:
        return 1
    return 2 if reshard_after_forward(parallel) is False else 3
