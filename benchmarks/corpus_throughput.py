"""Where the time of a corpus build goes: reading by shape, every filter, and the stages on two workers.

    python -m benchmarks corpus_throughput --corpus TEXT --work /tmp/throughput > throughput.md

Ingest is reading, parsing, mapping to the schema and assigning gids, into Arrow batches, without cleaning and without
writing. It is measured against a minimal baseline for the same text (orjson per line, orjson for a full array, pyarrow
for Parquet, bytes decoded for a text file), turn by turn in one process, in CPU seconds. MB are 10^6 bytes of the file
for ingest, and of text in UTF-8 everywhere else.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
from benchmarks.common import benchmark_parser, cpu_seconds, show, take_turns, wall_seconds

from zero2all.base.charts.table import markdown_table
from zero2all.base.tasks import TaskEngine
from zero2all.corpus import build_corpus
from zero2all.corpus.document import Document
from zero2all.corpus.filters import DEFAULT_FILTERS, Change, Drop, build_filters, classify_text
from zero2all.corpus.ingest import FileStats, read_documents
from zero2all.corpus.part_files import DocumentWriter
from zero2all.corpus.readers import RawFile, list_files
from zero2all.recipe import CorpusRecipe, SourceRecipe, TokenizerRecipe, TokensRecipe
from zero2all.tokenizer import train_tokenizer
from zero2all.tokens.build_store import build_tokens

KINDS = ("zh", "en", "code")
STAGES = {
    "write_part": "read, clean, write parts",
    "write_exact_keys": "exact duplicates",
    "write_exact_drops": "exact duplicates",
    "write_signatures": "near duplicates",
    "write_near_links": "near duplicates",
    "join_in_memory": "near duplicates",
    "write_star": "near duplicates",
    "write_labels": "near duplicates",
    "write_labeled_nodes": "near duplicates",
    "write_near_drops": "near duplicates",
    "collect_shard_drops": "exact duplicates",
    "measure_split": "validation text from long documents",
    "write_block_ngrams": "validation text from long documents",
    "merge_block_ngrams": "validation text from long documents",
    "write_cut_part": "validation text from long documents",
    "write_validation_signatures": "duplicates of validation documents",
    "build_validation_index": "duplicates of validation documents",
    "write_validation_drops": "duplicates of validation documents",
    "write_shards": "split and write shards",
    "_encode_shard": "tokenize",
}


def show_table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    show(f"{title}:\n\n{markdown_table(head, rows)}\n")


def make_files(corpus: Path, work: Path, megabytes: float) -> dict[str, Path]:
    """The same articles as JSONL, JSON array and Parquet, in Chinese and English, and books as plain text."""
    chinese = [orjson.loads(line) for line in (corpus / "zh/wiki2019zh_style/wiki_zh_00.jsonl").open("rb")]
    english = pq.read_table(corpus / "en/wiki_parquet").select(["id", "url", "title", "text"]).to_pylist()
    files = {}
    for kind, records in (("zh", chinese), ("en", english)):
        lines = [orjson.dumps(record) for record in records]
        lines = lines * max(1, round(megabytes * 1e6 / sum(map(len, lines))))
        files[f"JSONL {kind}"] = work / f"{kind}.jsonl"
        files[f"JSONL {kind}"].write_bytes(b"\n".join(lines) + b"\n")
        files[f"JSON array {kind}"] = work / f"{kind}.json"
        files[f"JSON array {kind}"].write_bytes(b"[" + b",\n".join(lines) + b"]")
        files[f"Parquet {kind}"] = work / f"{kind}.parquet"
        rows = pa.Table.from_pylist(records * (len(lines) // len(records)))
        pq.write_table(rows, files[f"Parquet {kind}"], compression="zstd", row_group_size=10_000)
    for kind, book in (("zh", "zh/txt/三国演义.txt"), ("en", "en/books/Moby-Dick--Or-The-Whale_2701.txt")):
        files[f"text {kind}"] = work / f"{kind}.txt"
        text = (corpus / book).read_bytes()
        files[f"text {kind}"].write_bytes(text * max(1, round(megabytes * 1e6 / len(text))))
    return files


def bare(path: Path) -> None:
    if path.suffix == ".jsonl":
        with open(path, "rb") as stream:
            for line in stream:
                orjson.loads(line)
    elif path.suffix == ".json":
        orjson.loads(path.read_bytes())
    elif path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            for _ in file.iter_batches(1000, use_threads=False):
                pass
    else:
        path.read_text(encoding="utf-8")


def batches(path: Path) -> Iterator[pa.RecordBatch]:
    return read_documents(RawFile.from_path(path), SourceRecipe(name="s", paths=[str(path)]), FileStats())


def write(made: list[pa.RecordBatch], path: Path) -> None:
    with DocumentWriter(path) as writer:
        for batch in made:
            writer.write(batch)


def measure_ingest(files: dict[str, Path], rounds: int, work: Path) -> None:
    rows = []
    for shape, path in files.items():

        def ingest(path: Path = path) -> None:
            for _ in batches(path):
                pass

        made = list(batches(path))
        texts = [text.encode() for batch in made for text in batch["content"].to_pylist()]

        def hashes(texts: list[bytes] = texts) -> None:
            for text in texts:
                hashlib.blake2b(text, digest_size=16)

        def written(made: list[pa.RecordBatch] = made) -> None:
            write(made, work / "written.parquet")

        sides: dict[str, Callable[[], object]] = {
            "bare": partial(bare, path),
            "ours": ingest,
            "hashes": hashes,
            "written": written,
        }
        times = take_turns({name: partial(cpu_seconds, side) for name, side in sides.items()}, rounds)
        plain, ours, hashed, stored = map(median, times.values())
        size, text = path.stat().st_size / 1e6, sum(map(len, texts)) / 1e6
        shares = f"{size / plain:.0f}", f"{size / ours:.0f}", f"{plain / ours:.2f}", f"{hashed / ours:.0%}"
        rows.append((shape, f"{size:.0f}", *shares, f"{text / stored:.0f}"))
    head = ("shape", "MB", "bare", "ingest", "ratio", "of it the hash of the gid", "writing Parquet (zstd)")
    show_table("Ingest, one process, MB of the file per CPU-second", head, rows)


def measure_filters(corpus: Path) -> None:
    filters = build_filters(DEFAULT_FILTERS)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    seen: dict[tuple[str, str], int] = defaultdict(int)
    dropped: dict[tuple[str, str], int] = defaultdict(int)
    for kind in KINDS:
        source = SourceRecipe(name=kind, paths=[str(corpus / kind)])
        for file in list_files(source):
            for batch in read_documents(file, source, FileStats()):
                for row in batch.to_pylist():
                    document = Document(**row)
                    for one in filters:
                        key = one.name, kind
                        sizes[key] += len(document.content.encode())
                        seen[key] += 1
                        start = time.perf_counter()
                        classify_text(document)  # cached: the first filter pays for all after it
                        asked = time.perf_counter()
                        result = one(document)
                        seconds[key] += time.perf_counter() - asked
                        seconds["classify_text", kind] += asked - start
                        if isinstance(result, Drop):
                            dropped[key] += 1
                            break
                        if isinstance(result, Change):
                            document = replace(document, content=result.content)
    names = ["classify_text", *(one.name for one in filters)]
    for kind in KINDS:
        sizes["classify_text", kind], seen["classify_text", kind] = sizes["normalize", kind], seen["normalize", kind]
    rows = []
    for name in names:
        cells = []
        for kind in KINDS:
            key = name, kind
            cells += [f"{sizes[key] / 1e6 / seconds[key]:.0f}", f"{dropped[key] / seen[key]:.2%}"]
        rows.append((f"`{name}`", *cells))
    cells = []
    for kind in KINDS:
        cells += [f"{sizes['normalize', kind] / 1e6 / sum(seconds[name, kind] for name in names):.0f}", ""]
    rows.append(("all together", *cells))
    title = "Filters of the default list, one process, MB of text per second, and documents dropped"
    show_table(title, ("filter", *(part for kind in KINDS for part in (kind, "dropped"))), rows)


@dataclass(frozen=True)
class TimedEngine(TaskEngine):
    """Wall seconds by function."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        start = time.perf_counter()
        result = super().run(function, *args, **kwargs)
        name = getattr(function, "__name__", None) or function.func.__name__  # type: ignore[attr-defined]
        self.seconds[STAGES[name]] += time.perf_counter() - start
        return result


