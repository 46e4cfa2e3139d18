"""``train --dry-run --gpu``: whether it fits, and for which stage an override of ``quickstart --chat`` is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zero2all.quickstart import _say_stage_of_overrides
from zero2all.train.estimate import _fit_lines


def lines(total: int, memory: int | None) -> list[str]:
    fits = None if memory is None else total <= memory
    estimate: Any = SimpleNamespace(
        memory_per_rank=SimpleNamespace(total=total), gpu_memory=memory, gpu="H100", fits=fits, world_size=4
    )
    return _fit_lines(estimate)


def test_the_dry_run_says_whether_a_named_gpu_is_large_enough() -> None:
    assert lines(10**9, 80 * 10**9) == ["it fits: 1.00GB of the 80.00GB of H100"]
    [line] = lines(90 * 10**9, 80 * 10**9)
    assert line.startswith("it does not fit: 90.00GB on each rank, and H100 has 80.00GB")
    assert "z2a plan RECIPE --gpu H100 --gpus 4" in line
    assert lines(10**9, None) == []


def test_overrides_of_the_quickstart_are_for_pretraining(capsys: pytest.CaptureFixture[str]) -> None:
    _say_stage_of_overrides(Path("runs/first"), ["train.steps=40", "seed=3", "model.hidden_size=64"])
    said = capsys.readouterr().err
    assert said.startswith("train.steps=40: for pretraining, stages 1 to 5. Fine-tuning has its own recipe")
    assert "runs/first/chat/recipe.yaml" in said.replace("\n", "")
    _say_stage_of_overrides(Path("runs/first"), ["seed=3"])
    assert capsys.readouterr().err == ""
