"""The control plane alone, with thousands of simulated agents on one machine: a real rendezvous in a process of its
own, and agents that speak its protocol over authenticated connections, with heartbeats at the real interval.

What it measures is the time and the server's CPU that a rendezvous of that many nodes needs. What it leaves out is the
network between machines, and everything that ranks do: agents return to the rendezvous at once.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar, cast

from tests.chaos.simulated_agents import (
    RANKS_PER_NODE,
    Command,
    Count,
    Event,
    Failed,
    Lose,
    Met,
    Noticed,
    Silence,
    Start,
    Traffic,
    run_fleet,
)
from zero2all.base.console import say
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.processes import raise_descriptor_limit, watch_parent
from zero2all.cluster.launch.rendezvous_messages import RendezvousSettings
from zero2all.cluster.launch.rendezvous_server import RendezvousServer

AGENTS_PER_PROCESS = 2048
SPARE_DESCRIPTORS = 64  # beside the connections
PHASE_TIMEOUT = 300.0
E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class ScaleReport:
    """Seconds, if not said otherwise."""

    agents: int
    ranks: int
    """At eight to a node."""
    arrive_over: float
    """The agents connect at random times within this many seconds."""
    meet: float
    """Until all have their ranks."""
    meet_rounds: int
    """1: the job was not restarted for agents that came late."""
    meet_messages_per_agent: float
    meet_server_cpu: float
    steady_server_cores: float
    """Share of a core that the server needs for heartbeats."""
    steady_messages_per_second: float
    steady_bytes_per_second: float
    lost_noticed: float
    """Until all others know that an agent's connection is closed,"""
    lost_recovered: float
    """and until they have met again."""
    silent_noticed: float
    """Until all others know that an agent sends no heartbeats,"""
    silent_recovered: float
    """and until they have met again."""
    recover_messages_per_agent: float
    replaced: float
    """Until all have met again, with replacements for both."""
    server_memory: int
    """Bytes, at most."""
    server_descriptors: int
    agent_cores: float
    """Cores that the simulated agents themselves take in steady state: they share the machine with the server."""


