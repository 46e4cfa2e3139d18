"""No command prints lines of libraries, with every extra installed. Commands of the docs are checked where they run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.doc_pages import Page, foreign_lines, prepare_stages, sandbox

# One process: a line of a library is printed when it is imported first.
PROGRAM = """
import sys
from zero2all.cli.main import main

for line in sys.argv[1:]:
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as end:
        assert not end.code, line
"""


@pytest.mark.slow
def test_training_and_export_print_only_their_own_lines(tmp_path: Path, workspace: Path) -> None:
    """``Sandbox.run`` fails on a foreign line. Export imports transformers, which imports torchao."""
    with sandbox(Page("", prepare_stages), tmp_path, workspace) as box:
        export, profile = "export runs/mine --to exported", "bench profile my.yaml --steps 1 --out profile"
        printed = box.run(sys.executable, "-c", PROGRAM, "train my.yaml train.steps=2", export, profile)
        assert [said for said in ("step 2/2", "transformers", "a step takes") if said not in printed] == []


@pytest.mark.parametrize(
    "line",
    [
        "Failed to load /x/torchao/_C_cutlass_90a.abi3.so: Could not load this library",
        "W1118 11:13:44.820000 16974 torch/utils/_pytree.py:630] <enum 'KernelPreference'> is an Enum subclass",
        "[W1118 15:03:07.631949277 CPUAllocator.cpp:245] Memory block of unknown size was allocated before",
        "USDT:2026-11-18 15:03:07 16343:16343 SyncActivityProfilerHandler.cpp:52] profiler_start",
        "/x/torch/foo.py:3: UserWarning: deprecated",
        "Loading weights: 100%|██████████| 20/20 [00:00<00:00, 1234.5it/s]",
    ],
)
def test_a_foreign_line_is_found(line: str) -> None:
    assert foreign_lines(f"step 1/2 loss 3.2\n{line}\nstep 2/2 loss 3.1\n") == [line]


def test_own_lines_are_not_foreign() -> None:
    assert foreign_lines("warning: 2 files skipped\nstep 1/2 loss 3.2 842 tok/s\nerror: no recipe at x\n") == []
