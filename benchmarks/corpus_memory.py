"""Peak memory of reading one large file: a JSON array, JSONL and Parquet of 1 GB and 4 GB, made by repetition.

    python -m benchmarks corpus_memory --text TEXT/zh/wiki2019zh_style/wiki_zh_00.jsonl --work /tmp/memory

Each file is read in a process of its own; the result is that process's peak resident memory.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from benchmarks.common import benchmark_parser, peak_bytes, run_child, show_json

from zero2all.corpus.part_files import PartTask, write_part
from zero2all.corpus.readers import RawFile
from zero2all.recipe import SourceRecipe


def make_file(kind: str, size: int, records: list[dict[str, str]], path: Path) -> None:
    """Repeat the records, each time with other ids, until the file has ``size`` bytes."""
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    if kind == "parquet":
        table = pa.Table.from_pylist(records)
        with pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False) as writer:
            while path.stat().st_size < size:
                writer.write_table(table, row_group_size=1000)
        return
    before, between, after = ("[", ",\n", "]") if kind == "json" else ("", "\n", "\n")
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(before + between.join(lines))
        while stream.tell() < size:
            stream.write(between + between.join(lines))
        stream.write(after)


def read_one(path: Path, out: Path) -> None:
    start = time.perf_counter()
    task = PartTask(SourceRecipe(name="s", paths=[str(path)]), (RawFile.from_path(path),), path.name)
    sidecar = write_part(task, [], out / path.stem)
    seconds = time.perf_counter() - start
    metrics = {
        "documents": sidecar.documents,
        "peak_mb": round(peak_bytes() / 1e6),
        "mb_per_second": round(path.stat().st_size / 1e6 / seconds),
    }
    show_json({"file": path.name, "bytes": path.stat().st_size, **metrics})


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--text", type=Path, help="JSONL to repeat")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 4])
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.read:
        read_one(options.read, options.work)
        return
    records = [json.loads(line) for line in options.text.read_text(encoding="utf-8").split("\n") if line]
    for kind, extension in (("json", "json"), ("lines", "jsonl"), ("parquet", "parquet")):
        for gigabytes in options.gigabytes:
            path = options.work / f"{kind}-{round(1000 * gigabytes)}MB.{extension}"
            make_file(kind, int(gigabytes * 1e9), records, path)
            run_child("corpus_memory", "--work", options.work / "out", "--read", path)
            path.unlink()