def simulate(agents: int, steady: float = 20.0, over: float = 0.0) -> ScaleReport:
    """Let ``agents`` meet, run for ``steady`` seconds, lose two of them, and take in replacements.

    >>> simulate(1024).silent_noticed < 15
    True
    """
    if agents < 4:
        raise UsageError(f"--simulate takes at least 4 agents, not {agents}")
    limit = raise_descriptor_limit()
    if limit < agents + SPARE_DESCRIPTORS:
        raise UsageError(
            f"{agents} agents need {agents + SPARE_DESCRIPTORS} open files in the server, and this user may have "
            f"{limit}: raise the hard limit (ulimit -Hn), or simulate fewer"
        )
    settings = RendezvousSettings(tuple(range(min(agents - 2, agents * 15 // 16), agents + 1)))
    with ScaleModel(settings).running(-(-agents // AGENTS_PER_PROCESS)) as model:
        return _measure(model, agents, steady, over)


def _measure(model: ScaleModel, agents: int, steady: float, over: float) -> ScaleReport:
    found: dict[str, Any] = {"agents": agents, "ranks": agents * RANKS_PER_NODE, "arrive_over": over}
    began, cpu = time.monotonic(), model.server_cpu()
    model.start(range(agents), over)
    met = model.wait_until_met(agents)
    found |= {"meet": met.time - began, "meet_rounds": met.round, "meet_server_cpu": model.server_cpu() - cpu}
    found["meet_messages_per_agent"] = model.traffic().messages / agents
    say(f"{agents} agents have met after {found['meet']:.1f} s; heartbeats for {steady:.0f} s")

    began, cpu, own, before = time.monotonic(), model.server_cpu(), model.agent_cpu(), model.traffic()
    time.sleep(steady)
    seconds, cpu, own = time.monotonic() - began, model.server_cpu() - cpu, model.agent_cpu() - own
    beats = model.traffic() - before
    found |= {"steady_server_cores": cpu / seconds, "agent_cores": own / seconds}
    found["steady_messages_per_second"] = beats.messages / seconds
    found["steady_bytes_per_second"] = beats.bytes / seconds

    before = model.traffic()
    for number, (how, command) in enumerate({"lost": Lose(agents // 2), "silent": Silence(agents // 3)}.items(), 1):
        began = time.monotonic()
        model.command_owner(command, command.number)
        noticed, met = model.wait_until_noticed(met.round) - began, model.wait_until_met(agents - number)
        found |= {f"{how}_noticed": noticed, f"{how}_recovered": met.time - began}
        if how == "lost":
            found["recover_messages_per_agent"] = (model.traffic() - before).messages / agents
        say(f"a {how} agent was noticed after {noticed:.2f} s, all have met again after {met.time - began:.1f} s")

    began = time.monotonic()
    model.start(range(agents, agents + 2), 0.0)
    found["replaced"] = model.wait_until_met(agents).time - began
    return ScaleReport(**found, server_memory=model.server_memory(), server_descriptors=model.server_descriptors())


def render_report(report: ScaleReport) -> str:
    """As a table."""
    rows = [
        (f"{report.agents:,} nodes meet ({report.ranks:,} ranks)", f"{report.meet:.1f} s"),
        ("rounds until all have met", f"{report.meet_rounds}"),
        ("messages for each node until then", f"{report.meet_messages_per_agent:.1f}"),
        ("heartbeats: the server's share of a core", f"{100 * report.steady_server_cores:.1f}%"),
        ("heartbeats: messages a second", f"{report.steady_messages_per_second:,.0f}"),
        ("heartbeats: bytes per second", f"{report.steady_bytes_per_second:,.0f}"),
        ("a node's connection closes: all others know", f"{report.lost_noticed:.2f} s"),
        ("and have met again", f"{report.lost_recovered:.1f} s"),
        ("messages for each node until then", f"{report.recover_messages_per_agent:.1f}"),
        ("a node is silent: all others know", f"{report.silent_noticed:.1f} s"),
        ("and have met again", f"{report.silent_recovered:.1f} s"),
        ("two nodes replace them: all have met again", f"{report.replaced:.1f} s"),
        ("memory of the server, at most", f"{report.server_memory / 1e6:.0f} MB"),
        ("open files of the server", f"{report.server_descriptors:,}"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


class ScaleModel:
    """The server's process and those of the agents, and what they report."""

    def __init__(self, settings: RendezvousSettings) -> None:
        self._settings = settings
        self._context = multiprocessing.get_context("spawn")
        self._server: BaseProcess | None = None
        self._fleets: list[tuple[BaseProcess, Connection]] = []
        self._events: dict[Connection, list[Event]] = {}

    @contextmanager
    def running(self, fleets: int) -> Iterator[ScaleModel]:
        """``fleets`` processes of agents."""
        secret = secrets.token_hex(32)
        receive, send = self._context.Pipe(duplex=False)
        self._server = server = self._context.Process(target=_serve, args=(secret, send), daemon=True)
        server.start()
        send.close()
        try:
            endpoint = receive.recv()
            for _ in range(fleets):
                ours, theirs = self._context.Pipe()
                process = self._context.Process(
                    target=run_fleet, args=(endpoint, secret, self._settings, theirs), daemon=True
                )
                process.start()
                theirs.close()
                self._fleets.append((process, ours))
                self._events[ours] = []
            self.traffic()  # they have started
            yield self
        finally:
            for fleet, pipe in self._fleets:
                pipe.close()
                fleet.join(10)
                fleet.kill()
            server.kill()
            server.join()

    def start(self, numbers: range, over: float) -> None:
        for index, (_, pipe) in enumerate(self._fleets):
            if own := tuple(number for number in numbers if number % len(self._fleets) == index):
                pipe.send(Start(own, over))

    def command_owner(self, command: Command, number: int) -> None:
        self._fleets[number % len(self._fleets)][1].send(command)

    def wait_until_met(self, nodes: int) -> Met:
        """A round of all of them; the time is that of the last."""
        found = [self._wait_for(pipe, Met, lambda event: event.nodes == nodes) for _, pipe in self._fleets]
        return max(found, key=lambda event: event.time)

    def wait_until_noticed(self, round: int) -> float:
        return max(self._wait_for(pipe, Noticed, lambda event: event.round == round).time for _, pipe in self._fleets)

    def traffic(self) -> Traffic:
        for _, pipe in self._fleets:
            pipe.send(Count())
        total = Traffic()
        for _, pipe in self._fleets:
            total += self._wait_for(pipe, Traffic, lambda event: True)
        return total

    def server_cpu(self) -> float:
        return _cpu_seconds(self._server)

    def agent_cpu(self) -> float:
        return sum(_cpu_seconds(process) for process, _ in self._fleets)

    def server_memory(self) -> int:
        status = Path(f"/proc/{self._server.pid}/status").read_text(encoding="utf-8")
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))

    def server_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self._server.pid}/fd"))

    def _wait_for(self, pipe: Connection, kind: type[E], fits: Callable[[E], bool]) -> E:
        """The first event of this kind that fits, which is removed; others stay for later."""
        deadline = time.monotonic() + PHASE_TIMEOUT
        while True:
            for event in self._events[pipe]:
                if isinstance(event, kind) and fits(event):
                    self._events[pipe].remove(event)
                    return event
            pipes = [pipe for _, pipe in self._fleets]
            ready = cast("list[Connection]", wait(pipes, timeout=max(0.0, deadline - time.monotonic())))
            if not ready:
                raise Z2aError(f"the agents have not met within {PHASE_TIMEOUT:.0f} s")
            for one in ready:
                try:
                    received: Event = one.recv()
                except EOFError:
                    raise Z2aError("a process of simulated agents has died") from None
                if isinstance(received, Failed):
                    raise Z2aError(received.why)
                self._events[one].append(received)


def _serve(secret: str, endpoint: Connection) -> None:
    watch_parent()
    server = RendezvousServer("127.0.0.1", 0, secret)
    endpoint.send(server.endpoint)
    server.serve()


def _cpu_seconds(process: BaseProcess | None) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
