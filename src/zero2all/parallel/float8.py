"""Float8 training through torchao: the matrix products of the blocks in float8, weights and optimizer as before."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import nn

from zero2all.base.errors import UsageError, need
from zero2all.base.torch_private import emulate_precision_casts
from zero2all.recipe.training import Float8Scaling

FLOAT8_CAPABILITY = (8, 9)  # Ada; H100 has 9.0
ALIGNMENT = 16  # elements: what the kernels require of both dimensions of a matrix


def check_float8(device: torch.device, dtype: torch.dtype, *, compile: bool) -> None:
    """Raise if float8 cannot work. A CPU emulates it, for tests: the same rounding, and slower than fp32."""
    if device.type == "cpu" and not compile:
        return
    if device.type != "cuda":
        raise UsageError(
            f"train.float8 needs a CUDA GPU; on {device.type} remove it"
            + (", or set train.compile=false to emulate it" if device.type == "cpu" else "")
        )
    if torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        raise UsageError(
            f"train.float8: {torch.cuda.get_device_name(device)} has no float8, as L40S and H100 have: remove it"
        )
    if dtype != torch.bfloat16:
        raise UsageError("train.float8 rounds from bf16: set train.precision=bf16, or auto")


def apply_float8(model: nn.Module, scaling: Float8Scaling, device: torch.device) -> None:
    """Convert the projections of all blocks. Embedding, head, routers and experts stay as they are.

    Float8Linear is an ``nn.Linear`` with the same parameters, so names, sharding and checkpoints do not change.
    """
    with warnings.catch_warnings():  # of torchao's import: about torch versions, and what it registers
        warnings.simplefilter("ignore")
        float8 = need("torchao.float8", "quant")
    # Padded, since the tokens of a micro-batch need not be a multiple of 16.
    config = replace(
        float8.Float8LinearConfig.from_recipe_name(scaling), emulate=device.type == "cpu", pad_inner_dim=True
    )
    if scaling == "rowwise":
        emulate_precision_casts()
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: is_converted(module))


def is_converted(module: nn.Module) -> bool:
    """A plain matrix of a block: head, routers and adapters are classes of their own."""
    return type(module) is nn.Linear and module.in_features % ALIGNMENT == module.out_features % ALIGNMENT == 0
