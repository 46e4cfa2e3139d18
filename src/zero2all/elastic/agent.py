"""The process that starts and monitors the ranks of a node: torch's elastic agent, which also detects hangs,
classifies failures and reports them."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from zero2all.console import say
from zero2all.elastic.exit_reason import ExitReason, FailureKind, classify_exit, is_signal_exit, oom_kills
from zero2all.elastic.failure_report import (
    LOG_LINES,
    NodeReport,
    RankFailure,
    RecoveryCost,
    add_recovery_cost,
    combine_node_reports,
    last_lines,
    render_text,
    trim_log,
    write_failure_report,
    write_node_report,
)
from zero2all.elastic.gpu_errors import GpuErrorPoll, GpuErrors, GpuFault, fatal_texts
from zero2all.elastic.hang_detection import (
    ActivityWatch,
    HungRank,
    collect_stacks,
    is_hung,
    request_abort,
    request_dump,
)
from zero2all.elastic.heartbeat import Heartbeat, HeartbeatStatus, StartupPhase, create_heartbeat, find_run_directory
from zero2all.elastic.notify import JobEvent
from zero2all.elastic.rendezvous import Rendezvous
from zero2all.elastic.restart_policy import READMIT_ADVICE, FailureFacts, RestartPolicy
from zero2all.elastic.stragglers import CHECK_INTERVAL, find_straggler, read_arrival_times
from zero2all.elastic.worker import collectives_path, dump_thread_path, stacks_path
from zero2all.environment import record_collective_starts
from zero2all.redact import redact
from zero2all.torch_private import Store, forbid_restarts, remaining_restarts, worker_context

EXIT_GRACE = 1.0  # seconds for ranks that lost a peer to exit and report it
CLASSIFIED_LINES = 1000  # of a log: an abort writes the stacks of all threads, in C++ and in Python, after its reason
LOG_TRIM_INTERVAL = 10.0  # seconds between two checks of the log size
PEER_LOSS_TIMEOUT = 5.0  # seconds for ranks to notice that a peer on another node is lost


@dataclass(frozen=True)
class ScriptSettings:
    """For ranks that run any script: it opens no run directory, and may send no heartbeat."""

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
        assert isinstance(spec.rdzv_handler, Rendezvous)
        self.rendezvous = spec.rdzv_handler
        self.directory, self.hang_after, self.grace = directory, hang_after, grace
        self.restart_policy = RestartPolicy(sees_progress=script is None)
        self.script = script
        self._activity = ActivityWatch(directory, hang_after) if script is not None and script.watch_activity else None
        self.last_failure: NodeReport | None = None
        """The failure that ended the job, or the latest one."""
        self.leaves_job = False
        """It is excluded, and the job continues without it."""
        self._heartbeats: dict[int, Heartbeat] = {}
        self._ended_by_agent: set[int] = set()
        self._abort_requested = False
        self._oom_kills = 0
        self._recovery: RecoveryTimer | None = None
        self._next_trim = time.monotonic() + LOG_TRIM_INTERVAL
        self._dump_requested, self._next_straggler_check = False, time.monotonic() + CHECK_INTERVAL
        self._gpu_errors = GpuErrors(since=time.clock_gettime(time.CLOCK_BOOTTIME))

    @property
    def run_directory(self) -> Path | None:
        """Known once a rank has set it; the reports of a script have a directory of their own."""
        found = find_run_directory(self.directory)
        return self.script.report_directory if found is None and self.script is not None else found

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """As assigned by the rendezvous. torch would exchange them through the store, and wait for a node that was
        lost in the meantime."""
        assignment = self.rendezvous.assignment
        assert assignment is not None
        ranks = [(local, assignment.first_rank + local) for local in range(spec.local_world_size)]
        return [Worker(local, rank, rank, assignment.ranks, assignment.ranks) for local, rank in ranks]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        report = self._write_report() if worker_group.group_rank == 0 else None
        if self._recovery is not None:
            self._recovery.rendezvous_done(report)
        for worker in worker_group.workers:
            self._heartbeats[worker.local_rank] = create_heartbeat(self.directory, worker.local_rank)
            for path in (collectives_path, stacks_path, dump_thread_path):  # of the rank before
                path(self.directory, worker.local_rank).unlink(missing_ok=True)
        if self._activity is not None:
            self._activity.restart()
        self._ended_by_agent.clear()
        self._abort_requested = False
        self._oom_kills = oom_kills()
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        statuses = self._heartbeat_statuses()
        self.restart_policy.record_progress(max(status.step for status in statuses.values()))
        if failed := self._failed():
            detected = time.monotonic()
            # Ranks that were asked to stop are still saving; those that lost a peer have nothing left to do.
            self._end_ranks(self.grace if any(map(self._was_stopped, failed)) else EXIT_GRACE)
            result = self._result(worker_group)
            self._handle_failure(worker_group, statuses, detected, failures=result.failures)
            return result
        result = self._result(worker_group)
        if result.state != WorkerState.HEALTHY:
            return result
        running = self._running()
        signs = statuses if self.script is None else self._signs_of_progress(statuses, running)
        if any(is_hung(signs[local], self.hang_after) for local in running):
            detected = time.monotonic()
            ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
            hung = collect_stacks(self.directory, running, ranks, statuses)
            self._end_ranks(0)
            self._handle_failure(worker_group, signs, detected, hung=hung)
            return RunResult(state=WorkerState.UNHEALTHY)
        if self._peers_lost(statuses):
            detected = time.monotonic()
            self._end_ranks(0)
            self._handle_failure(
                worker_group, statuses, detected, failures=self._result(worker_group).failures, kind="cut off"
            )
            return RunResult(state=WorkerState.UNHEALTHY)
        if self._recovery is not None and self._recovery.finish_if_stepped(statuses):
            self._recovery = None
        self._check_stragglers(worker_group)
        self._trim_logs()
        return result

    def _signs_of_progress(
        self, statuses: dict[int, HeartbeatStatus], running: dict[int, int]
    ) -> dict[int, HeartbeatStatus]:
        """A script without heartbeats has instead the time when it was last active, if that is watched."""
        now = time.monotonic()
        idle_since = dict.fromkeys(running, now) if self._activity is None else self._activity.idle_since(running)
        silent = {local: since for local, since in idle_since.items() if not statuses[local].has_stepped}
        # As if it made steps: an idle rank is hung after the same time whether it starts or works.
        working = tuple(float(phase == StartupPhase.STEPPED) for phase in StartupPhase)
        return statuses | {
            local: replace(statuses[local], time=since, phase_times=working) for local, since in silent.items()
        }

    def _peers_lost(self, statuses: dict[int, HeartbeatStatus]) -> bool:
        """A node is lost, and the ranks here had time to notice: they block in a collective that never ends. Ranks that
        are saving get the grace period."""
        lost_for = self.rendezvous.seconds_since_peer_loss()
        saving = any(status.phase_times[StartupPhase.ENDING] for status in statuses.values())
        if lost_for is not None and not saving and not self._abort_requested:
            self._abort_requested = True  # once: ranks that wait for NCCL exit now, those of gloo notice it themselves
            for local in self._running():
                request_abort(self.directory, local)
        return lost_for is not None and lost_for > (self.grace if saving else PEER_LOSS_TIMEOUT)

    def _trim_logs(self) -> None:
        if (now := time.monotonic()) >= self._next_trim:
            self._next_trim = now + LOG_TRIM_INTERVAL
            for log in self.directory.glob("logs/**/stderr.log"):
                trim_log(log)

    def _check_stragglers(self, worker_group: WorkerGroup) -> None:
        """Request dumps from the ranks of this node, and read them a second later."""
        now, locals_ = time.monotonic(), [worker.local_rank for worker in worker_group.workers]
        several_nodes = (worker_group.group_world_size or 1) > 1
        if now < self._next_straggler_check or (len(locals_) < 2 and not several_nodes):
            return
        if not self._dump_requested:
            for local in locals_:
                request_dump(self.directory, local)
            self._dump_requested, self._next_straggler_check = True, now + 1.0
            return
        arrivals = {
            worker.global_rank: read_arrival_times(self.directory, worker.local_rank) for worker in worker_group.workers
        }
        if several_nodes and (warning := self.rendezvous.report_arrivals(arrivals)) is not None:
            say(f"warning: {warning}")
        self._dump_requested = False
        self._next_straggler_check = time.monotonic() + self.rendezvous.clock.seconds_to_next_check()
        if (found := find_straggler(arrivals)) is not None:
            say(f"warning: rank {found[0]} is slow: the others wait for it {100 * found[1]:.0f}% of the time")

    def _result(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._recovery is None:  # no failure here: a node has joined, or another one has failed
            say("the nodes of the job change: this one saves and restarts with them")
        else:
            time.sleep(self._recovery.pause)
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(signal.SIGTERM, timeout=int(self.grace))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if death_sig != signal.SIGKILL and worker_context(self) is not None and (running := self._running()):
            say(f"telling the ranks to save and exit; they have {timeout} s")
            for pid in running.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, death_sig)
            self._wait_for_ranks(timeout)
            timeout = 1  # the rest is killed
        super()._shutdown(death_sig, timeout)

    def _wait_for_ranks(self, grace: float) -> None:
        """Until they have exited, or cannot: a peer that they need for saving is lost."""
        deadline = time.monotonic() + grace
        while self._running() and time.monotonic() < deadline and not self._peers_lost(self._heartbeat_statuses()):
            time.sleep(0.05)

    def _heartbeat_statuses(self) -> dict[int, HeartbeatStatus]:
        return {local: heartbeat.read() for local, heartbeat in self._heartbeats.items()}

    def _processes(self) -> dict[int, Any]:
        context = worker_context(self)
        assert context is not None
        return {local: handler.proc for local, handler in context.subprocess_handlers.items()}

    def _running(self) -> dict[int, int]:
        return {local: process.pid for local, process in self._processes().items() if process.poll() is None}

    def _failed(self) -> list[int]:
        return [local for local, process in self._processes().items() if process.poll() not in (None, 0)]

    def _was_stopped(self, local: int) -> bool:
        context = worker_context(self)
        assert context is not None
        return classify_exit(1, _read_error_file(Path(context.error_files[local]))[0]).kind == "stopped"

    def _end_ranks(self, wait: float) -> None:
        """Wait for ranks to exit, then kill them. torch would send SIGTERM and wait for half a minute."""
        deadline = time.monotonic() + wait
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._ended_by_agent = set(self._running())
        self._shutdown(signal.SIGKILL, timeout=5)

    def _handle_failure(
        self,
        worker_group: WorkerGroup,
        statuses: dict[int, HeartbeatStatus],
        detected: float,
        failures: dict[int, ProcessFailure] | None = None,
        hung: list[HungRank] | None = None,
        kind: FailureKind | None = None,
    ) -> None:
        """Report the failure, and decide whether to restart."""
        rank_failures = [] if failures is None else self._rank_failures(worker_group, failures, statuses)
        step = max(status.step for status in statuses.values())
        kind = kind or ("hang" if hung else _failure_kind(rank_failures))
        self.rendezvous.failed = kind != "stopped"
        reason = self.restart_policy.reason_to_give_up(
            kind, step, worker_group.group_world_size, remaining_restarts(self)
        )
        if rank_failures and self.run_directory is None and all(failure.status >= 0 for failure in rank_failures):
            reason = "not tried again: the command exited before it opened a run"
        faults = self._gpu_errors.faults()
        by_signal = any(is_signal_exit(failure.status) for failure in rank_failures if failure.kind == "crash")
        answer = self.rendezvous.report_failure(
            FailureFacts(step, kind, by_signal, reason is not None, fatal_texts(faults))
        )
        if answer.excluded is not None:
            self.leaves_job = True
            reason = f"this node is excluded: {answer.excluded}; the others continue; {READMIT_ADVICE}"
        if reason is not None:
            forbid_restarts(self)
        pause = self.restart_policy.backoff()
        after = f" after {pause:.0f} s" if pause else ""
        self.last_failure = NodeReport(
            node=socket.gethostname(),
            nodes=worker_group.group_world_size or 1,
            time=time.time() - (time.monotonic() - detected),
            kind=kind,
            step=step,
            since=detected - max(status.time for status in statuses.values()),
            decision=reason
            or f"restarting{after}"
            + ("" if self.script else " from the newest checkpoint")
            + (f"; {answer.kept}" if answer.kept else ""),
            command=[redact(str(word)) for word in worker_group.spec.args],
            deaths=rank_failures,
            stuck=hung or [],
            gpu_faults=[str(fault) for fault in faults],
            excluded=None if answer.excluded is None else f"{socket.gethostname()}: {answer.excluded}",
        )
        if kind in ("stopped", "wrong usage"):  # the ranks have logged why, and nothing is broken
            say(self.last_failure.decision)
        else:
            report = combine_node_reports([self.last_failure])
            say(render_text(report))
            if hung and not report.odd:
                record_collective_starts()  # so that the same hang names its rank next time
            if (run := self.run_directory) is not None:
                with suppress(OSError):  # a failing disk must not end the agent
                    write_node_report(run, self.last_failure)
        last_heartbeat = max(status.time for status in statuses.values())
        self._recovery = RecoveryTimer(last_heartbeat, detected, time.monotonic(), step, pause)

    def _rank_failures(
        self, worker_group: WorkerGroup, failures: dict[int, ProcessFailure], statuses: dict[int, HeartbeatStatus]
    ) -> list[RankFailure]:
        oom_killed = oom_kills() > self._oom_kills
        found = []
        for rank, failure in failures.items():
            local = failure.local_rank
            message, trace, when = _read_error_file(Path(failure.error_file))
            lines = last_lines(Path(failure.error_file).with_name("stderr.log"), CLASSIFIED_LINES)
            how = classify_exit(failure.exitcode, message, oom_killed, lines)
            if local in self._ended_by_agent:
                lost = ", ".join(self.rendezvous.client.status.lost)
                how = ExitReason(
                    "ended by the agent", f"waited for {lost}, lost" if lost else "ended with the other ranks"
                )
            found.append(
                RankFailure(
                    rank, socket.gethostname(), failure.pid, failure.exitcode, how.kind, how.description,
                    when or how.time or failure.timestamp, statuses[local].step, message, trace, lines[-LOG_LINES:],
                )
            )  # fmt: skip
        return found

    def _write_report(self) -> Path | None:
        with suppress(OSError):
            return None if self.run_directory is None else write_failure_report(self.run_directory)
        return None

    def poll_gpu_errors(self) -> GpuErrorPoll:
        """A context in which new faults of this node's GPUs are logged and sent to --notify."""
        return GpuErrorPoll(self._gpu_errors, self._report_gpu_fault)

    def _report_gpu_fault(self, fault: GpuFault) -> None:
        advice = "; the ranks will probably fail, and the node is excluded then" if fault.fatal else ""
        say(f"warning: {socket.gethostname()}: {fault}{advice}")
        self.rendezvous.on_event(JobEvent("GPU error", str(fault), socket.gethostname()))

    def end_event(self) -> JobEvent:
        """For a job that has failed."""
        return JobEvent("job gave up", "a rank failed" if self.last_failure is None else self.last_failure.decision)

    def write_final_report(self) -> Path | None:
        """At the end: combine the node reports that no restart has. Those of other nodes may still arrive."""
        if self.last_failure is None or self.run_directory is None:
            return None
        if self.last_failure.nodes > 1:
            time.sleep(EXIT_GRACE)
        return self._write_report()


