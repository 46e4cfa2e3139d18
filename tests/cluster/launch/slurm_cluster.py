"""A real Slurm of three nodes on this machine: each slurmd has its own network namespace, address and host name."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.simulated_nodes import SimulatedNode, simulated_nodes, simulation_unavailable_reason

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
CONFIGURATION = Path(__file__).with_name("slurm.conf").read_text(encoding="utf-8")


def slurm_unavailable_reason() -> str | None:
    os.environ["PATH"] += ":/usr/sbin"  # where Debian has the daemons
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm munge"
    return "needs root" if os.geteuid() else simulation_unavailable_reason()


class SlurmCluster:
    def __init__(self, directory: Path, configuration: Path, nodes: list[SimulatedNode]) -> None:
        """Jobs run in ``directory``."""
        self.directory, self.configuration, self.nodes = directory, configuration, nodes

    def run(self, *words: str) -> str:
        """A command on the first node, which has the controller too."""
        settings = (f"--chdir={self.directory}", f"SLURM_CONF={self.configuration}")
        line = self.nodes[0].command("env", *settings, *words)
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
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
                paths = [*self.directory.glob("*.log"), *self.configuration.parent.glob("*.log")]
                logs = [f"{path}\n{path.read_text(errors='replace')[-2000:]}" for path in paths]
                raise AssertionError(f"not within {seconds:.0f} s: {what}\n" + "\n".join(logs))
            time.sleep(0.2)


@contextmanager
def slurm_cluster(directory: Path, count: int) -> Iterator[SlurmCluster]:
    # Slurm's sockets are in its own directories, and the path of a socket is short.
    with tempfile.TemporaryDirectory(prefix="slurm-") as own, simulated_nodes(count) as nodes:
        names = "".join(f"{node.ip} {node.name}\n" for node in nodes)
        for node in nodes:
            node.path(Path("/etc/hosts")).write_text(f"127.0.0.1 localhost\n{names}")
        cluster = SlurmCluster(directory, _configure(Path(own), nodes), nodes)
        running = []
        try:
            for line in _daemons(Path(own), cluster):
                running.append(subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
                cluster.wait_until((Path(own) / "munge.socket").exists, "munged listens")
            probe = nodes[0].command("env", f"SLURM_CONF={cluster.configuration}", "sinfo", "-h", "-o", "%D %t")
            cluster.wait_until(
                lambda: subprocess.run(probe, capture_output=True).stdout.decode().strip() == f"{count} idle",
                "all nodes are idle",
            )
            yield cluster
        finally:
            for process in reversed(running):
                process.kill()
                process.wait()
            for node in nodes:  # what Slurm has started writes to its directories
                node.kill_all()


def _configure(own: Path, nodes: list[SimulatedNode]) -> Path:
    (own / "state").mkdir()
    key = own / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    lines = [f"NodeName={node.name} NodeAddr={node.ip} CPUs=1 RealMemory=2000" for node in nodes]
    text = CONFIGURATION.format(controller=nodes[0].name, directory=own, nodes="\n".join(lines))
    (own / "slurm.conf").write_text(text)
    return own / "slurm.conf"


def _daemons(own: Path, cluster: SlurmCluster) -> list[list[str]]:
    files = [f"--{name}-file={own}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    munged = ["munged", "--foreground", "--force", f"--socket={own}/munge.socket", *files]
    options = ["-D", "-f", str(cluster.configuration)]
    slurmds = [node.command("slurmd", *options, "-N", node.name) for node in cluster.nodes]
    return [munged, cluster.nodes[0].command("slurmctld", *options), *slurmds]
