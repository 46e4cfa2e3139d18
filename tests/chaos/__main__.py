"""Inject faults into small jobs and check exact recovery, or measure a large rendezvous.

python -m tests.chaos                                  # every fault, one after another; more than an hour
python -m tests.chaos --only "kill a rank" --seed 3    # one fault
python -m tests.chaos --part 2/3                       # the second of three parts of the faults
python -m tests.chaos --simulate 1024                  # the rendezvous of a job of 1,024 nodes, without ranks
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.scale_model import render_report, simulate
from tests.chaos.suite import part_of_faults, render_table, run_suite, select_faults
from zero2all.base.errors import UsageError
from zero2all.base.processes import stop_on_signals


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="directory for jobs and the result table")
    parser.add_argument("--only", action="append", default=[], help="inject only this fault; can be repeated")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="inject only the I-th of N parts of the faults")
    parser.add_argument("--seed", type=int, default=0, help="chooses the ranks and steps at which faults are injected")
    parser.add_argument("--jobs", "-j", type=int, default=1, help="faults at a time; times are then of a busy machine")
    parser.add_argument("--simulate", type=int, metavar="NODES", help="measure a rendezvous of this many nodes instead")
    parser.add_argument("--over", type=float, default=0.0, help="with --simulate: nodes arrive within so many seconds")
    parser.add_argument("--steady", type=float, default=20.0, help="with --simulate: seconds of measured heartbeats")
    options = parser.parse_args(words)
    try:
        if options.simulate is not None:
            sys.stdout.write(render_report(simulate(options.simulate, options.steady, options.over)) + "\n")
            return 0
        faults = part_of_faults(select_faults(options.only), options.part)
        rows = run_suite(options.out, faults, options.seed, options.jobs)
    except UsageError as error:
        parser.error(str(error))
    sys.stdout.write(render_table(rows) + "\n")
    return int(any(row.problems for row in rows))


if __name__ == "__main__":
    stop_on_signals()
    sys.exit(main(sys.argv[1:]))
