"""Which parameters Muon updates, and the bytes that an optimizer keeps for each element of a parameter."""

from __future__ import annotations

from zero2all.recipe import OptimizerRecipe

ROUTER = ".mlp.gate."  # one row of scores an expert: not a map of the residual stream, so not for Muon


def updated_by_muon(name: str, dims: int) -> bool:
    """Matrices inside the blocks, experts among them (three dimensions, the first one is the expert).

    >>> updated_by_muon("layers.0.mlp.experts.up_proj", 3), updated_by_muon("layers.0.mlp.gate.weight", 2)
    (True, False)
    """
    return "layers." in name and dims >= 2 and ROUTER not in name


def optimizer_state_bytes(optimizer: OptimizerRecipe, name: str, dims: int) -> int:
    """Bytes of optimizer state for one element of the parameter ``name``, which has ``dims`` dimensions.

    8-bit AdamW also keeps a scale for every 256 elements and leaves small tensors in fp32: about 1/32 byte more.

    >>> optimizer_state_bytes(OptimizerRecipe(name="lion"), "lm_head.weight", 2)
    4
    """
    if optimizer.name == "muon":
        return 4 if updated_by_muon(name, dims) else 8
    if optimizer.name == "sgd":
        return 4 if optimizer.momentum else 0
    return {"adamw": 8, "adamw-8bit": 2, "lion": 4}[optimizer.name]
