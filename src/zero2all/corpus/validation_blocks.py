"""Validation text from inside long documents, for sources with too few documents to hold whole ones out.

A document is cut into windows of about a thousand characters. Some runs of windows are validation text (blocks). The
window on either side of a block goes to neither split, and so does every train window that repeats a block, in any
document. What is left of a document, and each of its blocks, becomes a document whose gid lies on its side of the
split, so later stages need to know nothing of this. Blocks depend on the document and ``holdout`` alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from zero2all.corpus.code_paths import is_labeled_as_code
from zero2all.corpus.dedup.drops import count_drops, write_drops
from zero2all.corpus.dedup.near import remaining_mask, shingle_hashes
from zero2all.corpus.dedup.params import DedupParams
from zero2all.corpus.dedup.shingles import Hashes
from zero2all.corpus.dedup.shuffle import load_rows, save_rows
from zero2all.corpus.document import SCHEMA, Document, gid_in_split, gid_position, is_validation
from zero2all.corpus.manifest import SPLITS
from zero2all.corpus.part_files import DocumentWriter
from zero2all.io import atomic_path
from zero2all.paths import arrow_source

LONG_CHARACTERS = 32_768  # a shorter document gives no blocks
WINDOW_CHARACTERS = 1024
MAX_SHIFT_CHARACTERS = 256  # of a window's start, to where a line, sentence or word begins
MIN_BLOCK_WINDOWS = 4
SEVERAL_BLOCKS_WINDOWS = 16  # validation windows of a document that are worth another block
MAX_BLOCKS = 16  # of a document
TRAIN, VALID = SPLITS
GAP = "gap beside validation text"
COPY = "copy of validation text"
COPY_SHINGLES = DedupParams(ngram=13)  # longer than for near duplicates: phrases and templates recur in one book
MIN_COPIED_SHARE = 0.5  # of a window's n-grams
BATCH_DOCUMENTS = 64


@dataclass(frozen=True)
class Span:
    """A run of windows, in characters."""

    start: int
    stop: int
    label: str
    """The split, or why it is in neither."""


@dataclass(frozen=True)
class SplitSizes:
    """What a split by document gives."""

    train_bytes: int
    valid_bytes: int
    long_gids: tuple[str, ...]
    """Documents of at least ``LONG_CHARACTERS``."""


@dataclass(frozen=True)
class BlockChoice:
    """Which long documents of a source give blocks."""

    holdout: float
    first_gid: str
    """The document that gives blocks even if chance would choose none."""

    def blocks(self, document: Document) -> list[range]:
        """The blocks of a document, each a range of its windows."""
        if len(document.content) < LONG_CHARACTERS:
            return []
        windows = len(window_bounds(document.content)) - 1
        # Where the fraction is less than a block, some documents give a whole one.
        chance = self.holdout * windows / MIN_BLOCK_WINDOWS
        if document.gid != self.first_gid and gid_position(document.gid) >= chance:
            return []
        return place_blocks(document.gid, windows, self.holdout)


def window_bounds(text: str) -> list[int]:
    """Where windows begin, and where the last one ends."""
    bounds = [0]
    while len(text) - bounds[-1] >= 2 * WINDOW_CHARACTERS:
        bounds.append(_next_start(text, bounds[-1] + WINDOW_CHARACTERS))
    return [*bounds, len(text)]


def _next_start(text: str, place: int) -> int:
    for mark in ("\n", "。", " "):
        found = text.find(mark, place, place + MAX_SHIFT_CHARACTERS)
        if found >= 0:
            return found + 1
    return place


def place_blocks(gid: str, windows: int, holdout: float) -> list[range]:
    """Blocks of ``holdout`` of the windows together, one in each of as many equal sections, placed by gid.

    Each section keeps room for a gap on both sides of its block and a train window.
    """
    wanted = max(MIN_BLOCK_WINDOWS, round(holdout * windows))
    count = min(MAX_BLOCKS, max(1, wanted // SEVERAL_BLOCKS_WINDOWS))
    section = windows // count
    size = min(math.ceil(wanted / count), section - 3)
    blocks = []
    for number in range(count):
        digest = hashlib.blake2b(f"{gid}/{number}".encode(), digest_size=8).digest()
        start = number * section + 1 + int.from_bytes(digest, "little") % (section - size - 1)
        blocks.append(range(start, start + size))
    return blocks


def document_spans(
    document: Document, choice: BlockChoice | None, holdout: float, copied: Hashes, can_cut: bool = True
) -> list[Span]:
    """The spans of a document to cut it into; of one that stays whole, none. ``copied`` are n-grams of all blocks.

    Unless ``can_cut``, a document with a copy of a block is one span.
    """
    blocks = choice.blocks(document) if choice else []
    if not blocks and is_validation(document.gid, holdout):
        return []
    bounds = window_bounds(document.content)
    labels = [TRAIN] * (len(bounds) - 1)
    for block in blocks:
        labels[block.start - 1 : block.stop + 1] = [GAP, *[VALID] * len(block), GAP]
    windows = [document.content[start:stop] for start, stop in pairwise(bounds)]
    are_copies = _are_copies(windows, _is_code(document), copied).tolist()
    labels = [COPY if copy and label == TRAIN else label for copy, label in zip(are_copies, labels, strict=True)]
    for place in [place for place, label in enumerate(labels) if label == COPY]:
        for beside in (place - 1, place + 1):  # where a copy begins and ends
            if 0 <= beside < len(labels) and labels[beside] == TRAIN:
                labels[beside] = GAP
    if set(labels) == {TRAIN}:
        return []
    if not can_cut:
        return [Span(0, len(document.content), COPY)]
    spans, first = [], 0
    for label, run in groupby(labels):
        last = first + len(list(run))
        spans.append(Span(bounds[first], bounds[last], label))
        first = last
    return spans


def cut_document(document: Document, spans: Sequence[Span], holdout: float) -> list[Document]:
    """A document for each span. Its id has the span, and ``others`` the gid of the document that it is part of."""
    others = json.loads(document.others) if document.others else {}
    pieces = []
    for span in spans:
        place = f"[{span.start}:{span.stop}]"
        pieces.append(
            replace(
                document,
                gid=gid_in_split(f"{document.gid}{place}", span.label == VALID, holdout),
                id=f"{document.id}{place}",
                content=document.content[span.start : span.stop],
                others=json.dumps({**others, "part_of": document.gid}, ensure_ascii=False, sort_keys=True),
            )
        )
    return pieces


def measure_split(part: Path, drop_files: Sequence[Path], holdout: float) -> SplitSizes:
    """What a split by document gives of a part."""
    sizes = {TRAIN: 0, VALID: 0}
    long_gids = []
    for document, is_kept in _read_part(part, drop_files):
        if is_kept:
            sizes[VALID if is_validation(document.gid, holdout) else TRAIN] += len(document.content.encode())
            if len(document.content) >= LONG_CHARACTERS:
                long_gids.append(document.gid)
    return SplitSizes(sizes[TRAIN], sizes[VALID], tuple(long_gids))


def write_block_ngrams(part: Path, drop_files: Sequence[Path], choice: BlockChoice, out: Path) -> int:
    """Write the n-grams of a part's blocks. Returns the number of documents that have blocks."""
    found = [np.zeros(0, dtype=np.uint64)]
    for document, is_kept in _read_part(part, drop_files):
        blocks = choice.blocks(document) if is_kept else []
        if blocks:
            bounds = window_bounds(document.content)
            texts = [document.content[bounds[block.start] : bounds[block.stop]] for block in blocks]
            found.append(shingle_hashes(texts, _is_code(document), COPY_SHINGLES)[0])
    save_rows(out, np.unique(np.concatenate(found)))
    return len(found) - 1


