"""Decontamination: an index of the long n-grams of evaluation sets, to find documents that contain them.

English goes by 13 words, as GPT-3 did. Chinese goes by 20 characters: a Chinese word has some 1.6 characters, so both
are the same length of speech. Case, punctuation and width do not count. An item shorter than that is not in the index,
since short phrases occur in innocent documents too; ``DecontaminationIndex.too_short`` counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zero2all.base.errors import Z2aError
from zero2all.base.io import read_json, write_json
from zero2all.corpus.dedup.drops import write_drops
from zero2all.corpus.dedup.shingles import UNSPACED_SCRIPTS, HashedUnits, Hashes, hash_ngrams, hash_units, splitmix64
from zero2all.corpus.dedup.shuffle import SHINGLE_CHARACTERS, load_rows, read_columns, save_rows, split_by_characters

WORD_NGRAM, CHARACTER_NGRAM = 13, 20
UNSPACED_SHARE = 0.5


@dataclass(frozen=True)
class DecontaminationIndex:
    """``ngrams`` is sorted; ``owners`` holds for each the number of its set in ``names``."""

    names: tuple[str, ...]
    too_short: tuple[int, ...]
    ngrams: Hashes
    owners: NDArray[np.uint32]


def build_decontamination_index(texts: Mapping[str, Iterable[str]], out: Path) -> DecontaminationIndex:
    """Index the texts of each evaluation set by name, into the directory ``out``."""
    names, too_short, parts = sorted(texts), [], []
    for number, name in enumerate(names):
        hashes, short = _hash_evaluation_set(list(texts[name]))
        parts.append((hashes, np.full(len(hashes), number, dtype=np.uint32)))
        too_short.append(short)
    found = np.concatenate([np.zeros(0, dtype=np.uint64), *(hashes for hashes, _ in parts)])
    owners = np.concatenate([np.zeros(0, dtype=np.uint32), *(owner for _, owner in parts)])
    order = np.lexsort((owners, found))
    save_rows(out / "grams.npy", found[order])
    save_rows(out / "owners.npy", owners[order])
    body = {"words": WORD_NGRAM, "characters": CHARACTER_NGRAM, "names": names, "too_short": too_short}
    write_json(out / "index.json", body)
    return load_decontamination_index(out)


def load_decontamination_index(directory: Path) -> DecontaminationIndex:
    if not (directory / "index.json").exists():
        raise Z2aError(f"no index of evaluation sets in {directory}: build it first")
    body = read_json(directory / "index.json")
    if (body["words"], body["characters"]) != (WORD_NGRAM, CHARACTER_NGRAM):
        raise Z2aError(f"the index in {directory} has n-grams of another length: build it again")
    return DecontaminationIndex(
        tuple(body["names"]),
        tuple(body["too_short"]),
        load_rows(directory / "grams.npy"),
        load_rows(directory / "owners.npy"),
    )


def find_contamination(
    text: str, index: DecontaminationIndex, min_hits: int = 1, min_share: float = 1.0
) -> dict[str, int]:
    """The evaluation sets that the text contains too much of, and how many different n-grams of each.

    Too much is ``min_hits`` n-grams, or ``min_share`` of the text's n-grams: one that it shares by chance, or by
    quoting the same proverb, counts against a two-line note and not against a book.
    """
    units = hash_units([text], code=False)
    by_length = [np.unique(_hash_ngrams_tagged(units, n)[0]) for n in (WORD_NGRAM, CHARACTER_NGRAM)]
    wanted = np.concatenate(by_length)
    first = np.searchsorted(index.ngrams, wanted, side="left")
    counts = np.searchsorted(index.ngrams, wanted, side="right") - first
    # The same n-gram may be in several sets: walk from the first of its entries to the last.
    places = np.repeat(first, counts) + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    hits = np.bincount(index.owners[places], minlength=len(index.names)).tolist()
    enough = max(1, min(min_hits, min_share * max(map(len, by_length))))
    return {name: count for name, count in zip(index.names, hits, strict=True) if count >= enough}


def write_contamination_drops(
    shard: Path, index_dir: Path, out: Path, min_hits: int = 1, min_share: float = 1.0
) -> dict[str, int]:
    """Write which documents of a shard contain evaluation text. Returns counts by set."""
    index = load_decontamination_index(index_dir)
    gids, reasons = [], []
    found = dict.fromkeys(index.names, 0)
    for columns in read_columns(shard, ["gid", "content"]):
        for place in _find_candidates(columns["content"], index):
            sets = find_contamination(columns["content"][place], index, min_hits, min_share)
            if sets:
                gids.append(columns["gid"][place])
                reasons.append("evaluation text: " + ", ".join(sets))
            for name in sets:
                found[name] += 1
    write_drops(out, gids, [""] * len(gids), reasons)
    return found


def find_ngrams(shard: Path, index_dir: Path) -> NDArray[np.int64]:
    """The places in ``index.ngrams`` of all n-grams that any document of a shard has."""
    index = load_decontamination_index(index_dir)
    found = np.zeros(len(index.ngrams), dtype=bool)
    for columns in read_columns(shard, ["content"]):
        texts = columns["content"]
        for chunk in split_by_characters(texts, np.arange(len(texts)), SHINGLE_CHARACTERS):
            units = hash_units([texts[place] for place in chunk], code=False)
            for n in (WORD_NGRAM, CHARACTER_NGRAM):
                hashes = np.unique(_hash_ngrams_tagged(units, n)[0])
                places = np.searchsorted(index.ngrams, hashes)
                inside = places < len(index.ngrams)
                hits = hashes[inside][index.ngrams[places[inside]] == hashes[inside]]
                if len(hits):  # of few documents, and an n-gram may be there for several sets
                    found |= np.isin(index.ngrams, hits)
    return np.flatnonzero(found)


def _find_candidates(texts: list[str], index: DecontaminationIndex) -> Iterator[int]:
    """Documents with any n-gram of the index. Few do, so only they are checked one by one."""
    for chunk in split_by_characters(texts, np.arange(len(texts)), SHINGLE_CHARACTERS):
        units = hash_units([texts[place] for place in chunk], code=False)
        suspect = np.zeros(len(chunk), dtype=bool)
        for n in (WORD_NGRAM, CHARACTER_NGRAM):
            hashes, counts = _hash_ngrams_tagged(units, n)
            places = np.minimum(np.searchsorted(index.ngrams, hashes), len(index.ngrams) - 1)
            hit = index.ngrams[places] == hashes if len(index.ngrams) else np.zeros(len(hashes), dtype=bool)
            suspect[np.repeat(np.arange(len(chunk)), counts)[hit]] = True
        yield from chunk[suspect].tolist()


def _hash_evaluation_set(texts: list[str]) -> tuple[Hashes, int]:
    """Every different n-gram of a set, and how many of its texts are too short to have one."""
    parts, short = [np.zeros(0, dtype=np.uint64)], 0
    unspaced = np.array([_unspaced_share(text) > UNSPACED_SHARE for text in texts], dtype=bool)
    for n, chosen in ((WORD_NGRAM, ~unspaced), (CHARACTER_NGRAM, unspaced)):
        some = [texts[place] for place in np.flatnonzero(chosen)]
        hashes, counts = _hash_ngrams_tagged(hash_units(some, code=False), n)
        parts.append(hashes)
        short += int(np.count_nonzero(counts == 0))
    return np.unique(np.concatenate(parts)), short


def _hash_ngrams_tagged(units: HashedUnits, n: int) -> tuple[Hashes, NDArray[np.int64]]:
    """The n-grams of a text as hashes; they never equal n-grams of another length."""
    hashes, counts = hash_ngrams(units, n)
    return splitmix64(hashes + np.uint64(n)), counts


def _unspaced_share(text: str) -> float:
    letters = [ord(char) for char in text if char.isalnum()]
    unspaced = sum(any(first <= point <= last for first, last in UNSPACED_SCRIPTS) for point in letters)
    return unspaced / max(1, len(letters))
