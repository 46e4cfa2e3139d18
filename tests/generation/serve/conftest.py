from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.generation.serve.servers import Served, serve
from tests.runs import train_run
from zero2all.generation.serve import engine as engine_module
from zero2all.generation.serve.api_answers import ServedModel
from zero2all.generation.serve.engine import ServingEngine
from zero2all.train import Run


@pytest.fixture(scope="session", autouse=True)
def engines_stop_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "IDLE_SECONDS", 0.05)
        yield


@pytest.fixture(scope="session")
def served_run(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    context = ["train.seq_len=64", "model.max_position_embeddings=512"]
    return train_run(workspace, tmp_path_factory.mktemp("served"), "train.steps=20", *context)


@pytest.fixture(scope="session")
def server(served_run: Run) -> Iterator[Served]:
    tokenizer = served_run.tokenizer()
    engine = ServingEngine(served_run.load_model(), tokenizer, rows=4, max_waiting=64)
    with serve(engine, ServedModel("tiny", tokenizer, tokenizer.eos_token_id)) as served:
        yield served
