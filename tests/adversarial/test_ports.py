"""What the network sees of a job: a port scan of every port from another network namespace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.simulated_nodes import SimulatedNode, simulated_nodes, simulation_unavailable_reason
from tests.conftest import tiny_recipe
from zero2all.recipe import recipe_yaml

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        simulation_unavailable_reason() is not None, reason=f"no namespaces here: {simulation_unavailable_reason()}"
    ),
]
SCAN = """
import json, socket, sys
found = []
for port in range(1, 65536):
    with socket.socket() as probe:
        probe.settimeout(2)
        if probe.connect_ex((sys.argv[1], port)) == 0:
            found.append(port)
print(json.dumps(found))
"""
LISTEN = "import socket, time; s = socket.create_server(('0.0.0.0', 4321)); print('up', flush=True); time.sleep(600)"


def scan(attacker: SimulatedNode, address: str) -> list[int]:
    found: list[int] = json.loads(attacker.run(sys.executable, "-I", "-S", "-c", SCAN, address))
    return found


def test_a_job_of_one_node_has_no_port_open_to_others(workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workspace, f"out={tmp_path}/out", "train.steps=5000", "checkpoint.every=100000 steps")
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(recipe))
    words = ["-m", "zero2all.cli", "launch", "--nproc-per-node", "2", "--", "train", str(tmp_path / "recipe.yaml")]
    with simulated_nodes(2) as (victim, attacker):
        running = subprocess.Popen(
            victim.command(sys.executable, *words), env=dict(os.environ), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            record, deadline = recipe.run_dir / "record.jsonl", time.monotonic() + 240
            while not record.exists() or record.read_bytes().count(b'"loss"') < 3:
                assert running.poll() is None, "the job has ended"
                assert time.monotonic() < deadline
                time.sleep(0.2)
            listening = victim.run("ss", "-Hltn").splitlines()
            assert listening, "there are ports, on loopback"
            assert scan(attacker, victim.ip) == []
            assert running.poll() is None, "the scan has not disturbed it"
            assert [line for line in listening if "127.0.0.1:" not in line and "[::1]:" not in line] == []
        finally:
            running.terminate()
            running.wait(120)


def test_the_scan_finds_an_open_port() -> None:
    with simulated_nodes(2) as (victim, attacker):
        line = victim.command(sys.executable, "-I", "-S", "-c", LISTEN)
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as open_port:
            assert open_port.stdout.readline() == "up\n"
            assert scan(attacker, victim.ip) == [4321]
            open_port.kill()
