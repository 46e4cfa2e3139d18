"""Checkpoints through torch DCP, each with a manifest of checksums that is written last.

A directory counts as a checkpoint only under its final name and with every checksum right: DCP itself loads a
shard with a flipped bit without a word. DCP's ``.metadata`` is a pickle, so load only checkpoints that you trust;
weights travel between people as safetensors (``z2a export``).
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from zero2all.console import warn
from zero2all.io import atomic_dir, checksums, is_current, read_json, write_json, write_manifest

KIND = "checkpoint"
STATE = "state.json"


class Checkpoints:
    """The checkpoints of one run, newest last."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        self.directory, self.keep = directory, keep

    def steps(self) -> list[int]:
        names = (re.fullmatch(r"step-(\d+)", path.name) for path in self.directory.glob("step-*"))
        return sorted(int(match[1]) for match in names if match)

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08}"

    def save(self, step: int, model: nn.Module, optimizers: list[Optimizer], state: dict[str, Any]) -> Path:
        """``state`` is what a person may read: plain JSON. Step is the number of steps done."""
        tensors = _tensors(model, optimizers)
        with atomic_dir(self.path(step), KIND) as partial:
            with _one_process():
                state_dict_saver.save(tensors, checkpoint_id=partial, no_dist=True)
            write_json(partial / STATE, {"step": step, "rng": sorted(tensors["rng"]), **state})
            write_manifest(partial, KIND, {"key": str(step), "files": checksums(partial)})
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.path(old))
        return self.path(step)

    def newest(self) -> int | None:
        """The newest whole checkpoint; damaged ones are passed over aloud."""
        for step in reversed(self.steps()):
            if self.is_whole(step):
                return step
            warn(f"checkpoint {self.path(step)} is damaged; trying the one before it")
        return None

    def is_whole(self, step: int) -> bool:
        return is_current(self.path(step), KIND, str(step))

    def state(self, step: int) -> dict[str, Any]:
        state: dict[str, Any] = read_json(self.path(step) / STATE)
        return state

    def load(self, step: int, model: nn.Module, optimizers: list[Optimizer]) -> None:
        """Model, optimizers and random generators as they were when ``step`` steps were done."""
        tensors = _tensors(model, optimizers)
        # A run may move between machines with and without a GPU: only the generators that were there come back.
        tensors["rng"] = {name: tensors["rng"][name] for name in self.state(step)["rng"] if name in tensors["rng"]}
        with _one_process():
            state_dict_loader.load(tensors, checkpoint_id=self.path(step), no_dist=True)
        set_model_state_dict(model, tensors["model"])
        set_optimizer_state_dict(model, optimizers, tensors["optimizer"])
        _set_rng_state(tensors["rng"])

    def load_model(self, step: int, model: nn.Module) -> None:
        """The weights alone."""
        tensors: dict[str, Any] = {"model": get_model_state_dict(model)}
        with _one_process():
            state_dict_loader.load(tensors, checkpoint_id=self.path(step), no_dist=True)
        set_model_state_dict(model, tensors["model"])


def _tensors(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizers),
        "rng": _rng_state(),
    }


@contextmanager
def _one_process() -> Iterator[None]:
    """DCP warns that there is no process group; here that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
