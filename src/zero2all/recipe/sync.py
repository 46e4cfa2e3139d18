"""How data-parallel replicas keep their weights in agreement, for networks that are slower than the GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from zero2all.recipe.types import Fraction, Mistake, Positive, Section


class SyncRecipe(Section):
    """How replicas of the model are synchronized: after every step, or seldom between islands of fast networks."""

    islands: Annotated[int, Field(ge=1)] = 1
    """Number of islands, each a job of its own with all ranks of ``parallel``. With 1 the gradient is all-reduced after
    each step. Set more for networks that are too slow for that (DiLoCo): each island trains its own part of every
    batch, and they exchange what their weights have gained every ``every`` steps. The other keys are for islands."""
    every: Annotated[int, Field(ge=1)] = 50
    """Steps between two exchanges of the same weights (H)."""
    fragments: Annotated[int, Field(ge=1)] = 1
    """Number of groups of blocks that are exchanged in turn, so that the network is used evenly."""
    overlap: Annotated[int, Field(ge=0)] = 0
    """Steps that an exchange may take while training continues. 0 waits for it."""
    exchange_dtype: Literal["fp32", "bf16", "int8"] = "int8"
    """What is sent. What bf16 and int8 round off is added to the next exchange."""
    outer_lr: Positive = 0.7
    """Learning rate of the outer optimizer."""
    outer_momentum: Fraction = 0.9
    """Nesterov momentum of the outer optimizer. 0 is plain averaging."""

    def mistakes(self) -> Iterator[Mistake]:
        if self.overlap > self.every // self.fragments:
            yield Mistake(
                "an exchange must end before the next begins: set overlap to at most every / fragments "
                f"({self.every // self.fragments})",
                ("overlap", "every", "fragments"),
            )
        if self.fragments > self.every:
            yield Mistake(
                f"one fragment is exchanged at a time: set fragments to at most every={self.every}",
                ("fragments", "every"),
            )
