"""What the files beside a record say of a run: its recipe, its identity, the machine it ran on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zero2all.errors import UsageError
from zero2all.masking import mask
from zero2all.recipe.safe_yaml import LARGEST, read_yaml
from zero2all.track.lines import is_count, is_shallow
from zero2all.track.places import Place
from zero2all.units import show_bytes


@dataclass(frozen=True)
class Facts:
    """As far as the files are there; ``damage`` says which could not be used, and why."""

    name: str = ""
    sources: tuple[str, ...] = ()
    vocab_size: int | None = None
    batch_tokens: int | None = None
    recipe: str = ""
    environment: dict[str, Any] | None = None
    damage: tuple[str, ...] = ()


def read_facts(place: Place, sizes: dict[str, int]) -> Facts:
    damage: list[str] = []

    def text_of(file: str) -> str:
        size = sizes.get(file, 0)
        if size > LARGEST:
            damage.append(f"{file}: not read, since it has {show_bytes(size)}")
            return ""
        # Runs of older versions may have written down what must not be shown.
        return mask(place.read(file, 0, size).decode("utf-8", "replace")) if size else ""

    def mapping(file: str, text: str, parse: Callable[[str], Any]) -> dict[str, Any]:
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

    def part(file: str, mapping: dict[str, Any], key: str, right: Callable[[Any], bool]) -> Any:
        """A value of the right type, or None."""
        value = mapping.get(key)
        if value is None or right(value):
            return value
        damage.append(f"{file}: {key} is not what it should be")
        return None

    written = text_of("recipe.yaml")
    recipe = mapping("recipe.yaml", written, lambda text: read_yaml(text, "the file")[0])
    corpus = part("recipe.yaml", recipe, "corpus", _is_mapping) or {}
    train = part("recipe.yaml", recipe, "train", _is_mapping) or {}
    identity = mapping("identity.json", text_of("identity.json"), json.loads)
    model = part("identity.json", identity, "model", _is_mapping) or {}
    return Facts(
        name=part("recipe.yaml", recipe, "name", lambda name: isinstance(name, str)) or "",
        sources=tuple(
            str(source.get("name")) for source in part("recipe.yaml", corpus, "sources", _are_mappings) or []
        ),
        vocab_size=part("identity.json", model, "vocab_size", _is_positive),
        batch_tokens=part("recipe.yaml", train, "batch_tokens", _is_positive),
        recipe=written,
        environment=mapping("environment.json", text_of("environment.json"), json.loads),
        damage=tuple(damage),
    )


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _are_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_mapping, value))


def _is_positive(value: Any) -> bool:
    return is_count(value) and value > 0
