"""The one typed recipe: a YAML file, dotted overrides, and every mistake named at once.

>>> recipe = load_recipe("recipes/quickstart.yaml", ["train.steps=200"])
>>> recipe.train.steps
200
"""

from zero2all.recipe.load import load_recipe, parse_recipe, recipe_or_preset, recipe_schema, recipe_yaml
from zero2all.recipe.model import ModelConfig, MoeConfig, OpsRecipe, RopeScaling
from zero2all.recipe.parallel import ParallelRecipe
from zero2all.recipe.presets import PRESETS
from zero2all.recipe.sections import (
    CheckpointRecipe,
    CorpusRecipe,
    DedupRecipe,
    EvalsRecipe,
    OptimizerRecipe,
    Recipe,
    ScheduleRecipe,
    SourceRecipe,
    TokenizerRecipe,
    TokensRecipe,
    TrackRecipe,
    TrainRecipe,
)

__all__ = [
    "PRESETS",
    "CheckpointRecipe",
    "CorpusRecipe",
    "DedupRecipe",
    "EvalsRecipe",
    "ModelConfig",
    "MoeConfig",
    "OpsRecipe",
    "OptimizerRecipe",
    "ParallelRecipe",
    "Recipe",
    "RopeScaling",
    "ScheduleRecipe",
    "SourceRecipe",
    "TokenizerRecipe",
    "TokensRecipe",
    "TrackRecipe",
    "TrainRecipe",
    "load_recipe",
    "parse_recipe",
    "recipe_or_preset",
    "recipe_schema",
    "recipe_yaml",
]
