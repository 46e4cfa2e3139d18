"""z2a doctor"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Result, command


@command
def doctor(
    directory: Annotated[Path, typer.Option("--dir", help="Directory for runs; its disk is checked.")] = Path("runs"),
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            help="Measure this machine instead, and write a file for 'z2a plan --gpu FILE'. Default: do not.",
        ),
    ] = None,
    net: Annotated[
        bool,
        typer.Option(
            "--net",
            help="Check the network only: names, interfaces, MTU, ports, both directions and bandwidth of all pairs of "
            "nodes, and which firewall rule is missing where.",
        ),
    ] = False,
    json: Json = False,
) -> Result:
    """Check this machine, or all nodes and their network.

    To check all nodes, run 'z2a launch ... -- doctor'. The exit status is 1 if a check fails.

    Example: z2a doctor --dir runs
    """
    from zero2all.base.environment import JOB_SECRET_VARIABLE, STORE_VARIABLE
    from zero2all.cluster.doctor.preflight import check_net, run_checks
    from zero2all.cluster.launch.rendezvous_client import RendezvousStore

    if calibrate is not None:
        return write_calibration(calibrate)
    store = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # The agents' store: every node reaches it, even if the connection to the first node is broken.
        store = RendezvousStore.from_environment(
            os.environ[STORE_VARIABLE], os.environ["TORCHELASTIC_RUN_ID"], timedelta(seconds=60)
        )
    findings = check_net(store, os.environ.get(JOB_SECRET_VARIABLE, "")) if net else run_checks(directory, store)
    text = "\n".join(map(str, findings)) if os.environ.get("RANK", "0") == "0" else ""
    result = Result({"findings": findings}, text)
    if any(finding.level == "bad" for finding in findings):
        result.show(as_json=json)
        raise typer.Exit(1)
    return result


def write_calibration(path: Path) -> Result:
    """Matrix products, a training step, memory and link, as an entry of the hardware table."""
    import torch

    from zero2all.base.io import write_record
    from zero2all.base.machine.devices import hardware_key, pick_device
    from zero2all.bench.calibrate import measure_machine
    from zero2all.planner.calibrated import calibrated_entry, user_entry_path
    from zero2all.recipe import load_recipe_or_preset
    from zero2all.train.hyperparameters import fill_hyperparameters

    preset = "z2all-1.1b" if torch.cuda.is_available() else "z2all-10m"
    reference = fill_hyperparameters(load_recipe_or_preset(preset))
    found = measure_machine(reference)
    entry = calibrated_entry(path.stem, found, reference)
    kept = user_entry_path(hardware_key(pick_device(reference.train.device)))
    kept.parent.mkdir(parents=True, exist_ok=True)
    for place in (path, kept):
        write_record(place, entry)
    products = ", ".join(f"{size}: {flops / 1e9:,.0f}" for size, flops in found.product_flops.items())
    lines = [
        f"{found.device_name}: products in {found.dtype}, GFLOP/s by size: {products}",
        f"step of {preset}: {found.step_seconds:.3g} s; its products reach {entry.efficiency:.2f} of the best",
        f"memory {found.memory_bandwidth / 1e9:.1f} GB/s"
        + (f", link between ranks {found.link_bandwidth / 1e9:.2f} GB/s" if found.link_bandwidth else ""),
        f"written to {path}; plan with it: z2a plan RECIPE --gpus 1 --gpu {path}",
        f"kept as {kept}: runs of 'z2a train' on this hardware are planned with it, and 'z2a watch --html' compares",
    ]
    return Result({"measured": found, "entry": entry}, "\n".join(lines))
