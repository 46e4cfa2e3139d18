"""``z2a launch``: the same command on many ranks, on torch's elastic agent."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from zero2all.base.console import say
from zero2all.base.environment import (
    BACKEND_VARIABLE,
    ISLAND_VARIABLE,
    ISLANDS_ENDPOINT_VARIABLE,
    ISLANDS_SECRET_VARIABLE,
    JOB_SECRET_VARIABLE,
    BackendChoice,
    own_allocator_settings,
)
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import fingerprint
from zero2all.base.machine.cpus import (
    SYSFS,
    BindingMode,
    CpuBinding,
    encode_bindings,
    pci_numa_node,
    plan_bindings,
    spin_settings,
    threads_per_rank,
)
from zero2all.base.network.addresses import DEFAULT_PORT, OverlayKind, interface_for_address, wait_for_name
from zero2all.base.processes import AGENT_PID, leave_terminal, stop_signals
from zero2all.base.tasks import available_cores
from zero2all.cluster.launch.heartbeat import find_run_directory
from zero2all.cluster.launch.notify import JobEvent, Notifier
from zero2all.cluster.launch.restart_policy import NodePolicy
from zero2all.cluster.launch.worker import CLI_MODULE, worker_command

if TYPE_CHECKING:
    from zero2all.cluster.launch.overlay import WireGuardOverlay
    from zero2all.cluster.launch.rendezvous import Rendezvous
    from zero2all.cluster.launch.restart_policy import ExcludedNode

UNLIMITED_RESTARTS = 1_000_000
HANG_AFTER = 600.0  # seconds
REPORT_DIRECTORY = Path("z2a-reports")
MAX_RENDEZVOUS_LOSSES = 3  # times in a row that the rendezvous may be lost soon after connecting
STABLE_AFTER = 600.0  # seconds connected after which a loss is a new one, not one more of the same
RECONNECT_DELAY = 2.0  # seconds before connecting to the rendezvous again
RENDEZVOUS_ADVICE = (
    "the rendezvous is gone; 'z2a launch --rendezvous-only' on a separate machine lets a job survive any node"
)
MONITOR_INTERVAL = 0.1  # seconds between two checks of the ranks


@dataclass(frozen=True)
class LaunchConfig:
    """
    >>> LaunchConfig(["train", "my.yaml"], procs=4).run()
    0
    """

    command: Sequence[str]
    """What every rank runs: as after ``z2a``, or ``python`` with a script, or the path of a program."""
    procs: int
    """Ranks on each node."""
    nodes: tuple[int, int] = (1, 1)
    """Minimum and maximum number of nodes. With fewer than the maximum the job runs, and admits others."""
    rdzv_endpoint: str | None = None
    """HOST:PORT of the rendezvous; one node needs none."""
    listen: str | None = None
    """ADDRESS or ADDRESS:PORT to bind on the node that hosts the rendezvous, if it differs from ``rdzv_endpoint``."""
    advertise: str | None = None
    """HOST or HOST:PORT at which other nodes reach this one, if not the address from which it reaches the rendezvous.
    The port belongs to the ranks' store, or with an overlay it is its UDP port."""
    secret_file: Path | None = None
    """The file with the secret that the nodes share; else Z2A_JOB_SECRET, else a file in the home directory."""
    max_restarts: int | None = None
    """How often the ranks are restarted after a failure. If not given: a script never, as by torchrun; a z2a command as
    often as it makes progress. A step that fails three times ends the job anyway."""
    hang_after: float | None = None
    """Seconds without a step that count as a hang; five times as many before the first step. If not given, 600; but
    a script is watched only if it is given, or from its first :func:`~zero2all.cluster.launch.heartbeat.beat` on."""
    grace: float = 110
    """Seconds for the ranks to save after SIGTERM. Slurm gives two minutes (``slurm``)."""
    patience: float = 60
    """Seconds to wait for the rendezvous to have an address, and to answer."""
    numa_binding: BindingMode = "auto"
    """The way in which the ranks are bound to CPUs; see ``cpus.plan_bindings``."""
    sysfs: Path = SYSFS
    """Where the kernel describes the hardware."""
    module: str = CLI_MODULE
    """The Python module that runs the command."""
    report_directory: Path = REPORT_DIRECTORY
    """Where the failure reports of a script are written; a z2a command has them in its run directory."""
    node_policy: NodePolicy = field(default_factory=NodePolicy)
    listen_ranks: str | None = None
    """Address or interface of this node that its ranks use, with the port that ``advertise`` leads to."""
    overlay: OverlayKind = "none"
    """A private network between the nodes, if port maps separate them."""
    backend: BackendChoice = "auto"
    """The backend of the collectives on GPUs: NCCL, or gloo where it hangs."""
    island: int | None = None
    """The number of this job in a training with several islands (``parallel.sync.islands``)."""
    islands_endpoint: str | None = None
    """HOST:PORT of the rendezvous (``z2a launch --rendezvous-only``) at which the islands meet."""

    def __post_init__(self) -> None:
        if not self.command:
            raise UsageError("say what to run after --, such as: z2a launch --nproc-per-node 2 -- train my.yaml")
        if not 1 <= self.nodes[0] <= self.nodes[1]:
            raise UsageError(
                f"--nnodes {self.nodes[0]}:{self.nodes[1]}: the minimum must be at least 1, and at most the maximum"
            )
        if (self.island is None) != (self.islands_endpoint is None):
            raise UsageError("--island and --islands-endpoint go together: the number of this island, and HOST:PORT")
        if self.islands_endpoint is not None and not self.islands_endpoint.rpartition(":")[2].isdigit():
            raise UsageError(f"--islands-endpoint is {self.islands_endpoint}: write HOST:{DEFAULT_PORT}")

    @property
    def is_script(self) -> bool:
        """Whether the command is no z2a command."""
        return worker_command(self.command, self.module).is_script

    def run(self) -> int:
        """Start the ranks of this node and monitor them until the job has ended; the exit status for the CLI."""
        if self.nodes[1] > 1 and self.rdzv_endpoint is None:
            raise UsageError(
                f"{self.nodes[1]} nodes need a rendezvous: --rdzv-endpoint HOST:{DEFAULT_PORT}, the same on every node"
            )
        if self.overlay != "none" and self.rdzv_endpoint is None:
            raise UsageError(f"--overlay {self.overlay} is for several nodes: give --rdzv-endpoint")
        notifier = Notifier(self.node_policy.notify, self.command)
        before = {name: signal.signal(name, _raise_signal) for name in stop_signals()}
        # Torch would handle SIGHUP even under nohup, and print to a terminal that is gone.
        os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
        try:
            with tempfile.TemporaryDirectory(prefix="z2a-agent-") as directory, ExitStack() as stack:
                notifier.find_run = lambda: find_run_directory(Path(directory))
                return self._run_until_done(Path(directory), notifier, stack)
        finally:
            notifier.close()
            for name, handler in before.items():
                signal.signal(name, handler)

    def _run_until_done(self, directory: Path, notifier: Notifier, stack: ExitStack) -> int:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

        from zero2all.cluster.launch.rendezvous_client import JobEndedError, NodeExcludedError

        losses = 0  # in a row
        excluded: tuple[ExcludedNode, ...] = ()
        overlay: WireGuardOverlay | None = None
        while losses < MAX_RENDEZVOUS_LOSSES:
            connected: float | None = None
            try:
                if self.rdzv_endpoint is not None:
                    wait_for_name(self.rdzv_endpoint, self.patience)
                if self.overlay != "none":
                    overlay = overlay or stack.enter_context(self._open_overlay())
                rendezvous = self._join_rendezvous(excluded, overlay)
                connected = time.monotonic()
                rendezvous.on_event = notifier.send
                try:
                    unset = own_allocator_settings() if self.is_script else set()
                    with _in_environment(self.worker_environment(directory, rendezvous), unset):
                        return self._run_agent(directory, rendezvous)
                except RendezvousTimeoutError as error:
                    if rendezvous.claim("gave up"):
                        notifier.send(JobEvent("job gave up", str(error)))
                    raise
                except NodeExcludedError:
                    rendezvous.serve_until_others_end()
                    raise
                finally:
                    excluded = rendezvous.client.status.excluded
                    rendezvous.shutdown()
            except SignalException as stop:
                say(_stop_message(stop.sigval, script=self.is_script))
                return 1
            except JobEndedError as end:
                say("the job is done" if end.done else "another node has ended the job")
                return 0 if end.done else 1
            except NodeExcludedError as error:
                say(str(error))
                return 1
            except RendezvousTimeoutError as error:
                say(f"given up: {error} (--nnodes)")
                return 1
            except RendezvousError as error:
                say(f"the rendezvous {self.rdzv_endpoint or 'of this node'} is lost: {error}")
                was_steady = connected is not None and time.monotonic() - connected >= STABLE_AFTER
                losses = 1 if was_steady else losses + 1
                time.sleep(RECONNECT_DELAY if losses < MAX_RENDEZVOUS_LOSSES else 0)
        say(f"given up: {RENDEZVOUS_ADVICE}")
        return 1

    def _open_overlay(self) -> WireGuardOverlay:
        from zero2all.base.network.addresses import find_node_address
        from zero2all.cluster.launch.overlay import WireGuardOverlay

        underlay = find_node_address(self.rdzv_endpoint, self.advertise, self.listen_ranks, several=True)
        return WireGuardOverlay(fingerprint([*self.command]), underlay)

    def _join_rendezvous(self, excluded: tuple[ExcludedNode, ...], overlay: WireGuardOverlay | None) -> Rendezvous:
        from zero2all.cluster.launch.rendezvous import Rendezvous
        from zero2all.cluster.launch.rendezvous_host import RendezvousConfig
        from zero2all.cluster.launch.rendezvous_messages import RendezvousSettings

        for name in logging.root.manager.loggerDict:
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)  # the failure reports are clearer
        checks_network = self.command[0] != "doctor"  # which finds out itself which nodes do not reach each other
        config = RendezvousConfig(
            self.rdzv_endpoint,
            self.listen,
            self.advertise,
            self.secret_file,
            self.patience,
            self.node_policy.readmit,
            excluded,
            self.listen_ranks,
            check_network=checks_network,
            overlay=overlay,
        )
        counts = node_counts(self.command, self.procs, self.nodes)
        settings = RendezvousSettings(counts, stragglers=self.node_policy.stragglers)
        island = [] if self.island is None else [f"island {self.island}"]  # islands may share a rendezvous
        return Rendezvous(config, settings, fingerprint([*self.command, *island]), self.procs)

    def _run_agent(self, directory: Path, rendezvous: Rendezvous) -> int:
        from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
        from torch.distributed.elastic.multiprocessing.api import SignalException

        from zero2all.cluster.launch.agent import Agent, ScriptSettings

        worker = worker_command(self.command, self.module)
        restarts = 0 if worker.is_script else UNLIMITED_RESTARTS
        spec = WorkerSpec(
            role="z2a",
            local_world_size=self.procs,
            rdzv_handler=rendezvous,
            entrypoint=sys.executable,
            args=worker.args,
            max_restarts=restarts if self.max_restarts is None else self.max_restarts,
            monitor_interval=MONITOR_INTERVAL,
            local_addr=rendezvous.address.local,
        )
        script = ScriptSettings(self.report_directory.absolute(), watch_activity=self.hang_after is not None)
        agent = Agent(spec, directory, self.hang_after or HANG_AFTER, self.grace, script if worker.is_script else None)
        try:
            with agent.failures.poll_gpu_errors():
                result = agent.run()
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:  # a person stops the job, a scheduler takes this node
                rendezvous.close("failed")
            else:
                rendezvous.leave()
            raise
        failed = result is None or result.state != WorkerState.SUCCEEDED  # after a hang it is unhealthy
        if not agent.failures.leaves_job and rendezvous.close("failed" if failed else "done"):
            rendezvous.on_event(agent.failures.end_event() if failed else JobEvent("job finished", "the job is done"))
        if not failed:
            return 0
        if (report := agent.failures.write_final_report()) is not None:
            say(f"the report is in {report.with_suffix('.txt')}")
        if agent.failures.leaves_job:
            rendezvous.serve_until_others_end()
        return 2 if agent.failures.last is not None and agent.failures.last.kind == "wrong usage" else 1

    def worker_environment(self, directory: Path, rendezvous: Rendezvous) -> dict[str, str]:
        """The environment of the ranks; variables that the user has set stay."""
        from zero2all.base.environment import AGENT_DIR_VARIABLE, STORE_VARIABLE

        # Ranks share the cores; torch's own default of one thread would leave most of them idle.
        bindings = self.cpu_bindings()
        threads = threads_per_rank(bindings, available_cores())
        settings = {"OMP_NUM_THREADS": str(threads), **spin_settings(os.environ)}
        if (interface := interface_for_address(rendezvous.address.local)) is not None:
            settings["GLOO_SOCKET_IFNAME"] = interface
            if self.rdzv_endpoint is None:  # on one machine no other machine needs the ports of the ranks
                settings["NCCL_SOCKET_IFNAME"] = interface
            elif self.listen_ranks is not None or self.overlay != "none":
                settings["NCCL_SOCKET_IFNAME"] = f"={interface}"  # exactly this one, not eth10 for eth1
        own = {
            AGENT_DIR_VARIABLE: str(directory),
            STORE_VARIABLE: rendezvous.client.endpoint,
            JOB_SECRET_VARIABLE: rendezvous.host.secret,
        }
        if self.backend != "auto":
            own[BACKEND_VARIABLE] = self.backend
        own |= {AGENT_PID: str(os.getpid()), **encode_bindings(bindings)}
        return {**settings, **os.environ, **own, **self._island_environment()}

    def _island_environment(self) -> dict[str, str]:
        from zero2all.cluster.launch.job_secret import find_secret

        if self.island is None or self.islands_endpoint is None:
            return {}
        secret, _ = find_secret(self.secret_file, make=False, patience=self.patience)
        return {
            ISLAND_VARIABLE: str(self.island),
            ISLANDS_ENDPOINT_VARIABLE: self.islands_endpoint,
            ISLANDS_SECRET_VARIABLE: secret,
        }

    def cpu_bindings(self) -> list[CpuBinding | None]:
        """The binding of each rank of this node. torch's own binding needs the program numactl: containers lack it, and
        torch then runs the ranks unbound."""
        from zero2all.base.machine.devices import gpu_pci_addresses  # loads torch

        gpu_nodes = [pci_numa_node(address, self.sysfs) for address in gpu_pci_addresses()]
        return plan_bindings(self.numa_binding, self.procs, gpu_nodes, os.sched_getaffinity(0), self.sysfs)


