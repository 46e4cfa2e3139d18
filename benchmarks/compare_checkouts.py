"""Two checkouts compute the same: losses, parameters, checkpoints and records of tiny runs, to the last bit.

    git worktree add /tmp/before <commit>
    python -m benchmarks compare_checkouts /tmp/before .
    python -m benchmarks compare_checkouts /tmp/before . --only dense moe

For a refactor. Each checkout builds the corpus, the tokenizer and the tokens from the same generated text and trains
every case of its own benchmarks/compare/cases.yaml, so recipe keys may differ between the two. Then the second checkout
resumes, samples from and reports the runs of the first. One thread, one machine: floats are compared by ``repr``.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from benchmarks.common import benchmark_parser, show

# Measurements of the machine: their keys are compared, their values are not.
MEASURED = {
    "time", "tokens_per_second", "tflops", "mfu", "mfu_palm", "hfu", "memory", "data_wait", "startup", "seconds",
    "checkpoint_stall", "step_time",
}  # fmt: skip
STAGES = ("documents", "tokenizer", "tokens")


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    changes: list[str]


class Checkout:
    """A checkout, and the directory in which its commands run."""

    def __init__(self, path: Path, work: Path) -> None:
        self.path, self.work = path.resolve(), work
        work.mkdir(parents=True)
        write_text(work / "text")
        cases = yaml.safe_load((self.path / "benchmarks/compare/cases.yaml").read_text())
        self.cases = [Case(name, **case) for name, case in cases.items()]
        self.recipe = self.path / "benchmarks/compare/base.yaml"

    def z2a(self, *arguments: object) -> str:
        """Run a command; what it prints on stdout."""
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment = os.environ | threads | {"PYTHONPATH": str(self.path / "src")}
        command = [sys.executable, "-m", "zero2all.cli", *map(str, arguments)]
        done = subprocess.run(command, cwd=self.work, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{self.path}: {' '.join(command)} failed\n{done.stdout}{done.stderr}")
        return done.stdout

    def build(self) -> None:
        for stage in (("corpus", "build"), ("tokenizer", "train"), ("tokens", "build")):
            self.z2a(*stage, self.recipe, "out=stages")

    def train(self, case: Case, out: Path) -> None:
        if not out.exists():
            shutil.copytree(self.work / "stages", out)
        command = ("train", self.recipe, f"out={out}", *case.changes)
        self.z2a(*command) if case.ranks == 1 else self.z2a("launch", "--nproc-per-node", case.ranks, "--", *command)

    def sample(self, run: Path) -> str:
        before_chat = (self.path / "src/zero2all/cli/profile.py").exists()  # it was a command of its own
        command = "generate" if before_chat else "chat"
        return self.z2a(command, run, "--prompt", "ab", "max_tokens=12", "temperature=0", "top_k=0")


def write_text(directory: Path) -> None:
    """Two sources of words, drawn so that a few steps already learn something."""
    directory.mkdir()
    for name, alphabet in (("one", "abcdefghijklmnopqrstuvwxyz"), ("two", "的一是不了人我在有他这中大来上国个到说们")):
        rng = random.Random(name)
        words = ["".join(rng.choices(alphabet, k=rng.randint(2, 7))) for _ in range(300)]
        weights = [1 / rank for rank in range(1, len(words) + 1)]
        lines = (
            {"id": f"{name}-{number}", "text": " ".join(rng.choices(words, weights, k=rng.randint(60, 300)))}
            for number in range(300)
        )
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


def observed(out: Path) -> dict[str, Any]:
    """All that a run wrote which a refactor must not change."""
    run = out / "run"
    facts: dict[str, Any] = {}
    for record in sorted(run.glob("record*.jsonl")):
        if "index" in record.name:
            continue
        for line in map(json.loads, record.read_text().splitlines()):
            # Samples and histograms follow from the weights, and an older checkout may not record them.
            if any(key.startswith("system/") or key in ("sample", "histogram") for key in line):
                continue
            if line.get("event") in ("goodput", "initial weights"):  # times and paths
                continue
            values = {key: repr(value) for key, value in line.items() if key.split("/")[0] not in MEASURED}
            place = f"{record.name} {line.get('event', 'step')} {line.get('step')}"
            facts.setdefault(place, []).append({"keys": sorted(line), **values})
    for checkpoint in sorted((run / "checkpoints").glob("step-*")):
        facts[checkpoint.name] = digests(checkpoint)
    return facts


def digests(checkpoint: Path) -> dict[str, str]:
    """Name and SHA-256 of every tensor and value of a checkpoint, assembled from its shards."""
    from torch import Tensor, load
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(checkpoint, file.name)
        state = load(file.name, weights_only=True)
    found: dict[str, str] = {}

    def visit(name: str, value: Any) -> None:
        if name.startswith("/rng."):  # no training step draws from it, so nothing seeds it
            found[name] = "not compared"
        elif isinstance(value, dict):
            for key in value:
                visit(f"{name}/{key}", value[key])
        else:
            data = value.contiguous().view(-1).numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
            found[name] = hashlib.sha256(data).hexdigest()

    visit("", state)
    return found


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    found = []
    for place in sorted(old.keys() | new.keys()):
        if (a := old.get(place)) != (b := new.get(place)):
            if isinstance(a, dict) and isinstance(b, dict):
                unequal = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
                found.append(f"{place}: {len(unequal)} of {len(a)} differ, first {unequal[0]}")
            else:
                found.append(f"{place}:\n    {a}\n    {b}")
    return found


def resumed(old: Checkout, new: Checkout, case: Case, out: Path) -> list[str]:
    """The second checkout resumes a run of the first from the middle, then samples from it and reports it."""
    copy = new.work / f"{out.name}-of-old"
    shutil.copytree(out, copy)
    last = max((copy / "run/checkpoints").glob("step-*"))
    shutil.rmtree(last)
    new.train(case, copy)
    found = differences({last.name: digests(out / "run/checkpoints" / last.name)}, {last.name: digests(last)})
    if old.sample(out / "run") != new.sample(out / "run"):
        found.append("chat --prompt: another text")
    new.z2a("watch", out / "run", "--html", new.work / f"{out.name}.html")
    return found


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--fresh", action="store_true", help="do not resume runs of the first, whose keys are unknown")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        old = Checkout(options.old, Path(directory) / "old")
        new = Checkout(options.new, Path(directory) / "new")
        old.build()
        new.build()
        for case in new.cases:
            if options.only and case.name not in options.only:
                continue
            twin = next((twin for twin in old.cases if twin.name == case.name), None)
            if twin is None:
                sys.exit(f"{old.path} has no case {case.name}")
            old.train(twin, old.work / case.name)
            new.train(case, new.work / case.name)
            before, after = observed(old.work / case.name), observed(new.work / case.name)
            found = differences(before, after)
            if not options.fresh:
                found += [f"resumed: {line}" for line in resumed(old, new, case, old.work / case.name)]
            loss = [line["loss"] for lines in before.values() for line in lines if "loss" in line][-1]
            verdict = "DIFFERS" if found else "equal"
            line = f"{case.name:10} {case.ranks} ranks  {len(before)} facts  last loss {loss}  {verdict}"
            show("\n  ".join([line, *found]))
            failed |= bool(found)
    sys.exit(failed)
