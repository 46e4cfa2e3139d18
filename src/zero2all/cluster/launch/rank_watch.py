"""What the agent sees of the ranks of its node: their processes, heartbeats, activity and collectives."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from zero2all.base.console import say
from zero2all.base.torch_private import worker_context
from zero2all.cluster.launch.exit_reason import classify_exit, read_error_file
from zero2all.cluster.launch.hang_detection import ActivityWatch, HungRank, collect_stacks, is_hung, request_dump
from zero2all.cluster.launch.heartbeat import Heartbeat, HeartbeatStatus, StartupPhase, create_heartbeat
from zero2all.cluster.launch.rendezvous import Rendezvous
from zero2all.cluster.launch.stragglers import CHECK_INTERVAL, find_straggler, read_arrival_times
from zero2all.cluster.launch.worker import collectives_path, dump_thread_path, stacks_path


class RankWatch:
    """Ranks are known by their local number.

    >>> watch = RankWatch(agent, directory, hang_after=600.0, is_script=False, watches_activity=False)
    >>> watch.running()
    {0: 4711, 1: 4712}
    """

    def __init__(
        self, agent: LocalElasticAgent, directory: Path, hang_after: float, *, is_script: bool, watches_activity: bool
    ) -> None:
        self._agent, self._directory, self._hang_after, self._is_script = agent, directory, hang_after, is_script
        self._activity = ActivityWatch(directory, hang_after) if watches_activity else None
        self._heartbeats: dict[int, Heartbeat] = {}
        self.ended_by_agent: set[int] = set()

    def begin_round(self, ranks: Iterable[int]) -> None:
        """Called before new ranks start: what the ranks before them have left is removed."""
        for local in ranks:
            self._heartbeats[local] = create_heartbeat(self._directory, local)
            for path in (collectives_path, stacks_path, dump_thread_path):
                path(self._directory, local).unlink(missing_ok=True)
        if self._activity is not None:
            self._activity.restart()
        self.ended_by_agent.clear()

    def statuses(self) -> dict[int, HeartbeatStatus]:
        return {local: heartbeat.read() for local, heartbeat in self._heartbeats.items()}

    def running(self) -> dict[int, int]:
        """The process ids of ranks that have not exited."""
        return {local: process.pid for local, process in self._processes().items() if process.poll() is None}

    def failed(self) -> list[int]:
        return [local for local, process in self._processes().items() if process.poll() not in (None, 0)]

    def was_stopped(self, local: int) -> bool:
        context = worker_context(self._agent)
        assert context is not None
        return classify_exit(1, read_error_file(Path(context.error_files[local]))[0]).kind == "stopped"

    def _processes(self) -> dict[int, Any]:
        context = worker_context(self._agent)
        assert context is not None
        return {local: handler.proc for local, handler in context.subprocess_handlers.items()}

    def await_exits(self, seconds: float) -> None:
        """Ranks that still run afterwards are ended by the agent."""
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.ended_by_agent = set(self.running())

    def signs_of_progress(self, statuses: dict[int, HeartbeatStatus]) -> dict[int, HeartbeatStatus]:
        """A script without heartbeats has instead the time when it was last active, if that is watched."""
        if not self._is_script:
            return statuses
        now, running = time.monotonic(), self.running()
        idle_since = dict.fromkeys(running, now) if self._activity is None else self._activity.idle_since(running)
        silent = {local: since for local, since in idle_since.items() if not statuses[local].has_stepped}
        # As if it made steps: an idle rank is hung after the same time whether it starts or works.
        working = tuple(float(phase == StartupPhase.STEPPED) for phase in StartupPhase)
        return statuses | {
            local: replace(statuses[local], time=since, phase_times=working) for local, since in silent.items()
        }

    def is_hung(self, signs: dict[int, HeartbeatStatus]) -> bool:
        return any(is_hung(signs[local], self._hang_after) for local in self.running())

    def collect_stacks(self, worker_group: WorkerGroup, statuses: dict[int, HeartbeatStatus]) -> list[HungRank]:
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        return collect_stacks(self._directory, self.running(), ranks, statuses)


class StragglerCheck:
    """Compares once a minute when the ranks of this node entered their collectives, and reports it."""

    def __init__(self, directory: Path, rendezvous: Rendezvous) -> None:
        self._directory, self._rendezvous = directory, rendezvous
        self._dump_requested, self._next = False, time.monotonic() + CHECK_INTERVAL

    def advance(self, worker_group: WorkerGroup) -> None:
        """Request dumps from the ranks of this node, and read them a second later."""
        now, several_nodes = time.monotonic(), (worker_group.group_world_size or 1) > 1
        if now < self._next or (len(worker_group.workers) < 2 and not several_nodes):
            return
        if not self._dump_requested:
            for worker in worker_group.workers:
                request_dump(self._directory, worker.local_rank)
            self._dump_requested, self._next = True, now + 1.0
            return
        arrivals = {
            worker.global_rank: read_arrival_times(self._directory, worker.local_rank)
            for worker in worker_group.workers
        }
        if several_nodes and (warning := self._rendezvous.report_arrivals(arrivals)) is not None:
            say(f"warning: {warning}")
        self._dump_requested = False
        self._next = time.monotonic() + self._rendezvous.clock.seconds_to_next_check()
        if (found := find_straggler(arrivals)) is not None:
            say(f"warning: rank {found[0]} is slow: the others wait for it {100 * found[1]:.0f}% of the time")
