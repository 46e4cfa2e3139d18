"""The Ray engine gives the same bytes as the local one, also when the cluster loses a node in the middle."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.simulated_nodes import SimulatedNode, simulated_nodes, simulation_unavailable_reason
from tests.conftest import ENGLISH, write_raw
from tests.corpus.builds import rows_of, write_texts
from tests.corpus.test_resume import contents, recipe_for
from zero2all.corpus import build_corpus
from zero2all.recipe import load_recipe

pytest.importorskip("ray")
DRIVER = """
import json, sys
from pathlib import Path
from zero2all.corpus import build_corpus
from zero2all.base.tasks import TaskEngine
from zero2all.base.errors import Z2aError
from zero2all.recipe import CorpusRecipe

recipe = CorpusRecipe.model_validate(json.loads(sys.argv[1]))
engine = TaskEngine(kind="ray")
build_corpus(recipe, Path(sys.argv[2]), engine)

def fail(number):
    raise Z2aError(f"task {number} is wrong")

try:
    engine.run(fail, [(7,)])
except Z2aError as error:
    print(error)
"""


@pytest.mark.slow
def test_ray_gives_the_bytes_of_the_local_engine(tmp_path: Path) -> None:
    write_raw(tmp_path / "raw")
    build_corpus(recipe_for(tmp_path / "raw"), tmp_path / "local")
    words = [sys.executable, "-c", DRIVER, recipe_for(tmp_path / "raw").model_dump_json(), str(tmp_path / "ray")]
    done = subprocess.run(words, check=True, timeout=240, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "task 7 is wrong\n"
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


RAY = Path(sys.executable).with_name("ray")
Z2A = Path(sys.executable).with_name("z2a")
PORT = 6399
FILES, DOCUMENTS = 16, 700


def write_files(directory: Path) -> None:
    rng = random.Random(4)
    directory.mkdir()
    for file in range(FILES):
        texts = (" ".join(rng.choices(ENGLISH.split(), k=400)) + "." for _ in range(DOCUMENTS))
        write_texts(directory / f"{file:02}.jsonl", texts)


@contextmanager
def ray_cluster(machines: tuple[SimulatedNode, SimulatedNode]) -> Iterator[dict[str, str]]:
    """A node on each machine; gives the environment that a driver needs to join.

    Once any ``ray.init()`` of this user has left a token in the home directory, ``ray start --head`` turns token
    authentication on by itself, but neither a second node nor a driver does: they are refused until the mode is set.
    """
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # A node is given up after 3 seconds of silence instead of 15.
    environment |= {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
    head = f"{machines[0].ip}:{PORT}"
    directory = Path(tempfile.mkdtemp(prefix="z2r"))  # Ray's sockets have 107 bytes for their names
    try:
        for number, machine in enumerate(machines):
            role = ["--address", head] if number else ["--head", f"--port={PORT}", "--include-dashboard=false"]
            words = [str(RAY), "start", *role, f"--node-ip-address={machine.ip}", f"--temp-dir={directory}/{number}"]
            words += ["--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats"]
            subprocess.run(machine.command(*words), env=environment, check=True, timeout=90, stdout=subprocess.DEVNULL)
        yield environment
    finally:
        for machine in machines:
            machine.kill_all()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.long
def test_a_node_is_lost_and_no_document_is(tmp_path: Path) -> None:
    if reason := simulation_unavailable_reason():
        pytest.skip(reason)
    write_files(tmp_path / "raw")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"corpus: {{sources: [{{name: en, paths: ['{tmp_path}/raw']}}], dir: '{tmp_path}/ray'}}\n")
    local = build_corpus(load_recipe(recipe).corpus, tmp_path / "local")
    parts = tmp_path / "ray.work" / "parts"
    with simulated_nodes(2) as (head, lost), ray_cluster((head, lost)) as environment:
        words = [str(Z2A), "corpus", "build", str(recipe), "--ray", f"{head.ip}:{PORT}"]
        driver = subprocess.Popen(head.command(*words), env=environment)
        deadline = time.monotonic() + 120
        at_work: list[str] = []
        while not at_work or sum(1 for _ in parts.glob("*.json")) < FILES // 4:
            assert driver.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)  # poll until a task has started there and not finished
            at_work = [title for title in lost.processes().values() if title.startswith("ray::write_part")]
        done_before = sum(1 for _ in parts.glob("*.json"))
        lost.kill_all()
        assert driver.wait(timeout=150) == 0
    assert done_before < FILES
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    gids = [row["gid"] for row in rows_of(tmp_path / "ray")]
    assert len(gids) == len(set(gids)) == local.documents > 0
