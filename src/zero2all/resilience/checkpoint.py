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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
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
        with _shared_dir(self.path(step)) as partial:
            with _quiet_dcp():
                state_dict_saver.save(tensors, checkpoint_id=partial, no_dist=not dist.is_initialized())
            if _rank() == 0:
                write_json(partial / STATE, {"step": step, **state})
                write_manifest(partial, KIND, {"key": str(step), "files": checksums(partial)})
        if _rank() == 0:
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
        # A run may move to other machines and another number of them: only the generators that were there come back.
        saved = FileSystemReader(self.path(step)).read_metadata().state_dict_metadata
        tensors["rng"] = {name: value for name, value in tensors["rng"].items() if f"rng.{name}" in saved}
        with _quiet_dcp():
            state_dict_loader.load(tensors, checkpoint_id=self.path(step), no_dist=not dist.is_initialized())
        set_model_state_dict(model, tensors["model"])
        set_optimizer_state_dict(model, optimizers, tensors["optimizer"])
        _set_rng_state(tensors["rng"])

    def load_model(self, step: int, model: nn.Module) -> None:
        """The weights alone."""
        tensors: dict[str, Any] = {"model": get_model_state_dict(model)}
        with _quiet_dcp():
            state_dict_loader.load(tensors, checkpoint_id=self.path(step), no_dist=not dist.is_initialized())
        set_model_state_dict(model, tensors["model"])


def _tensors(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizers),
        "rng": _rng_state(),
    }


@contextmanager
def _shared_dir(target: Path) -> Iterator[Path]:
    """A directory that all ranks fill and rank 0 publishes, when every rank is done."""
    if not dist.is_initialized():
        with atomic_dir(target, KIND) as partial:
            yield partial
        return
    place: list[Path | None] = [None]
    with ExitStack() as stack:
        if _rank() == 0:
            place[0] = stack.enter_context(atomic_dir(target, KIND))
        dist.broadcast_object_list(place)
        assert place[0] is not None
        yield place[0]
        dist.barrier()
    dist.barrier()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def _quiet_dcp() -> Iterator[None]:
    """DCP warns where there is no process group; here that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _rng_state() -> dict[str, torch.Tensor]:
    """Every rank has generators of its own."""
    state = {f"cpu-{_rank()}": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"cuda-{_rank()}"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    for name, value in state.items():
        if name.startswith("cuda"):
            torch.cuda.set_rng_state(value)
        else:
            torch.set_rng_state(value)
