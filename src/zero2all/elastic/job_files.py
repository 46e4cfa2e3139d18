"""Job files for schedulers that run ``z2a launch`` on every node: a script for Slurm, an Indexed Job for Kubernetes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from zero2all.elastic.launcher import LaunchConfig
from zero2all.environment import JOB_SECRET_VARIABLE
from zero2all.errors import UsageError
from zero2all.network import DEFAULT_PORT

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

_SLURM = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1        # one agent, which starts the ranks of its node and binds each near its GPU;
                                   # --ntasks-per-socket is for one task per rank, and has no use here
#SBATCH --exclusive                # else a task has one core, and its ranks share it
#SBATCH --mem=0                    # all memory of a node, for the same reason
{gpus}
##SBATCH --time=24:00:00           # take one # away to set a limit: the job saves, is requeued and resumes
#SBATCH --signal=B:USR1@{signal}         # seconds before the limit, for the run to save
#SBATCH --requeue                  # Slurm starts the job again if a node fails
#SBATCH --open-mode=append         # and keeps the log of the first start
#SBATCH --output={name}-%j.log
{no_kill}

set -uo pipefail
max_requeues=100
{head}
# Every node runs this. An agent that was killed is started again, and the others admit it; any other status is final.
agent=$(cat <<'Z2A_AGENT'
trap : TERM  # Slurm signals this shell too, and must not take it for the end of the agent
kills=0
until {agent}; do
  status=$?
  ((status >= 128 && ++kills <= 10)) || exit $status
done
Z2A_AGENT
)
at_limit=
signalled=yes
# By scancel: srun would kill the agents as soon as it gets a signal itself.
trap 'signalled=yes; at_limit=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap 'signalled=yes' TERM  # scancel by the user: Slurm signals the agents too
# --cpu-bind=none: the task uses all cores of the job. A node that has saved must not end those that still save.
srun --export=ALL --cpu-bind=none --kill-on-bad-exit=0{srun} bash -c "$agent" &
while [[ $signalled ]]; do  # a signal ends wait, but not srun
  signalled=
  wait $!
  status=$?
done
if [[ $at_limit && $status != 0 && ${{SLURM_RESTART_COUNT:-0}} -lt $max_requeues ]]; then
  echo "the time limit is near and the run has saved: requeued, and will resume"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
"""
_SLURM_SECRET = f"""\
# Authenticates the nodes. Made here, so that Slurm does not store it; srun passes it on in their environment.
{JOB_SECRET_VARIABLE}=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n')
export {JOB_SECRET_VARIABLE}
"""

_KUBERNETES = """\
# Several nodes authenticate each other with a secret. Create it once:
#   openssl rand -hex 32 | kubectl create secret generic {name}-secret --from-file=secret=/dev/stdin
# The claim {name}-workspace (ReadWriteMany) holds recipe, tokens and runs; it is mounted at {workspace}.
# /dev/shm counts towards the memory limit, if you set one: in-memory checkpoints need two states of each rank.
"""


@dataclass(frozen=True)
class JobResources:
    """What a job file asks of the scheduler."""

    name: str = "z2a"
    gpus: int = 0
    """On each node."""
    image: str = "zero2all:latest"
    """Of a pod."""

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
        "--rdzv-listen": config.listen, "--advertise": config.advertise, "--secret-file": config.secret_file,
        "--listen": config.listen_ranks, "--overlay": None if config.overlay == "none" else config.overlay,
    }  # fmt: skip
    if wrong := [option for option, value in given.items() if value is not None]:
        raise UsageError(f"leave out {', '.join(wrong)}: the pods of a job have their own addresses and secret volume")
    name, labels = resources.name, {"app.kubernetes.io/name": "z2a", "app.kubernetes.io/instance": resources.name}
    endpoint = config.rdzv_endpoint or f"{name}-0.{name}:{DEFAULT_PORT}"
    words = _agent_options(config, SECRET_PATH)
    if config.nodes[1] > 1:
        words[2:2] = ["--rdzv-endpoint", endpoint, "--rdzv-timeout", str(POD_PATIENCE)]
    service = {
        "clusterIP": "None",  # the name of a pod resolves to the pod
        "publishNotReadyAddresses": True,
        "selector": labels,
        "ports": [{"name": "rendezvous", "port": DEFAULT_PORT}],
    }
    only_each_other = {
        "podSelector": {"matchLabels": labels},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": labels}}]}],
    }
    job = {
        "completions": config.nodes[1],
        "parallelism": config.nodes[1],
        "completionMode": "Indexed",
        "backoffLimit": POD_FAILURES_PER_NODE * config.nodes[1],
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"containerName": "z2a", "operator": "In", "values": [2]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {
            "metadata": {"labels": labels},
            "spec": _pod(config, resources, ["z2a", "launch", *words, "--", *config.command]),
        },
    }
    documents = [
        _resource("v1", "Service", name, service),
        _resource("networking.k8s.io/v1", "NetworkPolicy", name, only_each_other),
        _resource("batch/v1", "Job", name, job),
    ]
    return _KUBERNETES.format(name=name, workspace=WORKSPACE) + "---\n".join(map(_yaml, documents))


def _pod(config: LaunchConfig, resources: JobResources, command: list[str]) -> dict[str, Any]:
    name = resources.name
    container: dict[str, Any] = {
        "name": "z2a",
        "image": resources.image,
        "command": command,
        "workingDir": WORKSPACE,
        "ports": [{"name": "rendezvous", "containerPort": DEFAULT_PORT}],
        "resources": {"limits": {"nvidia.com/gpu": resources.gpus} if resources.gpus else {"cpu": str(config.procs)}},
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "workspace", "mountPath": WORKSPACE},
        ],
    }
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "workspace", "persistentVolumeClaim": {"claimName": f"{name}-workspace"}},
    ]
    if config.nodes[1] > 1:
        container["volumeMounts"].append({"name": "secret", "mountPath": str(SECRET_PATH.parent), "readOnly": True})
        volumes.append({"name": "secret", "secret": {"secretName": f"{name}-secret", "defaultMode": SECRET_MODE}})
    return {
        "subdomain": name,
        "restartPolicy": "Never",  # a failed pod is replaced, by the rules of podFailurePolicy
        "terminationGracePeriodSeconds": int(config.grace + SIGNAL_MARGIN),
        "enableServiceLinks": False,  # variables such as Z2A_PORT are not for z2a
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": volumes,
    }


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


def _resource(version: str, kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml(value: dict[str, Any]) -> str:
    return yaml.dump(value, Dumper=_NoAliases, sort_keys=False, width=10_000)
