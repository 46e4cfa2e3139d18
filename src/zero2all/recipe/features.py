"""What a layout requires of the plugins of a training run, and which of them do not support it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from zero2all.base.plugins import LAYOUTS, Feature, PluginSpec, loaded_plugin, split_spec
from zero2all.recipe.training import TrainRecipe
from zero2all.recipe.types import Mistake

if TYPE_CHECKING:
    from zero2all.recipe.parallel import ParallelRecipe


class NamedPlugin(NamedTuple):
    key: str
    kind: str
    spec: PluginSpec


CHECKED: dict[str, tuple[Feature, ...]] = {
    "optimizer": (*LAYOUTS, "cpu_offload", "file_offload", "checkpoint_state"),
    "objective": ("tensor_parallel", "pipeline_parallel", "context_parallel"),
    "callback": ("sharded_parameters", "tensor_parallel", "pipeline_parallel"),
}
"""The features that matter to a kind."""


def training_plugins(train: TrainRecipe) -> Iterator[NamedPlugin]:
    """Every plugin that a section ``train`` names, built-in ones too."""
    optimizer, schedules = train.optimizer, [("train.schedule", train.schedule)]
    yield NamedPlugin("train.optimizer", "optimizer", optimizer.spec)
    schedules += [(f"train.stages.{n}.schedule", one.schedule) for n, one in enumerate(train.stages) if one.schedule]
    for key, schedule in schedules:
        yield NamedPlugin(key, "schedule", {**schedule.options, "name": schedule.shape})
    objective = train.objective
    yield NamedPlugin("train.objective", "objective", objective.spec)
    yield from listed_plugins("train.objective.grpo.rewards", "reward", objective.grpo.rewards)
    yield from listed_plugins("train.callbacks", "callback", train.callbacks)


def listed_plugins(key: str, kind: str, specs: Iterable[PluginSpec]) -> Iterator[NamedPlugin]:
    return (NamedPlugin(f"{key}.{number}", kind, spec) for number, spec in enumerate(specs))


def feature_mistakes(train: TrainRecipe, parallel: ParallelRecipe, *, shards: bool = False) -> Iterator[Mistake]:
    """Features that are needed, and that a plugin does not support. ``shards``: auto shards over several ranks.

    A plugin that is not imported yet is not checked.
    """
    needed = [*_needed_features(parallel, shards=shards)]
    for key, kind, spec in training_plugins(train):
        name, _ = split_spec(spec)
        plugin = loaded_plugin(kind, name) if kind in CHECKED else None
        for feature, setting, remedy in needed:
            if plugin is not None and feature in CHECKED[kind] and feature not in plugin.supports:
                of = f" of {plugin.source}" if plugin.source else ""
                yield Mistake(
                    f"{kind} {name}{of} does not support {feature}, which {setting} needs: {remedy}, or choose a "
                    f"different {kind}",
                    (setting.partition("=")[0], key),
                )


def _needed_features(parallel: ParallelRecipe, *, shards: bool) -> Iterator[tuple[Feature, str, str]]:
    """Each with the setting that needs it, and what to set instead."""
    for feature, key in zip(LAYOUTS, ("dp_shard", "tp", "pp", "cp"), strict=True):
        size = getattr(parallel, key)
        if shards if size == "auto" else size > 1:
            yield feature, f"parallel.{key}={size}", f"set parallel.{key}=1"
    if parallel.offload_dir is not None:
        yield "file_offload", f"parallel.offload={parallel.offload}", "set parallel.offload=cpu or none"
    elif parallel.offload != "none":
        yield "cpu_offload", "parallel.offload=cpu", "set parallel.offload=none"
    yield "checkpoint_state", "checkpoint.every", "declare it in register(..., supports=...)"
