"""z2a launch"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from zero2all.base.environment import NOTIFY_VARIABLE, BackendChoice
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.machine.cpus import BindingMode
from zero2all.base.network.addresses import DEFAULT_PORT, HostPort, OverlayKind
from zero2all.base.processes import require_linux
from zero2all.cli.conventions import HelpAll, Json, Result, resumable_command
from zero2all.cluster.launch.restart_policy import NodePolicy, StragglerPolicy

if TYPE_CHECKING:
    from zero2all.cluster.launch.launcher import LaunchConfig

RankCommand = Annotated[
    list[str] | None,
    typer.Argument(
        help="What every rank runs: a z2a command such as 'train my.yaml', 'python script.py', 'python -m module', "
        "or the path of a program.",
        metavar="-- COMMAND...",
    ),
]
NprocPerNode = Annotated[
    int, typer.Option("--nproc-per-node", "--procs", min=1, help="Number of ranks on each node, usually one per GPU.")
]
Nodes = Annotated[str, typer.Option("--nnodes", "--nodes", help="Number of nodes, or MIN:MAX for an elastic job.")]
RdzvEndpoint = Annotated[
    str | None,
    typer.Option(
        "--rdzv-endpoint",
        "--rendezvous",
        help="HOST:PORT of the rendezvous server, the same on every node. Default: none, for one node.",
    ),
]
RdzvListen = Annotated[
    str | None,
    typer.Option(
        "--rdzv-listen",
        help="ADDRESS or ADDRESS:PORT to bind on the node that runs the rendezvous server. Default: the endpoint; "
        "behind a port map the port that it leads to.",
        hidden=True,
    ),
]
RendezvousOnly = Annotated[
    bool,
    typer.Option(
        "--rendezvous-only",
        help="Run no ranks but the rendezvous server of other nodes' jobs, on a machine that stays up, such as the "
        "login node. It listens at --rdzv-listen. Default: 127.0.0.1:29500, for this machine alone.",
    ),
]
Advertise = Annotated[
    str | None,
    typer.Option(
        "--advertise",
        "--local-addr",
        help="HOST or HOST:PORT at which other nodes reach this one. Default: its own address. The port belongs to the "
        "ranks' store, or with --overlay to the overlay (UDP).",
        hidden=True,
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen",
        help="Address or interface (10.0.0.2, eth1) that the ranks of this node use, and optionally the port that "
        "--advertise leads to (eth1:29501, or only 29501). Default: the one that leads to the rendezvous, any port.",
        hidden=True,
    ),
]
Overlay = Annotated[
    OverlayKind,
    typer.Option(
        "--overlay",
        help="Connect the nodes by a private network (wireguard) over one UDP port each, where port maps or firewalls "
        "separate them. Needs root and wireguard-tools.",
        hidden=True,
    ),
]
Backend = Annotated[
    BackendChoice,
    typer.Option(
        "--backend",
        help="Use gloo instead of NCCL on GPUs too, where NCCL hangs although the network works "
        "('z2a doctor --net'). It is slower. A script chooses its own.",
        hidden=True,
    ),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        "--secret-file",
        help="File with the job secret. Default: $Z2A_JOB_SECRET, then a file in ~/.config.",
        hidden=True,
    ),
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        "--max-restarts",
        "--restarts",
        min=0,
        help="Maximum number of restarts after failures. "
        "Default: unlimited, but a step that fails three times ends the job; 0 for a script.",
    ),
]
HangAfter = Annotated[
    float | None,
    typer.Option(
        "--hang-after",
        min=1,
        help="Seconds without a step after which a rank counts as hung. Default: 600. A script that does not call "
        "zero2all.cluster.launch.heartbeat.beat is watched only if this is given, by its CPU time and I/O.",
        hidden=True,
    ),
]
RdzvTimeout = Annotated[
    float,
    typer.Option("--rdzv-timeout", min=1, help="Seconds to wait for the rendezvous server to appear.", hidden=True),
]
Grace = Annotated[
    float,
    typer.Option(
        "--grace", min=1, help="Seconds that ranks have to save a checkpoint when the job is stopped.", hidden=True
    ),
]
Readmit = Annotated[
    bool,
    typer.Option(
        "--readmit", help="Come back to a job that has excluded this node, after it was repaired.", hidden=True
    ),
]
Stragglers = Annotated[
    StragglerPolicy,
    typer.Option(
        "--stragglers", help="Log a warning about a node that all others wait for, or exclude it.", hidden=True
    ),
]
Notify = Annotated[
    str | None,
    typer.Option(
        "--notify",
        envvar=NOTIFY_VARIABLE,
        help="Command that gets each event of the job (node lost or excluded, restart, end) as JSON on stdin, "
        "or a URL to which it is posted. Default: none.",
    ),
]
NumaBinding = Annotated[
    BindingMode,
    typer.Option(
        "--numa-binding",
        help="CPUs of a rank: the NUMA node of its GPU, one core complex (L3 cache) there, or off for "
        "all. Default: node, where there are several NUMA nodes; ranks without GPUs are spread over them.",
        hidden=True,
    ),
]
Island = Annotated[
    int | None,
    typer.Option(
        "--island",
        min=0,
        help="Number of this job, from 0, among the islands of a training (parallel.sync.islands). "
        "The run is in RUN/island-NUMBER. Default: no islands.",
        hidden=True,
    ),
]
IslandsEndpoint = Annotated[
    str | None,
    typer.Option(
        "--islands-endpoint",
        help="HOST:PORT of the rendezvous server at which the islands meet. Default: none.",
        hidden=True,
    ),
]
Check = Annotated[bool, typer.Option("--check", help="Run 'z2a doctor' on all nodes first, and stop if a check fails.")]
JobFile = Literal["slurm", "k8s"]
Emit = Annotated[
    JobFile | None,
    typer.Option(
        "--emit",
        help="Print a job file instead of running: a script for Slurm, or an Indexed Job for Kubernetes (k8s). "
        "Default: run here.",
    ),
]
JobName = Annotated[str, typer.Option("--job-name", help="Name of the job, for --emit.", hidden=True)]
Image = Annotated[str, typer.Option("--image", help="Container image of the Kubernetes job.", hidden=True)]


@resumable_command
def launch(
    rank_command: RankCommand = None,
    nproc_per_node: NprocPerNode = 1,
    nodes: Nodes = "1",
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_listen: RdzvListen = None,
    rendezvous_only: RendezvousOnly = False,
    advertise: Advertise = None,
    listen: Listen = None,
    overlay: Overlay = "none",
    backend: Backend = "auto",
    secret_file: SecretFile = None,
    max_restarts: MaxRestarts = None,
    hang_after: HangAfter = None,
    grace: Grace = 110,
    readmit: Readmit = False,
    stragglers: Stragglers = "warn",
    notify: Notify = None,
    numa_binding: NumaBinding = "auto",
    island: Island = None,
    islands_endpoint: IslandsEndpoint = None,
    rdzv_timeout: RdzvTimeout = 60,
    check: Check = False,
    emit: Emit = None,
    image: Image = "zero2all:latest",
    job_name: JobName = "z2a",
    help_all: HelpAll = False,
    json: Json = False,
) -> Result:
    """Run a command on many ranks with elastic restarts.

    For several nodes, run the same command on each. Failed ranks are restarted, failing nodes excluded.

    Example: z2a launch --nproc-per-node 2 -- train recipes/quickstart.yaml

    Example: z2a launch --nproc-per-node 2 -- python my_script.py --lr 3e-4

    Example: z2a launch --rendezvous-only --rdzv-listen 10.0.0.1:29500
    """
    if rendezvous_only:
        return _serve_rendezvous(rank_command, rdzv_listen, secret_file)
    if not rank_command:
        raise UsageError("give what every rank runs after --, such as: z2a launch --nproc-per-node 2 -- train my.yaml")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is loaded; its warnings add nothing
    from zero2all.cluster.launch.launcher import LaunchConfig

    launch_config = LaunchConfig(
        rank_command,
        nproc_per_node,
        _node_range(nodes),
        rdzv_endpoint,
        rdzv_listen,
        advertise,
        secret_file,
        max_restarts,
        hang_after,
        grace,
        rdzv_timeout,
        numa_binding,
        node_policy=NodePolicy(readmit, stragglers, notify),
        listen_ranks=listen,
        overlay=overlay,
        backend=backend,
        island=island,
        islands_endpoint=islands_endpoint,
    )
    if emit is None:
        return _run(launch_config, check=check)
    return _emit(launch_config, emit, job_name, image, check=check)


def _run(config: LaunchConfig, *, check: bool) -> Result:
    require_linux("z2a launch")
    doctor = replace(config, command=["doctor"], max_restarts=0, node_policy=NodePolicy())
    if status := (doctor.run() if check else 0) or config.run():
        raise typer.Exit(status if status > 0 else 1)
    return Result({"ranks": config.procs, "command": config.command}, f"{config.procs} ranks finished")


def _emit(config: LaunchConfig, scheduler: str, job_name: str, image: str, *, check: bool) -> Result:
    if check:
        raise UsageError("--check checks the nodes as they start: with --emit, run 'z2a launch ... -- doctor' there")
    if config.island is not None:
        raise UsageError(
            "--emit does not write --island: emit the job without it, and add it to each island's 'z2a launch'"
        )
    from zero2all.cluster.job_files import JobResources, indexed_job, slurm_script

    gpus = config.procs if _uses_gpus(config.command) else 0
    write = slurm_script if scheduler == "slurm" else indexed_job
    text = write(config, JobResources(job_name, gpus, image))
    return Result({"emit": scheduler, "text": text}, text)


def _node_range(nodes: str) -> tuple[int, int]:
    min_nodes, _, max_nodes = nodes.partition(":")
    if not min_nodes.isdigit() or not (max_nodes or min_nodes).isdigit():
        raise UsageError(f"--nnodes is {nodes}: write a number, or MIN:MAX such as 2:4")
    return int(min_nodes), int(max_nodes or min_nodes)


def _uses_gpus(rank_command: Sequence[str]) -> bool:
    """Whether the ranks of a job want a GPU each. All do, except with a recipe for the CPU."""
    from zero2all.recipe import load_recipe

    recipe = Path(rank_command[1] if len(rank_command) > 1 else "")
    overrides = [word for word in rank_command[2:] if "=" in word and not word.startswith("-")]
    try:
        return load_recipe(recipe, overrides).train.device != "cpu"
    except (Z2aError, OSError):  # a script, another command, or a recipe that is only on the cluster
        return "train.device=cpu" not in overrides


def _serve_rendezvous(rank_command: list[str] | None, listen: str | None, secret_file: Path | None) -> Result:
    require_linux("z2a launch --rendezvous-only")
    from zero2all.cluster.launch.rendezvous_server import serve_rendezvous

    if rank_command:
        raise UsageError("--rendezvous-only runs no ranks: leave out the command after --")
    bound = HostPort("", None) if listen is None else HostPort.parse(listen, "--rdzv-listen")
    serve_rendezvous(DEFAULT_PORT if bound.port is None else bound.port, bound.host or None, secret_file)
    return Result({}, "")
