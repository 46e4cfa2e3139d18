"""The node test, after a failure that no program explains: which node is bad?

Every node of a new round computes a matrix product, then exchanges data in pairs, in changing pairs until each node is
healthy or known to be bad. A node reports each of its turns and gets the next one, so messages grow with the number of
nodes, not with its square. The rendezvous decides by ``PairTest``, without sockets, threads or clocks of its own.

The part of a node runs in a process of its own: a broken driver may hang or crash it.
``python -m zero2all.cluster.launch.pair_check ENDPOINT JOB`` reads one line for each turn from stdin, and answers it.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from zero2all.base.console import say
from zero2all.base.errors import Z2aError
from zero2all.base.processes import end_with_parent
from zero2all.base.records import parse_record
from zero2all.cluster.doctor.pairs import (
    MAX_ROUNDS,
    MIN_SLOW_SECONDS,
    PAIR_TIMEOUT,
    SLOW_FACTOR,
    DeviceCheck,
    PairMeasurement,
    bad_nodes,
    min_rounds,
    round_robin_rounds,
    undecided_nodes,
)

DEVICE_TURN = -1
DEVICE_TIMEOUT = 60.0  # seconds to start the test and compute a product on every device
EXCHANGE_TIMEOUT = 6 * PAIR_TIMEOUT  # seconds for one exchange: gloo tries five times to reach a partner
REPORT_MARGIN = 10.0  # seconds more until a node that reports nothing is given up
MAX_BAD_SHARE = 4  # at most one node in so many can be bad; if more seem so, the cause is not a node


@dataclass(frozen=True)
class TurnReport:
    """What a node found in one turn."""

    turn: int
    devices: list[DeviceCheck] = field(default_factory=list)
    """The checks of the first turn; empty if the devices could not be checked."""
    seconds: float | None = None
    """The time of the exchange, in later turns; None if it failed."""


@dataclass(frozen=True)
class NextTurn:
    turn: int
    pair: tuple[int, int] | None = None
    """Which nodes of the round exchange data; None if this node has no partner in this turn."""
    done: bool = False
    again: bool = False
    """Whether another round must form once it is done, without a node that is bad or lost."""
    finding: str | None = None


class PairTest:
    """
    >>> test = PairTest(["a", "b", "c"], now=0.0)
    >>> test.report("a", TurnReport(DEVICE_TURN, [check]))
    >>> test.advance(now=1.0)
    False
    """

    def __init__(self, members: Sequence[str], now: float) -> None:
        self.members, self.turn, self.done, self.again = list(members), DEVICE_TURN, False, False
        self.finding: str | None = None
        self._since = now
        self._numbers = {id: number for number, id in enumerate(members)}
        self._rounds = round_robin_rounds(len(members), MAX_ROUNDS)
        self._reported: set[int] = set()
        self._devices: dict[int, list[DeviceCheck]] = {}
        self._measurements: list[PairMeasurement] = []
        self._silent: set[int] = set()

    def report(self, id: str, report: TurnReport) -> None:
        number = self._numbers[id]
        if report.turn != self.turn or number in self._reported or self.done:
            return  # too late: that turn is over
        self._reported.add(number)
        if report.turn == DEVICE_TURN:
            self._devices[number] = report.devices
        elif (pair := self._pair(number)) is not None:
            other = pair[0] if number == pair[1] else pair[1]
            self._measurements.append(PairMeasurement(number, other, report.seconds))

    def abort(self) -> None:
        """A node was lost meanwhile: another round must form anyway."""
        self.done = self.again = True

    def advance(self, now: float) -> bool:
        """Whether a turn has ended, because all have reported or ran out of time."""
        if self.done:
            return False
        limit = (DEVICE_TIMEOUT if self.turn == DEVICE_TURN else EXCHANGE_TIMEOUT) + REPORT_MARGIN
        missing = set(range(len(self.members))) - self._reported
        if missing and now - self._since < limit:
            return False
        self._silent |= missing
        self._reported, self._since, self.turn = set(), now, self.turn + 1
        self.done = self._is_decided()
        return True

    def next_turn(self, id: str, after: int) -> NextTurn | None:
        """What a node does after its report of a turn; None while others have not reported theirs."""
        if self.done:
            return NextTurn(self.turn, done=True, again=self.again, finding=self.finding)
        return NextTurn(self.turn, self._pair(self._numbers[id])) if self.turn > after else None

    def bad_members(self) -> dict[str, str]:
        """Why each bad node is bad; empty if more of them seem bad than ``MAX_BAD_SHARE`` allows."""
        found = {
            **bad_nodes(self._measurements, len(self.members)),
            **_bad_devices(self._devices),
            **dict.fromkeys(self._silent, "its part of the node test did not finish in time"),
        }
        limit = max(1, len(self.members) // MAX_BAD_SHARE)
        return {} if len(found) > limit else {self.members[number]: reason for number, reason in sorted(found.items())}

    def _pair(self, number: int) -> tuple[int, int] | None:
        return next((pair for pair in self._rounds[self.turn] if number in pair), None)

    def _is_decided(self) -> bool:
        if self._silent or self.turn >= len(self._rounds):
            return True  # a node that says nothing is found; others would only wait for it
        return self.turn >= min_rounds(len(self.members)) and not undecided_nodes(self._measurements, len(self.members))


def _bad_devices(by_node: dict[int, list[DeviceCheck]]) -> dict[int, str]:
    bad = {number: "no device could compute a matrix product" for number, checks in by_node.items() if not checks}
    every = [check for checks in by_node.values() for check in checks]
    for number, checks in by_node.items():
        for check in checks:
            if not check.steady:
                bad[number] = f"{check.device} computes different bits each time for the same product"
                continue
            peers = [other for other in every if other.device == check.device and other.steady]
            holders = {at for at, found in by_node.items() if any(one.device == check.device for one in found)}
            if len(holders) < 3:
                continue  # of two nobody knows which one is right
            usual, votes = Counter(peer.digest for peer in peers).most_common(1)[0]
            median = statistics.median(peer.seconds for peer in peers)
            if check.digest != usual and 2 * votes > len(peers):
                bad[number] = f"{check.device} computes different bits than its peers"
            elif check.seconds > SLOW_FACTOR * median and check.seconds > median + MIN_SLOW_SECONDS:
                bad[number] = f"{check.device} is {check.seconds / median:.0f} times as slow as its peers"
    return bad


def run_pair_check(endpoint: str, job: str, number: int, submit: Callable[[TurnReport], NextTurn]) -> NextTurn:
    """Called by the agent. ``submit`` sends the report of a turn to the rendezvous and returns the next one."""
    begin = time.monotonic()
    say("checking the nodes before the restart: a node may be the cause")
    command = [sys.executable, "-m", "zero2all.cluster.launch.pair_check", endpoint, job]
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
    """Serve the turns in the process of the check: one line in, one line out."""
    import torch

    from zero2all.base.torch_private import PrefixStore
    from zero2all.cluster.doctor.net_check import measure_pair
    from zero2all.cluster.doctor.preflight import check_device
    from zero2all.cluster.launch.rendezvous_client import RendezvousStore

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
