"""A small classifier of good and bad text: hashed n-grams and logistic regression, in the manner of fastText."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zero2all.base.errors import UsageError
from zero2all.base.io import atomic_path, read_json, sha256_file, write_record
from zero2all.base.plugins import BoundPlugin, register
from zero2all.corpus.document import Document
from zero2all.corpus.filters.filter_registry import KEEP, Drop, FilterResult
from zero2all.corpus.filters.text_kinds import HAN, classify_text

BUCKETS = 1 << 18
FORMAT = 1
QUALITY_FILTER = "quality_score"
MAX_CHARS = 8000  # of a text; its style shows early, and a book must not cost as much as a thousand pages
_LONGEST_N_GRAM = 3
# A word, a Han character, or a sign is one unit.
_UNIT = re.compile(rf"[{HAN}]|[^\W\d_{HAN}]+|\d+|[^\w\s]|\n")
_MIX = np.uint64(0x9E3779B97F4A7C15)

Buckets = npt.NDArray[np.int64]


@dataclass(frozen=True)
class QualityMetadata:
    """``<model>.json``: how a model was trained."""

    format: int
    buckets: int
    good: int
    """Examples."""
    bad: int
    epochs: int
    rate: float
    seed: int
    held_out: int
    """Examples in the validation set."""
    held_out_accuracy: float | None


@dataclass(frozen=True)
class QualityModel:
    weights: npt.NDArray[np.float32]
    bias: float

    def score(self, text: str) -> float:
        """Between 0, like the bad examples, and 1, like the good ones. Text without a word scores 0.5."""
        buckets = hash_features(text)
        return _sigmoid(self.bias + float(self.weights[buckets].mean())) if len(buckets) else 0.5


def hash_features(text: str) -> Buckets:
    """The bucket of every 1-, 2- and 3-gram of units. The same on every machine and in every process."""
    units = [zlib.crc32(unit.encode("utf-8", "replace")) for unit in _UNIT.findall(text[:MAX_CHARS].lower())]
    ids = np.array(units, np.uint64)
    hashes = np.zeros(len(ids), np.uint64)
    parts: list[Buckets] = []
    for n in range(min(_LONGEST_N_GRAM, len(ids))):
        hashes = (hashes[: len(ids) - n] ^ (ids[n:] + np.uint64(n + 1))) * _MIX
        hashes ^= hashes >> np.uint64(31)
        parts.append((hashes % np.uint64(BUCKETS)).astype(np.int64))
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def train_quality_model(
    good: Iterable[str], bad: Iterable[str], out: Path, *, epochs: int = 5, learning_rate: float = 0.5, seed: int = 0
) -> QualityMetadata:
    """Train on examples and write ``<out>.npz`` and ``<out>.json``; returns the contents of the latter.

    A tenth of the examples, chosen by the seed, is the validation set. Both sides weigh the same however
    many examples they have. The same examples in the same order with the same seed give the same bytes.
    """
    sides = [[found for text in texts if len(found := hash_features(text))] for texts in (bad, good)]
    if min(map(len, sides)) < 2:
        raise UsageError("a quality model needs at least two good and two bad examples with text in them")
    examples = [(found, label) for label, side in enumerate(sides) for found in side]
    random = np.random.default_rng(seed)
    order = random.permutation(len(examples))
    validation, training = np.split(order, [len(examples) // 10])
    class_weight = [len(examples) / (2 * len(side)) for side in sides]
    model = _fit([examples[index] for index in training], class_weight, epochs, learning_rate, random)

    metadata = QualityMetadata(
        format=FORMAT,
        buckets=BUCKETS,
        good=len(sides[1]),
        bad=len(sides[0]),
        epochs=epochs,
        rate=learning_rate,
        seed=seed,
        held_out=len(validation),
        held_out_accuracy=_accuracy(model, [examples[index] for index in validation]),
    )
    with atomic_path(out.with_suffix(".npz")) as partial, open(partial, "wb") as stream:
        np.savez(stream, weights=model.weights, bias=np.float64(model.bias))
    write_record(out.with_suffix(".json"), metadata)
    return metadata


def _fit(
    examples: list[tuple[Buckets, int]],
    class_weight: list[float],
    epochs: int,
    learning_rate: float,
    random: np.random.Generator,
) -> QualityModel:
    """Stochastic gradient descent with AdaGrad: rare n-grams learn as fast as frequent ones."""
    weights = np.zeros(BUCKETS, np.float64)
    squares = np.full(BUCKETS, 1e-8)
    bias = 0.0
    for _ in range(epochs):
        for index in random.permutation(len(examples)):
            buckets, label = examples[index]
            error = _sigmoid(bias + float(weights[buckets].mean())) - label
            touched, counts = np.unique(buckets, return_counts=True)
            gradient = class_weight[label] * error * counts / len(buckets)
            squares[touched] += gradient**2
            weights[touched] -= learning_rate * gradient / np.sqrt(squares[touched])
            bias -= 0.01 * learning_rate * class_weight[label] * error
    return QualityModel(weights.astype(np.float32), bias)


def _accuracy(model: QualityModel, examples: list[tuple[Buckets, int]]) -> float | None:
    if not examples:
        return None
    right = sum((model.bias + float(model.weights[found].mean()) > 0) == bool(label) for found, label in examples)
    return right / len(examples)


def _sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-np.clip(value, -60, 60))))


def load_quality_model(path: Path) -> QualityModel:
    """The model that ``train_quality_model`` wrote under this name, with or without its extension."""
    try:
        metadata = read_json(path.with_suffix(".json"))
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as stored:
            model = QualityModel(stored["weights"], float(stored["bias"]))
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"no quality model at {path}: train one with 'z2a corpus quality train' ({error})") from error
    if metadata.get("format") != FORMAT or model.weights.shape != (BUCKETS,):
        raise UsageError(f"{path} was made by another version of zero2all; train it again")
    return model


def filter_checksums(filters: Sequence[BoundPlugin]) -> list[str]:
    """Checksums of the models that filters use, and versions of those that are not built in: a different one gives
    different documents from the same text."""
    _cached_model.cache_clear()
    paths = [Path(bound.options["model"]) for bound in filters if bound.name == QUALITY_FILTER]
    for path in paths:
        load_quality_model(path)  # fail on a missing one before hours of reading
    return [*(sha256_file(path.with_suffix(".npz")) for path in paths), *(one.source for one in filters if one.source)]


@lru_cache(maxsize=4)
def _cached_model(path: str) -> QualityModel:
    return load_quality_model(Path(path))


@register("filter", QUALITY_FILTER)
def quality_score(document: Document, *, model: str, threshold: float = 0.5, in_code: bool = False) -> FilterResult:
    """Drop what the classifier at ``model`` scores below ``threshold``. Code only if asked: train a model on code."""
    if not in_code and classify_text(document) == "code":
        return KEEP
    return KEEP if _cached_model(model).score(document.content) >= threshold else Drop("low quality score")
