"""The rendezvous of a job: hosted by one of its nodes, or a separate process (``z2a launch --rendezvous-only``).

With a separate one the job survives the loss of any node. Otherwise the node that hosts it must stay.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from zero2all.console import say
from zero2all.elastic.job_secret import find_secret, new_secret
from zero2all.elastic.notify import JobEvent
from zero2all.elastic.overlay import CONNECT_TIMEOUT as OVERLAY_TIMEOUT
from zero2all.elastic.overlay import WireGuardOverlay
from zero2all.elastic.pair_test import DEVICE_TIMEOUT, REPORT_MARGIN, NextTurn, TurnReport, run_pair_test
from zero2all.elastic.reach_check import ReachCheck, ReachReport
from zero2all.elastic.rendezvous_client import JobEndedError, RendezvousClient, RendezvousStore
from zero2all.elastic.rendezvous_messages import (
    AddToValue,
    Close,
    Enter,
    JoinNextRound,
    Leave,
    OwnNode,
    ReadClock,
    ReportArrivals,
    ReportFailure,
    ReportTestTurn,
)
from zero2all.elastic.rendezvous_server import RendezvousServer
from zero2all.elastic.rendezvous_state import FailureAnswer, Outcome, RankAssignment, RendezvousSettings
from zero2all.elastic.restart_policy import READMIT_ADVICE, ExcludedNode, FailureFacts
from zero2all.elastic.stragglers import SharedClock
from zero2all.errors import UsageError, Z2aError
from zero2all.network import (
    LOOPBACK,
    HostPort,
    NodeAddress,
    find_node_address,
    interface_addresses,
    is_local_address,
    resolve_endpoint,
)
from zero2all.records import parse_record

JOIN_TIMEOUT = 600.0  # seconds to wait for enough nodes
MAX_TURN_SECONDS = DEVICE_TIMEOUT + 2 * REPORT_MARGIN  # for the slowest node to report a turn of the node test
_POLL_INTERVAL = 0.5
_FIRST_WORDS = 10.0  # seconds after which the node that hosts the rendezvous says where it waits
_LAST_WORDS = 5.0  # seconds that it serves the others after the job has failed


@dataclass(frozen=True)
class RendezvousConfig:
    """Where and how nodes meet; the options of the command line."""

    endpoint: str | None = None
    """HOST:PORT; None for a job on one node."""
    listen: str | None = None
    """ADDRESS or ADDRESS:PORT to bind if this node hosts it; that of ``endpoint`` if not given."""
    advertise: str | None = None
    """HOST or HOST:PORT at which other nodes reach this one, and the store of the ranks if they are on this node; the
    address from which it reaches the rendezvous if not given."""
    secret_file: Path | None = None
    patience: float = 60.0
    """Seconds to wait for an answer."""
    readmit: bool = False
    """Whether this node comes back although it was excluded."""
    excluded: tuple[ExcludedNode, ...] = ()
    """As known from the rendezvous before it was lost."""
    listen_ranks: str | None = None
    """Address or interface of this node that its ranks use, and the port of their store."""
    check_network: bool = False
    """Whether the nodes try to reach each other before their ranks start."""
    overlay: WireGuardOverlay | None = None
    """The private network that the ranks use."""

    def node_address(self, several: bool) -> NodeAddress:
        """Of this node, without the overlay. ``several``: it is one of several nodes."""
        return find_node_address(self.endpoint, self.advertise, self.listen_ranks, several)


class UnreachableError(Z2aError):
    """Nodes of the job cannot reach each other."""


class Rendezvous(RendezvousHandler):
    """Rendezvous handler of a job, for torch's elastic agent. ``close`` ends the job for all nodes.

    >>> rendezvous = Rendezvous(RendezvousConfig("login:29500"), RendezvousSettings((2, 3, 4)), job_id="abc", procs=8)
    >>> rendezvous.next_rendezvous().rank
    0
    """

    def __init__(self, config: RendezvousConfig, settings: RendezvousSettings, job_id: str, procs: int) -> None:
        """``job_id`` is the same on every node and differs from that of other jobs at the same endpoint."""
        self.job_id, self.settings = job_id, settings
        self._overlay = config.overlay
        self.address = config.node_address(settings.max_nodes > 1) if self._overlay is None else self._overlay.address
        self.secret, self.server = self._secret_and_server(config)
        self.endpoint = config.endpoint or (self.server.endpoint if self.server is not None else "")
        self._check_network, self._was_checked = config.check_network, False
        self.failed = False
        """Whether the ranks of the last round have failed: their peers must not wait for them."""
        self.assignment: RankAssignment | None = None
        self.on_event: Callable[[JobEvent], None] = lambda event: None
        """Called for what the first node of a round, or one for all, has to report."""
        try:
            self.client = RendezvousClient(self._own_endpoint(config), self.secret, config.patience)
            own = OwnNode(self.address.advertised, os.getpid(), procs)
            self.client.request(Enter(job_id, settings, own, config.readmit, config.excluded))
        except BaseException:
            self._stop_server()
            raise
        self.client.start_heartbeat()
        self.clock = SharedClock(lambda: float(self.client.request(ReadClock())))

    def _own_endpoint(self, config: RendezvousConfig) -> str:
        """As this node reaches the rendezvous: behind a port map, no packet comes back to its own outer address."""
        if self.server is not None:
            return self.server.endpoint
        return self.endpoint if config.listen is None else str(_bound_address(config.endpoint or "", config.listen))

    def _secret_and_server(self, config: RendezvousConfig) -> tuple[str, RendezvousServer | None]:
        """Starts the server if this node hosts it."""
        if config.endpoint is None:  # no other node connects
            secret = new_secret()
            return secret, _start_server(RendezvousServer(LOOPBACK, 0, secret))
        here = is_local_address(config.endpoint) or config.listen is not None
        secret, _ = find_secret(config.secret_file, make=here, patience=config.patience)
        if not here:
            return secret, None
        bound = _bound_address(config.endpoint, config.listen)
        try:
            return secret, _start_server(RendezvousServer(bound.host, bound.port or 0, secret))
        except OSError:
            return secret, None  # another process of this machine hosts it

    def get_backend(self) -> str:
        return "z2a"

    def get_run_id(self) -> str:
        return self.job_id

    def next_rendezvous(self) -> RendezvousInfo:
        failed, self.failed = self.failed, False
        while True:
            self.assignment = self._wait_for_assignment(failed)
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

        def is_interrupted() -> bool:
            self.client.raise_if_lost()
            status = self.client.status
            return bool(status.lost or status.change or status.closed)

        store, wanted = RendezvousStore(self.client), os.environ.get("GLOO_SOCKET_IFNAME", "")
        if self._overlay is not None and not self._overlay.connect(store, assignment, is_interrupted):
            return False
        if not self._check_network:
            return True
        check = ReachCheck(
            store, self.secret, assignment, self.address, self._store_port, self._was_checked, is_interrupted,
            interface_addresses().get(wanted, ""),
        )  # fmt: skip
        if self._overlay is not None:
            check = replace(check, overlay_endpoint=self._overlay.own.endpoint, timeout=OVERLAY_TIMEOUT)
        return self._judge_reachability(assignment, check)

    def _judge_reachability(self, assignment: RankAssignment, check: ReachCheck) -> bool:
        begin = time.monotonic()
        report = check.run()
        seconds = time.monotonic() - begin
        if report.interrupted:
            return False
        if not report.unreachable:
            self._was_checked = True
            return True
        if not report.has_checked_nodes:
            self.close("failed")
            self._raise_unreachable(report, seconds)
        if assignment.rank in report.new_nodes:
            self.leave()
            self._raise_unreachable(report, seconds)
        say(str(report))
        return not report.new_nodes  # those leave; if all nodes have worked before, the node test finds the bad one

    def _raise_unreachable(self, report: ReachReport, seconds: float) -> None:
        deadline = time.monotonic() + _LAST_WORDS
        self.client.close()
        while self.server is not None and self.server.has_nodes() and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)  # the others still read what was found
        raise UnreachableError(f"the nodes do not reach each other (found in {seconds:.1f} s)\n{report}")

    def _wait_for_assignment(self, failed: bool) -> RankAssignment:
        self._store_port = _free_port(self.address.local, self.address.local_port)
        pending = self.client.send(JoinNextRound(self.address.advertised_port or self._store_port, failed))
        began, logged, hosting = time.monotonic(), False, self.server is not None and self.settings.max_nodes > 1
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
                self._report_hosting()
                hosting = False
            elif not logged and time.monotonic() > began + self.settings.longest_call:
                self._report_waiting()
                logged = True
        return parse_record(RankAssignment, self.client.result(pending), self.endpoint)

    def _test_nodes(self, assignment: RankAssignment) -> bool:
        """Whether another round must form."""

        def submit(report: TurnReport) -> NextTurn:
            return parse_record(NextTurn, self.client.request(ReportTestTurn(report), MAX_TURN_SECONDS), self.endpoint)

        return run_pair_test(self.client.endpoint, self.job_id, assignment.rank, submit).again

    def _report_hosting(self) -> None:
        assert self.server is not None
        bound = "" if self.server.endpoint == self.endpoint else f", which must lead to {self.server.endpoint} here"
        say(f"waiting for other nodes; they must reach TCP {self.endpoint}{bound}")

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
        return parse_record(FailureAnswer, answer, self.endpoint)

    def report_arrivals(self, arrivals: Mapping[int, Mapping[Any, float]]) -> str | None:
        """When the ranks of this node entered their collectives; a warning about a slow node, if there is one."""
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
        """After this node has left: if it hosts the rendezvous, the others still need it."""
        self.client.close()
        if self.server is not None and self.server.has_nodes():
            say("this node hosts the rendezvous, and serves it until the others have ended")
            while self.server.has_nodes():
                time.sleep(_POLL_INTERVAL)

    def shutdown(self) -> bool:
        """Disconnect. Without ``close`` or ``leave`` the other nodes see a lost node."""
        self.client.close()
        self._stop_server()
        return True

    def _stop_server(self) -> None:
        if self.server is not None:
            self.server.stop()


def _start_server(server: RendezvousServer) -> RendezvousServer:
    server.start()
    return server


def _bound_address(endpoint: str, listen: str | None) -> HostPort:
    """Where the node that hosts the rendezvous listens."""
    if listen is None:
        _, (address, port, *_) = resolve_endpoint(endpoint)
        return HostPort(str(address), port)
    bound = HostPort.parse(listen, "--rdzv-listen")
    _, (address, port, *_) = resolve_endpoint(f"{bound.host or '0.0.0.0'}:{bound.port or 0}")
    return HostPort(str(address), port or HostPort.parse(endpoint, "--rdzv-endpoint").port)


def _free_port(address: str, wanted: int | None = None) -> int:
    """For the store of the ranks."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, wanted or 0))
        except OSError as error:
            port = "no free port" if wanted is None else f"port {wanted}"
            raise UsageError(f"{port} of {address} cannot be bound ({error.strerror}): see --listen") from None
        port_found: int = probe.getsockname()[1]
        return port_found
