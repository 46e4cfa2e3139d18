"""The part of one node in the node test. It runs in a process of its own: a broken driver may hang or crash it.

``python -m zero2all.elastic.pair_test_process ENDPOINT JOB`` reads one line for each turn from stdin, and answers it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta

from zero2all.console import say
from zero2all.elastic.pair_test import DEVICE_TIMEOUT, DEVICE_TURN, EXCHANGE_TIMEOUT, NextTurn, TurnReport
from zero2all.errors import Z2aError
from zero2all.processes import end_with_parent
from zero2all.records import parse_record


def run_pair_test(endpoint: str, job: str, number: int, submit: Callable[[TurnReport], NextTurn]) -> NextTurn:
    """On the agent's side: ``submit`` sends the report of a turn to the rendezvous and returns the next one."""
    begin = time.monotonic()
    say("checking the nodes before the restart: a node may be the cause (--no-node-test switches this off)")
    command = [sys.executable, "-m", "zero2all.elastic.pair_test_process", endpoint, job]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    )
    try:
        turn = submit(_ask(process, NextTurn(DEVICE_TURN), number, DEVICE_TIMEOUT))
        while not turn.done:
            report = TurnReport(turn.turn)
            if turn.pair is not None:
                report = _ask(process, turn, number, EXCHANGE_TIMEOUT)
            turn = submit(report)
    finally:
        process.kill()
        process.communicate()
    say(f"{turn.finding or 'no node is bad'} (checked in {time.monotonic() - begin:.1f} s)")
    return turn


def _ask(process: subprocess.Popen[bytes], turn: NextTurn, number: int, timeout: float) -> TurnReport:
    """A report without a result if the process has died, hangs or answers nonsense."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps({"number": number, **asdict(turn)}).encode() + b"\n")
        if select.select([process.stdout], [], [], timeout)[0]:
            return parse_record(TurnReport, json.loads(process.stdout.readline()), "node test")
    except (OSError, ValueError, Z2aError):
        pass
    return TurnReport(turn.turn)


def serve_turns(endpoint: str, job: str) -> None:
    """In the process: one line in, one line out."""
    import torch

    from zero2all.doctor.network_check import measure_pair
    from zero2all.doctor.node_check import check_device
    from zero2all.elastic.rendezvous_client import RendezvousStore
    from zero2all.torch_private import PrefixStore

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")]
    store = RendezvousStore.from_environment(endpoint, job, timedelta(seconds=EXCHANGE_TIMEOUT))
    for line in sys.stdin:
        turn, number = parse_record(NextTurn, json.loads(line), "turn"), int(json.loads(line)["number"])
        if turn.pair is None:
            report = TurnReport(turn.turn, [check_device(device) for device in devices])
        else:
            prefixed = PrefixStore(f"node-test/{turn.turn}/{turn.pair}", store)
            measured = measure_pair(prefixed, number, (turn.pair[0], turn.pair[1]), devices[0])
            report = TurnReport(turn.turn, seconds=measured.seconds)
        answers.write(json.dumps(asdict(report)) + "\n")
        answers.flush()


if __name__ == "__main__":
    end_with_parent()
    serve_turns(*sys.argv[1:])
