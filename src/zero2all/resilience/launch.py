"""``z2a launch``: the same command on many ranks, on torch's elastic agent, or as files for Slurm and Kubernetes."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import yaml

from zero2all.console import say
from zero2all.engine import all_cores
from zero2all.errors import UsageError, Z2aError
from zero2all.io import fingerprint
from zero2all.processes import AGENT_PID
from zero2all.resilience.addresses import PORT, interface_of
from zero2all.resilience.secret import VARIABLE
from zero2all.threads import waiting

if TYPE_CHECKING:
    from torch.numa.binding import NumaOptions

    from zero2all.resilience.rendezvous import Rendezvous

NO_LIMIT = 1_000_000
LOST_STORE = 3  # times in a row that the rendezvous may be lost soon after it was found
STEADY = 600.0  # seconds connected after which a loss is a new one, not one more of the same
PAUSE = 2.0  # seconds before the rendezvous is looked for again
MARGIN = 10  # seconds that Slurm has to give the ranks more than their grace
MONITOR = 0.1  # seconds between two looks at the ranks


@dataclass(frozen=True)
class Job:
    """
    >>> Job(["train", "my.yaml"], procs=4).run()
    0
    """

    command: Sequence[str]
    """What every rank runs, as after ``z2a``."""
    procs: int
    """Ranks on each node."""
    nodes: tuple[int, int] = (1, 1)
    """The least and the most nodes that the job runs on. With fewer than the most it goes on, and takes in others."""
    rendezvous: str | None = None
    """HOST:PORT where the nodes meet; one node needs none."""
    listen: str | None = None
    """On the node that holds the rendezvous: the address to bind, if not that of ``rendezvous``."""
    advertise: str | None = None
    """By which other nodes reach this one, if not the address from which it reaches the rendezvous."""
    secret_file: Path | None = None
    """With the secret that the nodes share; else Z2A_JOB_SECRET, else a file in the home directory."""
    restarts: int = NO_LIMIT
    """How often the ranks are started again after a failure. A step that fails three times ends the job anyway."""
    hang_after: float = 600
    """Seconds without a step after which the ranks are taken to hang; five times as long before the first."""
    grace: float = 110
    """Seconds that the ranks have to save when they are told to stop. Slurm gives two minutes (``slurm``)."""
    patience: float = 60
    """Seconds to wait for the rendezvous to answer."""
    module: str = "zero2all.cli"
    """The program that gets the command."""

    def __post_init__(self) -> None:
        if not self.command:
            raise UsageError("say what to run after --, such as: z2a launch --procs 2 -- train my.yaml")
        if not 1 <= self.nodes[0] <= self.nodes[1]:
            raise UsageError(
                f"--nodes {self.nodes[0]}:{self.nodes[1]}: the least must be at least 1, and not more than the most"
            )

    def run(self) -> int:
        """Start the ranks of this node and stay with them until the job has ended: the exit status for the CLI."""
        if self.nodes[1] > 1 and self.rendezvous is None:
            raise UsageError(
                f"{self.nodes[1]} nodes need a place to meet: --rendezvous HOST:{PORT}, the same on every node"
            )
        before = {name: signal.signal(name, _raise_signal) for name in (signal.SIGINT, signal.SIGTERM)}
        try:
            with tempfile.TemporaryDirectory(prefix="z2a-agent-") as directory:
                return self._until_it_ends(Path(directory))
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)

    def _until_it_ends(self, directory: Path) -> int:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

        from zero2all.resilience.link import JobEndedError

        losses = 0  # in a row
        while losses < LOST_STORE:
            connected: float | None = None
            try:
                rendezvous = self._meet()
                connected = time.monotonic()
                try:
                    with _in_environment(self.environment(directory, rendezvous)):
                        return self._stay(directory, rendezvous)
                finally:
                    rendezvous.shutdown()
            except SignalException as stop:
                say(_stopped(stop.sigval))
                return 1
            except JobEndedError as end:
                say("the job is done" if end.done else "another node has ended the job")
                return 0 if end.done else 1
            except RendezvousTimeoutError as error:
                say(f"given up: {error} (--nodes)")
                return 1
            except RendezvousError as error:
                say(f"the rendezvous {self.rendezvous or 'of this node'} is lost: {error}")
                was_steady = connected is not None and time.monotonic() - connected >= STEADY
                losses = 1 if was_steady else losses + 1
                time.sleep(PAUSE if losses < LOST_STORE else 0)
        say("given up: it is gone. 'z2a rendezvous' on a machine that stays lets a job outlive any node")
        return 1

    def _meet(self) -> Rendezvous:
        from zero2all.resilience.rendezvous import Place, Rendezvous
        from zero2all.resilience.rounds import Rules

        for name in logging.root.manager.loggerDict:
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)  # the reports say it better
        place = Place(self.rendezvous, self.listen, self.advertise, self.secret_file, self.patience)
        rules = Rules(node_counts(self.command, self.procs, self.nodes))
        return Rendezvous(place, rules, fingerprint([*self.command]), self.procs)

    def _stay(self, directory: Path, rendezvous: Rendezvous) -> int:
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.multiprocessing.api import SignalException

        from zero2all.resilience.agent import Agent

        spec = WorkerSpec(
            role="z2a",
            local_world_size=self.procs,
            rdzv_handler=rendezvous,
            entrypoint=sys.executable,
            args=("-m", self.module, *self.command),
            max_restarts=self.restarts,
            monitor_interval=MONITOR,
            local_addr=rendezvous.address,
            numa_options=near_their_gpus(),
        )
        agent = Agent(spec, directory, self.hang_after, self.grace)
        try:
            result = agent.run()
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:  # a person stops the whole job, a scheduler takes this node
                rendezvous.close("failed")
            else:
                rendezvous.leave()
            raise
        failed = result is None or result.is_failed()
        if not agent.leaves:  # to the others a node that leaves with a failure is lost, and they continue
            rendezvous.close("failed" if failed else "done")
        if not failed:
            return 0
        if (report := agent.conclude()) is not None:
            say(f"the report is in {report.with_suffix('.txt')}")
        return 2 if agent.last is not None and agent.last.kind == "wrong usage" else 1

    def environment(self, directory: Path, rendezvous: Rendezvous) -> dict[str, str]:
        """What the ranks find in theirs; what the user has set stays."""
        from zero2all.resilience.beat import AGENT_DIR, STORE

        # Cores are shared out; torch's own default of one thread would leave most of them idle.
        settings = {"OMP_NUM_THREADS": str(max(1, all_cores() // self.procs)), **waiting(os.environ)}
        if (interface := interface_of(rendezvous.address)) is not None:
            settings["GLOO_SOCKET_IFNAME"] = interface
            if self.rendezvous is None:  # ports of ranks that are all on one machine concern nobody else
                settings["NCCL_SOCKET_IFNAME"] = interface
        own = {AGENT_DIR: str(directory), STORE: rendezvous.place, VARIABLE: rendezvous.secret}
        own[AGENT_PID] = str(os.getpid())
        return {**settings, **os.environ, **own}

    def slurm(self, gpus: int = 0) -> str:
        """A script for ``sbatch``: one task a node, which starts its own ranks."""
        inner = f"z2a launch --procs {self.procs}"
        head = ""
        if self.nodes[1] > 1:
            place = shlex.quote(self.rendezvous) if self.rendezvous else f'"$head:{PORT}"'
            if self.rendezvous is None:
                head = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
            inner += f" --nodes {self.nodes[0]}:{self.nodes[1]} --rendezvous {place}"
            if self.secret_file is not None:
                inner += f" --secret-file {shlex.quote(str(self.secret_file))}"
            elif self.rendezvous is None:  # a rendezvous of its own has its own secret
                head += "# By which the nodes know each other; srun passes it on in their environment.\n"
                head += f"{VARIABLE}=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n')\nexport {VARIABLE}\n"
        elastic = self.nodes[0] < self.nodes[1]  # the job outlives a node
        bad_exit = "--no-kill --kill-on-bad-exit=0" if elastic else "--kill-on-bad-exit=1"
        options = {**self._chosen(), "--grace": self.grace}
        inner += "".join(f" {option} {value:g}" for option, value in options.items())
        return f"""#!/bin/bash
