"""Stage one of training: the words of the documents and how often each one stands there, in bounded memory.

Chinese has no spaces, so whole clauses are words, and the number of different ones grows as long as the text does. So
nothing is held that has no ceiling:

1. Each shard of documents is counted into a table of fixed size. When it is full it goes to disk as a *run*, parted by
   the hash of the word, and an empty one goes on.
2. The runs of all shards are added up, one part of the hashes after another, so that each word's total is known.
   Totals are kept while they fit into the ceiling. Past it a threshold T rises: a word with total c stays with
   probability min(1, c/T) and then counts as max(c, T). That is unbiased for every word and every pair, while leaving
   rare words out would cost Chinese up to 18 % of its compression: rare clauses are made of common pairs.

Whether a word stays depends on its total, T and a hash of word and seed, and T only on all totals. So neither the
number of workers nor the order of anything changes a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from zero2all.io import atomic_path, read_json, write_json
from zero2all.paths import arrow_source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zero2all.tokenizer.word_table import Table

PARTS = 256  # of a run, by the first byte of a word's hash
BATCH_DOCUMENTS = 256
COUNTED = pa.schema([("word", pa.large_binary()), ("count", pa.int64())])
COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")


@dataclass(frozen=True)
class Cutting:
    """How words are taken from documents; all that a run depends on besides its shard."""

    pattern: str
    chop: int
    share: float
    """Of the documents, by a hash that is in their gid."""


def count_shard(
    parquet: Path,
    stem: Path,
    key: str,
    cutting: Cutting,
    classes: Path,
    memory: int,
    advance: Callable[[float], None] = lambda size: None,
) -> dict[str, Any]:
    """One task: the words of a shard as runs ``<stem>-0.arrow`` and so on; its record is written last."""
    runs = RunWriter(stem, cutting, np.load(classes), memory)
    size = 0
    with pq.ParquetFile(arrow_source(parquet), buffer_size=1 << 20) as shard:
        for batch in shard.iter_batches(batch_size=BATCH_DOCUMENTS, columns=["gid", "content"]):
            texts, taken = batch.column("content"), in_sample(batch.column("gid"), cutting.share)
            runs.count(texts, taken)
            counted = int(pc.binary_length(texts).to_numpy(zero_copy_only=False)[taken].sum())
            size += counted
            advance(counted)
    runs.spill()
    record = {"key": key, "bytes": size, "rows": runs.rows, "runs": [path.name for path in runs.paths]}
    write_json(stem.with_suffix(".json"), record)
    return record


def finished(stem: Path, key: str) -> dict[str, Any] | None:
    """The record of a shard that was counted before, if it is still what would be counted now."""
    path = stem.with_suffix(".json")
    if not path.exists():
        return None
    record: dict[str, Any] = read_json(path)
    return record if record["key"] == key and all((stem.parent / run).exists() for run in record["runs"]) else None


def in_sample(gids: pa.Array, share: float) -> NDArray[np.bool_]:
    """Each document in or out by its gid, by other digits than those that decide the held-out split."""
    if share >= 1:
        return np.ones(len(gids), bool)
    digits = pc.utf8_slice_codeunits(gids, -12)
    return pc.less(digits, f"{int(share * 2**48):012x}").to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _flat(texts: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes of strings end to end, and where each one begins; nothing is copied but the places."""
    texts = texts.cast(pa.large_binary())
    _, starts, data = texts.buffers()
    bounds = np.frombuffer(starts, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(data or b"", np.uint8), bounds


class RunWriter:
    """Counts texts into a table of fixed size, and writes it to a new run whenever it is full."""

    def __init__(self, stem: Path, cutting: Cutting, classes: NDArray[np.uint8], memory: int) -> None:
        from zero2all.tokenizer.word_table import small_table

        self.stem, self.cutting, self.classes, self.memory = stem, cutting, classes, memory
        self.table = small_table()
        self.rows = 0
        self.paths: list[Path] = []

    def count(self, texts: pa.Array, taken: NDArray[np.bool_]) -> None:
        from zero2all.tokenizer.cut import RULES
        from zero2all.tokenizer.word_table import count_texts, grown, memory_of

        data, bounds = _flat(texts)
        rules = (*RULES[self.cutting.pattern], self.cutting.chop)
        number = at = 0
        while True:
            number, at = count_texts(self.table, data, bounds, taken, self.classes, *rules, number, at)
            if number == len(texts):
                return
            # While a table grows, and while it is written, half as much again is in use. A word must fit in any case.
            if memory_of(self.table) * 3 <= self.memory or not self.table.size[0]:
                self.table = grown(self.table, int(bounds[number + 1] - at) if not self.table.size[0] else 0)
            else:
                self.spill()

    def spill(self) -> None:
        from zero2all.tokenizer.word_table import clear

        path = self.stem.with_name(f"{self.stem.name}-{len(self.paths)}.arrow")
        _write_run(self.table, path)
        self.paths.append(path)
        self.rows += int(self.table.size[0])
        clear(self.table)


def _write_run(table: Table, path: Path) -> None:
    from zero2all.tokenizer.word_table import word_hashes

    part_of = (word_hashes(table) >> np.uint64(56)).astype(np.uint8)
    order = np.argsort(part_of, kind="stable")
    ends = np.cumsum(np.bincount(part_of, minlength=PARTS))
    words, counts = table.words(), table.counts()
    with atomic_path(path) as partial, pa.ipc.new_file(str(partial), COUNTED, options=COMPRESSED) as file:
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            mine = order[start:end]
            file.write_batch(pa.record_batch([words.take(pa.array(mine)), pa.array(counts[mine])], schema=COUNTED))


Part = tuple[pa.Array, "NDArray[np.int64]", "NDArray[np.float64]"]  # words, their totals, their chances


def collect(
    runs: Sequence[Path],
    rows: int,
    out: Path,
    cost: Callable[[int, int], int],
    room: int,
    seed: int,
    memory: int,
    advance: Callable[[float], None] = lambda part: None,
) -> dict[str, Any]:
    """Add up all runs into one file of (word, count), sampled so that ``cost(words, letters)`` fits into ``room``."""
    kept: list[Part] = []
    threshold, different, total = 1, 0, 0
    for part in _totals(runs, rows, seed, memory):
        different, total = different + len(part[0]), total + int(part[1].sum())
        kept.append(_sampled(part, threshold))
        while cost(sum(len(words) for words, _, _ in kept), sum(_letters(words) for words, _, _ in kept)) > room:
            threshold *= 2
            kept = [_sampled(part, threshold) for part in kept]
        advance(1)
    with atomic_path(out) as partial, pa.ipc.new_file(str(partial), COUNTED, options=COMPRESSED) as file:
        for words, counts, _ in kept:
            file.write_batch(pa.record_batch([words, pa.array(np.maximum(counts, threshold))], schema=COUNTED))
    return {
        "words": total,
        "different_words": different,
        "kept_words": sum(len(words) for words, _, _ in kept),
        "threshold": threshold,
    }


def _totals(runs: Sequence[Path], rows: int, seed: int, memory: int) -> Iterator[Part]:
    """All words with their totals, each once, a part of the hashes at a time."""
    from zero2all.tokenizer.word_table import ROW_BYTES, chances, clear, small_table, word_hashes

    table = small_table()
    passes = -(-2 * ROW_BYTES * rows // (PARTS * memory))
    for part in range(PARTS):
        for turn in range(passes):
            clear(table)
            for run in runs:
                table = _add_part(table, run, part, passes, turn)
            hashes = word_hashes(table)
            order = np.argsort(hashes)
            yield table.words().take(pa.array(order)), table.counts()[order], chances(hashes[order], seed)


def _add_part(table: Table, run: Path, part: int, passes: int, turn: int) -> Table:
    from zero2all.tokenizer.word_table import add_rows, grown

    with pa.OSFile(str(run)) as stream:
        batch = pa.ipc.open_file(stream).get_batch(part)
    data, bounds = _flat(batch.column("word"))
    counts = batch.column("count").to_numpy()
    number = 0
    while (number := add_rows(table, data, bounds, counts, passes, turn, number)) < len(counts):
        table = grown(table, int(bounds[number + 1] - bounds[number]))
    return table


def _sampled(part: Part, threshold: int) -> Part:
    words, counts, drawn = part
    stays = drawn * threshold < counts
    if stays.all():
        return part
    return words.filter(pa.array(stays)), counts[stays], drawn[stays]


def _letters(words: pa.Array) -> int:
    return int(pc.sum(pc.binary_length(words)).as_py() or 0)