class RecoveryTimer:
    """The time between a failure and the first step after it."""

    def __init__(self, last_heartbeat: float, detected: float, torn_down: float, step: int, pause: float) -> None:
        self.pause = pause
        self._last_heartbeat, self._detected, self._torn_down, self._step = last_heartbeat, detected, torn_down, step
        self._rendezvous_time = torn_down
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
            detect=self._detected - self._last_heartbeat,
            tear_down=self._torn_down - self._detected,
            back_off=self.pause,
            rendezvous=self._rendezvous_time - self._torn_down - self.pause,
            start=imported - self._rendezvous_time,
            join=joined - imported,
            load=loaded - joined,
            first_step=stepped - loaded,
            steps_again=max(0, self._step - min(status.step for status in statuses.values()) + 1),
        )
        say(f"training again after {cost}")
        if self._report is not None:
            with suppress(OSError):
                add_recovery_cost(self._report, cost)
        return True


def _failure_kind(rank_failures: list[RankFailure]) -> FailureKind:
    """The most severe kind; those that follow from another failure come last."""
    order: tuple[FailureKind, ...] = ("wrong usage", "out of memory", "crash", "hang", "stopped", "cut off")
    kinds = {failure.kind for failure in rank_failures}
    return next((kind for kind in order if kind in kinds), "crash")


def _read_error_file(error_file: Path) -> tuple[str, str, float]:
    """Message, traceback and time from the error file of a rank, if it wrote one, without what libraries were given."""
    try:
        message = json.loads(error_file.read_text(encoding="utf-8"))["message"]
        text, trace = redact(message["message"]), redact(message["extraInfo"]["py_callstack"])
        return text, trace, error_file.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return "", "", 0.0
