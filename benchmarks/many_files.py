"""Time and peak memory of listing and building a folder of many tiny files.

    python -m benchmarks many_files --work /tmp/many --files 100000

Each file is a note of about 120 bytes. Listing and building run in processes of their own, with one worker; a line has
the wall time, the CPU time and the peak resident memory of each.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path

from benchmarks.common import benchmark_parser, command, peak_bytes, show_json

from zero2all.corpus import build_corpus
from zero2all.corpus.readers import list_files
from zero2all.recipe import CorpusRecipe, SourceRecipe

SENTENCE = "This is note {0} of a folder, its key is {1}, and it is long enough to stay in a corpus of such notes.\n"


def write_notes(directory: Path, count: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (directory / f"note-{number:06}.txt").write_text(SENTENCE.format(number, number * 7919 % 1_000_003))


def measure(step: str, work: Path) -> None:
    source = SourceRecipe(name="notes", paths=[str(work / "raw")])
    start, cpu = time.perf_counter(), time.process_time()
    if step == "list":
        count = len(list_files(source))
    else:
        count = build_corpus(CorpusRecipe(sources=[source]), work / "documents").documents
    result = {
        "step": step,
        "count": count,
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "peak_mib": peak_bytes() >> 20,
    }
    show_json(result)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--step", choices=["list", "build"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        measure(options.step, options.work)
        return
    write_notes(options.work / "raw", options.files)
    for step in ("list", "build"):
        words = command("many_files", "--work", options.work, "--step", step)
        subprocess.run(words, check=True, stderr=subprocess.DEVNULL)
