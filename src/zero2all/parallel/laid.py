"""A model laid over the mesh, still without weights: what every rank holds of it."""

from __future__ import annotations

import torch
from torch import nn

from zero2all.model import Z2all
from zero2all.parallel.activations import apply_checkpointing
from zero2all.parallel.experts import cut_experts
from zero2all.parallel.layout import Layout
from zero2all.parallel.pipeline import Stage, cut, layer_costs, split_layers, stage_numbers
from zero2all.parallel.shards import shard_parameters
from zero2all.parallel.tensor import cut_matrices
from zero2all.recipe import ModelConfig, ParallelRecipe


class Laid:
    """On the meta device: stages first, then matrices and experts, checkpointing, and shards around all of it."""

    parts: list[Z2all]
    """The model, or this rank's stages of it."""
    stages: list[Stage]
    """The same as a pipeline runs them; none without a pipeline."""
    numbers: list[int]
    """Which stages they are."""
    sharded: bool
    """Whether FSDP2 gathers parameters and adds up gradients."""

    def __init__(self, config: ModelConfig, recipe: ParallelRecipe, layout: Layout, dtype: torch.dtype) -> None:
        sizes = layout.sizes
        self.numbers = stage_numbers(recipe, layout.at("pp"))
        with torch.device("meta"):
            if sizes.pp == 1:
                self.parts = [Z2all(config)]
            else:
                split = split_layers(layer_costs(config), sizes.pp * recipe.stages_per_rank)
                self.parts = [
                    cut(config, split[number], number == 0, number == len(split) - 1) for number in self.numbers
                ]
            for part in self.parts:
                if sizes.tp > 1:
                    cut_matrices(part, layout.mesh("tp"), recipe)
                if sizes.ep > 1:
                    cut_experts(part, layout.experts_mesh())
                apply_checkpointing(part.layers, recipe)
        self.stages = [Stage(part) for part in self.parts] if sizes.pp > 1 else []
        # Copies of a whole model are left to DDP; wherever else gradients are to be added up, FSDP2 does it.
        self.sharded = sizes.dp * sizes.cp > 1 and sizes.dp_replicate != sizes.world
        if self.sharded:
            experts_mesh = layout.experts_shard_mesh() if sizes.ep > 1 else None
            roots: list[nn.Module] = list(self.stages or self.parts)
            for root, part in zip(roots, self.parts, strict=True):
                shard_parameters(root, part.layers, layout.shard_mesh(), experts_mesh, recipe, dtype)
