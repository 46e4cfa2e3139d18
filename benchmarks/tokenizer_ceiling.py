"""Memory and time of ``z2a tokenizer train`` on texts of growing size, under one memory limit.

    python -m benchmarks tokenizer_ceiling --documents runs/mine/documents --work /tmp/ceiling \\
        --gigabytes 0.2 1 5 --max-memory 2GiB --vocabulary 65536 --workers 2

The texts are made by growing_text.py and removed afterwards. Memory is the largest sum, sampled four times a second,
of the resident memory of the command and all its children; shared pages count more than once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import benchmark_parser, show_json
from benchmarks.growing_text import make

RUN = "from zero2all.cli.main import main; main()"
PAGE = os.sysconf("SC_PAGE_SIZE")


def tree(root: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue  # ended meanwhile
            children.setdefault(parent, []).append(int(entry))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


def resident(root: int) -> int:
    total = 0
    for process in tree(root):
        try:
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE
        except (OSError, IndexError):
            continue
    return total


def measure(command: list[str]) -> dict[str, float]:
    """Run a command; its wall seconds, CPU-seconds and peak memory with all its children."""
    start, before = time.perf_counter(), os.times()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        time.sleep(0.25)
    if process.returncode:
        raise SystemExit(f"{command} failed")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "wall_s": round(time.perf_counter() - start, 1),
        "cpu_s": round(cpu, 1),
        "peak_mib": round(peak / 2**20),
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.2, 1, 5])
    parser.add_argument("--max-memory", default="2GiB")
    parser.add_argument("--vocabulary", type=int, default=65536)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    recipe = options.work / "recipe.yaml"
    recipe.write_text("name: ceiling\n")
    for gigabytes in options.gigabytes:
        documents, out = options.work / "documents", options.work / "tokenizer"
        for old in (documents, out, options.work / "tokenizer.work"):
            shutil.rmtree(old, ignore_errors=True)
        start = time.perf_counter()
        make(options.documents, int(gigabytes * 1e9), documents)
        made = time.perf_counter() - start
        changes = [f"corpus.dir={documents}", f"tokenizer.dir={out}", f"tokenizer.vocab_size={options.vocabulary}"]
        train = ["tokenizer", "train", str(recipe), *changes, "tokenizer.train_bytes=1TB", "--json"]
        limits = [f"tokenizer.max_memory={options.max_memory}", "--workers", str(options.workers)]
        metrics = measure([sys.executable, "-c", RUN, *train, *limits])
        manifest = json.loads((out / "manifest.json").read_text())
        result = {"gigabytes": gigabytes, **metrics, **manifest["counted"], "made_in_s": round(made)}
        show_json(result)
        shutil.rmtree(documents)
