"""TensorBoard as a sink."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from zero2all.base.errors import need
from zero2all.base.plugins import register


@register("sink", "tensorboard")
class TensorBoard:
    """Event files that ``tensorboard --logdir`` reads."""

    def __init__(self, directory: Path) -> None:
        need("tensorboard", "track")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory / "tensorboard"))

    def step(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def event(self, name: str, details: dict[str, Any]) -> None:
        self._writer.add_text(f"events/{name}", str(details), details.get("step", 0))
        self._writer.flush()

    def sample(self, step: int, name: str, text: str) -> None:
        indented = "\n".join("    " + line for line in text.splitlines())  # as code: TensorBoard reads Markdown
        self._writer.add_text(f"samples/{name}", indented, step)

    def histogram(self, step: int, name: str, counts: list[float], edges: list[float]) -> None:
        centers = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
        total = sum(counts)
        self._writer.add_histogram_raw(
            name,
            edges[0],
            edges[-1],
            total,
            sum(count * center for count, center in zip(counts, centers, strict=True)),
            sum(count * center**2 for count, center in zip(counts, centers, strict=True)),
            edges[1:],
            counts,
            step,
        )

    def close(self) -> None:
        self._writer.close()
