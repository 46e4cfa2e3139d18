"""Records of experiments that nobody has run, and processes in place of training."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from zero2all.experiments.mixtures import RECIPE_GROUP, SHARE_KEY
from zero2all.experiments.summary import summarize
from zero2all.track.experiment_record import (
    FORMAT,
    MIXTURE_SEARCH,
    ExperimentRecord,
    VariantRecord,
    VariantResult,
    VariantState,
)


def result(bits_per_byte: float, validation_set: str = "text", tokens: int = 3072) -> VariantResult:
    metrics = {"bits_per_byte": bits_per_byte, "bits_per_byte/en": bits_per_byte}
    return VariantResult(12, tokens, 3.5, 1000.0, metrics, bits_per_byte, 12, validation_set, 6144, "tokenizer")


def variant(
    group: str,
    seed: int,
    bits_per_byte: float | None,
    values: dict[str, int | float | str] | None = None,
    state: VariantState = "done",
    reason: str = "",
    validation_set: str = "text",
) -> VariantRecord:
    return VariantRecord(
        name=f"{group.replace('=', '-')}-seed{seed}",
        group=group,
        seed=seed,
        recipe="my.yaml",
        overrides=[],
        values=values or {},
        key=f"{group}{seed}",
        state=state,
        reason=reason,
        result=None if bits_per_byte is None else result(bits_per_byte, validation_set),
    )


def experiment(kind: str, *variants: VariantRecord, keys: list[str] | None = None) -> ExperimentRecord:
    return summarize(ExperimentRecord(FORMAT, "test", kind, keys or [], None, variants=list(variants)))


def mixture_search(helps: dict[str, float], mixtures: int = 12) -> ExperimentRecord:
    """A search in which each source lowers bits per byte by a multiple of the logarithm of its share."""
    rng = np.random.default_rng(1)
    drawn = [np.full(len(helps), 1 / len(helps)), *rng.dirichlet(np.ones(len(helps)), size=mixtures - 1)]
    variants = []
    for number, shares in enumerate(drawn):
        bits = 2 - sum(helps[name] * float(np.log(share + 0.03)) for name, share in zip(helps, shares, strict=True))
        values: dict[str, int | float | str] = {
            f"{SHARE_KEY}{name}": float(share) for name, share in zip(helps, shares, strict=True)
        }
        variants.append(variant(f"mixture-{number}" if number else RECIPE_GROUP, 1, bits, values))
    record = ExperimentRecord(FORMAT, "test", MIXTURE_SEARCH, list(values), None, {"en": 1.0}, variants=variants)
    return summarize(record)


Script = Callable[[str], str]
"""From the name of a variant to the shell script that its process is."""


class Training:
    """Processes in place of training. ``script`` says what they do; ``calls`` are the variants that were run."""

    def __init__(self) -> None:
        self.script: Script = lambda name: "exit 0"
        self.calls: list[str] = []
        self.recipes: dict[str, str] = {}
        self.started = threading.Event()

    def start(self, recipe: Path, ranks: int, log: object) -> subprocess.Popen[bytes]:
        self.calls.append(recipe.stem)
        self.recipes[recipe.stem] = recipe.read_text(encoding="utf-8")
        process = subprocess.Popen(
            ["/bin/sh", "-c", self.script(recipe.stem)],
            stdout=log,
            stderr=log,
            start_new_session=True,  # type: ignore[call-overload]
        )
        self.started.set()
        return process  # type: ignore[no-any-return]

    def result(self, directory: Path) -> VariantResult:
        return result({"1": 2.0, "2": 1.8, "4": 1.9}[directory.name.split("-")[1][0]])
