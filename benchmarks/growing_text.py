"""Documents of any size whose different words never stop growing, made from real ones; for tokenizer_ceiling.py.

    python benchmarks/growing_text.py --documents runs/mine/documents --gigabytes 5 --out growing

Chinese clauses of the given documents (as ``z2a corpus build`` leaves them) are cut in two at a random character; a new
clause is the first part of one and the second part of another, so that a million clauses give a million million. Three
quarters of the bytes are such Chinese; the rest are lines of English and code, with numbers of their own. The result
is a directory of documents in shards of 200 MB, written as a stream: memory does not grow with size.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from zero2all.io import read_json, sha256_file, write_manifest

SHARD = 200_000_000
CLAUSE = re.compile(r"[\u4e00-\u9fff]{4,40}")
READ = 60_000_000  # bytes of each source that parts are taken from


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
                lines += [line + "\n" for line in text.split("\n") if len(line) > 20]
            if (size := size + 3 * len(text)) > READ:
                break
    return first, second, lines


def shard_texts(first: list[str], second: list[str], lines: list[str], size: int, rng: random.Random) -> Iterator[str]:
    """About ``size`` bytes of documents of about 20 KB."""
    while size > 0:
        heads, tails = rng.choices(first, k=400), rng.choices(second, k=400)
        chinese = "".join(map(str.__add__, heads, tails)) + "。\n"
        other = ""
        while 3 * len(other) < 3 * len(chinese):  # a third of the Chinese bytes, which are three a character
            other += f"{rng.choice(lines).rstrip()} {rng.getrandbits(30)}\n"
        size -= 3 * len(chinese) + len(other)
        yield chinese
        yield other


def make(documents: Path, size: int, out: Path, seed: int = 0) -> None:
    first, second, lines = parts(documents, random.Random(seed))
    (out / "train").mkdir(parents=True)
    names, files, written = [], {}, 0
    while written < size:
        rng = random.Random(f"{seed} {len(names)}")
        name = f"mixed-{len(names):05}.parquet"
        with pq.ParquetWriter(
            out / "train" / name, pa.schema([("gid", pa.string()), ("content", pa.string())])
        ) as file:
            batch: list[str] = []
            for text in shard_texts(first, second, lines, min(SHARD, size - written), rng):
                batch.append(text)
                written += len(text.encode())
                if len(batch) == 512:
                    gids = [f"{rng.getrandbits(128):032x}" for _ in batch]
                    file.write_table(pa.table({"gid": gids, "content": batch}))
                    batch.clear()
            gids = [f"{rng.getrandbits(128):032x}" for _ in batch]
            file.write_table(pa.table({"gid": gids, "content": batch}))
        names.append(name)
        files[f"train/{name}"] = sha256_file(out / "train" / name)
    splits = {"train": {"mixed": {"shards": names, "bytes": written}}, "valid": {}}
    write_manifest(out, "documents", {"key": f"growing {seed} {size}", "splits": splits, "files": files})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    make(options.documents, int(options.gigabytes * 1e9), options.out)


if __name__ == "__main__":
    main()
