"""Recipe keys of the memory ladder, as a plan reads them."""

from __future__ import annotations

from zero2all.parallel.fsdp import reshard_after_forward
from zero2all.recipe import OptimizerRecipe, ParallelRecipe


def zero_stage(parallel: ParallelRecipe) -> int:
    """What the ranks of dp_shard share: 1 is optimizer state and master weights, 2 also gradients, 3 also weights."""
    if not reduces_every_micro_batch(parallel):
        return 1
    return 2 if reshard_after_forward(parallel) is False else 3


def reduces_every_micro_batch(parallel: ParallelRecipe) -> bool:
    return bool(getattr(parallel, "reduces_every_micro_batch", parallel.gradient_sync == "every"))


def offloads_optimizer(parallel: ParallelRecipe) -> bool:
    """Whether optimizer state and update are on the host."""
    return getattr(parallel, "offload", "none") != "none"


def weight_bytes(optimizer: OptimizerRecipe) -> int:
    """Of a stored weight and of its gradient: an optimizer of bf16 weights has no fp32 copy."""
    return 2 if getattr(optimizer, "has_bf16_weights", False) else 4


ZERO_KEYS: tuple[dict[str, object], ...] = (
    {"reshard_after_forward": "never", "gradient_sync": "last"},
    {"reshard_after_forward": "never", "gradient_sync": "every"},
    {"reshard_after_forward": "auto", "gradient_sync": "every"},
)
"""Keys of ``parallel`` for ZeRO 1, 2 and 3."""
OFFLOADS: tuple[dict[str, object], ...] = ({},)
"""Keys of ``parallel`` for each kind of offload, the fastest first."""
