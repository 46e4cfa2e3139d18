"""``python -m tests.chaos.chaos_agent JSON``: ``z2a launch`` for the ranks of the suite."""

from __future__ import annotations

import json
import sys

from tests.chaos.shifted_clock import shift_clock

shift_clock()

from zero2all.base.processes import end_with_parent  # noqa: E402
from zero2all.cluster.launch.launcher import LaunchConfig  # noqa: E402
from zero2all.cluster.launch.restart_policy import NodePolicy  # noqa: E402

if __name__ == "__main__":
    end_with_parent()
    options = json.loads(sys.argv[1])
    options |= {"nodes": tuple(options["nodes"]), "node_policy": NodePolicy(**options.get("node_policy", {}))}
    sys.exit(LaunchConfig(module="tests.chaos.chaos_rank", **options).run())
