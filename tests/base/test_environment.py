"""What is set for CUDA, unless the user has set it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from zero2all.base.environment import ALLOCATOR_VARIABLES, RECORDER_ENTRIES, RECORDER_VARIABLES, cuda_settings

SEEN_BY_TORCH = """
import os, sys
import zero2all.cli
assert "torch" not in sys.modules
print(os.environ["PYTORCH_ALLOC_CONF"], os.environ["TORCH_FR_BUFFER_SIZE"])
"""


def test_it_is_set_before_torch_is_imported() -> None:
    unset = {*ALLOCATOR_VARIABLES, *RECORDER_VARIABLES}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", SEEN_BY_TORCH], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["expandable_segments:True", RECORDER_ENTRIES]


@pytest.mark.parametrize("name", [*ALLOCATOR_VARIABLES, *RECORDER_VARIABLES])
def test_settings_of_the_user_are_kept(name: str) -> None:
    expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "TORCH_FR_BUFFER_SIZE": RECORDER_ENTRIES}
    del expected["PYTORCH_ALLOC_CONF" if name in ALLOCATOR_VARIABLES else "TORCH_FR_BUFFER_SIZE"]
    assert cuda_settings({name: "x"}) == expected
