"""A run that has validated several times, its export, and test sets of documents in several formats."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from tests.conftest import CHINESE, ENGLISH
from tests.model.helpers import make
from tests.runs import train_run
from tests.train.test_initial_weights import hf_recipe
from zero2all.evals import evaluate_bpb
from zero2all.export import export_run
from zero2all.model import export_hf
from zero2all.train import Run, train


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Texts that the model has not seen, of 1 to 120 tokens."""
    rng = random.Random(8)
    words = [*ENGLISH.split(), *CHINESE.split(), "naïve"]
    return [" ".join(rng.choices(words, k=length)) + "\n尾." for length in (1, 2, 5, 20, 31, 32, 33, 40, 60)]


@pytest.fixture(scope="session")
def test_set(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("test set") / "set.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def three_checkpoints(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """With a checkpoint of each of its three steps. Tests that add evaluations copy it."""
    options = ["train.steps=3", "checkpoint.every=1 steps", "checkpoint.keep_latest=3"]
    return train_run(workspace, tmp_path_factory.mktemp("checkpoints"), *options)


@pytest.fixture(scope="session")
def evaluated(workspace: Path, test_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Validated with a test set after every step, with attention inside documents.

    Its weights are wide from the beginning, so that every token in the context changes the loss.
    """
    wide = tmp_path_factory.mktemp("wide")
    export_hf(make(vocab_size=512), wide)
    shutil.copy(workspace / "tokenizer" / "tokenizer.json", wide)
    options = ["train.steps=6", "checkpoint.every=3 steps", "evals.every=1 steps", "train.document_mask=true"]
    sets = f"evals.test_sets={json.dumps({'words': str(test_set)})}"
    recipe = hf_recipe(wide, workspace, f"out={tmp_path_factory.mktemp('evaluated')}", *options, sets)
    train(recipe, evaluate=evaluate_bpb)
    return Run.open(recipe.run_dir)


@pytest.fixture(scope="session")
def hf(evaluated: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "hf"
    export_run(evaluated, out)
    return out
