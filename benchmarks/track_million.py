"""A record of a million steps of 60 scalars: bytes on disk, and the time until a real browser shows its first chart.

python -m benchmarks track_million --work /somewhere/large
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from pathlib import Path

from benchmarks.common import benchmark_parser
from selenium.webdriver.support.ui import WebDriverWait
from tests.track.browser import browser, watching

from zero2all.base.console import say
from zero2all.track.record_index import index_path
from zero2all.track.record_lines import EventLine, RecordLine, StepLine
from zero2all.track.run_record import RunRecordWriter

BATCH = 1000
DRAWN = "return performance.getEntriesByName('drawn loss').map(one => one.startTime)"


def write(record: Path, steps: int, scalars: int) -> float:
    """Write with RunRecordWriter. Returns the seconds it took."""
    rng = random.Random(1)
    names = ["loss", "lr", "grad_norm", "tokens_per_second", "loss/zh", "loss/en", "loss/code"]
    names += [f"layer{number}/norm" for number in range(scalars - len(names))]
    file, begun = RunRecordWriter(record), time.perf_counter()
    file.write([EventLine("start", 0.0, {"step": 0, "steps": steps})])
    for first in range(0, steps, BATCH):
        lines: list[RecordLine] = []
        for step in range(first, min(first + BATCH, steps)):
            base = 2 + 6 * math.exp(-step / 1e5)
            lines.append(StepLine(step, step * 0.5, {name: base + rng.gauss(0, 0.05) for name in names}))
        file.write(lines)
        if first % 10_000 == 0:
            file.write([EventLine("checkpoint", first * 0.5, {"step": first})])
    file.close()
    return time.perf_counter() - begun


def resident_mb(pid: int, what: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) / 1024


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--scalars", type=int, default=60)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    record = options.work / "run" / "record.jsonl"
    if not record.exists():
        record.parent.mkdir(parents=True)
        say(f"written in {write(record, options.steps, options.scalars):.0f} s")
    say(f"record {record.stat().st_size / 1e6:.0f} MB, index {index_path(record).stat().st_size / 1e6:.1f} MB")
    for _ in range(options.times):
        begun = time.perf_counter()
        with watching(options.work) as (url, server), tempfile.TemporaryDirectory() as profile:
            ready = time.perf_counter() - begun
            with browser(Path(profile)) as page:
                page.get(url)
                drawn = WebDriverWait(page, 60).until(lambda one: one.execute_script(DRAWN))[0] / 1000
                page.execute_script("window.scrollTo(0, document.body.scrollHeight)")
                time.sleep(3)
            say(
                f"z2a watch ready after {ready:.2f} s; first chart {drawn:.2f} s after the page was requested; "
                f"server {resident_mb(server.pid, 'VmRSS'):.0f} MB, at most {resident_mb(server.pid, 'VmHWM'):.0f} MB"
            )
