from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.conftest import tiny_recipe
from zero2all.base.errors import UsageError
from zero2all.checkpoint import RunIdentity
from zero2all.checkpoint.training_state import StageIdentity
from zero2all.train import train
from zero2all.train.resume import identity_changes

STAGE = StageIdentity("main", 0, "a1", [8, 0, 8, 0], [None, None])
RUN = RunIdentity([STAGE], "t1", {"num_hidden_layers": 2, "qk_norm": False}, "adamw", settings={"seed": 1})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (replace(RUN, tokenizer="t2"), "a different tokenizer"),
        (replace(RUN, settings={"train.optimizer.name": "muon"}), "train.optimizer.name=adamw, not muon"),
        (replace(RUN, model={"num_hidden_layers": 3, "qk_norm": False}), "model.num_hidden_layers=2, not 3"),
        (replace(RUN, model={"num_hidden_layers": 2}), "model.qk_norm=False, not None"),
        (replace(RUN, settings={"train.document_mask": True}), "train.document_mask=False, not True"),
        (replace(RUN, init="/weights"), "train.init=None, not /weights"),
        (replace(RUN, stages=[replace(STAGE, batch=[4, 0, 4, 0])]), "8 samples in a batch of stage main, not 4"),
        (replace(RUN, stages=[replace(STAGE, batch=[8, 0, 2, 5])]), "a different train.batch_ramp in stage main"),
        (replace(RUN, stages=[replace(STAGE, samples="b")]), "different samples in stage main (seed, train.seq_len"),
        (
            replace(RUN, stages=[replace(STAGE, rope=[5e5, None])]),
            "a different rope_theta or rope_scaling of stage main",
        ),
        (replace(RUN, stages=[replace(STAGE, name="x")]), "stage main at step 0, not x at step 0"),
        (replace(RUN, stages=[STAGE, STAGE]), "1 stages begun, not 2"),
    ],
)
def test_each_difference_is_named_with_its_key(changed: RunIdentity, said: str) -> None:
    [found] = identity_changes(RUN, changed)
    assert found.startswith(said)


def test_every_part_of_an_identity_is_compared() -> None:
    assert identity_changes(RUN, RUN) == []
    compared = {"stages", "tokenizer", "model", "optimizer", "init", "settings"}
    assert {field.name for field in fields(RunIdentity)} == compared
    assert {field.name for field in fields(StageIdentity) if field.compare} == {
        "name", "first_step", "samples", "batch", "rope",
    }  # fmt: skip


def test_a_run_with_another_batch_and_depth_is_refused_with_both_keys(workspace: Path, tmp_path: Path) -> None:
    train(tiny_recipe(workspace, f"out={tmp_path}", "train.steps=1"))
    other = tiny_recipe(workspace, f"out={tmp_path}", "train.batch_tokens=128", "model.num_hidden_layers=1")
    with pytest.raises(
        UsageError,
        match=r"train\.batch_tokens=256, not 128; model\.num_hidden_layers=2, not 1\. .*train a different run",
    ):
        train(other)
