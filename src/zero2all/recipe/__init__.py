"""The one typed recipe: a YAML file, dotted overrides, and every mistake named at once.

>>> recipe = load_recipe("recipes/quickstart.yaml", ["train.steps=200"])
>>> recipe.train.steps
200
"""

from zero2all.recipe.load import builtin, load_recipe, parse_recipe, recipe_or_preset, recipe_schema, recipe_yaml
from zero2all.recipe.model import ModelConfig, MoeConfig, OpsRecipe, RopeScaling
from zero2all.recipe.parallel import ParallelRecipe
from zero2all.recipe.presets import PRESETS
from zero2all.recipe.sections import (
    CheckpointRecipe,
    CorpusRecipe,
    DedupRecipe,
    EvalsRecipe,
    Recipe,
    SourceRecipe,
    TokenizerRecipe,
    TokensRecipe,
    TrackRecipe,
)
from zero2all.recipe.training import (
    GuardRecipe,
    OptimizerRecipe,
    RampRecipe,
    ScheduleRecipe,
    Stage,
    StageRecipe,
    TrainRecipe,
)

__all__ = [
    "PRESETS",
    "CheckpointRecipe",
    "CorpusRecipe",
    "DedupRecipe",
    "EvalsRecipe",
    "GuardRecipe",
    "ModelConfig",
    "MoeConfig",
    "OpsRecipe",
    "OptimizerRecipe",
    "ParallelRecipe",
    "RampRecipe",
    "Recipe",
    "RopeScaling",
    "ScheduleRecipe",
    "SourceRecipe",
    "Stage",
    "StageRecipe",
    "TokenizerRecipe",
    "TokensRecipe",
    "TrackRecipe",
    "TrainRecipe",
    "builtin",
    "load_recipe",
    "parse_recipe",
    "recipe_or_preset",
    "recipe_schema",
    "recipe_yaml",
]
