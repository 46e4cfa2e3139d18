"""``z2a launch``: the same command on many ranks, through torchrun, or as files for Slurm and Kubernetes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from zero2all.engine import all_cores
from zero2all.errors import UsageError

PORT = 29500


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
    nodes: int = 1
    rendezvous: str | None = None
    """HOST:PORT where the nodes meet; one node needs none."""
    restarts: int = 0
    """How often the ranks are started again after a failure."""

    def __post_init__(self) -> None:
        if not self.command:
            raise UsageError("say what to run after --, such as: z2a launch --procs 2 -- train my.yaml")

    def run(self) -> int:
        """Start the ranks of this node and wait for them; their exit status."""
        if self.nodes > 1 and self.rendezvous is None:
            raise UsageError(
                f"{self.nodes} nodes need a place to meet: --rendezvous HOST:{PORT}, the same on every node"
            )
        process = subprocess.Popen(self.torchrun(), env=self.environment())
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # the ranks got it too, and save before they end

    def torchrun(self) -> list[str]:
        meeting = ["--standalone"]
        if self.nodes > 1:
            meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(self.rendezvous), "--rdzv-id", "z2a"]
        sizes = ["--nnodes", str(self.nodes), "--nproc-per-node", str(self.procs)]
        words = [sys.executable, "-m", "torch.distributed.run", *meeting, *sizes]
        return [*words, "--max-restarts", str(self.restarts), "-m", "zero2all.cli", *self.command]

    def environment(self) -> dict[str, str]:
        return {
            # Cores are shared out; torchrun's own default of one thread would leave most of them idle.
            "OMP_NUM_THREADS": str(max(1, all_cores() // self.procs)),
            # With gloo, ranks that start again would read the addresses of those that died.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **os.environ,
        }

    def slurm(self, gpus: int = 0) -> str:
        """A script for ``sbatch``: one task a node, which starts its own ranks."""
        inner = f"z2a launch --procs {self.procs}"
        head = ""
        if self.nodes > 1:
            head = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
            inner += f' --nodes {self.nodes} --rendezvous "$head:{PORT}"'
        if self.restarts:
            inner += f" --restarts {self.restarts}"
        return f"""#!/bin/bash
#SBATCH --job-name=z2a
#SBATCH --nodes={self.nodes}
#SBATCH --ntasks-per-node=1
{f"#SBATCH --gpus-per-node={gpus}" if gpus else "##SBATCH --gpus-per-node=8   # take one # away to ask for GPUs"}
##SBATCH --time=24:00:00       # and here to set a limit
#SBATCH --output=z2a-%j.log
#SBATCH --signal=B:TERM@120    # two minutes before the limit, so that the run can save

set -euo pipefail
{head}# The ranks get the signal through srun; without exec the shell would keep it to itself.
exec srun --kill-on-bad-exit=1 {inner} -- {shlex.join(self.command)}
"""

    def train_job(self, image: str, gpus: int = 0) -> str:
        """A Kubeflow TrainJob (Trainer v2). Its runtime tells torchrun of nodes and ranks by PET_ variables."""
        limits = {"nvidia.com/gpu": gpus} if gpus else {"cpu": str(self.procs)}
        trainer = {
            "image": image,
            "numNodes": self.nodes,
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

        kinds = {"Master": replicas(1)} | ({"Worker": replicas(self.nodes - 1)} if self.nodes > 1 else {})
        return _yaml(
            {
                "apiVersion": "kubeflow.org/v1",
                "kind": "PyTorchJob",
                "metadata": {"name": "z2a"},
                "spec": {"nprocPerNode": str(self.procs), "pytorchReplicaSpecs": kinds},
            }
        )


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml(value: dict[str, Any]) -> str:
    return yaml.dump(value, Dumper=_NoAliases, sort_keys=False, width=10_000)
