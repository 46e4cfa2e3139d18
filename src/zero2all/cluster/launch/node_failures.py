"""Failures of the ranks of a node: their reports, the decision whether to restart, and what a recovery costs."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from zero2all.base.console import say
from zero2all.base.environment import record_collective_starts
from zero2all.base.redact import redact
from zero2all.cluster.launch.exit_reason import (
    ExitReason,
    FailureKind,
    classify_exit,
    is_signal_exit,
    oom_kills,
    read_error_file,
)
from zero2all.cluster.launch.failure_report import (
    LOG_LINES,
    NodeReport,
    RankFailure,
    RecoveryCost,
    add_recovery_cost,
    combine_node_reports,
    last_lines,
    render_text,
    write_failure_report,
    write_node_report,
)
from zero2all.cluster.launch.gpu_errors import GpuErrorPoll, GpuErrors, GpuFault, fatal_texts
from zero2all.cluster.launch.hang_detection import HungRank
from zero2all.cluster.launch.heartbeat import HeartbeatStatus, StartupPhase, find_run_directory
from zero2all.cluster.launch.notify import JobEvent
from zero2all.cluster.launch.rendezvous import Rendezvous
from zero2all.cluster.launch.restart_policy import READMIT_ADVICE, FailureFacts, RestartPolicy

REPORT_DELAY = 1.0  # seconds at the end of a job for the reports of other nodes to arrive
CLASSIFIED_LINES = 1000  # of a log: an abort writes the stacks of all threads, in C++ and in Python, after its reason


@dataclass(frozen=True)
class ObservedFailure:
    """What the agent has seen when its ranks failed; all of them have ended since."""

    kind: FailureKind
    detected: float
    statuses: dict[int, HeartbeatStatus]
    deaths: list[RankFailure] = field(default_factory=list)
    hung: list[HungRank] = field(default_factory=list)

    @property
    def step(self) -> int:
        return max(status.step for status in self.statuses.values())

    @property
    def last_heartbeat(self) -> float:
        return max(status.time for status in self.statuses.values())


class NodeFailures:
    """
    >>> failures = NodeFailures(rendezvous, directory, script_reports=None)
    >>> failures.handle(ObservedFailure("crash", detected, statuses, deaths), worker_group, restarts_left=3)
    True
    """

    def __init__(self, rendezvous: Rendezvous, directory: Path, script_reports: Path | None) -> None:
        """``script_reports`` is the directory for reports about a script, which opens no run directory."""
        self._rendezvous, self._directory, self._script_reports = rendezvous, directory, script_reports
        self._restart_policy = RestartPolicy(sees_progress=script_reports is None)
        self.last: NodeReport | None = None
        """The failure that ended the job, or the latest one."""
        self.leaves_job = False
        """This node is excluded, and the job continues without it."""
        self.recovery: RecoveryTimer | None = None
        self._oom_kills = 0
        self._gpu_errors = GpuErrors(since=time.clock_gettime(time.CLOCK_BOOTTIME))

    @property
    def run_directory(self) -> Path | None:
        """The directory for reports: of the run, once a rank has set it, or of a script."""
        found = find_run_directory(self._directory)
        return self._script_reports if found is None else found

    def begin_round(self, *, is_first_node: bool) -> None:
        report = self._write_report() if is_first_node else None
        if self.recovery is not None:
            self.recovery.rendezvous_done(report)
        self._oom_kills = oom_kills()

    def record_progress(self, statuses: dict[int, HeartbeatStatus]) -> None:
        self._restart_policy.record_progress(max(status.step for status in statuses.values()))

    def finish_recovery(self, statuses: dict[int, HeartbeatStatus]) -> None:
        """The recovery ends when every rank has done a step."""
        if self.recovery is not None and self.recovery.finish_if_stepped(statuses):
            self.recovery = None

    def rank_failures(
        self, failures: dict[int, ProcessFailure], statuses: dict[int, HeartbeatStatus], ended_by_agent: set[int]
    ) -> list[RankFailure]:
        oom_killed = oom_kills() > self._oom_kills
        found = []
        for rank, failure in failures.items():
            local = failure.local_rank
            message, trace, when = read_error_file(Path(failure.error_file))
            lines = last_lines(Path(failure.error_file).with_name("stderr.log"), CLASSIFIED_LINES)
            how = classify_exit(failure.exitcode, message, oom_killed=oom_killed, log=lines)
            if local in ended_by_agent:
                lost = ", ".join(self._rendezvous.client.status.lost)
                how = ExitReason(
                    "ended by the agent", f"waited for {lost}, lost" if lost else "ended with the other ranks"
                )
            found.append(
                RankFailure(
                    rank,
                    socket.gethostname(),
                    failure.pid,
                    failure.exitcode,
                    how.kind,
                    how.description,
                    when or how.time or failure.timestamp,
                    statuses[local].step,
                    message,
                    trace,
                    lines[-LOG_LINES:],
                )
            )
        return found

    def handle(self, failure: ObservedFailure, worker_group: WorkerGroup, restarts_left: int) -> bool:
        """Report the failure. Returns whether the ranks are started again."""
        self._rendezvous.failed = failure.kind != "stopped"
        nodes = worker_group.group_world_size
        reason = self._restart_policy.reason_to_give_up(failure.kind, failure.step, nodes, restarts_left)
        if failure.deaths and self.run_directory is None and all(death.status >= 0 for death in failure.deaths):
            reason = "not tried again: the command exited before it opened a run"
        faults = self._gpu_errors.faults()
        by_signal = any(is_signal_exit(death.status) for death in failure.deaths if death.kind == "crash")
        answer = self._rendezvous.report_failure(
            FailureFacts(failure.step, failure.kind, by_signal, reason is not None, fatal_texts(faults))
        )
        if answer.excluded is not None:
            self.leaves_job = True
            reason = f"this node is excluded: {answer.excluded}; the others continue; {READMIT_ADVICE}"
        pause = self._restart_policy.backoff()
        after = f" after {pause:.0f} s" if pause else ""
        source = " from the newest checkpoint" if self._script_reports is None else ""
        self.last = NodeReport(
            node=socket.gethostname(),
            nodes=nodes or 1,
            time=time.time() - (time.monotonic() - failure.detected),
            kind=failure.kind,
            step=failure.step,
            since=failure.detected - failure.last_heartbeat,
            decision=reason or f"restarting{after}{source}" + (f"; {answer.kept}" if answer.kept else ""),
            command=[redact(str(word)) for word in worker_group.spec.args],
            deaths=failure.deaths,
            stuck=failure.hung,
            gpu_faults=[str(fault) for fault in faults],
            excluded=None if answer.excluded is None else f"{socket.gethostname()}: {answer.excluded}",
        )
        self._publish(self.last)
        self.recovery = RecoveryTimer(failure, time.monotonic(), pause)
        return reason is None

    def _publish(self, found: NodeReport) -> None:
        if found.kind in ("stopped", "wrong usage"):  # the ranks have logged why, and nothing is broken
            say(found.decision)
            return
        report = combine_node_reports([found])
        say(render_text(report))
        if found.stuck and not report.odd:
            record_collective_starts()  # so that the same hang names its rank next time
        if (run := self.run_directory) is not None:
            with suppress(OSError):  # a failing disk must not end the agent
                write_node_report(run, found)

    def _write_report(self) -> Path | None:
        with suppress(OSError):
            return None if self.run_directory is None else write_failure_report(self.run_directory)
        return None

    def write_final_report(self) -> Path | None:
        """Combine the node reports that no restart has, at the end. Reports of other nodes may still arrive."""
        if self.last is None or self.run_directory is None:
            return None
        if self.last.nodes > 1:
            time.sleep(REPORT_DELAY)
        return self._write_report()

    def end_event(self) -> JobEvent:
        """The event of a job that has failed."""
        return JobEvent("job gave up", "a rank failed" if self.last is None else self.last.decision)

    def poll_gpu_errors(self) -> GpuErrorPoll:
        """A context in which new faults of this node's GPUs are logged and sent to --notify."""
        return GpuErrorPoll(self._gpu_errors, self._report_gpu_fault)

    def _report_gpu_fault(self, fault: GpuFault) -> None:
        advice = "; the ranks will probably fail, and the node is excluded then" if fault.fatal else ""
        say(f"warning: {socket.gethostname()}: {fault}{advice}")
        self._rendezvous.on_event(JobEvent("GPU error", str(fault), socket.gethostname()))


