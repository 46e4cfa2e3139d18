"""Two checkouts compute the same: losses, parameters, checkpoints and records of tiny runs, to the last bit.

    git worktree add /tmp/before <commit>
    python -m benchmarks compare_checkouts /tmp/before .
    python -m benchmarks compare_checkouts /tmp/before . --only dense moe

For a refactor. Each checkout builds the corpus, the tokenizer and the tokens from the same generated text and trains
every case of its own benchmarks/compare/cases.yaml, so recipe keys may differ between the two. Where the first one has
no such case or recipe, it takes those of the second. Then the second checkout resumes, samples from and reports the
runs of the first. One thread, one machine: floats are compared by ``repr``.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from benchmarks.common import benchmark_parser, show

# Measurements of the machine: their keys are compared, their values are not.
MEASURED = {
    "time", "tokens_per_second", "tflops", "mfu", "mfu_palm", "hfu", "memory", "data_wait", "startup", "seconds",
    "checkpoint_stall", "step_time", "islands/wait",
}  # fmt: skip
COMPARE = Path("benchmarks/compare")
REWARD = """def vowels(prompt, answer, reference):
    return sum(answer.count(one) for one in "aeiou") / 10
"""


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    changes: list[str] = field(default_factory=list)
    recipe: str = "base"
    islands: int = 1
    """Jobs that exchange what their weights have gained."""
    init: str | None = None
    """The case whose weights it starts from."""


def read_cases(checkout: Path) -> dict[str, Case]:
    cases = yaml.safe_load((checkout / COMPARE / "cases.yaml").read_text())
    return {name: Case(name, **case) for name, case in cases.items()}


class Checkout:
    """A checkout, and the directory in which its commands run."""

    def __init__(self, path: Path, work: Path) -> None:
        self.path, self.work = path.resolve(), work
        work.mkdir(parents=True)
        write_text(work / "text")
        (work / "compare_rewards.py").write_text(REWARD)

    @property
    def before_chat(self) -> bool:
        """Whether what is now part of other commands, such as chat and launch, has commands of its own."""
        return (self.path / "src/zero2all/cli/profile.py").exists()

    @contextmanager
    def running(self, *arguments: object) -> Iterator[subprocess.Popen[str]]:
        """A command, which is stopped at the end if it has not ended."""
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        own = {"PYTHONPATH": f"{self.path / 'src'}:{self.work}", "Z2A_JOB_SECRET": "0" * 32}
        environment = os.environ | threads | own
        command = [sys.executable, "-m", "zero2all.cli", *map(str, arguments)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=self.work, env=environment, stdout=pipe, stderr=pipe, text=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.communicate()

    def z2a(self, *arguments: object) -> str:
        """Run a command; what it prints on stdout."""
        with self.running(*arguments) as process:
            return self.finish(process)

    def finish(self, process: subprocess.Popen[str]) -> str:
        printed, errors = process.communicate()
        if process.returncode:
            sys.exit(f"{self.path}: {process.args!r} failed\n{printed}{errors}")
        return printed

    def recipe(self, name: str, other: Checkout) -> Path:
        path = self.path / COMPARE / f"{name}.yaml"
        return path if path.exists() else other.path / COMPARE / f"{name}.yaml"

    def train(self, case: Case, out: Path, other: Checkout, weights: Path | None = None) -> None:
        """Into ``out``, or on from what is there. The weights it starts from are below ``weights``, or here."""
        recipe, stages = self.recipe(case.recipe, other), self.work / "stages" / case.recipe
        init = () if case.init is None else (f"train.init={(weights or self.work) / case.init}",)
        if not stages.exists():
            for stage, verb in (("corpus", "build"), ("tokenizer", "train"), ("tokens", "build")):
                if case.recipe == "base" or stage != "tokenizer":  # the others take the tokenizer of base
                    self.z2a(stage, verb, recipe, f"out={stages}", *init)
        if not out.exists():
            shutil.copytree(stages, out)
        command = ("train", recipe, f"out={out}", *init, *case.changes)
        launch = ("launch", "--nproc-per-node", case.ranks)
        if case.islands > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                address = f"127.0.0.1:{free.getsockname()[1]}"
            host, port = address.split(":")
            listen = ("launch", "--rendezvous-only", "--rdzv-listen", address)
            serve = ("rendezvous", "--listen", host, "--port", port) if self.before_chat else listen
            islands = [("--island", island, "--islands-endpoint", address, "--") for island in range(case.islands)]
            with ExitStack() as stack:
                stack.enter_context(self.running(*serve))
                jobs = [stack.enter_context(self.running(*launch, *island, *command)) for island in islands]
                for job in jobs:
                    self.finish(job)
        else:
            self.z2a(*command) if case.ranks == 1 else self.z2a(*launch, "--", *command)

    def sample(self, run: Path) -> str:
        command = "generate" if self.before_chat else "chat"
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
        write_lines(directory / f"{name}.jsonl", lines)
    texts = [" ".join(rng.choices(words, weights, k=rng.randint(2, 6))) for _ in range(900)]
    asked, answers, worse = texts[:300], texts[300:600], texts[600:]
    talk = ([("user", one), ("assistant", two)] for one, two in zip(asked, answers, strict=True))
    conversations = ([{"role": role, "content": text} for role, text in messages] for messages in talk)
    write_lines(directory / "chat.jsonl", ({"messages": messages} for messages in conversations))
    pairs = zip(asked, answers, worse, strict=True)
    write_lines(directory / "pairs.jsonl", ({"prompt": a, "chosen": b, "rejected": c} for a, b, c in pairs))


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text("".join(lines), encoding="utf-8")


def observed(out: Path) -> dict[str, Any]:
    """All that a run wrote which a refactor must not change."""
    run = out / "run"
    facts: dict[str, Any] = {}
    for record in sorted(run.rglob("record*.jsonl")):
        if "index" in record.name:
            continue
        for line in map(json.loads, record.read_text().splitlines()):
            # Samples and histograms follow from the weights, and an older checkout may not record them.
            if any(key.startswith("system/") or key in ("sample", "histogram") for key in line):
                continue
            if line.get("event") in ("goodput", "initial weights"):  # times and paths
                continue
            values = {key: repr(value) for key, value in line.items() if not {key, key.split("/")[0]} & MEASURED}
            place = f"{record.relative_to(run)} {line.get('event', 'step')} {line.get('step')}"
            facts.setdefault(place, []).append({"keys": sorted(line), **values})
    for checkpoint in sorted(run.rglob("checkpoints/step-*")):
        facts[str(checkpoint.relative_to(run))] = digests(checkpoint)
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
    new.train(case, copy, old, old.work)
    found = differences({last.name: digests(out / "run/checkpoints" / last.name)}, {last.name: digests(last)})
    if old.sample(out / "run") != new.sample(out / "run"):
        found.append("chat --prompt: another text")
    new.z2a("watch", out / "run", "--html", new.work / f"{out.name}.html")
    return found


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases; dense, where some start, always runs")
    parser.add_argument("--fresh", action="store_true", help="do not resume runs of the first, whose keys are unknown")
    options = parser.parse_args()
    for checkout in (options.old, options.new):
        if not (checkout / COMPARE / "cases.yaml").is_file():
            parser.error(f"{checkout} has no {COMPARE}/cases.yaml: give the directory of a checkout")
    cases = read_cases(options.new)
    if unknown := set(options.only) - cases.keys():
        parser.error(f"--only {' '.join(sorted(unknown))}: the cases are {', '.join(cases)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running commands are stopped
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        old = Checkout(options.old, Path(directory) / "old")
        new = Checkout(options.new, Path(directory) / "new")
        before_cases = cases | read_cases(old.path)
        for case in cases.values():
            if options.only and case.name not in ("dense", *options.only):
                continue
            old.train(before_cases[case.name], old.work / case.name, new)
            new.train(case, new.work / case.name, old)
            before, after = observed(old.work / case.name), observed(new.work / case.name)
            found = differences(before, after)
            if not options.fresh and case.islands == 1:
                found += [f"resumed: {line}" for line in resumed(old, new, case, old.work / case.name)]
            loss = [line["loss"] for lines in before.values() for line in lines if "loss" in line][-1]
            verdict = "DIFFERS" if found else "equal"
            line = f"{case.name:10} {case.ranks} ranks  {len(before)} facts  last loss {loss}  {verdict}"
            show("\n  ".join([line, *found]))
            failed |= bool(found)
    sys.exit(failed)
