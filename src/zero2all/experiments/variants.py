"""The variants of an experiment: a recipe with overrides and a seed each."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice, product
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from zero2all.base.errors import UsageError
from zero2all.base.io import fingerprint
from zero2all.recipe import Recipe, load_recipe
from zero2all.recipe.sections import RunName
from zero2all.track.experiment_record import MAX_VARIANTS, VariantRecord

EXPERIMENTS_DIR = "experiments"  # below ``out``
LOCATION_KEYS = ("name", "run", "out", "corpus.dir", "tokenizer.dir", "tokens.dir", "checkpoint.dir")
UNVARIED_KEYS = {"run": "--name", "seed": "--seeds"}  # and the flag that sets what they stand for


@dataclass(frozen=True)
class Variant:
    """A run to be made."""

    record: VariantRecord
    recipe: Recipe
    """With its seed, run directory and the directories of its stages."""


@dataclass(frozen=True)
class ExperimentPlan:
    """The variants that a command asks for. Runs of one group differ only in their seed."""

    name: str
    kind: str
    keys: list[str]
    out: Path
    variants: list[Variant]
    target: dict[str, float] = field(default_factory=dict)
    """Weights of the validation sources by whose mean the variants are compared; empty: all validation text."""

    @property
    def directory(self) -> Path:
        return experiment_dir(self.out, self.name)


@dataclass(frozen=True)
class VariantGroup:
    """What the runs with different seeds have in common."""

    label: str
    path: Path
    """The path of the recipe file."""
    overrides: list[str]
    recipe: Recipe
    """The recipe with the overrides."""
    values: dict[str, int | float | str]
    """The values of the keys that are varied."""


def experiment_dir(out: Path, name: str) -> Path:
    return out / EXPERIMENTS_DIR / name


def plan_sweep(
    path: Path, words: Sequence[str], seeds: int, name: str | None = None, target: dict[str, float] | None = None
) -> ExperimentPlan:
    """A grid over the overrides that have several values, such as ``train.optimizer.lr=1e-3,2e-3``."""
    axes = [parse_axis(word) for word in words]
    swept = [(key, values) for key, values in axes if len(values) > 1]
    if not swept:
        raise UsageError("no key has several values: write KEY=VALUE,VALUE, such as train.optimizer.lr=1e-3,2e-3,4e-3")
    keys = [key for key, _ in swept]
    if twice := sorted({key for key, _ in axes if [other for other, _ in axes].count(key) > 1}):
        raise UsageError(f"{', '.join(twice)} is given twice: write all its values in one word")
    if (runs := seeds * math.prod(len(values) for _, values in axes)) > MAX_VARIANTS:
        raise UsageError(f"{runs} runs are more than an experiment can have ({MAX_VARIANTS})")
    short = _short_names(keys)
    groups = []
    for combination in product(*(values for _, values in axes)):
        overrides = [f"{key}={value}" for (key, _), value in zip(axes, combination, strict=True)]
        texts = {key: value for (key, _), value in zip(axes, combination, strict=True) if key in keys}
        recipe = load_recipe(path, overrides)
        label = " ".join(f"{short[key]}={text}" for key, text in texts.items())
        values = {key: _value_at(recipe, key, text) for key, text in texts.items()}
        groups.append(VariantGroup(label, path, overrides, recipe, values))
    name = name or _directory_names(["-".join(["sweep", *short.values()])])[0]
    return make_plan(name, "sweep", keys, groups, seeds, target)


def plan_comparison(
    paths: Sequence[Path],
    overrides: Sequence[str],
    seeds: int,
    name: str | None = None,
    target: dict[str, float] | None = None,
) -> ExperimentPlan:
    """Recipes as they are, with the same overrides for all. A recipe that is given twice gets other seeds."""
    labels: list[str] = []
    for path in paths:
        stem = path.stem if path.is_file() else path.name
        labels.append(next(label for n in count(1) if (label := stem if n == 1 else f"{stem}-{n}") not in labels))
    groups = [
        VariantGroup(label, path, list(overrides), load_recipe(path, list(overrides)), {})
        for label, path in zip(labels, paths, strict=True)
    ]
    return make_plan(name or _directory_names(["-vs-".join(labels)])[0], "compare", [], groups, seeds, target)


def make_plan(
    name: str,
    kind: str,
    keys: list[str],
    groups: list[VariantGroup],
    seeds: int,
    target: dict[str, float] | None = None,
) -> ExperimentPlan:
    """Every group with the same number of seeds, counted up from the recipe's."""
    if "/" in name or not is_run_name(f"{EXPERIMENTS_DIR}/{name}"):
        raise UsageError(f"--name {name}: use letters, digits, '.', '_' and '-', and not the name of a stage")
    first = groups[0].recipe
    out = first.out.absolute()
    used: dict[str, set[int]] = {}
    seeds_of = []
    for group in groups:
        taken = used.setdefault(result_key(group.recipe, with_seed=False), set())
        if taken and kind == "sweep":
            raise UsageError(f"{group.label}: another variant has the same values")
        chosen = list(islice((seed for seed in count(group.recipe.seed) if seed not in taken), seeds))
        taken.update(chosen)
        seeds_of.append(chosen)
    names = _directory_names([group.label.replace("=", "-") for group in groups])
    variants = []
    for number in range(seeds):  # every group has its first seed before any has its second
        for group, group_name, chosen in zip(groups, names, seeds_of, strict=True):
            variants.append(_variant(group, f"{group_name}-seed{chosen[number]}", chosen[number], first, name))
    return ExperimentPlan(name, kind, keys, out, variants, target or {})