class RecoveryTimer:
    """The time between a failure and the first step after it."""

    def __init__(self, failure: ObservedFailure, torn_down: float, pause: float) -> None:
        self.pause = pause
        self._failure, self._torn_down, self._rendezvous_time = failure, torn_down, torn_down
        self._report: Path | None = None

    def rendezvous_done(self, report: Path | None) -> None:
        """The next round has formed."""
        self._rendezvous_time, self._report = time.monotonic(), report

    def finish_if_stepped(self, statuses: dict[int, HeartbeatStatus]) -> bool:
        """Whether every rank has done a step; if so, log and record the recovery cost."""
        if not all(status.has_stepped for status in statuses.values()):
            return False
        imported, joined, loaded, stepped, _ = (
            max(status.phase_times[phase] for status in statuses.values()) for phase in StartupPhase
        )
        cost = RecoveryCost(
            detect=self._failure.detected - self._failure.last_heartbeat,
            tear_down=self._torn_down - self._failure.detected,
            back_off=self.pause,
            rendezvous=self._rendezvous_time - self._torn_down - self.pause,
            start=imported - self._rendezvous_time,
            join=joined - imported,
            load=loaded - joined,
            first_step=stepped - loaded,
            steps_again=max(0, self._failure.step - min(status.first_step for status in statuses.values()) + 1),
        )
        say(f"training again after {cost}")
        if self._report is not None:
            with suppress(OSError):
                add_recovery_cost(self._report, cost)
        return True


def gravest_kind(deaths: list[RankFailure]) -> FailureKind:
    """The most severe kind; kinds that follow from another failure come last."""
    order: tuple[FailureKind, ...] = ("wrong usage", "out of memory", "crash", "hang", "stopped", "cut off")
    kinds = {death.kind for death in deaths}
    return next((kind for kind in order if kind in kinds), "crash")
