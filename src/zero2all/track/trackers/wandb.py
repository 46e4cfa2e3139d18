"""Weights & Biases as a sink."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

from zero2all.base.errors import need
from zero2all.base.plugins import register


@register("sink", "wandb")
class Wandb:
    """Weights & Biases. Offline unless WANDB_MODE is set; ``wandb sync`` uploads the run."""

    def __init__(self, directory: Path) -> None:
        self._wandb: Any = need("wandb", "wandb")
        self._directory = directory

    @cached_property
    def _run(self) -> Any:
        """Created at the first line, on the sink's thread: it may wait for a server."""
        name, mode = self._directory.parent.name, os.environ.get("WANDB_MODE", "offline")
        return self._wandb.init(project="zero2all", name=name, dir=str(self._directory), mode=mode)

    def step(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def event(self, name: str, details: dict[str, Any]) -> None:
        self._run.log({f"events/{name}": str(details)}, commit=False)  # logged with the next step

    def sample(self, step: int, name: str, text: str) -> None:
        self._run.log({f"samples/{name}": text}, step=step)

    def histogram(self, step: int, name: str, counts: list[float], edges: list[float]) -> None:
        self._run.log({name: self._wandb.Histogram(np_histogram=(counts, edges))}, step=step)

    def close(self) -> None:
        self._run.finish()
