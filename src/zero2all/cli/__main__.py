"""``python -m zero2all.cli``: what launched ranks run, with the interpreter that launched them."""

import os
import sys

if "Z2A_AGENT_DIR" in os.environ:  # under an agent; heartbeat.py would load torch, also where there is none
    from zero2all.base.processes import end_with_agent

    end_with_agent()  # the next import takes seconds

    from zero2all.base.machine.cpus import bind_rank

    bound = bind_rank()  # before torch starts threads, which inherit it
    if bound is not None and bound.problem:
        sys.stderr.write(f"warning: rank {os.environ.get('RANK')} {bound.problem}\n")

    from zero2all.cluster.launch.worker import run_worker, setup_worker

    setup_worker()
    from zero2all.cli.main import main

    run_worker(main)

from zero2all.cli.main import main

main()
