"""Two runs of one recipe to one reference curve: they must be equal, step by step and to the last digit.

    z2a train recipes/reference/reference.yaml out=runs/one && z2a train recipes/reference/reference.yaml out=runs/two
    python -m benchmarks reference_curve runs/one/run runs/two/run --to recipes/reference/reference.json

Give both runs as many threads (OMP_NUM_THREADS): sums are taken in another order otherwise. The file holds the training
loss by tokens, which ``z2a watch`` holds other runs against, and bits per byte of held-out text for each source.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import benchmark_parser, show_json

from zero2all.base.io import write_text
from zero2all.track import read_steps
from zero2all.track.health_checks import ReferenceCurve
from zero2all.track.loss_changes import trailing_median
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunView

POINTS = 200


def reference_curve(run: RunView) -> ReferenceCurve:
    table = run.table(["loss"])
    valid = np.isfinite(table.mean["loss"])  # lines of other metrics have none
    steps, loss = table.steps[valid], table.mean["loss"][valid]
    smooth = trailing_median(loss, max(5, len(steps) // 50))
    rows = np.unique(np.linspace(0, len(smooth) - 1, POINTS).astype(int))
    batch = run.metadata.batch_tokens or 1
    return ReferenceCurve(
        recipe=run.metadata.name,
        sources=list(run.metadata.sources),
        tokens=[int((steps[row] + 1) * batch) for row in rows],
        loss=[round(float(smooth[row]), 4) for row in rows],
    )


def held_out(run: Path) -> dict[str, list[float]]:
    """Bits per byte over time, of all text and of each source."""
    lines = [json.loads(line) for line in (run / "record.jsonl").read_text("utf-8").splitlines()]
    found: dict[str, list[float]] = {"step": []}
    for line in lines:
        if line.get("event") == "evaluation":
            found["step"].append(line["step"] + 1)
            for name, metrics in {"all": line, **line["sources"]}.items():
                found.setdefault(name, []).append(metrics["bits_per_byte"])
    return found


def losses(run: Path) -> dict[int, Any]:
    return {step: values["loss"] for step, values in read_steps(run / "record.jsonl").items() if "loss" in values}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs=2)
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    one, two = options.runs
    first, second = losses(one), losses(two)
    differ = sorted(step for step in first.keys() | second.keys() if first.get(step) != second.get(step))
    if differ or held_out(one) != held_out(two):
        sys.exit(f"the two runs are not equal: the losses of {len(differ)} steps differ ({differ[:5]} ...)")
    watched = RunView(LocalRunLocation(one))
    watched.refresh()
    curve = {**asdict(reference_curve(watched)), "held_out": held_out(one), "equal_runs": 2}
    write_text(options.to, json.dumps(curve, allow_nan=False) + "\n")
    show_json(curve["held_out"], indent=2)
