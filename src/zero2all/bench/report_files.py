"""Report files of benchmarks."""

from __future__ import annotations

from pathlib import Path

from zero2all.io import write_json, write_text
from zero2all.records import to_json


def write_report(out: Path, name: str, report: object, markdown: str) -> None:
    """``<out>/<name>.md`` for people, ``<out>/<name>.json`` of a record for programs."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / f"{name}.md", markdown)
    write_json(out / f"{name}.json", to_json(report))
