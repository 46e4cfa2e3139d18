"""The one typed recipe: a YAML file, dotted overrides, and every mistake named at once.

>>> recipe = load_recipe("recipes/quickstart.yaml", ["train.steps=200"])
>>> recipe.train.steps
200
"""

from zero2all.recipe.load import builtin, load_recipe, parse_recipe, recipe_schema, recipe_yaml
from zero2all.recipe.presets import PRESETS
from zero2all.recipe.sections import (
    CheckpointRecipe,
    CorpusRecipe,
    DedupRecipe,
    EvalsRecipe,
    ModelConfig,
    OptimizerRecipe,
    ParallelRecipe,
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
    "OptimizerRecipe",
    "ParallelRecipe",
    "Recipe",
    "ScheduleRecipe",
    "SourceRecipe",
    "TokenizerRecipe",
    "TokensRecipe",
    "TrackRecipe",
    "TrainRecipe",
    "builtin",
    "load_recipe",
    "parse_recipe",
    "recipe_schema",
    "recipe_yaml",
]
