"""A training step in text, the same in the log of ``z2a train`` and in ``z2a watch``: lines of at most 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.cells import cell_len, set_cell_size

from zero2all.base.units import show_bytes, show_count, show_seconds

COLUMNS = 100
NAME_COLUMNS = 24  # of a source; a Chinese character takes two
SOURCE_PREFIX = "loss/"


def show_rate(tokens_per_second: float) -> str:
    return f"{show_count(round(tokens_per_second, 1))} tok/s"  # show_count prints 842.137 in full


FORMATS: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:.4f}" if abs(value) < 1000 else f"loss {value:.1e}",
    "lr": lambda value: f"lr {value:.2e}",
    "grad_norm": lambda value: f"grad {value:.3g}" if not value or 1e-3 <= value < 1000 else f"grad {value:.1e}",
    "tokens_per_second": show_rate,
    "mfu": lambda value: f"MFU {value:.1%}",
    "tokens": lambda value: f"{show_count(value)} tokens",
}
"""Metrics of the step line, in its order."""
DETAIL_FORMATS: dict[str, Callable[[float], str]] = {
    "tflops": lambda value: f"{value:.3g} TFLOP/s",
    "mfu_palm": lambda value: f"PaLM MFU {value:.1%}",
    "hfu": lambda value: f"HFU {value:.1%}",
    "memory": lambda value: f"memory {show_bytes(value)}",
    "data_wait": lambda value: f"data wait {value:.1%}",
}
OBJECTIVE_METRICS = ("reward", "rewards/accuracies", "rewards/margins")
"""Metrics that say more than the loss of their objective."""


def step_line(done: int, total: int | None, metrics: Mapping[str, float], seconds_left: float | None) -> str:
    """``step 640/649  loss 0.9335  lr 7.85e-04  grad 0.798  6.70K tok/s  MFU 15.8%  left 1s``."""
    left = [] if seconds_left is None else [f"left {show_seconds(seconds_left)}"]
    return "  ".join([f"step {done}/{total or '?'}", *_shown(FORMATS, metrics), *left])


def objective_line(metrics: Mapping[str, float]) -> str | None:
    """Rewards of preference and reinforcement learning."""
    shown = [f"{name} {metrics[name]:.3f}" for name in OBJECTIVE_METRICS if name in metrics]
    return "  " + "  ".join(shown) if shown else None


def source_line(metrics: Mapping[str, float]) -> str | None:
    """The loss of each source, as many as fit; None if there are fewer than two."""
    losses = {
        name.removeprefix(SOURCE_PREFIX): loss for name, loss in metrics.items() if name.startswith(SOURCE_PREFIX)
    }
    if len(losses) < 2:
        return None
    line, shown = "  loss by source:", 0
    for name, loss in losses.items():
        part = f"  {shorten(name, NAME_COLUMNS)} {loss:.3f}"
        more = len(losses) - shown - 1
        if cell_len(line + part) + (len(_more(more)) if more else 0) > COLUMNS:
            return line + _more(more + 1)
        line, shown = line + part, shown + 1
    return line


def detail_line(metrics: Mapping[str, float], note: str = "") -> str:
    """What ``--verbose`` adds."""
    return "  " + "  ".join([*_shown(DETAIL_FORMATS, metrics), *([note] if note else [])])


def _shown(formats: Mapping[str, Callable[[float], str]], metrics: Mapping[str, float]) -> list[str]:
    return [show(metrics[name]) for name, show in formats.items() if name in metrics]


def shorten(text: str, columns: int) -> str:
    """Cut to a number of columns, of which a Chinese character takes two.

    >>> shorten("从前，河边", 6)
    '从前…'
    """
    return text if cell_len(text) <= columns else set_cell_size(text, columns - 1).rstrip() + "…"


def _more(count: int) -> str:
    return f"  and {count} more"
