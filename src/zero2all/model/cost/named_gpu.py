"""A recipe as it would be trained on a GPU that need not be here."""

from __future__ import annotations

from zero2all.errors import UsageError
from zero2all.gpu_specs import Gpu
from zero2all.recipe import Recipe


def with_precision_of(recipe: Recipe, gpu: Gpu) -> Recipe:
    """The recipe with the precision that it has on ``gpu``. Precisions that the GPU does not compute are errors."""
    train = recipe.train
    if train.compute_precision == "bf16" and not gpu.has_bf16:
        cause = "train.precision" if train.precision == "bf16" else f"train.optimizer.name={train.optimizer.name}"
        raise UsageError(f"{gpu.name} has no bf16, which {cause} needs: set train.precision=fp16 with adamw")
    if train.float8 is not None and gpu.fp8_flops is None:
        raise UsageError(f"{gpu.name} has no fp8 products: remove train.float8, or use --gpu H100")
    if train.compute_precision != "auto":
        return recipe
    return recipe.model_copy(update={"train": train.model_copy(update={"precision": gpu.auto_precision})})