def _variant(group: VariantGroup, run_name: str, seed: int, first: Recipe, experiment: str) -> Variant:
    seeded = group.recipe.model_copy(update={"seed": seed})
    record = VariantRecord(
        name=run_name,
        group=group.label,
        seed=seed,
        recipe=str(group.path),
        overrides=group.overrides,
        values=group.values,
        key=result_key(seeded),
    )
    recipe = _place_stages(seeded, first, experiment)
    run = f"{EXPERIMENTS_DIR}/{experiment}/{run_name}"
    return Variant(record, recipe.model_copy(update={"out": first.out.absolute(), "run": run}))


def _place_stages(recipe: Recipe, first: Recipe, experiment: str) -> Recipe:
    """Set the directories of documents, tokenizer and tokens: shared by all variants for which they are the same.

    A variant with other text or another tokenizer gets its own below the experiment, so that none replaces another.
    """
    own = experiment_dir(first.out, experiment) / "stages"
    is_sharing = recipe.out.absolute() == first.out.absolute()
    documents, tokenizer, tokens = recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir
    same = True
    if is_sharing and recipe.corpus.dir is None and _differs(recipe.corpus, first.corpus):
        same = False
        documents = own / f"documents-{fingerprint(recipe.corpus.model_dump(mode='json'))}"
    key = fingerprint([str(documents), recipe.tokenizer.model_dump(mode="json")])
    if is_sharing and recipe.tokenizer.dir is None and (not same or _differs(recipe.tokenizer, first.tokenizer)):
        same = False
        tokenizer = own / f"tokenizer-{key}"
    if is_sharing and recipe.tokens.dir is None and not same:
        tokens = own / f"tokens-{key}"
    return recipe.model_copy(
        update={
            "corpus": recipe.corpus.model_copy(update={"dir": documents.absolute()}),
            "tokenizer": recipe.tokenizer.model_copy(update={"dir": tokenizer.absolute()}),
            "tokens": recipe.tokens.model_copy(update={"dir": tokens.absolute()}),
        }
    )


def _differs(section: Any, other: Any) -> bool:
    return bool(section.model_copy(update={"dir": None}) != other.model_copy(update={"dir": None}))


def result_key(recipe: Recipe, *, with_seed: bool = True) -> str:
    """Fingerprint of all that decides the result: not of names, places, checkpoints and what is recorded."""
    # Without defaults: a later version of zero2all, which has more keys, continues the experiment.
    values = recipe_values(recipe.model_dump(mode="json", exclude_defaults=True))
    ignored = ("checkpoint.", "track.", "evals.test_sets") + (() if with_seed else ("seed",))
    return fingerprint({key: value for key, value in values.items() if not key.startswith(ignored)})


def recipe_values(dumped: dict[str, Any]) -> dict[str, Any]:
    """Every value of a recipe by its dotted key, without names and places. Lists are values."""
    return {key: value for key, value in _flatten(dumped) if key not in LOCATION_KEYS}


def _flatten(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _flatten(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def parse_axis(word: str) -> tuple[str, list[str]]:
    """A key and its values, from ``KEY=VALUE,VALUE``."""
    key, equals, text = word.partition("=")
    key, values = key.strip(), split_values(text)
    if not equals or not key:
        raise UsageError(f"{word!r}: write KEY=VALUE,VALUE, such as train.optimizer.lr=1e-3,2e-3")
    if len(values) > 1 and not all(values):
        raise UsageError(f"{word!r}: there is nothing between two commas, or before or after one")
    if key in UNVARIED_KEYS:
        raise UsageError(f"{word!r}: an experiment sets {key} itself; see {UNVARIED_KEYS[key]}")
    return key, values


def split_values(text: str) -> list[str]:
    """Split at commas outside brackets, braces and quotes.

    >>> split_values("1e-3,2e-3"), split_values("[0.9,0.95],[0.9,0.99]")
    (['1e-3', '2e-3'], ['[0.9,0.95]', '[0.9,0.99]'])
    """
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and (depth or not values[-1].strip()):  # an apostrophe inside a word is no quote
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def _value_at(recipe: Recipe, key: str, text: str) -> int | float | str:
    """The value that a recipe has for a key, as a number if it is one: ``64Ki`` is 65536."""
    value: Any = recipe.model_dump(mode="json")
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        return value
    return text if value is None else json.dumps(value, ensure_ascii=False)


def _short_names(keys: list[str]) -> dict[str, str]:
    """The last part of each key, or all of it if two keys end in the same."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)}


def is_run_name(name: str) -> bool:
    try:
        TypeAdapter(RunName).validate_python(name)
    except ValidationError:
        return False
    return True


def _slug(text: str) -> str:
    """Letters, digits, '.', '_' and '-' only, as in the name of a run directory."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:120].strip("-.")


def _directory_names(labels: list[str]) -> list[str]:
    """Texts as directory names. One that is not ASCII, or would be like another's, gets a fingerprint."""
    slugs = [_slug(label) for label in labels]
    return [
        slug if label.isascii() and slug and slugs.count(slug) == 1 else f"{slug or 'variant'}-{fingerprint(label)[:8]}"
        for slug, label in zip(slugs, labels, strict=True)
    ]
