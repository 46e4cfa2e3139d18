"""What a machine with 1 or 8 GPUs shows of zero2all, in one report; ``gpu.sh`` runs it.

The sections of gpu_sections.py run one after another, each in a process of its own with a time limit. One that fails or
takes too long is in the report with what it had measured, and the next one runs.

    python -m benchmarks gpu_report --device cuda --out gpu-report.md
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import benchmark_parser, command, show

from zero2all.base.charts.table import markdown_table

SECTIONS = {  # name: seconds that it may take
    "environment": 60,
    "doctor": 120,
    "kernels": 240,
    "layouts": 300,
    "chaos": 240,
    "profile": 180,
    "mfu-1b": 240,
    "mfu-8b": 300,
    "variants": 420,
}
PATH = re.compile(r"(?<![\w.:])/(?:[\w.+@~-]+/)+([\w.+-]*)")
ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
GPU_ID = re.compile(r"\bGPU-[0-9a-f-]{36}\b")


@dataclass
class SectionResult:
    """What one section measured."""

    name: str
    status: str
    """``ok``, or why it did not end."""
    seconds: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""
    """The last lines of its output, if it failed."""


def run_section(name: str, options: argparse.Namespace, work: Path) -> SectionResult:
    out, log = work / f"{name}.json", work / f"{name}.log"
    words = command("gpu_sections", name, "--device", options.device, "--ranks", options.ranks, "--work", work)
    words += ["--tiny"] if options.tiny else []
    begin, status = time.monotonic(), "ok"
    with open(log, "wb") as stream:
        process = subprocess.Popen(words, stdout=stream, stderr=stream, start_new_session=True)
        try:
            code = process.wait(SECTIONS[name] * options.patience)
            status = "ok" if code == 0 else f"failed with status {code}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {SECTIONS[name] * options.patience:.0f} s"
        finally:
            _end_group(process)
    rows = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    tail = "" if status == "ok" else "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
    return SectionResult(name, status, round(time.monotonic() - begin, 1), rows, tail)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """The section and the ranks that it started: they are in one process group, or end with their parent."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def scrub(text: str) -> str:
    """Without names of hosts and users, addresses, ids of GPUs and directories: the report may be made public."""
    text = ADDRESS.sub("<address>", GPU_ID.sub("<gpu>", text))
    for secret in {socket.gethostname(), socket.getfqdn(), getpass.getuser()} - {"", "root", "localhost"}:
        text = re.sub(rf"\b{re.escape(secret)}\b", "<host>", text)
    return PATH.sub(r"\1", text)


def markdown(results: list[SectionResult], options: argparse.Namespace) -> str:
    """Tables for people, then the same as JSON."""
    lines = ["# zero2all on " + (f"{options.ranks} GPUs" if options.device == "cuda" else "a CPU"), ""]
    lines += ["| section | status | seconds |", "|---|---|---:|"]
    lines += [f"| {result.name} | {result.status} | {result.seconds:.0f} |" for result in results]
    for result in results:
        lines += ["", f"## {result.name}", "", *_table(result.rows)]
        if result.log:
            lines += ["", "```", result.log, "```"]
    data = json.dumps([asdict(result) for result in results], ensure_ascii=False, indent=1)
    return scrub(
        "\n".join([*lines, "", "<details><summary>JSON</summary>", "", "```json", data, "```", "</details>", ""])
    )


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return ["Nothing was measured."]
    return [markdown_table(columns, ([_cell(row.get(key)) for key in columns] for row in rows))]


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return text.replace("|", "\\|").replace("\n", "<br>")


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes and few steps, to try the script itself")
    parser.add_argument("--ranks", type=int, help="default: the number of GPUs, or 2 on a CPU")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="can be repeated")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies the time limits")
    parser.add_argument("--out", type=Path, default=Path("gpu-report.md"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: install its CUDA build, or try --device cpu --tiny")
    options.ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 2)
    results: list[SectionResult] = []
    with tempfile.TemporaryDirectory(prefix="z2a-gpu-") as work:
        for name in options.only or SECTIONS:
            sys.stderr.write(f"{name}: at most {SECTIONS[name] * options.patience:.0f} s\n")
            results.append(run_section(name, options, Path(work)))
            sys.stderr.write(f"{name}: {results[-1].status}, {results[-1].seconds:.0f} s\n")
            options.out.write_text(markdown(results, options), encoding="utf-8")
    show(
        f"\nThe report is {options.out}. It has no host names, user names, addresses or directories; read it, then "
        "attach it to a new issue of the GitHub repository that you cloned zero2all from, titled 'GPU report: <your "
        "GPU>'."
    )
    sys.exit(any(result.status != "ok" for result in results))
