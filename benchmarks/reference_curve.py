"""Two runs of one recipe to one reference curve: they must be equal, step by step and to the last digit.

    z2a train recipes/reference/reference.yaml out=runs/one && z2a train recipes/reference/reference.yaml out=runs/two
    python -m benchmarks reference_curve runs/one/run runs/two/run --to recipes/reference/reference.json

Give both runs as many threads (OMP_NUM_THREADS): sums are taken in another order otherwise. The file holds the training
loss by tokens, which ``z2a watch`` holds other runs against, and bits per byte of held-out text for each source.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import benchmark_parser, show_json

from zero2all.io import write_text
from zero2all.track import read_steps
from zero2all.track.health_checks import reference_curve
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunView


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
    curve = {**reference_curve(watched), "held_out": held_out(one), "equal_runs": 2}
    write_text(options.to, json.dumps(curve, allow_nan=False) + "\n")
    show_json(curve["held_out"], indent=2)
