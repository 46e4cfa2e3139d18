"""Ways to synchronize two nodes over a slow link: step time, bytes, and validation loss at equal tokens and equal time.

    python benchmarks/slow_link.py --corpus TEXT... --out bench

Two simulated nodes with one rank each, pinned to a core each, train a model of about 5 million parameters on real text,
with the same micro-batch and learning rate, a constant one, in every row. Each row is trained twice:

- a few steps over a link that is shaped (tc tbf) so that plain all-reduce takes most of a step: time and bytes;
- as many tokens as all others over a link that is not: its validation loss after each step, which no link changes.

Equal time is the time in which the fastest row trains all tokens. Rows that are in the report are not measured again.
Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from zero2all.bench.report_files import write_report
from zero2all.chaos.node_faults import PORT
from zero2all.chaos.simulated_nodes import SimulatedNode, simulated_nodes
from zero2all.console import say, warn
from zero2all.corpus import build_corpus
from zero2all.elastic.job_secret import new_secret
from zero2all.engine import Engine
from zero2all.environment import JOB_SECRET_VARIABLE
from zero2all.errors import Z2aError
from zero2all.io import read_record, write_text
from zero2all.model.cost.model_size import count_parameters
from zero2all.recipe import Recipe, parse_recipe, recipe_yaml
from zero2all.tokenizer import Tokenizer, train_tokenizer
from zero2all.tokens import build_tokens
from zero2all.track.record_lines import EventLine, StepLine
from zero2all.track.run_record import read_record_lines
from zero2all.train.run import resolve_model_config
from zero2all.units import show_bytes

SEQ_LEN, MICRO_BATCH, NODES = 128, 2, 2
BATCH = NODES * MICRO_BATCH * SEQ_LEN
RECIPE = f"""
name: slow-link
seed: 7
corpus: {{holdout: 0.05}}
tokenizer: {{vocab_size: 4096}}
model: {{hidden_size: 256, intermediate_size: 704, num_hidden_layers: 4, num_attention_heads: 4,
  num_key_value_heads: 4, max_position_embeddings: {SEQ_LEN}}}
train:
  steps: 100000
  seq_len: {SEQ_LEN}
  batch_tokens: {BATCH}
  micro_batch_tokens: {MICRO_BATCH * SEQ_LEN}
  precision: fp32
  device: cpu
  compile: false
  optimizer: {{lr: 2e-3}}
  schedule: {{shape: constant, warmup: 10 steps}}
