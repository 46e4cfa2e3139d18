"""MinHash signatures per second: ours against datasketch, on the same documents, interleaved in one run.

    python -m benchmarks minhash code=files.jsonl.zst wiki_zh.jsonl wiki_en.parquet --mb 4 --rounds 3

Each file is JSONL (also .gz or .zst) or Parquet; ``code=`` before a path, or a file name with code or pypi in it,
means code. Both sides go from text to 112 values a document with the same shingles. Prints one JSON object; MB are
10^6 bytes of UTF-8 per second of one process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from benchmarks.common import benchmark_parser, cpu_seconds, show_json, take_turns
from datasketch import MinHash

from zero2all.corpus.dedup.near import SIGNATURE_CHARACTERS, shingle_hashes
from zero2all.corpus.dedup.shingles import band_hashes, minhash_signatures
from zero2all.corpus.dedup.shuffle import DedupParams

FIELDS = ("text", "content", "markdown", "body", "answer", "code")
PROSE = re.compile(r"[\u4e00-\u9fff]|[^\W_\u4e00-\u9fff]+")
CODE = re.compile(r"\w+|[^\w\s]")
PARAMS = DedupParams()


def read_texts(path: Path, limit: int) -> list[str]:
    """Documents of a file until they have ``limit`` bytes."""
    if path.suffix == ".parquet":
        rows: Any = pq.read_table(path).to_pylist()
    else:
        # "detect" goes by the file's suffix and reads a file without one of these as it is.
        with pa.input_stream(str(path), compression="detect") as stream:
            rows = [json.loads(line) for line in stream.read().decode("utf-8").split("\n") if line.strip()]
    texts: list[str] = []
    size = 0
    for row in rows:
        text = next((row[name] for name in FIELDS if isinstance(row.get(name), str) and row[name]), "")
        texts.append(text)
        size += len(text.encode())
        if size >= limit:
            break
    return texts


def ours(texts: Sequence[str], code: bool) -> np.ndarray[Any, Any]:
    rows, batch, size = [], [], 0
    for place, text in enumerate(texts):
        batch.append(text)
        size += len(text)
        if size >= SIGNATURE_CHARACTERS or place + 1 == len(texts):
            values = minhash_signatures(*shingle_hashes(batch, code=code, params=PARAMS), PARAMS.slots)
            band_hashes(values, PARAMS.bands)
            rows.append(values)
            batch, size = [], 0
    return np.concatenate(rows)


def theirs(texts: Sequence[str], code: bool) -> np.ndarray[Any, Any]:
    rows = []
    for text in texts:
        units = CODE.findall(text) if code else PROSE.findall(text.casefold())
        shingles = {
            " ".join(gram).encode() for gram in zip(*(units[start:] for start in range(PARAMS.ngram)), strict=False)
        }
        minhash = MinHash(num_perm=PARAMS.slots)
        minhash.update_batch(list(shingles))
        rows.append(minhash.hashvalues)
    return np.stack(rows)


def compare(path: Path, code: bool, limit: int, rounds: int) -> dict[str, Any]:
    texts = read_texts(path, limit)
    size = sum(len(text.encode()) for text in texts) / 1e6
    for function in (ours, theirs):
        function(texts[:5], code)  # tables and imports are made once
    sides = {"ours": ours, "datasketch": theirs}
    turns = {name: partial(cpu_seconds, function, texts, code) for name, function in sides.items()}
    times = take_turns(turns, rounds, alternate=True)
    speed = {name: round(size / median(taken), 2) for name, taken in times.items()}
    ratio = median(times["datasketch"]) / median(times["ours"])
    return {"file": path.name, "documents": len(texts), "mb": round(size, 2), **speed, "ratio": round(ratio, 1)}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("files", nargs="+", help="[code=]path")
    parser.add_argument("--mb", type=float, default=4.0, help="text to take from each file")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side; medians are reported")
    options = parser.parse_args()
    results = []
    for given in options.files:
        kind, _, name = given.rpartition("=")
        path = Path(name)
        code = kind == "code" or (not kind and bool(re.search("code|pypi", path.name)))
        results.append(compare(path, code, int(options.mb * 1e6), options.rounds))
    times = {name: sum(one["mb"] / one[name] for one in results) for name in ("ours", "datasketch")}
    total = {"ratio": round(times["datasketch"] / times["ours"], 1)}
    show_json({"unit": "MB per CPU-second", "files": results, "all": total}, indent=2)
