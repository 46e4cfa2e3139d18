"""z2a launch"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from zero2all.cli.conventions import Json, Result, command
from zero2all.errors import UsageError


@command
def launch(
    words: Annotated[list[str], typer.Argument(help="What every rank runs, as after z2a.", metavar="-- COMMAND...")],
    procs: Annotated[int, typer.Option("--procs", min=1, help="Ranks on each node, one for each GPU.")] = 1,
    nodes: Annotated[
        str, typer.Option("--nodes", help="How many, or MIN:MAX: the job goes on with any number between.")
    ] = "1",
    rendezvous: Annotated[
        str | None, typer.Option("--rendezvous", help="HOST:PORT where several nodes meet; the same on every node.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option("--rdzv-listen", help="On the node that holds the rendezvous: the address to bind, if another."),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option("--advertise", help="The address by which other nodes reach this one, if another.")
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            "--secret-file", help="File with the job secret; $Z2A_JOB_SECRET or one in ~/.config if not given."
        ),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option("--restarts", min=0, help="Starts after a failure, at most; three for one step in any case."),
    ] = None,
    hang_after: Annotated[
        float, typer.Option("--hang-after", min=1, help="Seconds without a step that count as a hang.")
    ] = 600,
    grace: Annotated[float, typer.Option("--grace", min=1, help="Seconds to save in when told to stop.")] = 110,
    check: Annotated[
        bool, typer.Option("--check", help="Examine the nodes first ('z2a doctor'), and stop if something is bad.")
    ] = False,
    emit: Annotated[
        Literal["slurm", "k8s", "pytorchjob"] | None,
        typer.Option("--emit", help="Print a file for sbatch or kubectl instead of running."),
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", help="Where --emit writes; stdout if not given.")] = None,
    image: Annotated[str, typer.Option("--image", help="Container image for Kubernetes.")] = "zero2all:latest",
    gpus: Annotated[int, typer.Option("--gpus", min=0, help="GPUs of each node, for --emit.")] = 0,
    json: Json = False,
) -> Result:
    """Run a command on several ranks; nodes each run the same line.

    Example: z2a launch --procs 2 -- train recipes/quickstart.yaml
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is loaded; its warnings say nothing new
    from zero2all.resilience.launch import NO_LIMIT, Job

    least, _, most = nodes.partition(":")
    if not least.isdigit() or not (most or least).isdigit():
        raise UsageError(f"--nodes is {nodes}: write a number, or MIN:MAX such as 2:4")
    between = int(least), int(most or least)
    job = Job(
        words, procs, between, rendezvous, listen, advertise, secret_file,
        NO_LIMIT if restarts is None else restarts, hang_after, grace,
    )  # fmt: skip
    if emit is None:
        status = replace(job, command=["doctor"], restarts=0).run() if check else 0
        status = status or job.run()
        if status:
            raise typer.Exit(status if status > 0 else 1)
        return Result({"ranks": procs, "command": words}, f"{procs} ranks ended well")
    if check:
        raise UsageError("--check examines the nodes as they start: with --emit, run 'z2a launch ... -- doctor' there")
    if emit == "slurm":
        text = job.slurm(gpus)
    else:
        text = job.train_job(image, gpus) if emit == "k8s" else job.pytorch_job(image, gpus)
    if to is not None:
        to.write_text(text, encoding="utf-8")
    return Result({"emit": emit, "to": to and str(to), "text": text}, text if to is None else f"written to {to}")


@command
def rendezvous(
    port: Annotated[int, typer.Option("--port", min=0, max=65535)] = 29500,
    listen: Annotated[
        str | None, typer.Option("--listen", help="The address to bind; that of this machine's name if not given.")
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option("--secret-file", help="File with the job secret; written if there is none.")
    ] = None,
    json: Json = False,
) -> Result:
    """Hold the place where nodes meet, on a machine that outlives them, such as the login node.

    Example: z2a rendezvous --port 29500 --listen 10.0.0.1
    """
    from zero2all.resilience.rendezvous import serve

    serve(port, listen, secret_file)
    return Result({}, "")
