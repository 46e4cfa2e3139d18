"""Ways to synchronize two nodes over a slow link: step time, bytes, and validation loss at equal tokens and equal time.

    python -m benchmarks slow_link --corpus TEXT... --out bench

Two simulated nodes with one rank each, pinned to a core each, train a model of about 5 million parameters on real text,
with the same micro-batch and learning rate in every row. All rows begin with the weights of one plain run, of 500 short
steps or that of ``--init``: methods that average weights or send approximations lose less the later they begin. Each
row is trained

- to the end of its schedule, with as many tokens as all others, over a link that is not shaped: its validation loss,
  which no link changes. DiLoCo ends with an exchange, so its last loss is that of the merged weights. Repeated with
  other seeds (``--seeds``), which change the order of data;
- then a few steps over a link that is shaped (tc tbf) so that plain all-reduce takes most of a step: time and bytes.
  All rows are measured one after another, on a machine that does nothing else.

Equal time is the time in which the fastest row trains all tokens. What is in the report is not measured again, so that
a benchmark that was stopped continues. Needs root and iproute2.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from benchmarks.common import benchmark_parser
from tests.chaos.node_faults import PORT
from tests.chaos.simulated_nodes import SimulatedNode, simulated_nodes

from zero2all.base.charts.table import markdown_table
from zero2all.base.console import say, warn
from zero2all.base.environment import JOB_SECRET_VARIABLE
from zero2all.base.errors import Z2aError
from zero2all.base.io import read_record, write_text
from zero2all.base.tasks import TaskEngine
from zero2all.base.units import show_bytes
from zero2all.bench.measurements import write_report
from zero2all.cluster.launch.job_secret import new_secret
from zero2all.corpus import build_corpus
from zero2all.model.cost.model_size import count_parameters
from zero2all.recipe import Recipe, parse_recipe, recipe_yaml
from zero2all.tokenizer import Tokenizer, train_tokenizer
from zero2all.tokens import build_tokens
from zero2all.track.record_lines import EventLine, StepLine
from zero2all.track.run_record import read_record_lines
from zero2all.train.run import resolve_model_config

SEQ_LEN, MICRO_BATCH, ACCUMULATION, NODES = 128, 4, 4, 2
BATCH = NODES * ACCUMULATION * MICRO_BATCH * SEQ_LEN
RECIPE = f"""
name: slow-link
seed: 7
corpus: {{holdout: 0.05}}
tokenizer: {{vocab_size: 512}}
model: {{hidden_size: 256, intermediate_size: 704, num_hidden_layers: 6, num_attention_heads: 4,
  num_key_value_heads: 4, max_position_embeddings: {SEQ_LEN}}}
train:
  steps: 100000
  seq_len: {SEQ_LEN}
  batch_tokens: {BATCH}
  micro_batch_tokens: {MICRO_BATCH * SEQ_LEN}
  precision: fp32
  device: cpu
  compile: false
  optimizer: {{lr: 1e-3}}
  schedule: {{warmup: {10 * BATCH} tokens}}
evals: {{tokens: 16384}}
checkpoint: {{every: 100000 steps}}
track: {{log_every: 10}}
"""
REPLICAS = "parallel.dp_replicate=2 parallel.dp_shard=1"
DILOCO = f"parallel.sync.islands={NODES} parallel.sync.exchange_dtype=int8"
AVERAGES = f"{DILOCO} parallel.sync.outer_lr=1 parallel.sync.outer_momentum=0 parallel.sync.overlap=2"
ROWS = {
    "all-reduce": REPLICAS,
    "accumulation x8": f"{REPLICAS} train.batch_tokens={8 * BATCH}",
    "bf16": f"{REPLICAS} parallel.gradient_dtype=bf16",
    "diloco 10": f"{DILOCO} parallel.sync.every=10",
    "diloco 50": f"{DILOCO} parallel.sync.every=50",
    "diloco 10, averages": f"{AVERAGES} parallel.sync.every=10",
    "diloco 50, averages": f"{AVERAGES} parallel.sync.every=50",
}
FIRST = next(iter(ROWS))
SEEDS = (7, 8, 9)
PRETRAINING_STEPS = 500
WARM_UP = 3  # steps
EVALUATIONS = 5  # until a row has seen the tokens of all
TIMED = 10  # steps over the slow link; with DiLoCo as many exchanges as fit, but one
MAX_SECONDS = 1200.0  # of a run, start and validation included
COMMUNICATION_SHARE = 0.7  # what the link is to cost all-reduce


@dataclass(frozen=True)
class Curve:
    row: str
    seed: int
    losses: list[tuple[int, float]]
    """Tokens before each validation, and its loss in nats a token."""

    def loss_after(self, tokens: float) -> float | None:
        """Between two validations by linear interpolation."""
        for (before, first), (after, second) in pairwise(self.losses):
            if before <= tokens <= after:
                return first + (second - first) * (tokens - before) / (after - before)
        return None


@dataclass(frozen=True)
class Timing:
    """A few steps over the slow link."""

    row: str
    step_seconds: list[float]
    """After the warm-up, whole rounds of exchanges."""
    communication: list[float]
    """Exposed, in seconds of the same steps, on the first node."""
    wire_bytes: float
    """That a node sent in a step, with headers and acknowledgements: the counter of its network card."""
    batch_tokens: int
    load: float
    """Average number of processes that wanted a core."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    step_seconds: float
    wire_bytes: float
    tokens_per_second: float
    communication: float
    """Share of all steps."""
    curves: list[Curve]
    """One for each seed."""

    def loss_after(self, tokens: float) -> str:
        """The mean over the seeds, and half the distance between the smallest and the largest."""
        losses = [loss for curve in self.curves if (loss := curve.loss_after(tokens)) is not None]
        if not losses:
            return "-"
        spread = f" ± {(max(losses) - min(losses)) / 2:.3f}" if len(losses) > 1 else ""
        return f"{statistics.fmean(losses):.3f}{spread}"


