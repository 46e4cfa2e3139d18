"""Job files for schedulers that run ``z2a launch`` on every node: a script for Slurm, an Indexed Job for Kubernetes."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from string import Template

from zero2all.base.environment import JOB_SECRET_VARIABLE
from zero2all.base.errors import UsageError
from zero2all.base.network.addresses import DEFAULT_PORT
from zero2all.base.package_data import read_package_text
from zero2all.cluster.launch.launcher import LaunchConfig

SIGNAL_MARGIN = 10  # seconds that a scheduler grants in addition to the grace period
POD_PATIENCE = 600  # seconds to wait for the pod of the rendezvous: pulling its image takes minutes
POD_FAILURES_PER_NODE = 10
SECRET_PATH = Path("/run/z2a/secret")
WORKSPACE = "/workspace"
SECRET_MODE = 0o440
_OPTIONS = {
    "--max-restarts": "max_restarts", "--hang-after": "hang_after", "--grace": "grace",
    "--numa-binding": "numa_binding", "--listen": "listen_ranks", "--backend": "backend", "--overlay": "overlay",
}  # fmt: skip
"""Options of ``z2a launch`` that every node gets, and the fields of a launch that they set."""
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")  # the name of a Service; pods add their number

_SLURM = read_package_text(__package__, "slurm_job.sh")
_SLURM_SECRET = f"""\
# Authenticates the nodes. Made here, so that Slurm does not store it; srun passes it on in their environment.
{JOB_SECRET_VARIABLE}=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n')
export {JOB_SECRET_VARIABLE}
"""

_KUBERNETES = Template(read_package_text(__package__, "kubernetes_job.yaml"))


@dataclass(frozen=True)
class JobResources:
    """What a job file asks of the scheduler."""

    name: str = "z2a"
    gpus: int = 0
    """GPUs of each node."""
    image: str = "zero2all:latest"
    """The image of a pod."""

    def __post_init__(self) -> None:
        if not _LABEL.fullmatch(self.name):
            raise UsageError(
                f"--job-name is {self.name}: it becomes a host name, so write lower-case letters, digits and hyphens"
            )


def slurm_script(config: LaunchConfig, resources: JobResources) -> str:
    """A script for ``sbatch``: one task per node, which starts its own ranks."""
    head, endpoint = "", config.rdzv_endpoint and shlex.quote(config.rdzv_endpoint)
    if config.nodes[1] > 1 and endpoint is None:
        head = 'export Z2A_HEAD; Z2A_HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        endpoint = f'"$Z2A_HEAD:{DEFAULT_PORT}"'
        if config.secret_file is None:  # a rendezvous of its own has its own secret
            head += _SLURM_SECRET
    words = [shlex.quote(word) for word in _agent_options(config, config.secret_file)]
    if config.nodes[1] > 1:
        words[2:2] = ["--rdzv-endpoint", str(endpoint)]
    elastic = config.nodes[0] < config.nodes[1]  # the job outlives a node
    return _SLURM.format(
        name=resources.name,
        nodes=config.nodes[1],
        gpus=f"#SBATCH --gpus-per-node={resources.gpus}\n"
        "#SBATCH --gres-flags=enforce-binding   # on shared nodes: only cores of the sockets of these GPUs"
        if resources.gpus
        else "##SBATCH --gpus-per-node=8         # take one # away to ask for GPUs",
        signal=f"{config.grace + SIGNAL_MARGIN:g}",
        no_kill="#SBATCH --no-kill" if elastic else "##SBATCH --no-kill                # only for --nnodes MIN:MAX",
        head=head,
        srun=" --no-kill" if elastic else "",
        agent=f"z2a launch {' '.join(words)} -- {shlex.join(config.command)}",
    )


def indexed_job(config: LaunchConfig, resources: JobResources) -> str:
    """A Kubernetes Job with one pod per node and a stable host name for each; pod 0 runs the rendezvous."""
    given = {
        "--rdzv-listen": config.listen,
        "--advertise": config.advertise,
        "--secret-file": config.secret_file,
        "--listen": config.listen_ranks,
        "--overlay": None if config.overlay == "none" else config.overlay,
    }
    if wrong := [option for option, value in given.items() if value is not None]:
        raise UsageError(f"leave out {', '.join(wrong)}: the pods of a job have their own addresses and secret volume")
    name, nodes = resources.name, config.nodes[1]
    words, mounted_secret, secret = _agent_options(config, SECRET_PATH), "", ""
    if nodes > 1:
        endpoint = config.rdzv_endpoint or f"{name}-0.{name}:{DEFAULT_PORT}"
        words[2:2] = ["--rdzv-endpoint", endpoint, "--rdzv-timeout", str(POD_PATIENCE)]
        mounted_secret = f"- {{name: secret, mountPath: {SECRET_PATH.parent}, readOnly: true}}"
        secret = f"- {{name: secret, secret: {{secretName: {name}-secret, defaultMode: {SECRET_MODE}}}}}"
    text = _KUBERNETES.substitute(
        name=name,
        labels=json.dumps({"app.kubernetes.io/name": "z2a", "app.kubernetes.io/instance": name}),
        nodes=nodes,
        failures=POD_FAILURES_PER_NODE * nodes,
        grace=int(config.grace + SIGNAL_MARGIN),
        port=DEFAULT_PORT,
        image=json.dumps(resources.image),
        command=json.dumps(["z2a", "launch", *words, "--", *config.command]),
        workspace=WORKSPACE,
        limits=f"nvidia.com/gpu: {resources.gpus}" if resources.gpus else f"cpu: '{config.procs}'",
        mounted_secret=mounted_secret,
        secret=secret,
    )
    return "\n".join(line for line in text.splitlines() if line.strip()) + "\n"


def _agent_options(config: LaunchConfig, secret_file: Path | None) -> list[str]:
    """The options of ``z2a launch`` on a node, but for the rendezvous."""
    words = ["--nproc-per-node", str(config.procs)]
    if config.nodes[1] > 1:
        words += ["--nnodes", f"{config.nodes[0]}:{config.nodes[1]}"]
        words += [] if secret_file is None else ["--secret-file", str(secret_file)]
    for option, name in _OPTIONS.items():
        value = getattr(config, name)
        if option == "--grace" or value != getattr(LaunchConfig, name):
            words += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    return [*words, *config.node_policy.arguments()]
