"""Processes and launchers of islands that are killed and suspended in the middle of a training."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_recipe
from tests.train.diloco.island_threads import SECRET, thread_islands
from zero2all.base.console import say
from zero2all.base.environment import (
    ISLAND_VARIABLE,
    ISLANDS_ENDPOINT_VARIABLE,
    ISLANDS_SECRET_VARIABLE,
    JOB_SECRET_VARIABLE,
)
from zero2all.base.tasks import TaskEngine
from zero2all.cluster.launch.rendezvous_server import RendezvousServer
from zero2all.corpus import build_corpus
from zero2all.evals import evaluate_bpb
from zero2all.recipe import Recipe, parse_recipe, recipe_yaml
from zero2all.tokenizer import train_tokenizer
from zero2all.tokens import build_tokens
from zero2all.track import read_steps
from zero2all.track.record_lines import EventLine, StepLine
from zero2all.track.run_record import read_record_lines
from zero2all.train import Run

STEPS = 200
KILLED_AT, BACK_AT = 30, 38
WORDS, NEXT_WORDS = 100, 4
# Walks over words, of which each has its own few successors. Few words, so the loss is nearly flat in the end: with
# 300 words and 8 successors it still fell so fast that the steps which were missed cost 1.1%. Another order of the
# data changes the loss by 0.6%: the bound has little room.
WALKS = """
name: walks
seed: 11
corpus: {holdout: 0.1, filters: []}
tokenizer: {vocab_size: 512, min_frequency: 1}
model: {hidden_size: 48, intermediate_size: 96,
  num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64}
train:
  seq_len: 64
  batch_tokens: 1024
  micro_batch_tokens: 256
  precision: fp32
  device: cpu
  optimizer: {lr: 5e-3}
  schedule: {warmup: 10 steps}
checkpoint: {every: 10 steps, flash_every: null}
evals: {tokens: 65536}
parallel: {sync: {islands: 2, every: 8, fragments: 2, overlap: 2}}
"""
# Rank 1 of the second island kills itself at a step, once. The first island trains on, but not past another step before
# the second one is back: how long a start takes on this machine must not decide how much data is missed.
TRAINER = """
import os, signal, sys, time
from pathlib import Path
from zero2all.cluster.launch.worker import run_worker
from zero2all.recipe import load_recipe
from zero2all.train import TrainerHooks, train

recipe, island, kill_at, wait_at = load_recipe(sys.argv[1]), os.environ["Z2A_ISLAND"], *map(int, sys.argv[2:])

def watch(batch):
    mark, back, deadline = Path("killed"), Path("back"), time.monotonic() + 120
    if island == "1" and batch.step == kill_at and os.environ["LOCAL_RANK"] == "1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while island == "0" and batch.step == wait_at and not back.exists() and time.monotonic() < deadline:
        time.sleep(0.01)

