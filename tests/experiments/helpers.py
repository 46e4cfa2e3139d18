"""Records of experiments that nobody has run."""

from __future__ import annotations

from zero2all.experiments.summary import summarize
from zero2all.track.experiment_record import (
    FORMAT,
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
