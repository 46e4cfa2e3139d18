"""The process that starts and monitors the ranks of a node: torch's elastic agent, which also detects hangs,
classifies failures and reports them."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from zero2all.base.console import say
from zero2all.base.torch_private import Store, forbid_restarts, remaining_restarts, worker_context
from zero2all.cluster.launch.failure_report import trim_log
from zero2all.cluster.launch.heartbeat import HeartbeatStatus
from zero2all.cluster.launch.node_failures import NodeFailures, ObservedFailure, gravest_kind
from zero2all.cluster.launch.rank_shutdown import RankShutdown
from zero2all.cluster.launch.rank_watch import RankWatch, StragglerCheck
from zero2all.cluster.launch.rendezvous import Rendezvous

EXIT_GRACE = 1.0  # seconds for ranks that lost a peer to exit and report it
LOG_TRIM_INTERVAL = 10.0  # seconds between two checks of the log size


@dataclass(frozen=True)
class ScriptSettings:
    """Settings for ranks that run any script: it opens no run directory, and may send no heartbeat."""

    report_directory: Path
    watch_activity: bool
    """Whether a rank without heartbeats that is idle for ``hang_after`` seconds is hung."""


class Agent(LocalElasticAgent):
    """One for each node. ``run()`` returns when the job has ended, with success or failure."""

    def __init__(
        self, spec: WorkerSpec, directory: Path, hang_after: float, grace: float, script: ScriptSettings | None = None
    ) -> None:
        """``grace`` is how long ranks may take to save after SIGTERM."""
        logs = DefaultLogsSpecs(log_dir=str(directory / "logs"), tee=Std.ERR)
        super().__init__(spec, logs, log_line_prefix_template="[${rank}] ", shutdown_timeout=int(grace))
        rendezvous = spec.rdzv_handler
        assert isinstance(rendezvous, Rendezvous)
        self.failures = NodeFailures(rendezvous, directory, None if script is None else script.report_directory)
        self.rendezvous, self._directory, self._grace = rendezvous, directory, grace
        watches_activity = script is not None and script.watch_activity
        self._ranks = RankWatch(
            self, directory, hang_after, is_script=script is not None, watches_activity=watches_activity
        )
        self._rank_shutdown = RankShutdown(self._ranks, rendezvous, directory, grace)
        self._straggler_check = StragglerCheck(directory, rendezvous)
        self._next_trim = time.monotonic() + LOG_TRIM_INTERVAL

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """The rendezvous has assigned them. torch would exchange them through the store, and wait for a node that was
        lost in the meantime."""
        assignment = self.rendezvous.assignment
        assert assignment is not None
        ranks = [(local, assignment.first_rank + local) for local in range(spec.local_world_size)]
        return [Worker(local, rank, rank, assignment.ranks, assignment.ranks) for local, rank in ranks]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.failures.begin_round(is_first_node=worker_group.group_rank == 0)
        self._ranks.begin_round(worker.local_rank for worker in worker_group.workers)
        self._rank_shutdown.begin_round()
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        statuses = self._ranks.statuses()
        self.failures.record_progress(statuses)
        if failed := self._ranks.failed():
            # Ranks that were asked to stop are still saving; ranks that lost a peer have nothing left to do.
            grace = self._grace if any(map(self._ranks.was_stopped, failed)) else EXIT_GRACE
            return self._end_failed(worker_group, statuses, grace)
        result = self._result(worker_group)
        if result.state != WorkerState.HEALTHY:
            return result
        signs = self._ranks.signs_of_progress(statuses)
        if self._ranks.is_hung(signs):
            return self._end_hung(worker_group, statuses, signs)
        if self._rank_shutdown.peers_lost(statuses):
            return self._end_cut_off(worker_group, statuses)
        self.failures.finish_recovery(statuses)
        self._straggler_check.advance(worker_group)
        self._trim_logs()
        return result

    def _result(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _end_failed(self, worker_group: WorkerGroup, statuses: dict[int, HeartbeatStatus], grace: float) -> RunResult:
        detected = time.monotonic()
        self._end_ranks(grace)
        result = self._result(worker_group)
        deaths = self.failures.rank_failures(result.failures, statuses, self._ranks.ended_by_agent)
        self._handle_failure(worker_group, ObservedFailure(gravest_kind(deaths), detected, statuses, deaths))
        return result

    def _end_hung(
        self, worker_group: WorkerGroup, statuses: dict[int, HeartbeatStatus], signs: dict[int, HeartbeatStatus]
    ) -> RunResult:
        detected = time.monotonic()
        hung = self._ranks.collect_stacks(worker_group, statuses)
        self._end_ranks(0)
        self._handle_failure(worker_group, ObservedFailure("hang", detected, signs, hung=hung))
        return RunResult(state=WorkerState.UNHEALTHY)

    def _end_cut_off(self, worker_group: WorkerGroup, statuses: dict[int, HeartbeatStatus]) -> RunResult:
        detected = time.monotonic()
        self._end_ranks(0)
        failures = self._result(worker_group).failures
        deaths = self.failures.rank_failures(failures, statuses, self._ranks.ended_by_agent)
        self._handle_failure(worker_group, ObservedFailure("cut off", detected, statuses, deaths))
        return RunResult(state=WorkerState.UNHEALTHY)

    def _end_ranks(self, wait: float) -> None:
        """Wait for ranks to exit, then kill them. torch would send SIGTERM and wait for half a minute."""
        self._ranks.await_exits(wait)
        self._shutdown(signal.SIGKILL, timeout=5)

    def _handle_failure(self, worker_group: WorkerGroup, failure: ObservedFailure) -> None:
        if not self.failures.handle(failure, worker_group, remaining_restarts(self)):
            forbid_restarts(self)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self.failures.recovery is None:  # no failure here: a node has joined, or another one has failed
            say("the nodes of the job change: this one saves and restarts with them")
        else:
            time.sleep(self.failures.recovery.pause)
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(signal.SIGTERM, timeout=int(self._grace))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if death_sig != signal.SIGKILL and worker_context(self) is not None and self._ranks.running():
            self._rank_shutdown.ask_to_save(death_sig, timeout)
            timeout = 1  # the rest is killed
        super()._shutdown(death_sig, timeout)

    def _trim_logs(self) -> None:
        if (now := time.monotonic()) >= self._next_trim:
            self._next_trim = now + LOG_TRIM_INTERVAL
            for log in self._directory.glob("logs/**/stderr.log"):
                trim_log(log)
