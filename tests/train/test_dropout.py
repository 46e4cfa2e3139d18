"""Exact resume with dropout: no state of a random number generator is saved, and none is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import tiny_recipe
from tests.ranks import on_ranks
from tests.train.test_train import assert_same_run, ctrl_c_at, losses
from zero2all.base.errors import Interrupted, Z2aError
from zero2all.model.hf_config import hf_config
from zero2all.train import Run, TrainerHooks, train
from zero2all.train.data_loader import Batch

DROPOUT = ("model.attention_dropout=0.1", "model.residual_dropout=0.1", "train.steps=8", "checkpoint.every=3 steps")


class CrashError(Exception):
    pass


def crash(batch: Batch) -> None:
    if batch.step == 5:
        raise CrashError


def test_a_run_with_dropout_resumes_bit_for_bit(workspace: Path, tmp_path: Path) -> None:
    recipes = {name: tiny_recipe(workspace, f"out={tmp_path}/{name}", *DROPOUT) for name in ("plain", "crash", "stop")}
    train(recipes["plain"])
    with pytest.raises(CrashError):
        train(recipes["crash"], hooks=TrainerHooks(on_batch=crash))
    assert train(recipes["crash"]).resumed_at == 3
    with pytest.raises(Interrupted):
        train(recipes["stop"], hooks=TrainerHooks(on_batch=ctrl_c_at(4)))
    train(recipes["stop"])
    plain = Run.open(tmp_path / "plain")
    assert_same_run(plain, Run.open(tmp_path / "crash"))
    assert_same_run(plain, Run.open(tmp_path / "stop"))
    without = tiny_recipe(workspace, f"out={tmp_path}/without", *DROPOUT[2:])
    train(without)
    assert losses(Run.open(without.run_dir)) != losses(plain)
    assert hf_config(plain.load_model().config)["attention_dropout"] == 0.1
    assert "attention_dropout" not in Run.open(without.run_dir).identity().model, "as in runs of earlier versions"
    with pytest.raises(Z2aError, match=r"model.residual_dropout"):
        train(tiny_recipe(workspace, f"out={tmp_path}/plain", *DROPOUT, "model.residual_dropout=0.2", "train.steps=9"))


def train_twice(workspace: Path, directory: Path) -> None:
    """Over two ranks, whose files only rank 0 writes: uninterrupted, and with a crash of both ranks."""
    layout = ("parallel.dp_shard=2", "parallel.activation_checkpointing=full")
    train(tiny_recipe(workspace, f"out={directory}/plain", *DROPOUT, *layout))
    crashed = tiny_recipe(workspace, f"out={directory}/crash", *DROPOUT, *layout)
    with pytest.raises(CrashError):
        train(crashed, hooks=TrainerHooks(on_batch=crash))
    assert train(crashed).resumed_at == 3


@pytest.mark.long
def test_ranks_with_dropout_resume_bit_for_bit(workspace: Path, tmp_path: Path) -> None:
    on_ranks(2, train_twice, workspace, tmp_path)
    assert_same_run(Run.open(tmp_path / "plain"), Run.open(tmp_path / "crash"))