train(recipe, hooks=TrainerHooks(on_batch=watch))
"""


class Launchers:
    """Islands of two ranks each, that FSDP shards the model over, started by ``z2a launch``."""

    def __init__(self, directory: Path, recipe: Recipe, kill_at: int, wait_at: int) -> None:
        directory.mkdir()
        self.directory, self.steps = directory, [str(kill_at), str(wait_at)]
        self.server = RendezvousServer("127.0.0.1", 0, SECRET)
        self.server.start()
        (directory / "recipe.yaml").write_text(recipe_yaml(recipe), encoding="utf-8")
        (directory / "trainer.py").write_text(TRAINER, encoding="utf-8")
        self.processes = [self._start(island) for island in range(2)]

    def _start(self, island: int) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "zero2all.cli", "launch", "--nproc-per-node", "2", "--island", str(island)]
        line += ["--islands-endpoint", self.server.endpoint, "--max-restarts", "3", "--", "python", "trainer.py"]
        line += ["recipe.yaml", *self.steps]
        environment = {**os.environ, JOB_SECRET_VARIABLE: SECRET, "OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        with open(self.log(island), "ab") as log:
            return subprocess.Popen(line, cwd=self.directory, env=environment, stdout=log, stderr=log)

    def wait_until_back(self) -> None:
        """Until the second island was killed, and waits to take over the state of the first."""
        deadline = time.monotonic() + 200
        while True:
            islands = [training.quorum.present.get(1) for training in list(self.server.islands.by_name.values())]
            was_killed = (self.directory / "killed").exists()
            if was_killed and any(island is not None and island.start is not None for island in islands):
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (self.directory / "back").touch()

    def log(self, island: int) -> Path:
        return self.directory / f"island-{island}.log"

    def end(self) -> None:
        try:
            for island, process in enumerate(self.processes):
                assert process.wait(250) == 0, self.log(island).read_text(encoding="utf-8")[-5000:]
        finally:
            for process in self.processes:
                process.terminate()
                process.wait(30)
            self.server.stop()


def bits_per_byte(out: Path, island: int) -> float:
    run = Run.open(out / "run" / f"island-{island}")
    return evaluate_bpb(run.load_model(), run.tokenizer(), run.recipe, {}).bits_per_byte


def longest_step(out: Path, island: int, before: float = math.inf) -> float:
    lines = read_record_lines(out / "run" / f"island-{island}" / "record.jsonl")
    steps = [line for line in lines if isinstance(line, StepLine) and "loss" in line.metrics and line.step < before]
    times = [line.time for line in steps if line.time is not None]
    return max(after - before for before, after in itertools.pairwise(times))


def event_times(out: Path, island: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for line in read_record_lines(out / "run" / f"island-{island}" / "record.jsonl"):
        if isinstance(line, EventLine) and line.time is not None:
            found.setdefault(line.event, []).append(line.time)
    return found


def walks(count: int) -> Iterator[str]:
    rng = random.Random(1)
    words = [
        "".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))
        for _ in range(WORDS)
    ]
    successors = [rng.sample(range(WORDS), NEXT_WORDS) for _ in words]
    weights = [1 / (place + 1) for place in range(NEXT_WORDS)]
    for _ in range(count):
        at, text = rng.randrange(WORDS), []
        for _ in range(60):
            text.append(words[at])
            [at] = rng.choices(successors[at], weights)
        yield " ".join(text) + "."


def walks_recipe(root: Path, out: Path, *overrides: str) -> Recipe:
    sources = json.dumps([{"name": "walks", "paths": [f"{root}/walks.jsonl"]}])
    stages = [f"{name}.dir={root}/{name}" for name in ("corpus", "tokenizer", "tokens")]
    return parse_recipe(WALKS, [f"out={out}", f"train.steps={STEPS}", f"corpus.sources={sources}", *stages, *overrides])


@pytest.fixture(scope="module")
def walks_workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("walks")
    lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(walks(4000))]
    (root / "walks.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    recipe, engine = walks_recipe(root, root), TaskEngine()  # in this process
    build_corpus(recipe.corpus, recipe.documents_dir, engine)
    train_tokenizer(recipe.tokenizer, recipe.documents_dir, recipe.tokenizer_dir, engine)
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir, engine)
    return root


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_island_killed_in_the_middle_is_not_waited_for_and_costs_less_than_one_percent(
    walks_workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with thread_islands() as islands:  # one rank each
        islands.train(walks_recipe(walks_workspace, tmp_path / "undisturbed"))
    recipe = walks_recipe(walks_workspace, tmp_path / "killed")
    killed = Launchers(tmp_path / "job", recipe, KILLED_AT, BACK_AT)
    killed.wait_until_back()
    killed.end()
    for out in (tmp_path / "undisturbed", tmp_path / "killed"):
        one, other = (Run.open(out / "run" / f"island-{number}").load_model().state_dict() for number in range(2))
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert len(event_times(tmp_path / "killed", 1)["caught up"]) == 1
    assert len(event_times(tmp_path / "killed", 0)["islands"]) == 3  # both, one, both
    assert longest_step(tmp_path / "killed", 0, before=BACK_AT) < 10
    expected, found = bits_per_byte(tmp_path / "undisturbed", 0), bits_per_byte(tmp_path / "killed", 0)
    with capsys.disabled():
        say(f"bits per byte of validation text: undisturbed {expected:.4f}, with a loss {found:.4f}")
    # In both directions: better by more than that would be other data, or another schedule.
    assert found == pytest.approx(expected, rel=0.01)


ISLAND = """
import sys, time
from zero2all.recipe import load_recipe
from zero2all.train import TrainerHooks, train
from zero2all.train.diloco import islands

islands.START_PATIENCE = 60
train(load_recipe(sys.argv[1]), hooks=TrainerHooks(on_batch=lambda batch: time.sleep(0.1)))
"""


@contextmanager
def island_processes(recipe: Recipe, directory: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Islands that train slowly, at one rendezvous of this machine."""
    server, processes = RendezvousServer("127.0.0.1", 0, SECRET), list[subprocess.Popen[bytes]]()
    server.start()
    path = directory / "recipe.yaml"
    path.write_text(recipe_yaml(recipe), encoding="utf-8")
    place = {ISLANDS_ENDPOINT_VARIABLE: server.endpoint, ISLANDS_SECRET_VARIABLE: SECRET, "OMP_NUM_THREADS": "1"}
    try:
        for island in range(recipe.parallel.sync.islands):
            environment = {**os.environ, **place, ISLAND_VARIABLE: str(island)}
            processes.append(subprocess.Popen([sys.executable, "-c", ISLAND, str(path)], env=environment))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
        server.stop()


@pytest.mark.long
def test_an_island_that_is_silent_is_not_waited_for_and_catches_up_when_it_runs_again(
    workspace: Path, tmp_path: Path
) -> None:
    options = ["train.steps=200", "parallel.sync.islands=2", "parallel.sync.every=5"]
    recipe = tiny_recipe(workspace, f"out={tmp_path}/out", *options)
    record = tmp_path / "out" / "run" / "island-1" / "record.jsonl"
    with island_processes(recipe, tmp_path) as islands:
        deadline = time.monotonic() + 120
        while not (record.exists() and len(read_steps(record)) > 20):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        islands[1].send_signal(signal.SIGSTOP)
        while len(event_times(tmp_path / "out", 0).get("islands", [])) < 2:
            assert time.monotonic() < deadline + 60
            time.sleep(0.1)
        islands[1].send_signal(signal.SIGCONT)
        assert [process.wait(200) for process in islands] == [0, 0]
    assert longest_step(tmp_path / "out", 0) < 10
    assert len(event_times(tmp_path / "out", 1)["caught up"]) == 1
    one, other_weights = (Run.open(tmp_path / f"out/run/island-{n}").load_model().state_dict() for n in range(2))
    assert all(torch.equal(one[name], other_weights[name]) for name in one)
