"""Report files of benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero2all.io import write_json, write_text


def write_report(out: Path, name: str, report: dict[str, Any], markdown: str) -> None:
    """``<out>/<name>.md`` for people, ``<out>/<name>.json`` for programs."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / f"{name}.md", markdown)
    write_json(out / f"{name}.json", report)
