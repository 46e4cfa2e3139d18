"""What happens to a job that a person may want to know; :mod:`zero2all.elastic.notify` tells them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EventKind = Literal[
    "node lost",
    "node excluded",
    "spare taken in",
    "GPU error",
    "job restarted",
    "job waits",
    "job gave up",
    "job finished",
]


@dataclass(frozen=True)
class JobEvent:
    kind: EventKind
    text: str
    """One line for a person."""
    node: str | None = None
    """Name and address, if it is about one node."""
