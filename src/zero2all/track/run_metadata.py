"""Metadata of a run, from the files beside its record: recipe, identity, environment, plan."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.records import parse_record
from zero2all.base.redact import redact
from zero2all.base.units import show_bytes
from zero2all.recipe.safe_yaml import MAX_FILE_BYTES, read_yaml
from zero2all.track.record_lines import is_count, is_shallow
from zero2all.track.run_locations import PLAN_FILE, RunLocation


@dataclass(frozen=True)
class ObjectiveMetadata:
    """``train.objective``, as far as health checks need it."""

    name: str = "pretrain"
    dpo_loss: str = "sigmoid"
    has_sft_term: bool = False

    @classmethod
    def from_recipe(cls, train: dict[str, Any]) -> ObjectiveMetadata:
        objective = train.get("objective")
        objective = objective if isinstance(objective, dict) else {}
        dpo = objective.get("dpo")
        dpo = dpo if isinstance(dpo, dict) else {}
        return cls(
            str(objective.get("name", cls.name)), str(dpo.get("loss", cls.dpo_loss)), bool(dpo.get("sft_weight"))
        )


@dataclass(frozen=True)
class PlannedValue:
    """What a plan says that a metric of the run will be."""

    name: str
    unit: str
    metric: str
    """Name of the metric in the record."""
    planned: float
    note: str = ""
    scale: float = 1.0
    """Size of the unit: 1e9 for GB of a metric in bytes."""
    over: Literal["median", "most"] = "median"


@dataclass(frozen=True)
class PlannedRun:
    """``plan.json``, written when a run starts on hardware that the planner knows."""

    hardware: str
    """Name of the entry that it was planned with."""
    ranks: int
    values: list[PlannedValue]

    def __post_init__(self) -> None:
        if not all(math.isfinite(one.planned) and math.isfinite(one.scale) and one.scale > 0 for one in self.values):
            raise Z2aError("a planned value is not a number")


@dataclass(frozen=True)
class RunMetadata:
    """What the metadata files say, as far as they exist; ``damage`` lists the invalid ones, and why."""

    name: str = ""
    sources: tuple[str, ...] = ()
    vocab_size: int | None = None
    batch_tokens: int | None = None
    objective: ObjectiveMetadata = ObjectiveMetadata()
    sources_left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Sources that the mixture of a stage does not have, by stage."""
    recipe: str = ""
    environment: dict[str, Any] | None = None
    plan: PlannedRun | None = None
    damage: tuple[str, ...] = ()


def read_run_metadata(location: RunLocation, sizes: dict[str, int]) -> RunMetadata:
    damage: list[str] = []

    def read_text(file: str) -> str:
        size = sizes.get(file, 0)
        if size > MAX_FILE_BYTES:
            damage.append(f"{file}: not read, it is too large ({show_bytes(size)})")
            return ""
        # Runs of older versions may contain secrets.
        return redact(location.read(file, 0, size).decode("utf-8", "replace")) if size else ""

    def parse_mapping(file: str, text: str, parse: Callable[[str], Any]) -> dict[str, Any]:
        if not text:
            return {}
        try:
            value = parse(text)
        except (ValueError, RecursionError, UsageError) as error:
            damage.append(f"{file}: {str(error)[:200] or 'nested too deeply'}")
            return {}
        if not isinstance(value, dict) or not is_shallow(value):
            damage.append(f"{file}: not a mapping of plain values")
            return {}
        return value

    def typed_value(file: str, mapping: dict[str, Any], key: str, is_valid: Callable[[Any], bool]) -> Any:
        """A value of the expected type, or None."""
        value = mapping.get(key)
        if value is None or is_valid(value):
            return value
        damage.append(f"{file}: {key} has the wrong type")
        return None

    recipe_text = read_text("recipe.yaml")
    recipe = parse_mapping("recipe.yaml", recipe_text, lambda text: read_yaml(text, "the file")[0])
    corpus = typed_value("recipe.yaml", recipe, "corpus", _is_mapping) or {}
    train = typed_value("recipe.yaml", recipe, "train", _is_mapping) or {}
    identity = parse_mapping("identity.json", read_text("identity.json"), json.loads)
    model = typed_value("identity.json", identity, "model", _is_mapping) or {}
    plan = None
    if mapping := parse_mapping(PLAN_FILE, read_text(PLAN_FILE), json.loads):
        try:
            plan = parse_record(PlannedRun, mapping, PLAN_FILE)
        except Z2aError as error:
            damage.append(f"{PLAN_FILE}: {str(error)[:200]}")
    names = tuple(
        str(source.get("name")) for source in typed_value("recipe.yaml", corpus, "sources", _are_mappings) or []
    )
    return RunMetadata(
        name=typed_value("recipe.yaml", recipe, "name", lambda name: isinstance(name, str)) or "",
        sources=names,
        vocab_size=typed_value("identity.json", model, "vocab_size", _is_positive),
        batch_tokens=typed_value("recipe.yaml", train, "batch_tokens", _is_positive),
        objective=ObjectiveMetadata.from_recipe(train),
        sources_left_out=_sources_left_out(train, names),
        recipe=recipe_text,
        environment=parse_mapping("environment.json", read_text("environment.json"), json.loads),
        plan=plan,
        damage=tuple(damage),
    )


def _sources_left_out(train: dict[str, Any], sources: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    stages, left_out = train.get("stages"), {}
    for stage in stages if isinstance(stages, list) else []:
        mixture = stage.get("mixture") if isinstance(stage, dict) else None
        if isinstance(mixture, dict):
            left_out[str(stage.get("name"))] = tuple(source for source in sources if not mixture.get(source))
    return left_out


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _are_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_mapping, value))


def _is_positive(value: Any) -> bool:
    return is_count(value) and value > 0
