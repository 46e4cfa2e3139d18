from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import tiny_recipe
from tests.generation.serve.servers import Served, serve
from zero2all.generation.serve.api_answers import ServedModel
from zero2all.generation.serve.engine import ServingEngine
from zero2all.train import Run, train


@pytest.fixture(scope="session")
def served_run(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    context = ["train.seq_len=64", "model.max_position_embeddings=512"]
    recipe = tiny_recipe(workspace, f"out={tmp_path_factory.mktemp('served')}", "train.steps=20", *context)
    train(recipe)
    return Run.open(recipe.run_dir)


@pytest.fixture(scope="session")
def server(served_run: Run) -> Iterator[Served]:
    tokenizer = served_run.tokenizer()
    engine = ServingEngine(served_run.load_model(), tokenizer, rows=4, max_waiting=64)
    with serve(engine, ServedModel("tiny", tokenizer, tokenizer.eos_token_id)) as served:
        yield served
