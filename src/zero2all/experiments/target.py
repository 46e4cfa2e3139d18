"""The target of an experiment: weights of the validation sources by whose mean the variants are compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from zero2all.base.errors import UsageError
from zero2all.tokens import TokenStore


def parse_target(text: str | None) -> dict[str, float]:
    """Weights by source, without those that are 0. None is the empty target: all validation text.

    >>> parse_target("zh=1,en=0.5,junk=0")
    {'zh': 1.0, 'en': 0.5}
    """
    weights: dict[str, float] = {}
    for part in [] if text is None else text.split(","):
        name, _, number = (word.strip() for word in part.rpartition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not 0 <= weight < math.inf:
            raise UsageError(f"--target {text}: write SOURCE=WEIGHT,SOURCE=WEIGHT, such as zh=1,en=0.5")
        if name in weights:
            raise UsageError(f"--target {text}: {name} is given twice")
        weights[name] = weight
    if text is not None and not any(weights.values()):
        raise UsageError(f"--target {text}: no source has a weight above 0")
    return {name: weight for name, weight in weights.items() if weight}


def show_target(target: Mapping[str, float]) -> str:
    """The text that ``--target`` takes."""
    return ",".join(f"{name}={weight:g}" for name, weight in target.items())


def validation_sources(store: TokenStore, seq_len: int) -> list[str]:
    """Sources of the validation split that bits per byte are measured on: those with a full sequence."""
    return [name for name, tokens in store.source_tokens.items() if tokens > seq_len]


def require_validation(target: Mapping[str, float], measured: Iterable[str]) -> None:
    """Refuse a target with sources that are not validated."""
    known = sorted(measured)
    if missing := [name for name in target if name not in known]:
        raise UsageError(
            f"--target: there is no validation text of {', '.join(missing)}, not even one sequence; there is some of "
            f"{', '.join(known) or 'no source'}"
        )
