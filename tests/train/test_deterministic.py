"""train.deterministic on a GPU, as far as it can be tested without one."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from zero2all.base.errors import UsageError
from zero2all.base.machine.devices import CUBLAS_VARIABLE, set_deterministic
from zero2all.model.ops import OPS, choose_kernels
from zero2all.model.ops.attention import MaskInputs
from zero2all.recipe import ModelConfig, Recipe
from zero2all.train import Trainer, setup

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _restore_settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(CUBLAS_VARIABLE, "")  # so that it is restored, whatever a test sets
    monkeypatch.delenv(CUBLAS_VARIABLE)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A fake of the package; records the options of each call."""
    calls: list[dict[str, Any]] = []

    def attention(q: Tensor, *rest: Any, **options: Any) -> Tensor:
        calls.append(options)
        return q

    fake = ModuleType("flash_attn")
    fake.__spec__ = ModuleSpec("flash_attn", None)
    fake.flash_attn_func = fake.flash_attn_varlen_func = attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    return calls


def model(**ops: str) -> ModelConfig:
    return ModelConfig.model_validate({"vocab_size": 64, "ops": ops})


def test_flash_attn_uses_its_deterministic_backward(flash_attn: list[dict[str, Any]]) -> None:
    assert choose_kernels(model(attention="flash"), CUDA)["attention"].form == "flash"
    backend = OPS["attention"]["flash"].load()
    q = torch.zeros(1, 2, 4, 8)
    documents = (None, torch.zeros(1, 4, dtype=torch.int32))
    masks = [backend.mask_for(MaskInputs(starts, 4, None, q.device)) for starts in documents]
    for on in (False, True):
        torch.use_deterministic_algorithms(on)
        for mask in masks:
            backend.attend(q, q, q, mask)
    assert [options.get("deterministic", False) for options in flash_attn] == [False, False, True, True]


class Cuda:
    """A fake machine with a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, initialized: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)


def test_cublas_gets_its_workspace_before_cuda_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    set_deterministic(on=False, wanted="auto")
    assert CUBLAS_VARIABLE not in os.environ
    Cuda(monkeypatch)
    set_deterministic(on=True, wanted="auto")
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ[CUBLAS_VARIABLE] == ":4096:8"
    monkeypatch.setenv(CUBLAS_VARIABLE, ":16:8")
    set_deterministic(on=True, wanted="cuda")
    assert os.environ[CUBLAS_VARIABLE] == ":16:8", "the user's setting is kept"


@pytest.mark.parametrize(("value", "initialized"), [(":0:0", False), (None, True)], ids=["wrong", "late"])
def test_an_invalid_workspace_is_refused(value: str | None, initialized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch, initialized)
    if value is not None:
        monkeypatch.setenv(CUBLAS_VARIABLE, value)
    with pytest.raises(UsageError, match=f"{CUBLAS_VARIABLE}=:4096:8"):
        set_deterministic(on=True, wanted="auto")
    set_deterministic(on=True, wanted="cpu")  # cuBLAS is not used


def test_a_run_sets_it_before_it_uses_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        pass

    def pick_device(wanted: str) -> torch.device:
        assert os.environ[CUBLAS_VARIABLE] == ":4096:8"
        assert torch.are_deterministic_algorithms_enabled()
        raise Reached

    Cuda(monkeypatch)
    monkeypatch.setattr(setup, "pick_device", pick_device)
    monkeypatch.setattr(setup, "require_data", lambda recipe: None)
    recipe = Recipe.model_validate({"train": {"steps": 1, "deterministic": True}})
    with pytest.raises(Reached):
        Trainer(recipe)
