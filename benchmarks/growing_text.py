"""Documents of any size whose different words never stop growing, made from real ones; for tokenizer_ceiling.py.

    python -m benchmarks growing_text --documents runs/mine/documents --gigabytes 5 --out growing

Chinese clauses of the given documents (of ``z2a corpus build``) are split in two at a random character; a new
clause is the first part of one and the second part of another, so that a million clauses give a million million. Three
quarters of the bytes are such Chinese; the rest are lines of English and code, with numbers of their own. The result
is a directory of documents in shards of 100 MB, written as a stream: memory does not grow with size.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from benchmarks.common import benchmark_parser

from zero2all.base.io import read_json, sha256_file
from zero2all.base.manifest import write_manifest

SHARD = 100_000_000
CLAUSE = re.compile(r"[\u4e00-\u9fff]{4,40}")
READ = 60_000_000  # bytes of each source that parts are taken from
DOCUMENTS = 256  # made at a time, of either kind
CLAUSES = 400  # in a document of Chinese
SCHEMA = pa.schema([("gid", pa.string()), ("content", pa.string())])


def texts(documents: Path, source: str) -> Iterator[str]:
    for shard in read_json(documents / "manifest.json")["splits"]["train"][source]["shards"]:
        with pq.ParquetFile(documents / "train" / shard) as file:
            for batch in file.iter_batches(batch_size=256, columns=["content"]):
                yield from batch.column("content").to_pylist()


def parts(documents: Path, rng: random.Random) -> tuple[list[str], list[str], list[str]]:
    """First and second parts of Chinese clauses, and lines of everything else."""
    first, second, lines = [], [], []
    for source in read_json(documents / "manifest.json")["splits"]["train"]:
        size = 0
        for text in texts(documents, source):
            clauses = CLAUSE.findall(text)
            if len(clauses) * 20 > len(text):
                for clause in clauses:
                    at = rng.randint(1, len(clause) - 1)
                    first.append(clause[:at])
                    second.append(clause[at:] + "，")
            else:
                lines += [line.rstrip() for line in text.split("\n") if len(line) > 20]
            if (size := size + 3 * len(text)) > READ:
                break
    return first, second, lines


def drawn(strings: pa.Array, rng: np.random.Generator, number: int) -> pa.Array:
    return strings.take(pa.array(rng.integers(len(strings), size=number)))


def joined(strings: pa.Array, to_a_document: int) -> pa.Array:
    ends = pa.array(np.arange(0, len(strings) + 1, to_a_document, dtype=np.int64))
    return pc.binary_join(pa.LargeListArray.from_arrays(ends, strings), "")


def some_documents(first: pa.Array, second: pa.Array, lines: pa.Array, rng: np.random.Generator) -> pa.Table:
    """DOCUMENTS of Chinese, and as many of other lines, of a third of their bytes."""
    clauses = pc.binary_join_element_wise(
        drawn(first, rng, DOCUMENTS * CLAUSES), drawn(second, rng, DOCUMENTS * CLAUSES), ""
    )
    bytes_each = [pc.mean(pc.binary_length(strings)).as_py() for strings in (clauses, lines)]
    to_a_document = max(1, round(CLAUSES * bytes_each[0] / bytes_each[1] / 3))
    numbers = pa.array([f" {number}\n" for number in rng.integers(1 << 30, size=DOCUMENTS * to_a_document)])
    others = pc.binary_join_element_wise(drawn(lines, rng, len(numbers)), numbers, "")
    texts = pa.concat_arrays([joined(clauses, CLAUSES), joined(others, to_a_document)])
    gids = [rng.bytes(16).hex() for _ in range(len(texts))]
    return pa.table({"gid": gids, "content": texts})


def make(documents: Path, size: int, out: Path, seed: int = 0) -> None:
    first, second, lines = (pa.array(strings) for strings in parts(documents, random.Random(seed)))
    (out / "train").mkdir(parents=True)
    names: list[str] = []
    files, written = {}, 0
    while written < size:
        rng = np.random.default_rng([seed, len(names)])
        name = f"mixed-{len(names):05}.parquet"
        end = min(size, written + SHARD)
        with pq.ParquetWriter(out / "train" / name, SCHEMA) as file:
            while written < end:
                table = some_documents(first, second, lines, rng)
                file.write_table(table)
                written += pc.sum(pc.binary_length(table["content"])).as_py()
        names.append(name)
        files[f"train/{name}"] = sha256_file(out / "train" / name)
    splits = {"train": {"mixed": {"shards": names, "bytes": written}}, "valid": {}}
    write_manifest(out, "documents", {"key": f"growing {seed} {size}", "splits": splits, "files": files})


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    make(options.documents, int(options.gigabytes * 1e9), options.out)