def measure_build(corpus: Path, work: Path, workers: int) -> tuple[Path, Path]:
    engine = TimedEngine(workers=workers)
    sources = [SourceRecipe(name=kind, paths=[str(corpus / kind)]) for kind in KINDS]
    recipe = CorpusRecipe(sources=sources, dedup={"near": True}, holdout=0.01)
    start = time.perf_counter()
    built_corpus = build_corpus(recipe, work / "documents", engine)
    built = time.perf_counter() - start
    read = sum(counts.read.bytes for counts in built_corpus.sources.values()) / 1e6
    kept = built_corpus.bytes / 1e6
    train_tokenizer(TokenizerRecipe(vocab_size=8192), work / "documents", work / "tokenizer")
    start = time.perf_counter()
    build_tokens(TokensRecipe(), work / "documents", work / "tokenizer", work / "tokens", engine)
    encoded = time.perf_counter() - start
    sizes = f"{read:.0f} MB of text read, {kept:.0f} MB kept"
    rows = [(stage, f"{taken:.1f}", f"{read / taken:.0f}") for stage, taken in engine.seconds.items()]
    rows.append(("total, with overhead", f"{built + encoded:.1f}", f"{read / (built + encoded):.1f}"))
    title = f"Stages, local engine, {workers} workers, wall seconds; {sizes}"
    show_table(title, ("stage", "seconds", "MB/s"), rows)
    return work / "documents", work / "tokenizer"


