"""Environment variables that the launcher sets for its workers."""

from __future__ import annotations

import os

AGENT_DIR_VARIABLE = "Z2A_AGENT_DIR"  # where the agent of this node looks for heartbeats and stack dumps
STORE_VARIABLE = "Z2A_STORE"  # endpoint of the store that the agents share
JOB_SECRET_VARIABLE = "Z2A_JOB_SECRET"


def has_agent() -> bool:
    """Whether 'z2a launch' started this process."""
    return AGENT_DIR_VARIABLE in os.environ
