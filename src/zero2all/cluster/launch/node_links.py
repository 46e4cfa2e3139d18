"""Whether the nodes of a round reach each other before their ranks start."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from zero2all.base.console import say
from zero2all.base.errors import Z2aError
from zero2all.base.network.addresses import NodeAddress, interface_addresses
from zero2all.cluster.launch.overlay import CONNECT_TIMEOUT as OVERLAY_TIMEOUT
from zero2all.cluster.launch.overlay import WireGuardOverlay
from zero2all.cluster.launch.reach_check import ReachCheck, ReachReport
from zero2all.cluster.launch.rendezvous_client import RendezvousClient, RendezvousStore
from zero2all.cluster.launch.rendezvous_messages import RankAssignment


class UnreachableNodesError(Z2aError):
    """Nodes of the job cannot reach each other."""

    def __init__(self, report: ReachReport, seconds: float) -> None:
        super().__init__(f"the nodes do not reach each other (found in {seconds:.1f} s)\n{report}")
        self.ends_job = not report.has_checked_nodes
        """Otherwise only this node, which is new, must leave."""


class NodeLinks:
    """
    >>> links = NodeLinks(client, secret, address, overlay=None, is_checked=True)
    >>> links.connect(assignment, store_port=4000)
    True
    """

    def __init__(
        self,
        client: RendezvousClient,
        secret: str,
        address: NodeAddress,
        overlay: WireGuardOverlay | None,
        *,
        is_checked: bool,
    ) -> None:
        """``is_checked``: whether the nodes try to reach each other."""
        self._client, self._secret, self._address, self._overlay = client, secret, address, overlay
        self._is_checked, self._was_checked = is_checked, False

    def connect(self, assignment: RankAssignment, store_port: int) -> bool:
        """Whether this round can start. If not, another one must form."""
        store, wanted = RendezvousStore(self._client), os.environ.get("GLOO_SOCKET_IFNAME", "")
        if self._overlay is not None and not self._overlay.connect(store, assignment, self._is_interrupted):
            return False
        if not self._is_checked:
            return True
        check = ReachCheck(
            store,
            self._secret,
            assignment,
            self._address,
            store_port,
            self._was_checked,
            self._is_interrupted,
            interface_addresses().get(wanted, ""),
        )
        if self._overlay is not None:
            check = replace(check, overlay_endpoint=self._overlay.own.endpoint, timeout=OVERLAY_TIMEOUT)
        return self._judge(assignment, check)

    def _is_interrupted(self) -> bool:
        self._client.raise_if_lost()
        status = self._client.status
        return bool(status.lost or status.change or status.closed)

    def _judge(self, assignment: RankAssignment, check: ReachCheck) -> bool:
        begin = time.monotonic()
        report = check.run()
        if report.interrupted:
            return False
        if not report.unreachable:
            self._was_checked = True
            return True
        if not report.has_checked_nodes or assignment.rank in report.new_nodes:
            raise UnreachableNodesError(report, time.monotonic() - begin)
        say(str(report))
        return not report.new_nodes  # they leave; if all nodes have worked before, the node test finds the bad one