def measure_tokens(documents: Path, tokenizer: Path, work: Path, rounds: int) -> None:
    shards = sorted((documents / "train").glob("*.parquet"))
    texts = [text for shard in shards for text in pq.read_table(shard)["content"].to_pylist()]
    size = sum(len(text.encode()) for text in texts) / 1e6
    engine = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def plain() -> None:
        for start in range(0, len(texts), 256):
            engine.encode_batch_fast(texts[start : start + 256], add_special_tokens=False)

    def ours() -> None:
        shutil.rmtree(work / "tokens")
        build_tokens(TokensRecipe(), documents, tokenizer, work / "tokens")

    times = take_turns({"bare": partial(wall_seconds, plain), "ours": partial(wall_seconds, ours)}, rounds)
    bare_seconds, our_seconds = map(median, times.values())
    row = f"{size / bare_seconds:.1f}", f"{size / our_seconds:.1f}", f"{bare_seconds / our_seconds:.2f}"
    title = "Tokenizing, one process with the threads of the engine, wall MB/s"
    show_table(title, ("bare `encode_batch_fast`", "`z2a tokens build`", "ratio"), [row])


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="the shared test corpus")
    parser.add_argument("--work", type=Path, required=True, help="a directory that is emptied")
    parser.add_argument("--megabytes", type=float, default=40, help="of each file for ingest")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--parts", nargs="+", default=["ingest", "filters", "build"], help="what to measure")
    options = parser.parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    if "ingest" in options.parts:
        measure_ingest(make_files(options.corpus, options.work, options.megabytes), options.rounds, options.work)
    if "filters" in options.parts:
        measure_filters(options.corpus)
    if "build" in options.parts:
        documents, tokenizer = measure_build(options.corpus, options.work, options.workers)
        measure_tokens(documents, tokenizer, options.work, options.rounds)
    shutil.rmtree(options.work)
