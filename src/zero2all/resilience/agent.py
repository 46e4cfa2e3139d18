"""The process that starts the ranks of a node and watches over them: torch's elastic agent, which also sees hangs,
knows one failure from another, and says what happened."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from zero2all.console import say
from zero2all.resilience.beat import Beat, Mark, Pulse, new_beat, run_note
from zero2all.resilience.exits import Exit, Kind, gpu_faults, oom_kills, read_exit
from zero2all.resilience.hang import Stuck, is_stuck, look, ring
from zero2all.resilience.history import History, leaves_alone
from zero2all.resilience.logs import last_lines, trim
from zero2all.resilience.rank import collectives_path
from zero2all.resilience.rendezvous import Rendezvous
from zero2all.resilience.report import (
    LOG_LINES,
    Account,
    Cost,
    Death,
    add_cost,
    leave_account,
    make_report,
    screenful,
    summarize,
)
from zero2all.resilience.stragglers import EVERY, read_arrivals, straggler

LAST_WORDS = 1.0  # seconds in which ranks that lost a peer may end by themselves and say so
TRIM_EVERY = 10.0  # seconds between two looks at the size of the logs
PEER_LOST = 5.0  # seconds in which ranks that lost a peer on another node may notice it by themselves


class Agent(LocalElasticAgent):
    """One for each node. ``run()`` returns when the job has ended, well or not."""

    def __init__(self, spec: WorkerSpec, directory: Path, hang_after: float, grace: float) -> None:
        """``grace`` is how long ranks that are told to stop may take to save."""
        logs = DefaultLogsSpecs(log_dir=str(directory / "logs"), tee=Std.ERR)
        super().__init__(spec, logs, log_line_prefix_template="[${rank}] ", shutdown_timeout=int(grace))
        assert isinstance(spec.rdzv_handler, Rendezvous)
        self.rendezvous = spec.rdzv_handler
        self.directory, self.hang_after, self.grace = directory, hang_after, grace
        self.history = History()
        self.last: Account | None = None
        """The failure that ended the job, or the latest one."""
        self.leaves = False
        """This node alone failed too often: it stays out, and the job continues without it."""
        self._beats: dict[int, Beat] = {}
        self._ended_by_us: set[int] = set()
        self._oom_kills = 0
        self._recovery: Recovery | None = None
        self._next_trim = time.monotonic() + TRIM_EVERY
        self._asked, self._next_look = False, time.monotonic() + EVERY
        self._started = time.clock_gettime(time.CLOCK_BOOTTIME)

    @property
    def run_directory(self) -> Path | None:
        """Known once a rank has told."""
        note = run_note(self.directory)
        return Path(note.read_text(encoding="utf-8")) if note.exists() else None

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """As the rendezvous has counted them. torch would exchange them through the store, and wait for a node that was
        lost in the meantime."""
        seat = self.rendezvous.seat
        assert seat is not None
        ranks = [(local, seat.first_rank + local) for local in range(spec.local_world_size)]
        return [Worker(local, rank, rank, seat.ranks, seat.ranks) for local, rank in ranks]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        report = self._report() if worker_group.group_rank == 0 else None
        if self._recovery is not None:
            self._recovery.met(report)
        for worker in worker_group.workers:
            self._beats[worker.local_rank] = new_beat(self.directory, worker.local_rank)
            collectives_path(self.directory, worker.local_rank).unlink(missing_ok=True)
        self._ended_by_us.clear()
        self._oom_kills = oom_kills()
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        pulses = self._pulses()
        self.history.reached(max(pulse.step for pulse in pulses.values()))
        if failed := self._failed():
            seen = time.monotonic()
            # Ranks that were told to stop are still saving; those that lost a peer have nothing left to do.
            self._end_ranks(self.grace if any(map(self._stops, failed)) else LAST_WORDS)
            result = self._result(worker_group)
            self._judge(worker_group, pulses, seen, failures=result.failures)
            return result
        result = self._result(worker_group)
        if result.state != WorkerState.HEALTHY:
            return result
        running = self._running()
        if any(is_stuck(pulses[local], self.hang_after) for local in running):
            seen = time.monotonic()
            ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
            stuck = look(self.directory, running, ranks, pulses)
            self._end_ranks(0)
            self._judge(worker_group, pulses, seen, stuck=stuck)
            return RunResult(state=WorkerState.UNHEALTHY)
        if self._peers_are_gone(pulses):
            seen = time.monotonic()
            self._end_ranks(0)
            self._judge(worker_group, pulses, seen, failures=self._result(worker_group).failures, kind="cut off")
            return RunResult(state=WorkerState.UNHEALTHY)
        if self._recovery is not None and self._recovery.over(pulses):
            self._recovery = None
        self._look_for_stragglers(worker_group)
        self._trim_logs()
        return result

    def _peers_are_gone(self, pulses: dict[int, Pulse]) -> bool:
        """A node is lost, and the ranks here had time to notice: they sleep in a collective that never ends. Those that
        are saving by themselves get the time for it."""
        lost_for = self.rendezvous.lost_for()
        saving = any(pulse.marks[Mark.ENDING] for pulse in pulses.values())
        return lost_for is not None and lost_for > (self.grace if saving else PEER_LOST)

    def _trim_logs(self) -> None:
        if (now := time.monotonic()) >= self._next_trim:
            self._next_trim = now + TRIM_EVERY
            for log in self.directory.glob("logs/**/stderr.log"):
                trim(log)

    def _look_for_stragglers(self, worker_group: WorkerGroup) -> None:
        """Ask the ranks of this node, and a second later read what they say."""
        now, locals_ = time.monotonic(), [worker.local_rank for worker in worker_group.workers]
        if now < self._next_look or len(locals_) < 2:
            return
        if not self._asked:
            for local in locals_:
                ring(self.directory, local)
            self._asked, self._next_look = True, now + 1.0
            return
        self._asked, self._next_look = False, now + EVERY
        found = straggler(
            {worker.global_rank: read_arrivals(self.directory, worker.local_rank) for worker in worker_group.workers}
        )
        if found is not None:
            say(f"warning: rank {found[0]} is slow: the others wait for it {100 * found[1]:.0f} % of the time")

    def _result(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._recovery is None:  # no failure of ours: a node has come, or another one has failed
            say("the nodes of the job change: this one saves and starts again with them")
        else:
            time.sleep(self._recovery.pause)
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(signal.SIGTERM, timeout=int(self.grace))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if death_sig != signal.SIGKILL and self._pcontext is not None and (running := self._running()):
            say(f"telling the ranks to save and end; they have {timeout} s")
            for pid in running.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, death_sig)
            self._wait_for_ranks(timeout)
            timeout = 1  # and whatever is left is killed
        super()._shutdown(death_sig, timeout)

    def _wait_for_ranks(self, grace: float) -> None:
        """Until they have ended, or there is no use in waiting: a peer that they need for it is lost."""
        deadline = time.monotonic() + grace
        while self._running() and time.monotonic() < deadline and not self._peers_are_gone(self._pulses()):
            time.sleep(0.05)

    def _pulses(self) -> dict[int, Pulse]:
        return {local: beat.read() for local, beat in self._beats.items()}

    def _processes(self) -> dict[int, Any]:
        assert isinstance(self._pcontext, SubprocessContext)
        return {local: handler.proc for local, handler in self._pcontext.subprocess_handlers.items()}

    def _running(self) -> dict[int, int]:
        return {local: process.pid for local, process in self._processes().items() if process.poll() is None}

    def _failed(self) -> list[int]:
        return [local for local, process in self._processes().items() if process.poll() not in (None, 0)]

    def _stops(self, local: int) -> bool:
        assert self._pcontext is not None
        return read_exit(1, _last_words(Path(self._pcontext.error_files[local]))[0]).kind == "stopped"

    def _end_ranks(self, wait: float) -> None:
        """Wait so many seconds for them to end by themselves. torch would send SIGTERM and wait for half a minute."""
        deadline = time.monotonic() + wait
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._ended_by_us = set(self._running())
        self._shutdown(signal.SIGKILL, timeout=5)

    def _judge(
        self,
        worker_group: WorkerGroup,
        pulses: dict[int, Pulse],
        seen: float,
        failures: dict[int, ProcessFailure] | None = None,
        stuck: list[Stuck] | None = None,
        kind: Kind | None = None,
    ) -> None:
        """Say what happened, and whether it is worth another try."""
        deaths = [] if failures is None else self._deaths(worker_group, failures, pulses)
        step = max(pulse.step for pulse in pulses.values())
        kind = kind or ("hang" if stuck else _kind(deaths))
        self.rendezvous.failed = kind != "stopped"
        reason = self.history.give_up(kind, step, worker_group.group_world_size, self._remaining_restarts)
        if deaths and self.run_directory is None and all(death.status >= 0 for death in deaths):
            reason = "not tried again: it is no training, and ended of its own accord"
        if leaves_alone(self.rendezvous, kind, step, worker_group.group_world_size or 1) and reason is not None:
            self.leaves = True
            reason = f"{reason}: this node leaves the job, and the others continue; look at it with 'z2a doctor'"
        if reason is not None:
            self._remaining_restarts = 0
        pause = self.history.pause()
        after = f" after {pause:.0f} s" if pause else ""
        self.last = Account(
            node=socket.gethostname(),
            nodes=worker_group.group_world_size or 1,
            time=time.time() - (time.monotonic() - seen),
            kind=kind,
            step=step,
            since=seen - max(pulse.time for pulse in pulses.values()),
            decision=reason or f"starting again{after} from the newest checkpoint",
            command=list(worker_group.spec.args),
            deaths=deaths,
            stuck=stuck or [],
            gpu_faults=gpu_faults(since=self._started),
        )
        if kind in ("stopped", "wrong usage"):  # the ranks have said why, and nothing is broken
            say(self.last.decision)
        else:
            say(screenful(summarize([self.last])))
            if (run := self.run_directory) is not None:
                with suppress(OSError):  # a disk that fails must not take the agent with it
                    leave_account(run, self.last)
        last_sign = max(pulse.time for pulse in pulses.values())
        self._recovery = Recovery(last_sign, seen, time.monotonic(), step, pause)

    def _deaths(
        self, worker_group: WorkerGroup, failures: dict[int, ProcessFailure], pulses: dict[int, Pulse]
    ) -> list[Death]:
        oom_killed = oom_kills() > self._oom_kills
        found = []
        for rank, failure in failures.items():
            local = failure.local_rank
            message, trace, when = _last_words(Path(failure.error_file))
            lines = last_lines(Path(failure.error_file).with_name("stderr.log"), LOG_LINES)
            how = read_exit(failure.exitcode, message, oom_killed, lines)
            if local in self._ended_by_us:
                lost = ", ".join(self.rendezvous.link.status.lost)
                how = Exit("ended by the agent", f"waited for {lost}, lost" if lost else "ended with the others")
            found.append(
                Death(
                    rank, socket.gethostname(), failure.pid, failure.exitcode, how.kind, how.words,
                    when or failure.timestamp, pulses[local].step, message, trace, lines,
                )
            )  # fmt: skip
        return found

    def _report(self) -> Path | None:
        with suppress(OSError):
            return None if self.run_directory is None else make_report(self.run_directory)
        return None

    def conclude(self) -> Path | None:
        """At the end: put the accounts together that no new start has. Other nodes' may be on their way."""
        if self.last is None or self.run_directory is None:
            return None
        if self.last.nodes > 1:
            time.sleep(LAST_WORDS)
        return self._report()


