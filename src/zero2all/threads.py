"""How OpenMP's threads wait for each other.

torch's libgomp lets a thread spin 300,000 times at a barrier before it sleeps: 4.3 ms on the machine of our benchmarks.
On a core of its own that costs nothing. Beside other work the thread that it waits for may not run at all, and is
kept from its core by the one that spins. Longer than most gaps between two operations is enough.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

SPINS = "3000"  # 43 us there; benchmarks/cpu_threads.py compares others
CHOSEN_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def waiting(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to an environment, unless it says already how threads wait."""
    return {} if any(name in environment for name in CHOSEN_BY_USER) else {"GOMP_SPINCOUNT": SPINS}


def wait_briefly() -> None:
    """For this process and all that it starts. libgomp reads it when torch is imported, so this comes first."""
    os.environ.update(waiting(os.environ))
