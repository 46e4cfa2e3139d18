"""Log-probabilities of answers by the model that a run began as, computed once and kept in the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zero2all.io import atomic_path, fingerprint, read_record, write_record
from zero2all.parallel import ParallelModel
from zero2all.tokens.conversation_rows import ConversationRows
from zero2all.tokens.token_store import Array, Split
from zero2all.train.answer_scores import score_answers
from zero2all.train.mismatched import MismatchedAnswers

REFERENCE = "reference"
MANIFEST = "reference.json"


@dataclass(frozen=True)
class ReferenceManifest:
    """Of the files in the directory: what they were computed from."""

    key: str
    names: list[str]
    """Split and source of each file, in the order of their numbers."""


@dataclass(frozen=True)
class Reference:
    """By split and source, such as ``train/pairs``: the log-probability of each document's answer, fp64."""

    logps: Mapping[str, Array]

    def of(self, split: Split, source: str) -> Array:
        return self.logps[f"{split}/{source}"]

    def of_mismatched(self, source: str) -> Array:
        return self.logps[f"mismatched/{source}"]


def reference_key(init_fingerprint: str | None, stores: list[str], seq_len: int, dtype: str, mismatched: bool) -> str:
    """The number counts changes of how answers are packed, masked and paired."""
    return fingerprint([2, init_fingerprint, stores, seq_len, dtype, mismatched])


def read_reference(directory: Path, key: str) -> Reference | None:
    """What is stored, if it was computed from the same."""
    path = directory / MANIFEST
    if not path.exists():
        return None
    manifest = read_record(ReferenceManifest, path)
    if manifest.key != key:
        return None
    try:
        arrays = [np.load(directory / f"{number}.npy", allow_pickle=False) for number in range(len(manifest.names))]
    except (OSError, ValueError):
        return None
    return Reference(dict(zip(manifest.names, arrays, strict=True)))


def compute_reference(
    model: ParallelModel,
    rows: Mapping[tuple[Split, str], ConversationRows],
    mismatched: Mapping[str, MismatchedAnswers],
) -> Reference:
    """With the model as it is now; every rank calls it."""
    logps = {}
    for (split, source), of_source in rows.items():
        logps[f"{split}/{source}"] = score_answers(
            model,
            of_source.document_lengths,
            of_source.read_document,
            of_source.seq_len,
            f"reference log-probabilities of {source} ({split})",
        )
    for source, pairs in mismatched.items():
        logps[f"mismatched/{source}"] = score_answers(
            model, pairs.lengths, pairs.read, pairs.seq_len, f"reference divergence of {source}"
        )
    return Reference(logps)


def write_reference(directory: Path, key: str, reference: Reference) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MANIFEST).unlink(missing_ok=True)
    for number, array in enumerate(reference.logps.values()):
        with atomic_path(directory / f"{number}.npy") as partial, open(partial, "wb") as file:
            np.save(file, array, allow_pickle=False)
    write_record(directory / MANIFEST, ReferenceManifest(key, list(reference.logps)))
