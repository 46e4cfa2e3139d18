"""Options of ``z2a launch`` about bad nodes, and about whom to tell."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from zero2all.environment import NOTIFY_VARIABLE

StragglerPolicy = Literal["warn", "exclude"]


@dataclass(frozen=True)
class NodePolicy:
    readmit: bool = False
    """This node comes back although it was excluded."""
    node_test: bool = True
    """Nodes are tested before the ranks restart after a failure that a node may have caused."""
    stragglers: StragglerPolicy = "warn"
    """What is done about a node that all others wait for."""
    notify: str | None = None
    """A command that gets every event of the job as JSON on its stdin, or a URL to which it is posted."""

    def arguments(self) -> list[str]:
        """Those that differ from their defaults, as words of a command line."""
        found = [*(["--readmit"] if self.readmit else []), *([] if self.node_test else ["--no-node-test"])]
        if self.stragglers != NodePolicy.stragglers:
            found += ["--stragglers", self.stragglers]
        if self.notify is not None and self.notify != os.environ.get(NOTIFY_VARIABLE):
            found += ["--notify", self.notify]
        return found
