"""What an optimizer is registered with: how it is built, its learning rate, and the bytes of its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # recipes are read without torch
    import torch.distributed as dist
    from torch import Tensor
    from torch.optim import Optimizer

    from zero2all.recipe.optimizer import OptimizerRecipe

FP32_BYTES = 4
ROUTER = ".mlp.gate."  # in names of parameters: one row of scores an expert, not a map of the residual stream
ParameterGroups = list[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerParameters:
    """The trained parameters of a model, and what an optimizer may need to update them."""

    named: Sequence[tuple[str, Tensor]]
    recipe: OptimizerRecipe
    build_groups: Callable[..., ParameterGroups]
    """Groups of parameters with the same settings: a parallel layout may need several."""
    mup_width_mult: float = 1.0
    replicas: dist.ProcessGroup | None = None
    """The ranks of DDP, over which an optimizer may divide its work."""
    seed: int = 0
    compile: bool = False

    def groups(self, named: Sequence[tuple[str, Tensor]] | None = None) -> ParameterGroups:
        """Groups of all parameters, or of some: embedding, matrices and vectors, with their ``rate`` and ``decays``.

        Weight decay applies to matrices only; on a norm's scale or a bias it would hurt.
        """
        given = self.named if named is None else named
        embedding = [p for name, p in given if "embed_tokens" in name]
        matrices = [p for name, p in given if p.dim() >= 2 and "embed_tokens" not in name]
        vectors = [p for _, p in given if p.dim() < 2]
        return [
            *self.build_groups(embedding, decays=True, rate=1.0),
            *self.build_groups(matrices, decays=True, rate=self.mup_width_mult),
            *self.build_groups(vectors, decays=False, rate=1.0),
        ]


@dataclass(frozen=True)
class LearningRateLaw:
    """The peak learning rate of AdamW for a model and its tokens, and where it is from."""

    adamw: float
    source: str


class OptimizerPlugin:
    """An optimizer. A subclass is registered under its name, and is instantiated with its options."""

    has_bf16_weights: ClassVar[bool] = False
    """Whether the weights of the model are stored in bf16, not in fp32."""
    rates: ClassVar[tuple[str, ...]] = ("lr",)
    """The keys of ``train.optimizer`` with its peak learning rates."""

    def build(self, parameters: OptimizerParameters) -> list[Optimizer]:
        """Optimizers of torch with state in tensors of the parameters' shapes, or in DTensors."""
        raise NotImplementedError

    def learning_rate(self, key: str, law: LearningRateLaw) -> tuple[float, str]:
        """The peak learning rate for a recipe that sets none, and its source."""
        return law.adamw, law.source

    def peak_lr(self, recipe: OptimizerRecipe, optimizer: Optimizer) -> float:
        """The peak learning rate of one of the optimizers that ``build`` returned."""
        return recipe.peak_lr

    def state_bytes(self, recipe: OptimizerRecipe, name: str, shape: Sequence[int]) -> int:
        """Bytes of state for a shard of this shape of the parameter ``name``, without a step counter."""
        return math.prod(shape) * 2 * FP32_BYTES
