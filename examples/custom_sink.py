"""A tracking sink of your own: the metrics of a run as CSV.

    python examples/custom_sink.py --out runs/examples/sink

Any run can use it; the module has to be on ``PYTHONPATH``:

    PYTHONPATH=examples z2a train my.yaml 'track.sinks=[custom_sink:CsvSink]'
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from tiny_run import argument_parser, prepare
from zero2all.recipe import load_recipe
from zero2all.train import train


class CsvSink:
    """``metrics.csv`` in the run directory: one row for each metric of a step.

    It has the methods of ``zero2all.track.Sink``. They are called on rank 0, on a thread of the sink's own. After a
    resume the steps since the checkpoint are appended again; the last row of a step and metric counts.
    """

    def __init__(self, directory: Path) -> None:
        self._stream = open(directory / "metrics.csv", "a", newline="", encoding="utf-8", buffering=1)
        self._writer = csv.writer(self._stream)

    def step(self, step: int, values: dict[str, float]) -> None:
        self._writer.writerows((step, name, value) for name, value in values.items())

    def event(self, name: str, details: dict[str, Any]) -> None: ...

    def sample(self, step: int, name: str, text: str) -> None: ...

    def histogram(self, step: int, name: str, counts: list[float], edges: list[float]) -> None: ...

    def close(self) -> None:
        self._stream.close()


def main() -> None:
    recipe = load_recipe(
        prepare(argument_parser(__doc__).parse_args().out),
        ["train.steps=20", "track.sinks=[custom_sink:CsvSink]"],
    )
    path = Path(train(recipe).run) / "metrics.csv"
    with open(path, newline="", encoding="utf-8") as stream:
        rows = list(csv.reader(stream))
    last_step = rows[-1][0]
    print(f"{len(rows)} rows in {path}; the last step:")
    for step, name, value in rows:
        if step == last_step:
            print(f"{step},{name},{value}")


if __name__ == "__main__":
    main()
