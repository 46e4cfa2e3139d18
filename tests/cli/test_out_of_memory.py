"""Out of memory is no bug, nor is the loss of another rank: the error says what to change or where to look."""

from __future__ import annotations

from pathlib import Path

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


def lose_a_peer(*words: object, **options: object) -> None:
    raise RuntimeError("[enforce fail at pair.cc:553] Read error [127.0.0.1]:4711: Connection reset by peer. GLHF!")


def test_a_rank_that_loses_another_has_no_bug(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("zero2all.recipe.load_recipe", lambda *words: None)
    monkeypatch.setattr("zero2all.train.train", lose_a_peer)
    alone = CliRunner().invoke(app, ["train", "recipe.yaml"])
    assert "this is a bug" in alone.stderr
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    done = CliRunner().invoke(app, ["train", "recipe.yaml"])
    assert done.exit_code == 1
    assert "lost the connection to another rank" in done.stderr
    assert "bug" not in done.stderr
    assert "Connection reset by peer" in (tmp_path / "error.json").read_text(encoding="utf-8")  # the agent reads it
