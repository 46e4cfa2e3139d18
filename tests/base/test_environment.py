"""What is set for CUDA and OpenMP in the command and its children, unless the user has set it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from zero2all.base.environment import ALLOCATOR_VARIABLES, RECORDER_ENTRIES, RECORDER_VARIABLES, cuda_settings
from zero2all.base.machine.cpus import SPIN_COUNT, USER_VARIABLES, spin_settings

START = """
import os, sys
import zero2all.cli
assert "torch" not in sys.modules
from zero2all.base.tasks import TaskEngine
if __name__ == "__main__":
    print(os.environ["PYTORCH_ALLOC_CONF"], os.environ["TORCH_FR_BUFFER_SIZE"])
    print(*TaskEngine(workers=2).run(os.getenv, [("GOMP_SPINCOUNT",), ("GOMP_SPINCOUNT",)]))
    import torch
"""


def test_it_is_set_before_torch_is_imported_and_workers_inherit_it() -> None:
    unset = {*ALLOCATOR_VARIABLES, *RECORDER_VARIABLES, *USER_VARIABLES, "OMP_NUM_THREADS"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["OMP_DISPLAY_ENV"] = "VERBOSE"
    done = subprocess.run(
        [sys.executable, "-c", START], env=environment, capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.split() == ["expandable_segments:True", RECORDER_ENTRIES, SPIN_COUNT, SPIN_COUNT]
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch has another OpenMP here")
    assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in done.stderr


@pytest.mark.parametrize("name", [*ALLOCATOR_VARIABLES, *RECORDER_VARIABLES])
def test_settings_of_the_user_for_cuda_are_kept(name: str) -> None:
    expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "TORCH_FR_BUFFER_SIZE": RECORDER_ENTRIES}
    del expected["PYTORCH_ALLOC_CONF" if name in ALLOCATOR_VARIABLES else "TORCH_FR_BUFFER_SIZE"]
    assert cuda_settings({name: "x"}) == expected


@pytest.mark.parametrize("name", USER_VARIABLES)
def test_settings_of_the_user_for_openmp_are_kept(name: str) -> None:
    assert spin_settings({name: "5"}) == {}
    assert spin_settings({"OMP_NUM_THREADS": "4"}) == {"GOMP_SPINCOUNT": SPIN_COUNT}