def merge_block_ngrams(files: Sequence[Path], out: Path) -> None:
    save_rows(out, np.unique(np.concatenate([load_rows(path) for path in files])))


def write_cut_part(
    part: Path,
    drop_files: Sequence[Path],
    choice: BlockChoice | None,
    holdout: float,
    ngrams: Path,
    out: Path,
    can_cut: bool = True,
) -> bool:
    """Write a part with its documents cut, and ``<out>.drops`` with the spans in neither split.

    Returns False and writes nothing if every document of the part stays whole.
    """
    copied: Hashes = np.asarray(load_rows(ngrams))
    cuts = {
        number: spans
        for number, (document, is_kept) in enumerate(_read_part(part, drop_files))
        if is_kept and (spans := document_spans(document, choice, holdout, copied, can_cut))
    }
    if not cuts:
        return False
    drops: list[tuple[str, str, str]] = []
    with atomic_path(out) as partial, DocumentWriter(partial) as writer:
        for number, (document, _) in enumerate(_read_part(part, drop_files)):
            spans = cuts.get(number, [])
            pieces = cut_document(document, spans, holdout) or [document]
            writer.write(pa.RecordBatch.from_pylist([vars(piece) for piece in pieces], schema=SCHEMA))
            drops += [
                (piece.gid, document.gid, span.label)
                for piece, span in zip(pieces, spans, strict=False)
                if span.label not in SPLITS
            ]
    gids, kept, reasons = (list(column) for column in zip(*drops, strict=True)) if drops else ([], [], [])
    write_drops(cut_drops_path(out), gids, kept, reasons)
    return True


def cut_drops_path(cut_part: Path) -> Path:
    return cut_part.with_name(cut_part.name + ".drops")


def _read_part(part: Path, drop_files: Sequence[Path]) -> Iterator[tuple[Document, bool]]:
    """The documents of a part, each with whether it is kept by the drop files."""
    dropped_counts = count_drops(drop_files)
    with pq.ParquetFile(arrow_source(part)) as table:
        for batch in table.iter_batches(batch_size=BATCH_DOCUMENTS):
            rows = batch.to_pylist()
            kept = remaining_mask([row["gid"] for row in rows], dropped_counts).tolist()
            for row, is_kept in zip(rows, kept, strict=True):
                yield Document(**row), is_kept


def _is_code(document: Document) -> bool:
    return is_labeled_as_code(document.category, document.title, document.others)


def _are_copies(windows: list[str], code: bool, copied: Hashes) -> NDArray[np.bool_]:
    """Which windows have most of their n-grams in common with ``copied``, which is sorted."""
    if len(copied) == 0:
        return np.zeros(len(windows), dtype=bool)
    hashes, counts = shingle_hashes(windows, code, COPY_SHINGLES)
    places = np.searchsorted(copied, hashes)
    is_shared = copied[np.minimum(places, len(copied) - 1)] == hashes
    owners = np.repeat(np.arange(len(windows)), counts)
    shared: NDArray[np.intp] = np.bincount(owners[is_shared], minlength=len(windows))
    return (counts > 0) & (shared >= MIN_COPIED_SHARE * counts)
