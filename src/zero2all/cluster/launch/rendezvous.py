"""The rendezvous of a job: hosted by one of its nodes, or a separate process (``z2a launch --rendezvous-only``).

With a separate one the job survives the loss of any node. Otherwise the node that hosts it must stay.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from zero2all.base.console import say
from zero2all.base.errors import UsageError
from zero2all.base.records import parse_record
from zero2all.cluster.launch.node_links import NodeLinks, UnreachableNodesError
from zero2all.cluster.launch.notify import JobEvent
from zero2all.cluster.launch.pair_check import DEVICE_TIMEOUT, REPORT_MARGIN, NextTurn, TurnReport, run_pair_check
from zero2all.cluster.launch.rendezvous_client import JobEndedError, RendezvousClient, RendezvousStore
from zero2all.cluster.launch.rendezvous_host import RendezvousConfig, RendezvousHost
from zero2all.cluster.launch.rendezvous_messages import (
    AddToValue,
    Close,
    Enter,
    FailureAnswer,
    JoinNextRound,
    Leave,
    Outcome,
    OwnNode,
    RankAssignment,
    ReadClock,
    RendezvousSettings,
    ReportArrivals,
    ReportFailure,
    ReportTestTurn,
)
from zero2all.cluster.launch.restart_policy import READMIT_ADVICE, FailureFacts
from zero2all.cluster.launch.stragglers import SharedClock

JOIN_TIMEOUT = 600.0  # seconds to wait for enough nodes
MAX_TURN_SECONDS = DEVICE_TIMEOUT + 2 * REPORT_MARGIN  # for the slowest node to report a turn of the node test
_POLL_INTERVAL = 0.5
_FIRST_WORDS = 10.0  # seconds after which the node that hosts the rendezvous says where it waits
_LAST_WORDS = 5.0  # seconds that it serves the others after the job has failed


class Rendezvous(RendezvousHandler):
    """Rendezvous handler of a job, for torch's elastic agent. ``close`` ends the job for all nodes.

    >>> rendezvous = Rendezvous(RendezvousConfig("login:29500"), RendezvousSettings((2, 3, 4)), job_id="abc", procs=8)
    >>> rendezvous.next_rendezvous().rank
    0
    """

    def __init__(self, config: RendezvousConfig, settings: RendezvousSettings, job_id: str, procs: int) -> None:
        """``job_id`` is the same on every node and differs from the ids of other jobs at the same endpoint."""
        self.job_id, self.settings = job_id, settings
        overlay = config.overlay
        self.address = config.node_address(several=settings.max_nodes > 1) if overlay is None else overlay.address
        self.host = RendezvousHost(config)
        self.failed = False
        """Whether the ranks of the last round have failed: their peers must not wait for them."""
        self.assignment: RankAssignment | None = None
        self.on_event: Callable[[JobEvent], None] = lambda event: None
        """Called for what the first node of a round, or one for all, has to report."""
        try:
            self.client = RendezvousClient(self.host.own_endpoint, self.host.secret, config.patience)
            own = OwnNode(self.address.advertised, os.getpid(), procs)
            self.client.request(Enter(job_id, settings, own, config.readmit, config.excluded))
        except BaseException:
            self.host.stop()
            raise
        self.client.start_heartbeat()
        self._links = NodeLinks(self.client, self.host.secret, self.address, overlay, is_checked=config.check_network)
        self.clock = SharedClock(lambda: float(self.client.request(ReadClock())))

    def get_backend(self) -> str:
        return "z2a"

    def get_run_id(self) -> str:
        return self.job_id

    def next_rendezvous(self) -> RendezvousInfo:
        failed, self.failed = self.failed, False
        while True:
            self.assignment = self._wait_for_assignment(failed=failed)
            for event in self.assignment.events:
                say(event.text)
                self.on_event(event)
            failed = False
            if self.assignment.node_test and self._test_nodes(self.assignment):
                continue  # a bad node was found, or one was lost: another round
            if self.assignment.nodes < 2 or self._connect_nodes(self.assignment):
                break
        master, port = self.assignment.master, self.assignment.port
        if self.assignment.rank == 0:  # from behind a port map, this node does not reach its own outer address
            master, port = self.address.local, self._store_port
        store = RendezvousStoreInfo(master, port)
        return RendezvousInfo(RendezvousStore(self.client), self.assignment.rank, self.assignment.nodes, store)

    def _connect_nodes(self, assignment: RankAssignment) -> bool:
        """Whether this round can start. If not, another one must form."""
        try:
            return self._links.connect(assignment, self._store_port)
        except UnreachableNodesError as error:
            if error.ends_job:
                self.close("failed")
            else:
                self.leave()
            self.client.close()
            self.host.serve_others(_LAST_WORDS)  # they still read what was found
            raise

    def _wait_for_assignment(self, *, failed: bool) -> RankAssignment:
        self._store_port = _free_port(self.address.local, self.address.local_port)
        pending = self.client.send(JoinNextRound(self.address.advertised_port or self._store_port, failed))
        began, logged, hosting = time.monotonic(), False, self.host.server is not None and self.settings.max_nodes > 1
        deadline = began + JOIN_TIMEOUT
        while not pending.arrived.wait(_POLL_INTERVAL):
            if self.client.status.running:
                deadline = time.monotonic() + JOIN_TIMEOUT
                if not logged:
                    say(
                        f"the job is running on {self.client.status.running} nodes; this one waits as a spare until "
                        "one of them is lost, or enough nodes wait for a larger job"
                    )
                    logged = True
            elif time.monotonic() > deadline:
                raise RendezvousTimeoutError(f"fewer than {self.settings.counts[0]} nodes came in {JOIN_TIMEOUT:.0f} s")
            elif hosting and time.monotonic() > began + _FIRST_WORDS:
                self.host.report_hosting()
                hosting = False
            elif not logged and time.monotonic() > began + self.settings.longest_call:
                self._report_waiting()
                logged = True
        return parse_record(RankAssignment, self.client.result(pending), self.host.endpoint)

    def _test_nodes(self, assignment: RankAssignment) -> bool:
        """Whether another round must form."""

        def submit(report: TurnReport) -> NextTurn:
            answer = self.client.request(ReportTestTurn(report), MAX_TURN_SECONDS)
            return parse_record(NextTurn, answer, self.host.endpoint)

        return run_pair_check(self.client.endpoint, self.job_id, assignment.rank, submit).again

    def _report_waiting(self) -> None:
        left_out = "".join(f"; excluded is {node}, {READMIT_ADVICE}" for node in self.client.status.excluded[:3])
        text = f"the job waits for enough nodes: it needs {self.settings.counts[0]}; start more of them{left_out}"
        say(text)
        if self.assignment is not None and self.claim("job waits"):
            self.on_event(JobEvent("job waits", text))

    def claim(self, name: str) -> bool:
        """Whether this node is the first to claim it since the last round formed: one of them reports for all."""
        try:
            return int(self.client.request(AddToValue(f"claim/{name}", 1))) == 1
        except RendezvousError:
            return False

    def num_nodes_waiting(self) -> int:
        """Greater than 0 if the ranks must save and restart with other nodes."""
        self.client.raise_if_lost()
        status = self.client.status
        if status.closed == "failed":
            raise JobEndedError(done=False)
        return int(status.change and not status.lost and status.closed is None)

    def seconds_since_peer_loss(self) -> float | None:
        """Seconds since a peer of this round was lost; None if none is."""
        since = self.client.lost_since
        return None if since is None else time.monotonic() - since

    def report_failure(self, facts: FailureFacts) -> FailureAnswer:
        """The ranks of this node have failed; whether it must leave the job."""
        try:
            answer = self.client.request(ReportFailure(facts))
        except RendezvousError:
            return FailureAnswer()  # the rendezvous is lost; that is handled elsewhere
        return parse_record(FailureAnswer, answer, self.host.endpoint)

    def report_arrivals(self, arrivals: Mapping[int, Mapping[Any, float]]) -> str | None:
        """Report when the ranks of this node entered their collectives. Returns a warning if a node is slow."""
        with suppress(RendezvousError):
            self.clock.synchronize()
            warning = self.client.request(ReportArrivals(self.clock.arrival_report(arrivals)))
            return None if warning is None else str(warning)
        return None

    def is_closed(self) -> bool:
        return self.client.status.closed is not None

    def set_closed(self) -> None:
        self.close("failed")

    def close(self, outcome: Outcome) -> bool:
        """End the job for all nodes. Whether it was this node that ended it."""
        try:
            return bool(self.client.request(Close(outcome)))
        except RendezvousError:
            return False  # the rendezvous is already gone, and the job with it

    def leave(self) -> None:
        """The ranks of this node have saved and ended; the others may continue."""
        with suppress(RendezvousError):
            self.client.request(Leave())

    def serve_until_others_end(self) -> None:
        """Called after this node has left: if it hosts the rendezvous, the others still need it."""
        self.client.close()
        if self.host.has_nodes():
            say("this node hosts the rendezvous, and serves it until the others have ended")
            self.host.serve_others()

    def shutdown(self) -> bool:
        """Disconnect. Without ``close`` or ``leave`` the other nodes see a lost node."""
        self.client.close()
        self.host.stop()
        return True


def _free_port(address: str, wanted: int | None = None) -> int:
    """A free port for the store of the ranks."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, wanted or 0))
        except OSError as error:
            port = "no free port" if wanted is None else f"port {wanted}"
            raise UsageError(f"{port} of {address} cannot be bound ({error.strerror}): see --listen") from None
        port_found: int = probe.getsockname()[1]
        return port_found