#SBATCH --job-name=z2a
#SBATCH --nodes={self.nodes[1]}
#SBATCH --ntasks-per-node=1
{f"#SBATCH --gpus-per-node={gpus}" if gpus else "##SBATCH --gpus-per-node=8   # take one # away to ask for GPUs"}
##SBATCH --time=24:00:00       # and here to set a limit
#SBATCH --output=z2a-%j.log
{"#SBATCH --no-kill" if elastic else "##SBATCH --no-kill"}
#SBATCH --signal=B:TERM@{self.grace + MARGIN:g}    # seconds before the limit, so that the run can save

set -euo pipefail
{head}# The ranks get the signal through srun; without exec the shell would keep it to itself.
exec srun --export=ALL {bad_exit} {inner} -- {shlex.join(self.command)}
"""

    def _chosen(self) -> dict[str, float]:
        """Options of the agent that are not as they would be anyway."""
        options = {
            "--restarts": (self.restarts, NO_LIMIT),
            "--hang-after": (self.hang_after, Job.hang_after),
            "--grace": (self.grace, Job.grace),
        }
        return {option: value for option, (value, usual) in options.items() if value != usual}

    def _left_to_torchrun(self) -> None:
        places = {
            "--rendezvous": self.rendezvous, "--rdzv-listen": self.listen, "--advertise": self.advertise,
            "--secret-file": self.secret_file,
        }  # fmt: skip
        given = [*self._chosen(), *(option for option, value in places.items() if value is not None)]
        if given:
            raise UsageError(
                f"leave out {', '.join(given)}: in Kubernetes torchrun starts the ranks, and the job starts them again"
            )

    def train_job(self, image: str, gpus: int = 0) -> str:
        """A Kubeflow TrainJob (Trainer v2). Its runtime tells torchrun of nodes and ranks by PET_ variables."""
        self._left_to_torchrun()
        limits = {"nvidia.com/gpu": gpus} if gpus else {"cpu": str(self.procs)}
        trainer = {
            "image": image,
            "numNodes": self.nodes[1],
            "numProcPerNode": self.procs,
            "command": ["torchrun", "--no-python", "z2a", *self.command],
            "resourcesPerNode": {"limits": limits},
        }
        return _yaml(
            {
                "apiVersion": "trainer.kubeflow.org/v1alpha1",
                "kind": "TrainJob",
                "metadata": {"name": "z2a"},
                "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
            }
        )

    def pytorch_job(self, image: str, gpus: int = 0) -> str:
        """The older Kubeflow PyTorchJob (Training Operator v1); it sets the same variables."""
        self._left_to_torchrun()
        limits = {"nvidia.com/gpu": gpus} if gpus else {"cpu": str(self.procs)}
        container = {
            "name": "pytorch",
            "image": image,
            "command": ["torchrun", "--no-python", "z2a", *self.command],
            "resources": {"limits": limits},
        }

        def replicas(count: int) -> dict[str, Any]:
            return {
                "replicas": count,
                "restartPolicy": "OnFailure",
                "template": {"spec": {"containers": [container]}},
            }

        kinds = {"Master": replicas(1)} | ({"Worker": replicas(self.nodes[1] - 1)} if self.nodes[1] > 1 else {})
        return _yaml(
            {
                "apiVersion": "kubeflow.org/v1",
                "kind": "PyTorchJob",
                "metadata": {"name": "z2a"},
                "spec": {"nprocPerNode": str(self.procs), "pytorchReplicaSpecs": kinds},
            }
        )


def node_counts(command: Sequence[str], procs: int, nodes: tuple[int, int]) -> tuple[int, ...]:
    """Numbers of nodes between the least and the most that the layout of the recipe can use.

    All of them if there are none: then the ranks say what is wrong.
    """
    from zero2all.parallel.layout import Sizes
    from zero2all.recipe import load_recipe

    every = tuple(range(nodes[0], nodes[1] + 1))
    if len(command) < 2 or command[0] != "train":
        return every
    try:
        recipe = load_recipe(command[1], [word for word in command[2:] if not word.startswith("-")])
    except (Z2aError, OSError):
        return every

    def fits(count: int) -> bool:
        try:
            Sizes.of(recipe.parallel, count * procs)
        except UsageError:
            return False
        return True

    return tuple(filter(fits, every)) or every


def near_their_gpus() -> NumaOptions | None:
    """Each rank on the cores of the NUMA node that its GPU hangs on; where there are no GPUs they may roam."""
    import torch
    from torch.numa.binding import AffinityMode, NumaOptions

    if not torch.cuda.is_available():
        return None
    return NumaOptions(affinity_mode=AffinityMode.NODE, should_fall_back_if_binding_fails=True)


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml(value: dict[str, Any]) -> str:
    return yaml.dump(value, Dumper=_NoAliases, sort_keys=False, width=10_000)


@contextmanager
def _in_environment(values: dict[str, str]) -> Iterator[None]:
    """torch gives its ranks the environment of this process. Afterwards it is as it was: the secret of a rendezvous
    that is gone must not be taken for one that the user has set."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _raise_signal(number: int, frame: FrameType | None) -> None:
    """As torch does once its ranks are started; before that, too."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    raise SignalException("", signal.Signals(number))


def _stopped(number: signal.Signals) -> str:
    why = "stopped by the user" if number == signal.SIGINT else f"told to leave ({number.name})"
    return f"{why}: the same command goes on from the newest checkpoint"
