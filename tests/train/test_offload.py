"""Training with shards in host memory and optimizer state in files; two ranks are in tests/parallel/test_zero.py."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.conftest import tiny_recipe
from tests.train.runs import ctrl_c_at
from tests.train.test_resume import recorded
from zero2all.base.errors import Interrupted, Z2aError
from zero2all.optim.optimizer import MOMENTS, map_optimizer_state
from zero2all.train import train

STEPS = ("train.steps=4", "train.precision=fp32", "train.optimizer.name=adamw")


def test_an_offloaded_run_on_one_device_that_is_interrupted_equals_a_plain_one(workspace: Path, tmp_path: Path) -> None:
    train(tiny_recipe(workspace, f"out={tmp_path / 'plain'}", *STEPS))
    offload = f"parallel={{zero: 2, offload: {tmp_path / 'nvme'}}}"
    recipe = tiny_recipe(workspace, f"out={tmp_path / 'files'}", offload, *STEPS)
    with pytest.raises(Interrupted):
        train(recipe, ctrl_c_at(2))
    assert train(recipe).resumed_at == 3
    assert recorded(tmp_path / "files") == recorded(tmp_path / "plain")
    assert not list((tmp_path / "nvme").iterdir()), "files are deleted once they are mapped"
    assert not dist.is_initialized()


def adamw() -> torch.optim.AdamW:
    weight = torch.nn.Parameter(torch.ones(3, 5))
    weight.grad = torch.ones_like(weight)
    return torch.optim.AdamW([weight], fused=True)


def test_a_loaded_state_is_copied_into_the_files(tmp_path: Path) -> None:
    plain, mapped = adamw(), adamw()
    plain.step()
    map_optimizer_state([mapped], tmp_path / "new")
    [files] = mapped.state.values()
    before = {name: files[name].data_ptr() for name in MOMENTS}
    mapped.load_state_dict(plain.state_dict())
    [loaded], [expected] = mapped.state.values(), plain.state.values()
    assert {name: loaded[name].data_ptr() for name in MOMENTS} == before
    assert all(loaded[name].equal(expected[name]) for name in ("step", *MOMENTS))


def test_a_full_disk_is_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Z2aError, match=r"No space left on device.*: free space there, or change parallel.offload"):
        map_optimizer_state([adamw()], tmp_path)
    assert not list(tmp_path.iterdir())
