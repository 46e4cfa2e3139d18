"""``python -m zero2all.cli``: what launched ranks run, with the interpreter that launched them."""

import os

if "Z2A_AGENT_DIR" in os.environ:  # there is an agent; to ask beat.py would load torch also where there is none
    from zero2all.processes import end_with_agent

    end_with_agent()  # the next import takes seconds

    from zero2all.resilience.rank import attend, run_rank

    attend()
    from zero2all.cli.main import main

    run_rank(main)

from zero2all.cli.main import main

main()
