"""OpenMP's threads do not spin for long, in the command and in what it starts, unless the user wants it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from zero2all.threads import CHOSEN_BY_USER, SPINS, waiting

NAMES = (*CHOSEN_BY_USER, "OMP_NUM_THREADS")
WORKER = """
import os
import zero2all.cli
from zero2all.engine import Engine
if __name__ == "__main__":
    print(Engine(workers=2).run(os.getenv, [("GOMP_SPINCOUNT",), ("GOMP_SPINCOUNT",)]))
"""


def run(*words: str, **settings: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, *words], env=environment | settings, capture_output=True, text=True, timeout=240, check=True
    )
    return done.stdout + done.stderr


def test_libgomp_has_read_it_when_torch_is_there() -> None:
    said = run("-m", "zero2all.cli", "model", "show", "z2all-3m", OMP_DISPLAY_ENV="VERBOSE")
    if "GOMP_SPINCOUNT" not in said:
        pytest.skip("torch has another OpenMP here")
    assert f"GOMP_SPINCOUNT = '{SPINS}'" in said


def test_workers_inherit_it() -> None:
    assert run("-c", WORKER).strip() == str([SPINS, SPINS])


@pytest.mark.parametrize("name", CHOSEN_BY_USER)
def test_what_the_user_has_set_stays(name: str) -> None:
    assert waiting({name: "5"}) == {}
    assert waiting({"OMP_NUM_THREADS": "4"}) == {"GOMP_SPINCOUNT": SPINS}
