"""The same corpus built by local processes and by Ray: wall time, and how soon the first part is on disk.

    python -m benchmarks corpus_engines --text TEXT/zh TEXT/en TEXT/code --work /tmp/engines

The input is the text repeated to 200 MB, each copy with another last line, so that none is a duplicate. Ray
starts a cluster of its own on this machine and leaves one core free. How soon the first part is there is measured on
the first megabyte, since a part is one file.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import benchmark_parser, show_json

from zero2all.corpus.ingest import document_texts

FILE_BYTES, FIRST_BYTES = 10_000_000, 128_000
RECIPE = "corpus: {{sources: [{{name: text, paths: ['{raw}']}}], dir: '{out}'}}\n"


def write_input(texts: list[str], directory: Path, total: int, file_size: int) -> None:
    directory.mkdir(parents=True)
    written = 0
    for copy in itertools.count():
        for text in texts:
            line = json.dumps({"text": f"{text}\ncopy {copy}"}, ensure_ascii=False) + "\n"
            with open(directory / f"{written // file_size:05}.jsonl", "a", encoding="utf-8") as stream:
                stream.write(line)
            written += len(line.encode())
            if written >= total:
                return


def build(work: Path, raw: Path, *options: str) -> dict[str, float]:
    """Seconds from the start of the command to the first part, and to the end."""
    out = work / "documents"
    for old in (out, work / "documents.work"):
        shutil.rmtree(old, ignore_errors=True)
    recipe = work / "recipe.yaml"
    recipe.write_text(RECIPE.format(raw=raw, out=out))
    z2a = Path(sys.executable).with_name("z2a")
    begun = time.perf_counter()
    command = subprocess.Popen([z2a, "corpus", "build", recipe, *options], stdout=subprocess.DEVNULL)
    first = None
    while command.poll() is None:
        if first is None and any((work / "documents.work" / "parts").glob("[!.]*.parquet")):
            first = time.perf_counter() - begun
        time.sleep(0.005)
    if command.returncode:
        sys.exit(f"z2a failed with status {command.returncode}")
    ended = time.perf_counter() - begun
    return {"first_part_seconds": round(first or ended, 2), "seconds": round(ended, 1)}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--text", nargs="+", required=True, help="files or directories to take text from")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--engines", nargs="+", default=["local", "ray"], choices=["local", "ray"])
    options = parser.parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    texts = [text for text in document_texts(options.text) if text.strip()]
    write_input(texts, options.work / "raw", options.megabytes * 1_000_000, FILE_BYTES)
    write_input(texts, options.work / "first", 8 * FIRST_BYTES, FIRST_BYTES)
    for engine in options.engines:
        small = build(options.work, options.work / "first", *(["--ray", "auto"] if engine == "ray" else []))
        large = build(options.work, options.work / "raw", *(["--ray", "auto"] if engine == "ray" else []))
        metrics = {"first_part_seconds": small["first_part_seconds"], "seconds": large["seconds"]}
        speed = round(options.megabytes / large["seconds"], 1)
        show_json({"engine": engine, **metrics, "mb_per_second": speed})
    shutil.rmtree(options.work)
