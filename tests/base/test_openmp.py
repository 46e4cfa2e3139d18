"""OpenMP threads do not spin for long, in the command and its children, unless the user sets it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from zero2all.base.machine.cpus import SPIN_COUNT, USER_VARIABLES, spin_settings

NAMES = (*USER_VARIABLES, "OMP_NUM_THREADS")
WORKER = """
import os
import zero2all.cli
from zero2all.base.tasks import TaskEngine
if __name__ == "__main__":
    print(TaskEngine(workers=2).run(os.getenv, [("GOMP_SPINCOUNT",), ("GOMP_SPINCOUNT",)]))
"""


def run(*words: str, **settings: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, *words], env=environment | settings, capture_output=True, text=True, timeout=240, check=True
    )
    return done.stdout + done.stderr


def test_libgomp_has_read_it_when_torch_is_imported() -> None:
    said = run("-c", "import zero2all.cli, torch", OMP_DISPLAY_ENV="VERBOSE")
    if "GOMP_SPINCOUNT" not in said:
        pytest.skip("torch has another OpenMP here")
    assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in said


def test_workers_inherit_it() -> None:
    assert run("-c", WORKER).strip() == str([SPIN_COUNT, SPIN_COUNT])


@pytest.mark.parametrize("name", USER_VARIABLES)
def test_settings_of_the_user_are_kept(name: str) -> None:
    assert spin_settings({name: "5"}) == {}
    assert spin_settings({"OMP_NUM_THREADS": "4"}) == {"GOMP_SPINCOUNT": SPIN_COUNT}
