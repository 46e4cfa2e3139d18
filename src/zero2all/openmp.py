"""How OpenMP's threads wait for each other.

torch's libgomp lets a thread spin 300,000 times at a barrier before it sleeps: 4.3 ms on the machine of our benchmarks.
On a core of its own that costs nothing. Beside other work the thread that it waits for may not run at all, and is
kept from its core by the one that spins. Longer than most gaps between two operations is enough.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

SPIN_COUNT = "3000"  # 43 us there; python -m benchmarks cpu_threads compares others
USER_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def spin_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to an environment, unless it already sets how threads wait."""
    return {} if any(name in environment for name in USER_VARIABLES) else {"GOMP_SPINCOUNT": SPIN_COUNT}


def limit_openmp_spinning() -> None:
    """For this process and its children. libgomp reads the variable when torch is imported, so call this first."""
    os.environ.update(spin_settings(os.environ))
