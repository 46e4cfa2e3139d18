"""Stage one of training: word counts of the documents, in bounded memory.

Chinese has no spaces, so entire clauses are words, and the number of distinct words grows with the text. So every data
structure has a memory limit:

1. Each shard of documents is counted into a table of fixed size. A full table is spilled to disk, partitioned by the
   hash of the word, and cleared.
2. The spills of all shards are aggregated, one hash partition after another, so that each word's total is known.
   Totals are kept while they fit into the limit. Beyond it a threshold T rises: a word with total c is kept with
   probability min(1, c/T) and then counts as max(c, T). That is unbiased for every word and every pair, while dropping
   rare words would cost Chinese up to 18% of its compression: rare clauses are made of common pairs.

Whether a word is kept depends on its total, T and a hash of word and seed, and T only on all totals. So neither the
number of workers nor any ordering changes a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tokenizers import Regex, pre_tokenizers

from zero2all.base.io import atomic_path, write_record
from zero2all.base.manifest import read_finished
from zero2all.base.paths import arrow_source
from zero2all.tokenizer.pretokenizer import PATTERN_RULES, WHOLE_TEXT
from zero2all.tokenizer.word_table import (
    ROW_BYTES,
    WordTable,
    add_rows,
    clear_table,
    count_texts,
    grow_table,
    small_table,
    table_bytes,
    word_hashes,
    word_uniforms,
)

HASH_PARTITIONS = 256  # of a spill, by the first byte of a word's hash
BATCH_DOCUMENTS = 256
SPLIT_CHARACTERS = 1 << 16  # of a text that a regular expression splits at a time: a list of words takes 50x its text
COUNTS_SCHEMA = pa.schema([("word", pa.large_binary()), ("count", pa.int64())])
ZSTD_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")


@dataclass(frozen=True)
class PretokenizeConfig:
    """How documents are split into words; all that a spill depends on besides its shard."""

    pattern: str
    """The name of a pattern, or a regular expression."""
    max_han_run: int
    share: float
    """Fraction of the documents, selected by a hash in their gid."""


@dataclass(frozen=True)
class ShardCounts:
    """The record of a counted shard."""

    key: str
    bytes: int
    rows: int
    runs: list[str]
    """File names of its spills."""


def count_shard(
    parquet: Path,
    stem: Path,
    key: str,
    config: PretokenizeConfig,
    classes: Path,
    table_memory: int,
    advance: Callable[[float], None] = lambda size: None,
) -> ShardCounts:
    """One task: count the words of a shard into spills ``<stem>-0.arrow`` and so on; its record is written last."""
    spills = SpillWriter(stem, config, np.load(classes), table_memory)
    size = 0
    with pq.ParquetFile(arrow_source(parquet), buffer_size=1 << 20) as shard:
        for batch in shard.iter_batches(batch_size=BATCH_DOCUMENTS, columns=["gid", "content"]):
            texts, selected = batch.column("content"), select_documents(batch.column("gid"), config.share)
            spills.count(texts, selected)
            counted = int(pc.binary_length(texts).to_numpy(zero_copy_only=False)[selected].sum())
            size += counted
            advance(counted)
    spills.spill()
    record = ShardCounts(key, size, spills.row_count, [path.name for path in spills.paths])
    write_record(stem.with_suffix(".json"), record)
    return record


def read_finished_count(stem: Path, key: str) -> ShardCounts | None:
    """The record of a shard that was counted before, if it is still current."""
    return read_finished(
        ShardCounts,
        stem.with_suffix(".json"),
        key,
        lambda record: all((stem.parent / spill).exists() for spill in record.runs),
    )


def select_documents(gids: pa.Array, fraction: float) -> NDArray[np.bool_]:
    """Sample documents by their gid, using other digits than those that decide the validation split."""
    if fraction >= 1:
        return np.ones(len(gids), bool)
    digits = pc.utf8_slice_codeunits(gids, -12)
    return pc.less(digits, f"{int(fraction * 2**48):012x}").to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def split_words(pattern: str, texts: list[str]) -> Iterator[list[str]]:
    """The words of texts by a regular expression of the encoder, a part of a text at a time.

    A word that crosses the end of a part is counted as two.
    """
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    for text in texts:
        for start in range(0, len(text), SPLIT_CHARACTERS):
            yield [word for word, _ in split.pre_tokenize_str(text[start : start + SPLIT_CHARACTERS])]


def _flatten_strings(texts: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The concatenated bytes of strings, and their offsets; only the offsets are copied."""
    texts = texts.cast(pa.large_binary())
    _, starts, data = texts.buffers()
    bounds = np.frombuffer(starts, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(data or b"", np.uint8), bounds


class SpillWriter:
    """Counts texts into a table of fixed size, and spills it to a new file whenever it is full."""

    def __init__(self, stem: Path, config: PretokenizeConfig, classes: NDArray[np.uint8], memory: int) -> None:
        self.stem, self.config, self.classes, self.memory = stem, config, classes, memory
        self.table = small_table()
        self.row_count = 0
        self.paths: list[Path] = []

    def count(self, texts: pa.Array, selected: NDArray[np.bool_]) -> None:
        if self.config.pattern in PATTERN_RULES:
            self._count(texts, selected, PATTERN_RULES[self.config.pattern])
            return
        for words in split_words(self.config.pattern, texts.filter(pa.array(selected)).to_pylist()):
            self._count(pa.array(words, pa.large_string()), np.ones(len(words), bool), WHOLE_TEXT)

    def _count(self, texts: pa.Array, selected: NDArray[np.bool_], family: tuple[int, int]) -> None:
        data, bounds = _flatten_strings(texts)
        rules = (*family, self.config.max_han_run)
        text_index = pos = 0
        while True:
            text_index, pos = count_texts(self.table, data, bounds, selected, self.classes, *rules, text_index, pos)
            if text_index == len(texts):
                return
            # While a table grows, and while it is written, half as much again is in use. A word must fit in any case.
            if table_bytes(self.table) * 3 <= self.memory or not self.table.size[0]:
                self.table = grow_table(self.table, int(bounds[text_index + 1] - pos) if not self.table.size[0] else 0)
            else:
                self.spill()

    def spill(self) -> None:
        path = self.stem.with_name(f"{self.stem.name}-{len(self.paths)}.arrow")
        _write_spill(self.table, path)
        self.paths.append(path)
        self.row_count += int(self.table.size[0])
        clear_table(self.table)


def _write_spill(table: WordTable, path: Path) -> None:
    partitions = (word_hashes(table) >> np.uint64(56)).astype(np.uint8)
    order = np.argsort(partitions, kind="stable")
    ends = np.cumsum(np.bincount(partitions, minlength=HASH_PARTITIONS))
    words, counts = table.words(), table.counts()
    with atomic_path(path) as partial, pa.ipc.new_file(str(partial), COUNTS_SCHEMA, options=ZSTD_OPTIONS) as file:
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            selected = order[start:end]
            file.write_batch(
                pa.record_batch([words.take(pa.array(selected)), pa.array(counts[selected])], schema=COUNTS_SCHEMA)
            )


@dataclass(frozen=True)
class WordCounts:
    """How many words there are, and how many were kept."""

    words: int
    """All occurrences."""
    different_words: int
    kept_words: int
    threshold: int
    """T: 1 if all words were kept."""


class WordPartition(NamedTuple):
    words: pa.Array
    totals: NDArray[np.int64]
    uniforms: NDArray[np.float64]
    """A random number for each word, which decides whether it is kept."""


@dataclass(frozen=True)
class AggregationLimits:
    """How many words are kept, and the memory to add them up in."""

    memory_cost: Callable[[int, int], int]
    """Memory that words need later, by their number and their bytes."""
    budget: int
    """Maximum of ``memory_cost``."""
    table_memory: int
    seed: int = 0
    """Seed of the sample that is kept if not all words are in budget."""


def aggregate_counts(
    spills: Sequence[Path],
    rows: int,
    out: Path,
    limits: AggregationLimits,
    advance: Callable[[float], None] = lambda part: None,
) -> WordCounts:
    """Aggregate all spills into one file of (word, count), sampled until the words are in budget."""
    kept: list[WordPartition] = []
    threshold, different, total, kept_words, kept_bytes = 1, 0, 0, 0, 0
    for part in _partition_totals(spills, rows, limits.seed, limits.table_memory):
        different, total = different + len(part.words), total + int(part.totals.sum())
        kept.append(_subsample(part, threshold))
        kept_words, kept_bytes = kept_words + len(kept[-1].words), kept_bytes + _total_bytes(kept[-1].words)
        while limits.memory_cost(kept_words, kept_bytes) > limits.budget:
            threshold *= 2
            kept = [_subsample(part, threshold) for part in kept]
            kept_words, kept_bytes = sum(len(one.words) for one in kept), sum(_total_bytes(one.words) for one in kept)
        advance(1)
    with atomic_path(out) as partial, pa.ipc.new_file(str(partial), COUNTS_SCHEMA, options=ZSTD_OPTIONS) as file:
        for part in kept:
            counts = pa.array(np.maximum(part.totals, threshold))
            file.write_batch(pa.record_batch([part.words, counts], schema=COUNTS_SCHEMA))
    return WordCounts(total, different, kept_words, threshold)


def _partition_totals(spills: Sequence[Path], rows: int, seed: int, memory: int) -> Iterator[WordPartition]:
    """All words with their totals, each once, one hash partition at a time."""
    table = small_table()
    num_passes = -(-2 * ROW_BYTES * rows // (HASH_PARTITIONS * memory))
    for part in range(HASH_PARTITIONS):
        for pass_index in range(num_passes):
            clear_table(table)
            for spill in spills:
                table = _add_partition(table, spill, part, num_passes, pass_index)
            hashes = word_hashes(table)
            order = np.argsort(hashes)
            uniforms = word_uniforms(hashes[order], seed)
            yield WordPartition(table.words().take(pa.array(order)), table.counts()[order], uniforms)


def _add_partition(table: WordTable, spill: Path, partition: int, num_passes: int, pass_index: int) -> WordTable:
    with pa.OSFile(str(spill)) as stream:
        batch = pa.ipc.open_file(stream).get_batch(partition)
    data, bounds = _flatten_strings(batch.column("word"))
    counts = batch.column("count").to_numpy()
    number = 0
    while (number := add_rows(table, data, bounds, counts, num_passes, pass_index, number)) < len(counts):
        table = grow_table(table, int(bounds[number + 1] - bounds[number]))
    return table


def _subsample(partition: WordPartition, threshold: int) -> WordPartition:
    kept = partition.uniforms * threshold < partition.totals
    if kept.all():
        return partition
    return WordPartition(partition.words.filter(pa.array(kept)), partition.totals[kept], partition.uniforms[kept])


def _total_bytes(words: pa.Array) -> int:
    return int(pc.sum(pc.binary_length(words)).as_py() or 0)
