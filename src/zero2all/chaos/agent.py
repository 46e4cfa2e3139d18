"""``python -m zero2all.chaos.agent JSON``: ``z2a launch`` for ranks of the suite."""

from __future__ import annotations

import json
import sys

from zero2all.processes import end_with_parent
from zero2all.resilience.launch import Job

if __name__ == "__main__":
    end_with_parent()
    options = json.loads(sys.argv[1])
    sys.exit(Job(module="zero2all.chaos.rank", **{**options, "nodes": tuple(options["nodes"])}).run())
