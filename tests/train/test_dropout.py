"""Exact resume with dropout: no state of a random number generator is saved, and none is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.helpers import crashed, losses
from tests.conftest import tiny_recipe
from tests.ranks import on_ranks
from tests.train.runs import assert_same_run, ctrl_c_at, trained
from zero2all.base.errors import Interrupted, Z2aError
from zero2all.model.hf_config import hf_config
from zero2all.train import Run, train

DROPOUT = ("model.attention_dropout=0.1", "model.residual_dropout=0.1", "train.steps=8", "checkpoint.every=3 steps")


def test_a_run_with_dropout_resumes_bit_for_bit(workspace: Path, tmp_path: Path) -> None:
    """After a Ctrl-C; test_kill.py has crashes."""
    plain = trained(tiny_recipe(workspace, f"out={tmp_path}/plain", *DROPOUT))
    stopped = tiny_recipe(workspace, f"out={tmp_path}/stop", *DROPOUT)
    with pytest.raises(Interrupted):
        train(stopped, hooks=ctrl_c_at(4))
    assert_same_run(plain, trained(stopped))
    without = trained(tiny_recipe(workspace, f"out={tmp_path}/without", *DROPOUT[2:]))
    assert losses(without) != losses(plain)
    assert hf_config(plain.load_model().config)["attention_dropout"] == 0.1
    assert "attention_dropout" not in without.identity().model, "as in runs of earlier versions"
    with pytest.raises(Z2aError, match=r"model.residual_dropout"):
        train(tiny_recipe(workspace, f"out={tmp_path}/plain", *DROPOUT, "model.residual_dropout=0.2", "train.steps=9"))


def train_twice(workspace: Path, directory: Path) -> None:
    """Over two ranks, whose files only rank 0 writes: uninterrupted, and with a crash of both ranks."""
    layout = ("parallel.dp_shard=2", "parallel.activation_checkpointing=full")
    train(tiny_recipe(workspace, f"out={directory}/plain", *DROPOUT, *layout))
    recipe = tiny_recipe(workspace, f"out={directory}/crash", *DROPOUT, *layout)
    crashed(recipe, 5)
    assert train(recipe).resumed_at == 3


@pytest.mark.long
def test_ranks_with_dropout_resume_bit_for_bit(workspace: Path, tmp_path: Path) -> None:
    on_ranks(2, train_twice, workspace, tmp_path)
    assert_same_run(Run.open(tmp_path / "plain"), Run.open(tmp_path / "crash"))
