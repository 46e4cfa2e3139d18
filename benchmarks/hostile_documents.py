"""Time and peak memory of reading hostile PDF, DOCX, EPUB, 7z and RAR files, each in a process of its own.

    python -m benchmarks hostile_documents --work /tmp/hostile --mib 300

Bombs unpack to that many MiB. A line has the file, the reason it was skipped for, the time, and the peak resident
memory of the process that reads and of the process that parses for it. Linux counts what a parent had when it started a
child as the child's too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from pathlib import Path

from benchmarks.common import benchmark_parser, peak_bytes, run_child, show_json
from tests.corpus.document_files import hostile_files

from zero2all.corpus.readers import BrokenRecord, RawFile, UnreadableFileError, read_records


def write_files(directory: Path, mib: int) -> list[Path]:
    files = hostile_files(mib)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return [directory / name for name in files]


def read_one(path: Path) -> None:
    start, found = time.perf_counter(), []
    try:
        for record in read_records(RawFile.from_path(path)):
            found.append(record.reason if isinstance(record, BrokenRecord) else f"{len(record['content'])} characters")
    except UnreadableFileError as reason:
        found.append(str(reason))
    result = {
        "file": path.name,
        "bytes": path.stat().st_size,
        "seconds": round(time.perf_counter() - start, 1),
        "peak_mib": peak_bytes() >> 20,
        "child_peak_mib": peak_bytes(resource.RUSAGE_CHILDREN) >> 20,
        "found": list(dict.fromkeys(found)),
    }
    show_json(result)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--work", type=Path, help="Directory for the files.")
    parser.add_argument("--mib", type=int, default=300)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        read_one(options.read)
        return
    options.work.mkdir(parents=True, exist_ok=True)
    with multiprocessing.Pool(1) as pool:  # in another process: a child counts its parent's memory as its own peak
        paths = pool.apply(write_files, [options.work, options.mib])
    for path in paths:
        run_child("hostile_documents", "--read", path)