@dataclass(frozen=True)
class Report:
    rate: str
    tokens: int
    init: str
    """The run that all rows begin with; empty if it was trained here."""
    parameters: int
    curves: list[Curve]
    timings: list[Timing]

    def rows(self) -> list[Row]:
        return [
            Row(
                name=timing.row,
                step_seconds=(seconds := statistics.fmean(timing.step_seconds)),
                wire_bytes=timing.wire_bytes,
                tokens_per_second=timing.batch_tokens / seconds,
                communication=statistics.fmean(timing.communication) / seconds,
                curves=[curve for curve in self.curves if curve.row == timing.row],
            )
            for timing in sorted(self.timings, key=lambda timing: list(ROWS).index(timing.row))
        ]


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

    def __init__(self, out: Path, corpus: list[Path], rate: str, tokens: int, init: Path | None) -> None:
        """``init``: the run whose weights all rows begin with, if it is not to be trained here."""
        self.out, self.rate, self.tokens = out, rate, tokens
        sources = json.dumps([{"name": "text", "paths": [str(path.absolute()) for path in corpus]}])
        self._shared = [f"out={out / 'workspace'}", f"corpus.sources={sources}"]
        recipe, engine = self.recipe("base", ""), TaskEngine()
        build_corpus(recipe.corpus, recipe.documents_dir, engine)
        train_tokenizer(recipe.tokenizer, recipe.documents_dir, recipe.tokenizer_dir, engine)
        build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir, engine)
        config = resolve_model_config(recipe, Tokenizer(recipe.tokenizer_dir))
        self.parameters = count_parameters(config).total
        pretrained = init or self._pretrain()
        self._shared.append(f"train.init={pretrained}")
        self._initial_loss = Progress.of(pretrained / "record.jsonl").validations[-1][1]

    def recipe(self, name: str, overrides: str) -> Recipe:
        return parse_recipe(RECIPE, [*self._shared, f"run={name}", *overrides.split()])

    def _pretrain(self) -> Path:
        batch = BATCH // ACCUMULATION
        length = f"train.batch_tokens={batch} train.steps={PRETRAINING_STEPS} evals.every=100steps"
        schedule = "train.schedule.shape=constant train.schedule.warmup=10steps"
        recipe = self.recipe("pretraining", f"{REPLICAS} seed=1 {length} {schedule}")
        path = self.out / "pretraining.yaml"
        write_text(path, recipe_yaml(recipe))
        launch = [sys.executable, "-m", "zero2all.cli", "launch", "--nproc-per-node", str(NODES)]
        # Resumes, and is over at once if it is finished.
        subprocess.run([*launch, "--", "train", str(path)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return recipe.run_dir

    def curve(self, name: str, seed: int) -> Curve:
        batch = self.recipe("base", ROWS[name]).train.batch_tokens
        assert batch is not None
        progress, _ = self._train(name, f"seed-{seed}", self.tokens // batch, None, seed)
        losses = [(0, self._initial_loss), *((done * batch, loss) for done, loss in progress.validations)]
        return Curve(name, seed, losses)

    def timing(self, name: str) -> Timing:
        recipe = self.recipe("base", ROWS[name])
        assert recipe.train.batch_tokens is not None
        sync = recipe.parallel.sync
        period = sync.every if sync.islands > 1 else 1
        first = WARM_UP + sync.overlap  # so that as many exchanges are merged as begin
        steps = first + max(1, TIMED // period) * period
        progress, wire = self._train(name, "timing", steps, self.rate)
        return Timing(
            row=name,
            step_seconds=progress.step_seconds[first:steps],
            communication=progress.communication[first:steps],
            wire_bytes=wire / len(progress.step_seconds),
            batch_tokens=recipe.train.batch_tokens,
            load=os.getloadavg()[0],
        )

    def _train(
        self, name: str, purpose: str, steps: int, rate: str | None, seed: int = SEEDS[0]
    ) -> tuple[Progress, float]:
        """What it recorded, and the bytes that a node sent in all steps. Over a slow link the run is stopped long
        before its end, which would have exchanges of its own."""
        length = f"evals.every={self.tokens // EVALUATIONS}tokens train.steps={steps}"
        if rate is not None:
            length = "evals.every=100000steps"
        run = f"{name.replace(' ', '-').replace(',', '')}-{purpose}"
        recipe = self.recipe(run, f"{ROWS[name]} {length} seed={seed}")
        shutil.rmtree(recipe.run_dir, ignore_errors=True)
        path = self.out / f"{run}.yaml"
        write_text(path, recipe_yaml(recipe))
        is_island = recipe.parallel.sync.islands > 1
        record = recipe.run_dir / ("island-0" if is_island else "") / "record.jsonl"
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
        return Progress.of(record), wire

    def _start(
        self, recipe: Path, nodes: list[SimulatedNode], login: SimulatedNode, is_island: bool
    ) -> list[subprocess.Popen[bytes]]:
        """The rendezvous, then a launcher on every node, each on a core of its own."""
        environment = {**os.environ, JOB_SECRET_VARIABLE: new_secret(), "OMP_NUM_THREADS": "1"}
        z2a, endpoint = [sys.executable, "-m", "zero2all.cli"], f"{login.ip}:{PORT}"
        commands = [login.command(*z2a, "launch", "--rendezvous-only", "--rdzv-listen", f"{login.ip}:{PORT}")]
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
            time.sleep(1)
            has_ended = any(process.poll() is not None for process in launchers)  # before its record is read
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
            if has_ended or now > MAX_SECONDS:
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
    rows = report.rows()
    if not rows:
        return ""
    equal_seconds = report.tokens / max(row.tokens_per_second for row in rows)
    title = (
        f"{report.parameters / 1e6:.1f}M parameters, {NODES} nodes of one rank, link of {report.rate}; loss after "
        f"{report.tokens:,} tokens, and after {equal_seconds:.0f} s of training."
    )
    head = "method", "s a step", "sent a step", "tokens/s", "communication", "loss, equal tokens", "loss, equal time"
    cells = []
    for row in rows:
        trained = min(report.tokens, row.tokens_per_second * equal_seconds)
        sizes = f"{row.step_seconds:.2f}", show_bytes(row.wire_bytes), f"{row.tokens_per_second:,.0f}"
        losses = row.loss_after(report.tokens), row.loss_after(trained)
        cells.append((row.name, *sizes, f"{row.communication:.0%}", *losses))
    return f"{title}\n\n{markdown_table(head, cells)}\n"


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--corpus", type=Path, nargs="+", required=True, help="files or directories of text")
    parser.add_argument("--out", type=Path, required=True, help="directory of the report and of all runs")
    parser.add_argument("--init", type=Path, help="run to begin with instead of 500 short steps")
    parser.add_argument("--only", action="append", choices=list(ROWS), help="a row to measure; may be repeated")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS], help="orders of data for the losses")
    parser.add_argument("--rate", default="25mbit", help="of the link, as tc has it")
    parser.add_argument("--tokens", type=int, default=120 * BATCH, help="at which losses are compared")
    options = parser.parse_args()
    if options.tokens % (8 * BATCH * EVALUATIONS):
        parser.error(f"--tokens must be a multiple of {8 * BATCH * EVALUATIONS}, so that every row validates there")
    out = options.out.absolute()
    saved = out / "slow_link.json"
    known = read_record(Report, saved) if saved.exists() else None
    init = None if options.init is None else options.init.absolute()
    same = (options.rate, options.tokens, str(init or ""))
    if known is not None and (known.rate, known.tokens, known.init) != same:
        began = f" --init {known.init}" if known.init else " and no --init"
        parser.error(f"{saved} is of --rate {known.rate} --tokens {known.tokens}{began}: give those, or another --out")
    if init is not None and not Progress.of(init / "record.jsonl").validations:
        parser.error(
            f"--init {init} is no run with a validation: give the directory of a run that has its record.jsonl"
        )
    link = SlowLink(out, options.corpus, options.rate, options.tokens, init)
    report = known or Report(*same, link.parameters, [], [])
    rows = options.only or list(ROWS)
    for seed in options.seeds:
        for name in rows:
            if (name, seed) not in {(curve.row, curve.seed) for curve in report.curves}:
                say(f"{name}: {ROWS[name]} seed={seed}")
                report = replace(report, curves=[*report.curves, link.curve(name, seed)])
                write_report(out, "slow_link", report, markdown(report))
    for name in rows:
        if name not in {timing.row for timing in report.timings}:
            report = replace(report, timings=[*report.timings, link.timing(name)])
            write_report(out, "slow_link", report, markdown(report))
    say(markdown(report))
    first = next((row for row in report.rows() if row.name == FIRST), None)
    if first is not None and first.communication < COMMUNICATION_SHARE:
        warn(f"all-reduce takes {first.communication:.0%} of a step: a slower --rate shows more")
