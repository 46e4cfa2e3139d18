"""Out of memory is no bug: the error says what to change."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from zero2all.cli.main import app

HUGE = 1 << 55


def allocate_in_torch(*words: object, **options: object) -> None:
    torch.empty(HUGE, dtype=torch.uint8)


def allocate_in_python(*words: object, **options: object) -> None:
    bytearray(HUGE)


def allocate_on_a_gpu(*words: object, **options: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")


def allocate_on_a_mac(*words: object, **options: object) -> None:
    raise RuntimeError("MPS backend out of memory (MPS allocated: 9.05 GB, other allocations: 1.2 GB, max allowed: …)")


@pytest.mark.parametrize("allocate", [allocate_in_torch, allocate_in_python, allocate_on_a_gpu, allocate_on_a_mac])
def test_the_error_says_what_to_change(allocate: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.recipe.load_recipe", lambda *words: None)
    monkeypatch.setattr("zero2all.train.train", allocate)
    done = CliRunner().invoke(app, ["train", "recipe.yaml"])
    assert done.exit_code == 1
    assert "error: out of memory: " in done.stderr
    assert "train.micro_batch_tokens" in done.stderr
    assert "bug" not in done.stderr
    assert "documentation" not in done.stderr
