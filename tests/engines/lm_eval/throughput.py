"""Items per second of log-likelihood evaluation, beside lm-eval's own backend on the export of the same checkpoint.

    python -m tests.engines.lm_eval.throughput RUN EVAL_DIR

EVAL_DIR has arc_easy_test.jsonl and cmmlu/test/*.csv. Both evaluate the same requests in turn, with the same number of
threads, and each with the batch size that is fastest for it; the ratio is that of the medians.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from zero2all.evals import open_target
from zero2all.evals.lm_eval_model import Z2allLM
from zero2all.export import export_run
from zero2all.train import Run

ITEMS = 200  # of each benchmark
ROUNDS = 3
HF_BATCH_SIZES = (4, 16, 64)


def read_requests(folder: Path) -> dict[str, list[Instance]]:
    lines = (folder / "arc_easy_test.jsonl").read_text("utf-8").splitlines()[:ITEMS]
    arc = [
        (f"Question: {item['question']}\nAnswer:", f" {text}")
        for item in map(json.loads, lines)
        for text in item["choices"]["text"]
    ]
    rows = [
        row
        for path in sorted((folder / "cmmlu" / "test").glob("*.csv"))
        for row in csv.DictReader(path.read_text("utf-8").splitlines(keepends=True))
    ]
    cmmlu = [
        ("\n".join([row["Question"].strip(), *(f"{letter}. {row[letter]}" for letter in "ABCD"), "答案："]), letter)
        for row in rows[:ITEMS]
        for letter in "ABCD"
    ]
    return {
        name: [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
        for name, pairs in (("arc", arc), ("cmmlu", cmmlu))
    }


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    run, requests = Run.open(Path(sys.argv[1])), read_requests(Path(sys.argv[2]))
    ours = Z2allLM(open_target(str(run.directory)))
    with tempfile.TemporaryDirectory() as folder:
        export_run(run, Path(folder) / "hf")
        theirs = {
            size: HFLM(str(Path(folder) / "hf"), dtype="float32", device="cpu", batch_size=size)
            for size in HF_BATCH_SIZES
        }
    for name, items in requests.items():
        calls = {"z2a": lambda items=items: ours.loglikelihood(items)} | {
            f"hf batch {size}": lambda backend=backend, items=items: backend.loglikelihood(items, disable_tqdm=True)
            for size, backend in theirs.items()
        }
        for call in calls.values():
            call()
        times = {label: [] for label in calls}
        for _ in range(ROUNDS):
            for label, call in calls.items():
                times[label].append(seconds(call))
        medians = {label: statistics.median(values) for label, values in times.items()}
        best = min(value for label, value in medians.items() if label != "z2a")
        rates = ", ".join(f"{label} {ITEMS / value:.1f}" for label, value in medians.items())
        sys.stdout.write(f"{name}: items/s: {rates}; ratio to the fastest {best / medians['z2a']:.2f}\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
