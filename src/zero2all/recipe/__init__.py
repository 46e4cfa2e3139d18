"""The typed recipe: a YAML file, dotted overrides, and validation that reports all mistakes at once.

>>> recipe = load_recipe("recipes/quickstart.yaml", ["train.steps=200"])
>>> recipe.train.steps
200
"""

from zero2all.recipe.corpus import CorpusRecipe, DedupRecipe, SourceRecipe, TakeRecipe
from zero2all.recipe.load import (
    builtin_recipe_path,
    load_recipe,
    load_recipe_or_preset,
    parse_recipe,
    recipe_for_model,
    recipe_schema,
    recipe_yaml,
)
from zero2all.recipe.model import PRESETS, ModelConfig, MoeConfig, OpsRecipe, RopeScaling
from zero2all.recipe.optimizer import ExtendMode, ExtensionRecipe, OptimizerRecipe, ScheduleRecipe
from zero2all.recipe.parallel import ParallelRecipe
from zero2all.recipe.sections import CheckpointRecipe, EvalsRecipe, Recipe, TokenizerRecipe, TokensRecipe, TrackRecipe
from zero2all.recipe.training import BatchRampRecipe, GuardRecipe, ResolvedStage, StageRecipe, TrainRecipe
from zero2all.recipe.types import Mistake

__all__ = [
    "PRESETS",
    "BatchRampRecipe",
    "CheckpointRecipe",
    "CorpusRecipe",
    "DedupRecipe",
    "EvalsRecipe",
    "ExtendMode",
    "ExtensionRecipe",
    "GuardRecipe",
    "Mistake",
    "ModelConfig",
    "MoeConfig",
    "OpsRecipe",
    "OptimizerRecipe",
    "ParallelRecipe",
    "Recipe",
    "ResolvedStage",
    "RopeScaling",
    "ScheduleRecipe",
    "SourceRecipe",
    "StageRecipe",
    "TakeRecipe",
    "TokenizerRecipe",
    "TokensRecipe",
    "TrackRecipe",
    "TrainRecipe",
    "builtin_recipe_path",
    "load_recipe",
    "load_recipe_or_preset",
    "parse_recipe",
    "recipe_for_model",
    "recipe_schema",
    "recipe_yaml",
]
