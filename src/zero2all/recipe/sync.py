"""The synchronization of replicas: every step, or seldom between islands (DiLoCo)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from zero2all.recipe.types import Degree, Fraction, Mistake, Positive, Section


class SyncRecipe(Section):
    """How replicas of the model are synchronized: after every step, or seldom between islands of fast networks."""

    islands: Degree = 1
    """Number of islands (DiLoCo), each a job of its own with all ranks of ``parallel`` and its part of every batch.
    They exchange what their weights have gained every ``every`` steps; with 1 the gradient is all-reduced after each
    step. Raise it if the network is too slow for that. The other keys are for islands."""
    every: Degree = 50
    """Steps between two exchanges of the same weights (H). Raise it if exchanges still limit training, and lower it if
    the loss suffers."""
    fragments: Degree = 1
    """Number of groups of blocks that are exchanged in turn, so that the network is used evenly. Raise it if one
    exchange of all weights takes too long."""
    overlap: Annotated[int, Field(ge=0)] = 0
    """Steps that an exchange may take while training continues. 0 waits for it. Raise it until ``islands/wait`` is near
    0, and no further: islands then average older weights."""
    exchange_dtype: Literal["fp32", "bf16", "int8"] = "int8"
    """Dtype in which islands send their changes. Rounding errors of bf16 and int8 are added to the next exchange.
    Change it only to rule out rounding."""
    outer_lr: Positive = 0.7
    """Learning rate of the outer optimizer. Set it to 1, with ``outer_momentum: 0``, for small batches or short
    runs."""
    outer_momentum: Fraction = 0.9
    """Nesterov momentum of the outer optimizer. Set it to 0, with ``outer_lr: 1``, for plain averaging."""

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
