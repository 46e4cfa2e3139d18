"""Supervised fine-tuning: predict what the assistant writes in whole conversations."""

from __future__ import annotations

from zero2all.base.plugins import LAYOUTS, register
from zero2all.recipe.objective import ObjectiveRecipe
from zero2all.recipe.objective_plugin import Conversations
from zero2all.train.objectives.registered.pretrain import PretrainPlugin


@register("objective", "sft", supports=LAYOUTS)
class SFTPlugin(PretrainPlugin):
    """Supervised fine-tuning: predict what the assistant writes in whole conversations."""

    def conversations(self, recipe: ObjectiveRecipe) -> Conversations:
        return "packed" if recipe.packing else "padded"
