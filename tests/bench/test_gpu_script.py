"""``benchmarks/gpu.sh``: the same code as on GPUs, with small shapes on two ranks of a CPU."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def report(tmp_path: Path, *words: str) -> tuple[int, str]:
    command = [ROOT / "benchmarks/gpu.sh", "--device", "cpu", "--tiny", "--out", tmp_path / "report.md", *words]
    done = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, stdout=subprocess.PIPE, text=True)
    assert "attach it to a new issue" in done.stdout
    return done.returncode, (tmp_path / "report.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_every_section_runs_and_the_report_says_nothing_of_the_machine(tmp_path: Path) -> None:
    status, text = report(tmp_path, "--patience", "5")
    assert status == 0, text
    sections = json.loads(text.split("```json\n")[1].split("\n```")[0])
    assert [section["status"] for section in sections] == ["ok"] * len(sections)
    assert all(section["rows"] for section in sections)
    rows = {section["name"]: section["rows"] for section in sections}
    assert [row["equal"] for row in rows["layouts"] if "error" not in row] == [True, True]
    assert rows["chaos"][-1]["steps"] == 1, "the losses are those of the job that was left alone"
    assert max(row["difference"] for row in rows["kernels"] if row["dtype"] == "float32" and "ms" in row) < 1e-5
    for secret in {str(ROOT), str(tmp_path), socket.gethostname(), getpass.getuser()} - {"root", "localhost"}:
        assert secret not in text


@pytest.mark.slow
def test_a_section_that_is_stopped_is_in_the_report_and_the_next_one_runs(tmp_path: Path) -> None:
    status, text = report(tmp_path, "--patience", "0.001", "--only", "environment", "--only", "doctor")
    assert status == 1
    assert "| environment | stopped after 0 s |" in text
    assert "| doctor | stopped after 0 s |" in text
