"""A real Slurm of three nodes on this machine: each slurmd has its own network namespace, address and host name."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zero2all.chaos.simulated_nodes import SimulatedNode, simulated_nodes, simulation_unavailable_reason

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
# Without cgroups and accounting. A requeued job waits until its credential has expired, so that is soon.
CONFIGURATION = """\
ClusterName=z2a
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_min_interval=100000
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def slurm_unavailable_reason() -> str | None:
    os.environ["PATH"] += ":/usr/sbin"  # where Debian has the daemons
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm munge"
    return "needs root" if os.geteuid() else simulation_unavailable_reason()


class SlurmCluster:
    def __init__(self, directory: Path, nodes: list[SimulatedNode]) -> None:
        self.directory, self.nodes = directory, nodes

    def run(self, *words: str) -> str:
        """A command on the first node, which has the controller too."""
        line = self.nodes[0].command("env", f"SLURM_CONF={self.directory}/slurm.conf", *words)
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=self.directory)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        return self.run("scontrol", "--oneliner", "show", "job", job).partition("JobState=")[2].split()[0]

    def log(self, job: str) -> str:
        path = self.directory / f"z2a-{job}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = [path.read_text()[-2000:] for path in sorted(self.directory.glob("*.log"))]
                raise AssertionError(f"not within {seconds:.0f} s: {what}\n" + "\n".join(logs))
            time.sleep(0.2)


@contextmanager
def slurm_cluster(directory: Path, count: int) -> Iterator[SlurmCluster]:
    (directory / "state").mkdir()
    key = directory / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    with simulated_nodes(count) as nodes:
        names = "".join(f"{node.ip} {node.name}\n" for node in nodes)
        for node in nodes:
            node.path(Path("/etc/hosts")).write_text(f"127.0.0.1 localhost\n{names}")
        lines = [f"NodeName={node.name} NodeAddr={node.ip} CPUs=1 RealMemory=2000" for node in nodes]
        text = CONFIGURATION.format(controller=nodes[0].name, directory=directory, nodes="\n".join(lines))
        (directory / "slurm.conf").write_text(text)
        cluster = SlurmCluster(directory, nodes)
        files = [f"--{name}-file={directory}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        daemons = [["munged", "--foreground", "--force", f"--socket={directory}/munge.socket", *files]]
        daemons.append(nodes[0].command("slurmctld", "-D", "-f", f"{directory}/slurm.conf"))
        daemons += [node.command("slurmd", "-D", "-f", f"{directory}/slurm.conf", "-N", node.name) for node in nodes]
        running = []
        try:
            for line in daemons:
                running.append(subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
                if len(running) == 1:
                    cluster.wait_until((directory / "munge.socket").exists, "munged listens")
            probe = nodes[0].command("env", f"SLURM_CONF={directory}/slurm.conf", "sinfo", "-h", "-o", "%D %t")
            cluster.wait_until(
                lambda: subprocess.run(probe, capture_output=True).stdout.decode().strip() == f"{count} idle",
                "all nodes are idle",
            )
            yield cluster
        finally:
            for process in reversed(running):
                process.kill()
                process.wait()
