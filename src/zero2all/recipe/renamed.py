"""Recipe keys that were renamed in 0.2.

Runs, checkpoints and tokenizers of earlier versions are read through this table. A recipe that a user wrote is not:
each retired key in it is a mistake that names its new key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zero2all.errors import RecipeProblem
from zero2all.recipe.places import Places, locate, located_problem
from zero2all.recipe.safe_yaml import KeyPath

RENAMED = {  # path of the retired key -> its new name in the same section; * is any element of a list
    "model.n_layers": "num_hidden_layers",
    "model.n_heads": "num_attention_heads",
    "model.n_kv_heads": "num_key_value_heads",
    "model.context": "max_position_embeddings",
    "model.norm_eps": "rms_norm_eps",
    "model.tied": "tie_word_embeddings",
    "model.global_every": "full_attention_interval",
    "model.init_std": "initializer_range",
    "model.logit_softcap": "final_logit_softcapping",
    "model.rope_scaling.type": "rope_type",
    "model.rope_scaling.original_context": "original_max_position_embeddings",
    "model.moe.experts": "num_experts",
    "model.moe.top_k": "num_experts_per_tok",
    "model.moe.expert_intermediate": "moe_intermediate_size",
    "model.moe.shared_experts": "n_shared_experts",
    "model.moe.first_dense": "first_k_dense_replace",
    "model.moe.router": "scoring_func",
    "model.moe.balance": "load_balancing",
    "model.moe.aux_weight": "router_aux_loss_coef",
    "model.moe.bias_rate": "bias_update_rate",
    "train.optimizer.clip": "max_grad_norm",
    "train.schedule.final": "min_lr_ratio",
    "train.schedule.decay": "decay_ratio",
    "train.guard.least_loss": "min_loss_change",
    "train.guard.least_norm": "min_norm_factor",
    "train.stages.*.schedule.final": "min_lr_ratio",
    "train.stages.*.schedule.decay": "decay_ratio",
    "train.stages.*.rope_scaling.type": "rope_type",
    "train.stages.*.rope_scaling.original_context": "original_max_position_embeddings",
    "parallel.reshard": "reshard_after_forward",
    "checkpoint.keep": "keep_latest",
    "track.print_every": "log_every",
    "tokenizer.chop": "max_han_run",
    "tokenizer.sample": "train_bytes",
}
RENAMED_VALUES = {"parallel.cp_attention": {"gather": "allgather"}}

_Section = tuple[str, ...]
_NEW_KEYS = {tuple(path.split(".")): new for path, new in RENAMED.items()}
_OLD_KEYS = {(*path[:-1], new): path[-1] for path, new in _NEW_KEYS.items()}
_NEW_VALUES = {tuple(path.split(".")): values for path, values in RENAMED_VALUES.items()}
_OLD_VALUES = {path: {new: old for old, new in values.items()} for path, values in _NEW_VALUES.items()}


def to_new(values: Any, section: str = "") -> Any:
    """A stored recipe, or the ``section`` of one, with today's keys. One that has them already stays as it is."""
    return _translate(values, _section(section), _NEW_KEYS, _NEW_VALUES)


def to_old(values: Any, section: str = "") -> Any:
    """The reverse, for fingerprints that earlier versions computed of the retired keys."""
    return _translate(values, _section(section), _OLD_KEYS, _OLD_VALUES)


def identity_to_new(identity: dict[str, Any]) -> dict[str, Any]:
    """The identity of a run, or the state of a checkpoint, with today's keys of the model and its stages."""
    translated = dict(identity)
    for name in ("model", "rope"):  # rope is what a stage has changed in the model
        if name in identity:
            translated[name] = to_new(identity[name], "model")
    if isinstance(stages := identity.get("stages"), list):
        translated["stages"] = [_stage_to_new(stage) for stage in stages]
    return translated


def retired_key_problems(values: dict[str, Any], places: Places) -> list[RecipeProblem]:
    """One mistake for each retired key or value of a user's recipe."""
    return list(_retired(values, (), (), places))


def places_to_new(places: Places) -> Places:
    """The place of each key under its new name as well."""
    translated = dict(places)
    for path, place in places.items():
        if new := _NEW_KEYS.get(_pattern(path)):
            translated.setdefault((*path[:-1], new), place)
    return translated


def _translate(values: Any, section: _Section, keys: Mapping[_Section, str], words: Mapping[_Section, Any]) -> Any:
    if isinstance(values, list):
        return [_translate(inner, (*section, "*"), keys, words) for inner in values]
    if not isinstance(values, dict):
        return words.get(section, {}).get(values, values) if isinstance(values, str) else values
    translated = {}
    for key, inner in values.items():
        name = keys.get((*section, key), key)
        if name == key or name not in values:  # with both, the one that is valid counts
            translated[name] = _translate(inner, (*section, key), keys, words)
    return translated


def _stage_to_new(stage: Any) -> Any:
    if isinstance(stage, dict) and isinstance(rope := stage.get("rope"), list) and len(rope) == 2:
        return {**stage, "rope": [rope[0], to_new(rope[1], "model.rope_scaling")]}
    return stage


def _retired(values: Any, path: KeyPath, section: _Section, places: Places) -> Iterator[RecipeProblem]:
    dotted = ".".join(map(str, path))
    if isinstance(values, list):
        for index, inner in enumerate(values):
            yield from _retired(inner, (*path, index), (*section, "*"), places)
    elif isinstance(values, dict):
        for key, inner in values.items():
            if new := _NEW_KEYS.get((*section, key)):
                old = f"{dotted}.{key}"
                hint = f"both are given: remove `{key}`" if new in values else ""
                yield located_problem((*path, key), f"`{old}` is now `{new}`", hint, locate(places, (*path, key)))
            yield from _retired(inner, (*path, key), (*section, key), places)
    elif isinstance(values, str) and (new := _NEW_VALUES.get(section, {}).get(values)):
        yield located_problem(path, f"`{dotted}: {values}` is now `{new}`", place=locate(places, path))


def _section(dotted: str) -> _Section:
    return tuple(dotted.split(".")) if dotted else ()


def _pattern(path: KeyPath) -> _Section:
    return tuple("*" if isinstance(key, int) else key for key in path)
