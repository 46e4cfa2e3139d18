"""How ranks are told to save and exit, and how long the agent waits for them."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from zero2all.base.console import say
from zero2all.cluster.launch.hang_detection import request_abort
from zero2all.cluster.launch.heartbeat import HeartbeatStatus, StartupPhase
from zero2all.cluster.launch.rank_watch import RankWatch
from zero2all.cluster.launch.rendezvous import Rendezvous

PEER_LOSS_TIMEOUT = 5.0  # seconds for ranks to notice that a peer on another node is lost


class RankShutdown:
    """``grace`` is how long ranks may take to save after SIGTERM."""

    def __init__(self, ranks: RankWatch, rendezvous: Rendezvous, directory: Path, grace: float) -> None:
        self._ranks, self._rendezvous, self._directory, self._grace = ranks, rendezvous, directory, grace
        self._abort_requested = False

    def begin_round(self) -> None:
        self._abort_requested = False

    def peers_lost(self, statuses: dict[int, HeartbeatStatus]) -> bool:
        """A node is lost, and the ranks here had time to notice: they block in a collective that never ends. Ranks that
        are saving get the grace period."""
        lost_for = self._rendezvous.seconds_since_peer_loss()
        saving = any(status.phase_times[StartupPhase.ENDING] for status in statuses.values())
        if lost_for is not None and not saving and not self._abort_requested:
            # Once: ranks that wait for NCCL exit now, ranks that wait for gloo notice it themselves.
            self._abort_requested = True
            for local in self._ranks.running():
                request_abort(self._directory, local)
        return lost_for is not None and lost_for > (self._grace if saving else PEER_LOSS_TIMEOUT)

    def ask_to_save(self, stop: signal.Signals, seconds: int) -> None:
        """Returns when the ranks have exited, or their time is over."""
        say(f"telling the ranks to save and exit; they have {seconds} s")
        for pid in self._ranks.running().values():
            with suppress(ProcessLookupError):
                os.kill(pid, stop)
        self.wait(seconds)

    def wait(self, seconds: float) -> None:
        """Returns when the ranks have exited, or cannot: a peer that they need for saving is lost."""
        deadline = time.monotonic() + seconds
        while self._ranks.running() and time.monotonic() < deadline and not self.peers_lost(self._ranks.statuses()):
            time.sleep(0.05)
