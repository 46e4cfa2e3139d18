"""How OpenMP's threads wait for each other.

torch's libgomp lets a thread spin 300,000 times at a barrier before it sleeps: some 15 ms on a processor whose pause
instruction takes 50 ns. On a core of its own that costs nothing. Beside other work the thread that it waits for may not
be running at all, and is kept from it by the one that spins. About as long as it takes to wake a thread is enough.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

SPINS = "1000"  # about 50 us; measured by benchmarks/cpu_threads.py
CHOSEN_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def waiting(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to an environment, unless it says already how threads wait."""
    return {} if any(name in environment for name in CHOSEN_BY_USER) else {"GOMP_SPINCOUNT": SPINS}


def wait_briefly() -> None:
    """For this process and all that it starts. libgomp reads it when torch is imported, so this comes first."""
    os.environ.update(waiting(os.environ))