def node_counts(command: Sequence[str], procs: int, nodes: tuple[int, int]) -> tuple[int, ...]:
    """Node counts between minimum and maximum that the parallel layout of the recipe can use.

    All of them if there are none: then the ranks report the error.
    """
    from zero2all.parallel.mesh import ParallelDims
    from zero2all.recipe import load_recipe

    every = tuple(range(nodes[0], nodes[1] + 1))
    if len(command) < 2 or command[0] != "train":
        return every
    try:
        # Values of options, such as --extend rewarm, are not overrides.
        recipe = load_recipe(command[1], [word for word in command[2:] if "=" in word and not word.startswith("-")])
    except (Z2aError, OSError):
        return every

    def fits(count: int) -> bool:
        try:
            ParallelDims.from_recipe(recipe.parallel, count * procs)
        except UsageError:
            return False
        return True

    return tuple(filter(fits, every)) or every


@contextmanager
def _in_environment(values: dict[str, str], unset: Iterable[str] = ()) -> Iterator[None]:
    """torch passes the environment of this process to its ranks. Afterwards it is restored: the secret of a lost
    rendezvous must not be mistaken for a secret that the user has set."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    for name in unset:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _raise_signal(number: int, frame: FrameType | None) -> None:
    """What torch does once its ranks have started; here it is done from the beginning."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    if number == signal.SIGHUP:
        leave_terminal()
    raise SignalException("", signal.Signals(number))


def _stop_message(number: signal.Signals, *, script: bool) -> str:
    why = "stopped by the user" if number == signal.SIGINT else f"told to leave ({number.name})"
    return f"{why}: the same command {'starts it again' if script else 'resumes from the newest checkpoint'}"