class Recovery:
    """The time between a failure and the first step after it."""

    def __init__(self, last_sign: float, seen: float, torn_down: float, step: int, pause: float) -> None:
        self.pause = pause
        self._last_sign, self._seen, self._torn_down, self._step = last_sign, seen, torn_down, step
        self._met = torn_down
        self._report: Path | None = None

    def met(self, report: Path | None) -> None:
        """The nodes have met again."""
        self._met, self._report = time.monotonic(), report

    def over(self, pulses: dict[int, Pulse]) -> bool:
        """Whether every rank has done a step; then what it cost is told and written down."""
        if not all(pulse.has_stepped for pulse in pulses.values()):
            return False
        imported, joined, loaded, stepped, _ = (max(pulse.marks[mark] for pulse in pulses.values()) for mark in Mark)
        cost = Cost(
            detect=self._seen - self._last_sign,
            tear_down=self._torn_down - self._seen,
            back_off=self.pause,
            rendezvous=self._met - self._torn_down - self.pause,
            start=imported - self._met,
            join=joined - imported,
            load=loaded - joined,
            first_step=stepped - loaded,
            steps_again=max(0, self._step - min(pulse.step for pulse in pulses.values()) + 1),
        )
        say(f"training again after {cost}")
        if self._report is not None:
            with suppress(OSError):
                add_cost(self._report, cost)
        return True


def _kind(deaths: list[Death]) -> Kind:
    """Of the first that did not only follow another."""
    order: tuple[Kind, ...] = ("wrong usage", "out of memory", "crash", "stopped", "cut off")
    kinds = {death.kind for death in deaths}
    return next((kind for kind in order if kind in kinds), "crash")


def _last_words(error_file: Path) -> tuple[str, str, float]:
    """Message, traceback and time of the error that a rank left, if it left one."""
    try:
        message = json.loads(error_file.read_text(encoding="utf-8"))["message"]
        return message["message"], message["extraInfo"]["py_callstack"], error_file.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return "", "", 0.0