evals: {{tokens: 4096}}
checkpoint: {{every: 100000 steps}}
track: {{log_every: 10}}
"""
REPLICAS = "parallel.dp_replicate=2 parallel.dp_shard=1"
DILOCO = f"parallel.sync.method=diloco parallel.sync.islands={NODES} parallel.sync.exchange_dtype=int8"
ROWS = {
    "all-reduce": REPLICAS,
    "accumulation x8": f"{REPLICAS} train.batch_tokens={8 * BATCH}",
    "bf16": f"{REPLICAS} parallel.gradient_dtype=bf16",
    "powersgd 4": f"{REPLICAS} parallel.sync.method=powersgd parallel.sync.powersgd_rank=4",
    "powersgd 16": f"{REPLICAS} parallel.sync.method=powersgd parallel.sync.powersgd_rank=16",
    "diloco 10": f"{DILOCO} parallel.sync.every=10",
    "diloco 10, overlapped": f"{DILOCO} parallel.sync.every=10 parallel.sync.overlap=5",
    "diloco 50": f"{DILOCO} parallel.sync.every=50",
}
FIRST = next(iter(ROWS))
INITIAL_LOSS = math.log(4096)  # of random weights, and a vocabulary of that size
WARM_UP = 3  # steps
EVALUATIONS = 10  # until a row has seen the tokens of all
TIMED = 22  # steps over the slow link; with DiLoCo as many exchanges as fit, but two
MAX_SECONDS = 900.0  # of a run, start and validation included
COMMUNICATION_SHARE = 0.7  # what the link is to cost all-reduce


@dataclass(frozen=True)
class Row:
    name: str
    overrides: str
    timed_steps: int
    step_seconds: float
    """Mean after the warm-up, over whole rounds of exchanges."""
    wire_bytes: float
    """That a node sent in a step, with headers and acknowledgements: the counter of its network card."""
    tokens_per_second: float
    communication: float
    """Exposed, as a share of all steps, on rank 0."""
    losses: list[tuple[int, float]]
    """Tokens before each validation, and its loss in nats a token."""
    load: float
    """Average number of processes that wanted a core."""

    def loss_after(self, tokens: float) -> float | None:
        """Between two validations by linear interpolation."""
        for (before, first), (after, second) in pairwise(self.losses):
            if before <= tokens <= after:
                return first + (second - first) * (tokens - before) / (after - before)
        return None


@dataclass(frozen=True)
class Report:
    rate: str
    tokens: int
    parameters: int
    rows: list[Row]

    @property
    def equal_seconds(self) -> float:
        return self.tokens / max(row.tokens_per_second for row in self.rows)


@dataclass(frozen=True)
class Progress:
    """What a run has recorded so far, on rank 0."""

    step_seconds: list[float]
    communication: list[float]
    validations: list[tuple[int, float]]
    """Steps before each, and its loss."""

    @classmethod
    def of(cls, record: Path) -> Progress:
        steps: dict[int, dict[str, float]] = {}
        validations = []
        for line in read_record_lines(record) if record.exists() else ():
            if isinstance(line, StepLine):
                steps.setdefault(line.step, {}).update(line.metrics)
            elif isinstance(line, EventLine) and line.event == "evaluation" and line.step is not None:
                validations.append((line.step + 1, float(line.details["loss"])))
        timed = [steps[step] for step in sorted(steps) if "step_time" in steps[step]]
        return cls(
            [one["step_time"] for one in timed], [one.get("time/communication", 0.0) for one in timed], validations
        )


class SlowLink:
    """The workspace of all rows, and the nodes of one."""

    def __init__(self, out: Path, corpus: list[Path], rate: str, tokens: int) -> None:
        self.out, self.rate, self.tokens = out, rate, tokens
        sources = json.dumps([{"name": "text", "paths": [str(path.absolute()) for path in corpus]}])
        self._shared = [f"out={out / 'workspace'}", f"corpus.sources={sources}"]
        recipe, engine = self.recipe("base", ""), Engine()
        build_corpus(recipe.corpus, recipe.documents_dir, engine)
        train_tokenizer(recipe.tokenizer, recipe.documents_dir, recipe.tokenizer_dir, engine)
        build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir, engine)
        config = resolve_model_config(recipe, Tokenizer(recipe.tokenizer_dir))
        self.parameters = count_parameters(config).total

    def recipe(self, name: str, overrides: str) -> Recipe:
        return parse_recipe(RECIPE, [*self._shared, f"run={name}", *overrides.split()])

    def measure(self, name: str) -> Row:
        every = self.recipe("base", ROWS[name]).parallel.sync
        rounds = every.every if every.method == "diloco" else 1
        steps = WARM_UP + max(2, (TIMED - WARM_UP) // rounds) * rounds
        slow, batch, wire = self._train(name, "slow", steps, self.rate)
        fast, _, _ = self._train(name, "fast", self.tokens // batch, None)
        timed = slow.step_seconds[WARM_UP:steps]
        seconds = statistics.fmean(timed)
        return Row(
            name=name,
            overrides=ROWS[name],
            timed_steps=len(timed),
            step_seconds=seconds,
            wire_bytes=wire / len(slow.step_seconds),
            tokens_per_second=batch / seconds,
            communication=sum(slow.communication[WARM_UP:steps]) / sum(timed),
            losses=[(0, INITIAL_LOSS), *((done * batch, loss) for done, loss in fast.validations)],
            load=os.getloadavg()[0],
        )

    def _train(self, name: str, link: str, steps: int, rate: str | None) -> tuple[Progress, int, float]:
        """What it recorded, its batch, and the bytes that a node sent in all steps."""
        validate = f"{self.tokens // EVALUATIONS} tokens" if rate is None else f"{steps + 1000} steps"
        run = f"{name.replace(' ', '-').replace(',', '')}-{link}"
        recipe = self.recipe(run, f"{ROWS[name]} evals.every={validate.replace(' ', '')}")
        shutil.rmtree(recipe.run_dir, ignore_errors=True)
        path = self.out / f"{run}.yaml"
        write_text(path, recipe_yaml(recipe))
        is_island = recipe.parallel.sync.method == "diloco"
        record = recipe.run_dir / ("island-0" if is_island else "") / "record.jsonl"
        assert recipe.train.batch_tokens is not None
        with simulated_nodes(NODES + 1) as (*nodes, login):
            for node in nodes if rate is not None else []:
                node.run("tc", *f"qdisc replace dev cable root tbf rate {rate} burst 128kb latency 400ms".split())
            processes = self._start(path, nodes, login, is_island)
            try:
                wire = self._watch(run, record, nodes[0], processes[1:], steps, validates=rate is None)
            finally:
                for process in reversed(processes):
                    process.kill()
                    process.wait()
        return Progress.of(record), recipe.train.batch_tokens, wire

    def _start(
        self, recipe: Path, nodes: list[SimulatedNode], login: SimulatedNode, is_island: bool
    ) -> list[subprocess.Popen[bytes]]:
        """The rendezvous, then a launcher on every node, each on a core of its own."""
        environment = {**os.environ, JOB_SECRET_VARIABLE: new_secret(), "OMP_NUM_THREADS": "1"}
        z2a, endpoint = [sys.executable, "-m", "zero2all.cli"], f"{login.ip}:{PORT}"
        commands = [login.command(*z2a, "rendezvous", "--port", str(PORT), "--listen", login.ip)]
        for number, node in enumerate(nodes):
            if is_island:
                place = ["--island", str(number), "--islands-endpoint", endpoint]
            else:
                place = ["--nnodes", str(NODES), "--rdzv-endpoint", endpoint]
            words = [*z2a, "launch", "--nproc-per-node", "1", "--max-restarts", "0", *place, "--", "train", str(recipe)]
            commands.append(node.command("taskset", "-c", str(number % (os.cpu_count() or 1)), *words))
        with open(recipe.with_suffix(".log"), "wb") as log:
            return [
                subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment) for words in commands
            ]

    def _watch(
        self,
        name: str,
        record: Path,
        node: SimulatedNode,
        launchers: list[subprocess.Popen[bytes]],
        steps: int,
        validates: bool,
    ) -> float:
        """Until the run has trained and validated these steps; returns the bytes that the node sent meanwhile."""
        began, said, before = time.monotonic(), 0.0, 0
        while True:
            time.sleep(0.5)
            seen, now = Progress.of(record), time.monotonic() - began
            count, trained = len(seen.step_seconds), sum(seen.step_seconds)
            if count == 0:
                before = _sent_bytes(node)
            if now > said + 15:
                said = now
                validated = f", loss {seen.validations[-1][1]:.3f}" if seen.validations else ""
                say(f"{name}: {count} steps in {trained:.0f} s of training{validated} ({now:.0f} s in all)")
            if count >= steps and (not validates or any(done == steps for done, _ in seen.validations)):
                break
            if any(process.poll() is not None for process in launchers) or now > MAX_SECONDS:
                raise Z2aError(f"{name} ended after {count} steps and {now:.0f} s: see the logs in {self.out}")
        sent = _sent_bytes(node) - before
        for process in launchers:
            process.send_signal(signal.SIGTERM)
        for process in launchers:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                warn(f"{name}: a node did not stop in 60 s, and is killed")
        return sent


def _sent_bytes(node: SimulatedNode) -> int:
    [link] = json.loads(node.run("ip", "-s", "-j", "link", "show", "cable"))
    return int(link["stats64"]["tx"]["bytes"])


def markdown(report: Report) -> str:
    head = [
        f"{report.parameters / 1e6:.1f}M parameters, {NODES} nodes of one rank, link of {report.rate}; loss after "
        f"{report.tokens:,} tokens, and after {report.equal_seconds:.0f} s of training.",
        "",
        "| method | s a step | sent a step | tokens/s | communication | loss, equal tokens | loss, equal time |",
        "|---|---|---|---|---|---|---|",
    ]
    lines = [
        f"| {row.name} | {row.step_seconds:.2f} | {show_bytes(row.wire_bytes)} | {row.tokens_per_second:,.0f} | "
        f"{row.communication:.0%} | {_loss(row.loss_after(report.tokens))} | "
        f"{_loss(row.loss_after(min(report.tokens, row.tokens_per_second * report.equal_seconds)))} |"
        for row in report.rows
    ]
    return "\n".join([*head, *lines]) + "\n"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, nargs="+", required=True, help="files or directories of text")
    parser.add_argument("--out", type=Path, required=True, help="directory of the report and of all runs")
    parser.add_argument("--only", action="append", choices=list(ROWS), help="measure this row again; may be repeated")
    parser.add_argument("--rate", default="50mbit", help="of the link, as tc has it")
    parser.add_argument("--tokens", type=int, default=400 * BATCH, help="at which losses are compared")
    options = parser.parse_args()
    if options.tokens % (8 * BATCH * EVALUATIONS):
        parser.error(f"--tokens must be a multiple of {8 * BATCH * EVALUATIONS}, so that every row validates there")
    out = options.out.absolute()
    saved = out / "slow_link.json"
    known = read_record(Report, saved) if saved.exists() else None
    if known is not None and (known.rate, known.tokens) != (options.rate, options.tokens):
        parser.error(f"{saved} is of --rate {known.rate} --tokens {known.tokens}: give those, or another --out")
    link = SlowLink(out, options.corpus, options.rate, options.tokens)
    rows = {row.name: row for row in known.rows} if known else {}
    wanted = options.only or [name for name in ROWS if name not in rows]
    for name in sorted(wanted, key=list(ROWS).index):
        say(f"{name}: {ROWS[name]}")
        rows[name] = link.measure(name)
        report = Report(options.rate, options.tokens, link.parameters, [rows[one] for one in ROWS if one in rows])
        write_report(out, "slow_link", report, markdown(report))
        say(markdown(report))
        if name == FIRST and rows[name].communication < COMMUNICATION_SHARE:
            warn(f"all-reduce takes {rows[name].communication:.0%} of a step: a slower --rate shows more")


if __name__ == "__main__":
    main()
