"""For which stage an override of ``quickstart --chat`` is."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero2all.quickstart import _say_stage_of_overrides


def test_overrides_of_the_quickstart_are_for_pretraining(capsys: pytest.CaptureFixture[str]) -> None:
    _say_stage_of_overrides(Path("runs/first"), ["train.steps=40", "seed=3", "model.hidden_size=64"])
    said = capsys.readouterr().err
    assert said.startswith("train.steps=40: for pretraining, stages 1 to 5. Fine-tuning has its own recipe")
    assert "runs/first/chat/recipe.yaml" in said.replace("\n", "")
    _say_stage_of_overrides(Path("runs/first"), ["seed=3"])
    assert capsys.readouterr().err == ""
