"""The validation split: blocks of long documents where there are too few, and train documents that repeat it.

Sources with too few documents to hold whole ones out give validation text from inside long ones. A document is cut into
windows of about a thousand characters. Some runs of windows are validation text (blocks). The window on either side of
a block goes to neither split, and so does every train window that repeats a block, in any document. What is left of a
document, and each of its blocks, becomes a document whose gid lies on its side of the split, so later stages need to
know nothing of this. Blocks depend on the document and ``holdout`` alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from zero2all.base.console import say
from zero2all.base.io import atomic_path, fingerprint, write_json
from zero2all.base.manifest import read_finished
from zero2all.base.paths import arrow_source
from zero2all.base.tasks import TaskEngine
from zero2all.corpus.dedup.drops import count_drops, write_drops
from zero2all.corpus.dedup.near import remaining_mask, shingle_hashes
from zero2all.corpus.dedup.shingles import Hashes
from zero2all.corpus.dedup.shuffle import DedupParams, load_rows, save_rows
from zero2all.corpus.dedup.stage import DoneMarker, task_runner
from zero2all.corpus.dedup.validation_overlap import (
    build_validation_index,
    write_validation_drops,
    write_validation_signatures,
)
from zero2all.corpus.document import SCHEMA, Document, gid_in_split, gid_position, is_labeled_as_code, is_validation
from zero2all.corpus.manifest import SPLITS
from zero2all.corpus.part_files import DocumentWriter, PartFile
from zero2all.recipe import CorpusRecipe

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
FEW_EXPECTED_DOCUMENTS = 20  # in the smaller split: with more, chance hardly leaves it empty
MIN_VALIDATION_BYTES = 4096


@dataclass(frozen=True)
class SplitSpan:
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
    document: Document, choice: BlockChoice | None, holdout: float, copied: Hashes, *, can_cut: bool = True
) -> list[SplitSpan]:
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
    are_copies = _are_copies(windows, code=_is_code(document), copied=copied).tolist()
    labels = [COPY if copy and label == TRAIN else label for copy, label in zip(are_copies, labels, strict=True)]
    for place in [place for place, label in enumerate(labels) if label == COPY]:
        for beside in (place - 1, place + 1):  # where a copy begins and ends
            if 0 <= beside < len(labels) and labels[beside] == TRAIN:
                labels[beside] = GAP
    if set(labels) == {TRAIN}:
        return []
    if not can_cut:
        return [SplitSpan(0, len(document.content), COPY)]
    spans, first = [], 0
    for label, run in groupby(labels):
        last = first + len(list(run))
        spans.append(SplitSpan(bounds[first], bounds[last], label))
        first = last
    return spans


def cut_document(document: Document, spans: Sequence[SplitSpan], holdout: float) -> list[Document]:
    """A document for each span. Its id has the span, and ``others`` the gid of the document that it is part of."""
    others = json.loads(document.others) if document.others else {}
    pieces = []
    for span in spans:
        place = f"[{span.start}:{span.stop}]"
        pieces.append(
            replace(
                document,
                gid=gid_in_split(f"{document.gid}{place}", valid=span.label == VALID, holdout=holdout),
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
            found.append(shingle_hashes(texts, code=_is_code(document), params=COPY_SHINGLES)[0])
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
        if is_kept and (spans := document_spans(document, choice, holdout, copied, can_cut=can_cut))
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


def _are_copies(windows: list[str], *, code: bool, copied: Hashes) -> NDArray[np.bool_]:
    """Which windows have most of their n-grams in common with ``copied``, which is sorted."""
    if len(copied) == 0:
        return np.zeros(len(windows), dtype=bool)
    hashes, counts = shingle_hashes(windows, code=code, params=COPY_SHINGLES)
    places = np.searchsorted(copied, hashes)
    is_shared = copied[np.minimum(places, len(copied) - 1)] == hashes
    owners = np.repeat(np.arange(len(windows)), counts)
    shared: NDArray[np.intp] = np.bincount(owners[is_shared], minlength=len(windows))
    return (counts > 0) & (shared >= MIN_COPIED_SHARE * counts)


def split_parts(
    engine: TaskEngine, recipe: CorpusRecipe, parts: list[PartFile], work: Path, key: str
) -> list[PartFile]:
    """The parts with documents cut and drop files added, so that every gid tells its split and nothing crosses it.

    ``key`` fingerprints everything that the documents depend on.
    """
    if not recipe.holdout:
        return parts
    chats = {source.name for source in recipe.sources if source.kind != "text"}
    cut = _cut_parts(engine, recipe.holdout, parts, chats, work / "blocks")
    cut_names = [after.path.name for before, after in zip(parts, cut, strict=True) if before is not after]
    key = fingerprint([key, cut_names]) if cut_names else key
    # After the other drops, since a validation document that is dropped itself drops no train document.
    return _drop_near_validation(engine, recipe, cut, work / "validation", key)


def _cut_parts(
    engine: TaskEngine, holdout: float, parts: list[PartFile], chats: set[str], work: Path
) -> list[PartFile]:
    """``chats`` are sources whose documents are dropped or kept as a whole."""
    choices = _choose_blocks(engine, holdout, [part for part in parts if part.record.source not in chats])
    if not choices:
        return parts
    chosen = [part for part in parts if part.record.source in choices]
    files = [work / "ngrams" / f"{part.path.name}.npy" for part in chosen]
    outs = [work / "cut" / part.path.name for part in parts]
    title = "taking validation text from long documents"
    with task_runner(engine, title, len(chosen) + 1 + len(parts)) as run_tasks:
        names = [part.record.source for part in parts]
        with_blocks = [(part.path, part.drop_files, choices[part.record.source]) for part in chosen]
        counts = run_tasks(write_block_ngrams, [(*task, out) for task, out in zip(with_blocks, files, strict=True)])
        run_tasks(merge_block_ngrams, [(files, work / "ngrams.npy")])
        tasks = [
            (part.path, part.drop_files, choices.get(name), holdout, work / "ngrams.npy", out, name not in chats)
            for part, name, out in zip(parts, names, outs, strict=True)
        ]
        was_cut = run_tasks(write_cut_part, tasks)
    for name in choices:
        documents = sum(count for part, count in zip(chosen, counts, strict=True) if part.record.source == name)
        say(f"{name}: too few documents to hold whole ones out; validation text is taken from inside {documents}")
    return [
        replace(part, path=out, drop_files=(*part.drop_files, cut_drops_path(out))) if changed else part
        for part, out, changed in zip(parts, outs, was_cut, strict=True)
    ]


def _choose_blocks(engine: TaskEngine, holdout: float, parts: list[PartFile]) -> dict[str, BlockChoice]:
    """The blocks by source, for sources whose documents are long and too few for a usable split by document."""
    documents: Counter[str] = Counter()
    for part in parts:
        documents[part.record.source] += part.record.documents
    few = {name for name, count in documents.items() if count * min(holdout, 1 - holdout) < FEW_EXPECTED_DOCUMENTS}
    measured = [part for part in parts if part.record.source in few]
    sizes = engine.run(measure_split, [(part.path, part.drop_files, holdout) for part in measured])
    choices = {}
    for name in sorted(few):
        mine = [size for part, size in zip(measured, sizes, strict=True) if part.record.source == name]
        long_gids = [gid for size in mine for gid in size.long_gids]
        if long_gids and not _is_usable_split(mine, holdout):
            choices[name] = BlockChoice(holdout, min(long_gids))
    return choices


def _is_usable_split(sizes: list[SplitSizes], holdout: float) -> bool:
    """Whether there is validation text to speak of, and training has at least half of what it should have."""
    train = sum(size.train_bytes for size in sizes)
    valid = sum(size.valid_bytes for size in sizes)
    return valid >= MIN_VALIDATION_BYTES and train >= (1 - holdout) / 2 * (train + valid)


def _drop_near_validation(
    engine: TaskEngine, recipe: CorpusRecipe, parts: list[PartFile], work: Path, key: str
) -> list[PartFile]:
    """Add to each part a file that names its train documents that are near duplicates of validation documents."""
    outs = [work / "drops" / part.path.name for part in parts]
    added = [replace(part, drop_files=(*part.drop_files, out)) for part, out in zip(parts, outs, strict=True)]
    done = work / "done.json"
    if read_finished(DoneMarker, done, key):
        return added
    done.unlink(missing_ok=True)
    params = DedupParams(threshold=recipe.dedup.threshold)
    signed = [work / "signed" / f"{part.path.name}.npy" for part in parts]
    with task_runner(engine, "finding duplicates of validation documents", 2 * len(parts) + 1) as run_tasks:
        files = [(part.path, part.drop_files, recipe.holdout) for part in parts]
        run_tasks(write_validation_signatures, [(*of, out, params) for of, out in zip(files, signed, strict=True)])
        (documents,) = run_tasks(build_validation_index, [(signed, work / "index", params)])
        tasks = [(*of, work / "index", out, params) for of, out in zip(files, outs, strict=True)]
        counts = run_tasks(write_validation_drops, tasks)
    write_json(done, {"key": key, "validation": documents, "dropped": sum(counts)})
    return added
