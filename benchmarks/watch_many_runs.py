"""Time to the first page of ``z2a watch`` over many unfinished runs, and its CPU while nothing changes.

    python -m benchmarks watch_many_runs --runs 500 --steps 1500

The page is there when ``/`` and ``/api/runs`` have been answered, counted from the start of the command. CPU is that of
the server over the seconds after, as a share of one core; one run is appended to meanwhile, and must still be followed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from benchmarks.common import benchmark_parser, show

from zero2all.track import RunRecord


def make_runs(root: Path, runs: int, steps: int) -> None:
    with RunRecord(root / "0" / "record.jsonl", system_every=None) as record:
        record.event("start", step=0, steps=10 * steps)
        for step in range(steps):
            record.step(step, loss=5.0 - step / steps, grad_norm=1.0, lr=1e-3, tokens=float(step * 1000), seconds=0.5)
    files = {path.name: path.read_bytes() for path in (root / "0").iterdir()}
    for number in range(1, runs):
        (root / str(number)).mkdir()
        for name, data in files.items():
            (root / str(number) / name).write_bytes(data)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=300) as answer:
        return bytes(answer.read())


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--idle", type=float, default=60.0, help="Seconds over which CPU is measured.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        make_runs(root, options.runs, options.steps)
        words = [sys.executable, "-m", "zero2all.cli", "watch", str(root), "--port", "0"]
        begun = time.monotonic()
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            address = next(found[0] for line in process.stderr if (found := re.search(r"http://\S+", line)))
            listening = time.monotonic() - begun
            base, _, key = address.partition("/?key=")
            get(f"{base}/")
            size = len(get(f"{base}/api/runs?key={key}"))
            shown, used = time.monotonic() - begun, cpu_seconds(process.pid)
            time.sleep(min(90.0, options.idle))  # until every run has been read and judged
            before, since = cpu_seconds(process.pid), time.monotonic()
            time.sleep(options.idle)
            share = (cpu_seconds(process.pid) - before) / (time.monotonic() - since)
            with open(root / "0" / "record.jsonl", "a", encoding="utf-8") as stream:
                stream.write(f'{{"step":{options.steps},"time":{time.time()},"loss":1}}\n')
            appended = time.monotonic()
            while f'"step":{options.steps},' not in get(f"{base}/api/runs?key={key}").decode().replace(" ", ""):
                assert time.monotonic() - appended < 60, "the run is no longer followed"
                time.sleep(0.1)
            followed = time.monotonic() - appended
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
        show(
            f"{options.runs} runs of {options.steps} steps: listening after {listening:.1f} s, first page after "
            f"{shown:.1f} s and {used:.1f} s of CPU ({size / 1e6:.1f} MB), idle {100 * share:.1f}% of a core, a new "
            f"step shown after {followed:.1f} s"
        )
