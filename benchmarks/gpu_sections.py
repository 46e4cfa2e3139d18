"""One section of gpu_report.

It writes ``WORK/<section>.json``, a list of table rows, again after every row, so that one that is stopped keeps what
it had measured.

    python -m benchmarks gpu_sections kernels --device cpu --ranks 2 --tiny --work /tmp/work
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.common import benchmark_parser
from tests.chaos.injections import Injection
from tests.chaos.scenario import Scenario, expect_status
from tests.chaos.workspace import build_workspace, workspace_recipe
from torch import Tensor

from zero2all.base.errors import Z2aError
from zero2all.base.machine.devices import synchronize
from zero2all.model import document_starts
from zero2all.model.ops import OPS
from zero2all.model.ops.attention import MaskInputs
from zero2all.model.ops.cross_entropy import HeadConfig
from zero2all.model.ops.kernels import Kernel
from zero2all.planner.rank_plan import plan_recipe_memory
from zero2all.recipe import ModelConfig, Recipe, recipe_yaml
from zero2all.track import read_steps
from zero2all.train import TrainerHooks, train

PACKAGES = ("torch", "triton", "liger-kernel", "flash-attn", "torchao", "zero2all")
WARM_STEPS = 3
LOSS_TOLERANCE = 5e-6
LLAMA_8B = (
    "model={hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, num_attention_heads: 32, "
    "num_key_value_heads: 8, head_dim: 128, max_position_embeddings: 8192, vocab_size: 128256, rope_theta: 500000.0}"
)
TINY = "model={hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 512}"
# The first that is predicted to fit: micro-batch tokens, activation checkpointing.
FITS = (("16Ki", "selective"), ("8Ki", "selective"), ("8Ki", "full"), ("4Ki", "full"), ("2Ki", "full"))


@dataclass(frozen=True)
class Settings:
    """How a section runs."""

    device: str
    ranks: int
    tiny: bool
    work: Path
    section: str

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def save(self, rows: list[dict[str, Any]]) -> None:
        (self.work / f"{self.section}.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")


class Rows:
    """The rows of a section's table."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.rows = settings, list[dict[str, Any]]()

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        self.settings.save(self.rows)

    def attempt(self, measure: Callable[[], dict[str, Any]], **row: Any) -> None:
        """Add what it measures, or the error: the other rows come anyway."""
        try:
            self.add(**row, **measure())
        except Exception as error:  # of a compiler, a kernel, a recipe or a rank: any is a finding
            self.add(**row, error=f"{type(error).__name__}: {str(error)[:300]}")


def environment(settings: Settings, rows: Rows) -> None:
    for name in PACKAGES:
        try:
            rows.add(what=name, value=version(name))
        except PackageNotFoundError:
            rows.add(what=name, value="not installed")
    rows.add(what="python", value=sys.version.split()[0])
    rows.add(what="cores", value=os.cpu_count())
    rows.add(what="memory GB", value=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)
    rows.add(what="/dev/shm GB", value=shutil.disk_usage("/dev/shm").total / 1e9)
    if settings.device == "cuda":
        rows.add(what="cuda", value=torch.version.cuda)
        rows.add(what="cudnn", value=torch.backends.cudnn.version())
        rows.add(what="nccl", value=".".join(map(str, torch.cuda.nccl.version())))
    fields = "name,driver_version,memory.total,pcie.link.gen.max,power.limit,clocks.max.sm,ecc.mode.current"
    for words in (["--query-gpu=" + fields, "--format=csv"], ["topo", "-m"]):
        if shutil.which("nvidia-smi"):
            done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=30)
            rows.add(what=f"nvidia-smi {words[0].split('=')[0]}", value=done.stdout.strip())


def doctor(settings: Settings, rows: Rows) -> None:
    command = [sys.executable, "-m", "zero2all.cli", "doctor", "--json", "--dir", str(settings.work)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    found = json.loads(done.stdout)
    for finding in found if isinstance(found, list) else next(v for v in found.values() if isinstance(v, list)):
        rows.add(**{name: value for name, value in finding.items() if isinstance(value, str | int | float | bool)})


def kernels(settings: Settings, rows: Rows) -> None:
    """Every kernel against the reference, in bf16 and fp32: largest difference of outputs and gradients, and time."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config = ModelConfig(preset="z2all-3m", vocab_size=512)
    for dtype in (torch.float32, torch.bfloat16):
        for op, case, inputs, call in kernel_cases(settings, dtype):
            reference = run_kernel(OPS[op]["reference"].load(), inputs, call, settings.torch_device)
            for name, kernel in OPS[op].items():
                row = {"op": op, "case": case, "kernel": name, "dtype": str(dtype).removeprefix("torch.")}
                if (reason := kernel.unavailable_reason(settings.torch_device, config)) is not None:
                    rows.add(**row, error=reason)
                    continue
                rows.attempt(partial(compare, kernel, inputs, call, settings, reference), **row)


def kernel_cases(settings: Settings, dtype: torch.dtype) -> list[tuple[str, str, list[Tensor], Callable[..., Any]]]:
    device, tiny = settings.torch_device, settings.tiny
    batch, length, hidden, heads, vocab = (2, 64, 64, 4, 320) if tiny else (2, 2048, 2048, 32, 64320)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, device=device, generator=generator) * 0.5).to(dtype)

    size = hidden // heads
    x, wide = random(batch * length, hidden), random(batch * length, 2 * hidden)
    q, k, v = random(batch, heads, length, size), *(random(batch, heads // 4, length, size) for _ in range(2))
    tokens = torch.randint(0, 40, (batch, length), device=device, generator=generator)
    angles = torch.randn(length, size // 2, device=device, generator=generator).repeat(1, 2)
    table, head = torch.stack([angles.cos(), angles.sin()]), HeadConfig(vocab)
    targets = torch.randint(0, vocab, (batch * length,), device=device, generator=generator)
    cases: list[tuple[str, str, list[Tensor], Callable[..., Any]]] = [
        ("norm", "", [x, random(hidden)], lambda f, a, w: f(a, w, 1e-5)),
        ("rope", "", [q, k], lambda f, a, b: f(a, b, table)),
        ("swiglu", "", [wide, wide * 0.5], lambda f, a, b: f(a, b)),
        ("cross_entropy", "", [x, random(vocab, hidden)], lambda f, a, w: f(a, w, targets, head)),
    ]
    for case, starts, window in (
        ("causal", None, None),
        ("packed", document_starts(tokens == 0), None),
        ("window", None, length // 4),
    ):
        cases.append(
            (
                "attention",
                case,
                [q, k, v],
                lambda f, a, b, c, s=starts, w=window: f.attend(a, b, c, f.mask_for(MaskInputs(s, length, w, device))),
            )
        )
    return cases


def run_kernel(
    function: Any, inputs: list[Tensor], call: Callable[..., Any], device: torch.device
) -> tuple[list[Tensor], float, float]:
    """Outputs and gradients, milliseconds of forward and backward, and peak GB."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    for _ in range(5):
        given = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        synchronize(device)
        begin = time.perf_counter()
        outputs = call(function, *given)
        outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
        torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
        synchronize(device)
        times.append(1000 * (time.perf_counter() - begin))
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    return [tensor.detach() for tensor in (*outputs, *(x.grad for x in given if x.grad is not None))], min(times), peak


def compare(
    kernel: Kernel,
    inputs: list[Tensor],
    call: Callable[..., Any],
    settings: Settings,
    reference: tuple[list[Tensor], float, float],
) -> dict[str, Any]:
    found, milliseconds, peak = run_kernel(kernel.load(), inputs, call, settings.torch_device)
    differences = [
        float((one.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1.0))
        for one, other in zip(found, reference[0], strict=True)
    ]
    return {"difference": max(differences), "ms": milliseconds, "reference ms": reference[1], "peak GB": peak}


def tokens_of(settings: Settings) -> Path:
    """A tokenizer and tokens, which all sections share; the text is made up."""
    root = settings.work / "tokens"
    build_workspace(root, seed=0)
    return root


def recipe_of(settings: Settings, name: str, *overrides: str) -> Recipe:
    common = [f"train.device={settings.device}", "checkpoint={every: 100000 steps}", "train.deterministic=false"]
    return workspace_recipe(tokens_of(settings), settings.work / "runs" / name, *common, *overrides)


def train_run(settings: Settings, name: str, ranks: int, *overrides: str, seconds: float = 200.0) -> Path:
    """Train a recipe on some ranks; the record of the run."""
    recipe = recipe_of(settings, name, *overrides)
    path = settings.work / f"{name}.yaml"
    path.write_text(recipe_yaml(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "zero2all.cli", "launch", "--nproc-per-node", str(ranks), "--max-restarts", "0"]
    environment = os.environ if settings.device == "cuda" else {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--", "train", str(path)], capture_output=True, text=True, timeout=seconds, env=environment
    )
    if done.returncode:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in said if "error" in line.lower()]
        raise Z2aError(" / ".join((errors or said)[-3:]) or f"status {done.returncode}")
    return recipe.run_dir / "record.jsonl"


def losses(record: Path) -> dict[int, float]:
    return {step: values["loss"] for step, values in read_steps(record).items() if "loss" in values}


def layouts(settings: Settings, rows: Rows) -> None:
    """Losses of a few layouts, in fp32 on all ranks, against one process."""
    moe = "model.moe={num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 32, load_balancing: bias}"
    small = ["train.steps=6", "train.schedule.warmup=0", "model.num_key_value_heads=4"]
    if settings.ranks < 2:
        rows.add(layout="all", error="one rank: nothing to compare")
        return
    alone = {
        kind: losses(train_run(settings, f"alone-{bool(kind)}", 1, *small, *([moe] if kind else [])))
        for kind in ((False,) if settings.tiny else (False, True))
    }
    cases = {
        "FSDP": ("{}", False), "DDP": (f"{{dp_replicate: {settings.ranks}, dp_shard: 1}}", False),
        "TP 2": ("{tp: 2}", False), "PP 2": ("{pp: 2}", False), "CP 2": ("{cp: 2}", False),
        "CP 2 ulysses": ("{cp: 2, cp_attention: ulysses}", False), "CP 2 ring": ("{cp: 2, cp_attention: ring}", False),
        "TP 2 async": ("{tp: 2, async_tp: true}", False), "EP 2": ("{ep: 2}", True),
    }  # fmt: skip
    for name, (parallel, experts) in cases.items():
        if experts not in alone or (settings.tiny and name not in ("FSDP", "TP 2", "CP 2 ring")):
            continue

        def difference(name: str = name, parallel: str = parallel, experts: bool = experts) -> dict[str, Any]:
            words = [*small, f"parallel={parallel}", *([moe] if experts else [])]
            found = losses(train_run(settings, name.replace(" ", "-"), settings.ranks, *words, seconds=60))
            worst = max(abs(found[step] - loss) for step, loss in alone[experts].items())
            return {"largest loss difference": worst, "equal": worst <= LOSS_TOLERANCE}

        rows.attempt(difference, layout=name, ranks=settings.ranks)


def chaos(settings: Settings, rows: Rows) -> None:
    """A rank is killed; the job restarts from a checkpoint and ends with the losses of one that was left alone."""
    root, found = tokens_of(settings), {}
    overrides = (f"train.device={settings.device}",)
    seconds: float | None = None
    for name, injections in (("alone", []), ("killed", [Injection("kill", settings.ranks - 1, 11)])):
        scenario = Scenario(root, settings.work / "chaos" / name, injections, overrides, seconds)
        begin = time.monotonic()
        try:
            expect_status(scenario.run(settings.ranks), 0)
        finally:
            scenario.terminate()
        seconds = time.monotonic() - begin
        found[name] = losses(scenario.run_dir / "record.jsonl")
        costs = [report.get("cost") for report in scenario.reports()]
        rows.add(
            job=name, seconds=seconds, steps=len(found[name]), restarts=len(costs), recovery=costs[0] if costs else ""
        )
    rows.add(job="losses equal bit for bit", seconds=0.0, steps=int(found["alone"] == found["killed"]))


def sized(settings: Settings, name: str, model: str, length: int) -> tuple[list[str], int]:
    """Overrides of the largest micro-batch that is predicted to fit, and the predicted bytes of a rank."""
    if settings.tiny:
        fixed = [TINY, "train.seq_len=32", "train.micro_batch_tokens=64", f"train.batch_tokens={64 * settings.ranks}"]
        fixed += ["model.max_position_embeddings=32", "train.steps=6", "train.schedule.warmup=0"]
        return fixed, plan_recipe_memory(recipe_of(settings, name, *fixed), settings.ranks, torch.device("cpu")).total
    room, predicted = 0.92 * torch.cuda.get_device_properties(0).total_memory, 0
    for micro, checkpointing in FITS:
        tokens = int(micro.removesuffix("Ki")) * 1024 * settings.ranks
        if tokens < length * settings.ranks:
            continue
        words = [model, f"train.seq_len={length}", f"train.micro_batch_tokens={micro}", f"train.batch_tokens={tokens}"]
        words += [f"parallel.activation_checkpointing={checkpointing}", "train.steps=12", "train.schedule.warmup=0"]
        words += ["train.precision=auto"]
        predicted = plan_recipe_memory(recipe_of(settings, name, *words), settings.ranks).total
        if predicted <= room:
            return words, predicted
    raise Z2aError(f"needs {predicted / 1e9:.0f} GB on each of {settings.ranks} GPUs, which have {room / 1e9:.0f}")


def measure_training(settings: Settings, name: str, words: list[str], seconds: float) -> dict[str, Any]:
    steps = list(read_steps(train_run(settings, name, settings.ranks, *words, seconds=seconds)).values())[WARM_STEPS:]
    keys = ("tokens_per_second", "mfu", "hfu", "data_wait")
    values = {key: median(step[key] for step in steps if key in step) for key in keys}
    return {**values, "peak GB": max(step["memory"] for step in steps if "memory" in step) / 1e9}


def mfu(settings: Settings, rows: Rows, model: str, length: int) -> None:
    """Throughput, and the memory of rank 0 beside what ``z2a plan`` predicts."""
    for compile in ("true", "false")[settings.tiny :]:

        def measure(compile: str = compile) -> dict[str, Any]:
            words, predicted = sized(settings, settings.section, model, length)
            name = f"{settings.section}-compile-{compile}"
            found = measure_training(settings, name, [*words, f"train.compile={compile}"], 140)
            return {**found, "predicted GB": predicted / 1e9, "settings": " ".join(words[2:5])}

        rows.attempt(measure, compile=compile, ranks=settings.ranks)


def variants(settings: Settings, rows: Rows) -> None:
    """One change each from the same recipe. A key that this version does not know is a row with the error."""
    even = settings.ranks % 2 == 0
    cases = {
        "base": [], "compile off": ["train.compile=false"], "float8 tensorwise": ["train.float8=tensorwise"],
        "float8 rowwise": ["train.float8=rowwise"], "Muon": ["train.optimizer.name=muon"],
        "Muon, fp32": ["train.optimizer.name=muon", "train.optimizer.muon_dtype=fp32"],
        "documents": ["train.document_mask=true"],
        **({"TP 2": ["parallel.tp=2"], "TP 2, async": ["parallel.tp=2", "parallel.async_tp=true"],
            "CP 2, allgather": ["parallel.cp=2"], "CP 2, ring": ["parallel.cp=2", "parallel.cp_attention=ring"]}
           if even else {}),
        **{f"attention {name}": [f"model.ops.attention={name}"] for name in OPS["attention"] if name != "reference"},
    }  # fmt: skip
    words, _ = sized(settings, "variants", "model={preset: z2all-300m, vocab_size: 64320}", 2048)
    base = [*words, f"train.compile={str(not settings.tiny).lower()}"]
    for name, changes in cases.items():
        if settings.tiny and name not in ("base", "Muon", "float8 tensorwise", "attention flash"):
            continue
        run = "variant-" + name.replace(" ", "-").replace(",", "")
        rows.attempt(partial(measure_training, settings, run, [*base, *changes], 90), variant=name)


def profile(settings: Settings, rows: Rows) -> None:
    """Two steps of one process: how long the GPU is idle, and where the host waits for it."""
    model = "model={preset: z2all-1.1b}" if settings.device == "cuda" else TINY
    alone = Settings(settings.device, 1, settings.tiny, settings.work, settings.section)
    words, _ = sized(alone, "profile", model, 2048)
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if settings.device == "cuda" else []
    profiler = torch.profiler.profile(activities=activities)
    seen: list[float] = []

    def on_batch(batch: Any) -> None:
        if batch.step == WARM_STEPS:
            profiler.start()
        if batch.step in (WARM_STEPS, WARM_STEPS + 2):
            synchronize(settings.torch_device)
            seen.append(time.perf_counter())
        if batch.step == WARM_STEPS + 2:
            profiler.stop()
            if settings.device == "cuda":
                torch.cuda.set_sync_debug_mode("warn")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(recipe_of(alone, "profile", *words), TrainerHooks(on_batch=on_batch))
    rows.add(what="seconds of a step", value=(seen[1] - seen[0]) / 2)
    events = profiler.events() or []
    if settings.device == "cuda":
        busy = busy_seconds([(e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA"])
        rows.add(what="share of time in which the GPU is idle", value=1 - busy / (seen[1] - seen[0]))
    wait = "Synchronize" if settings.device == "cuda" else "aten::_local_scalar_dense"
    waits = [event for event in events if wait in event.name]
    rows.add(what="host syncs in a step", value=len(waits) / 2)
    rows.add(what="seconds of host syncs in a step", value=sum(e.cpu_time_total for e in waits) / 2e6)
    places = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    for place in sorted(set(places)):
        rows.add(what=f"host syncs at {place}, all later steps", value=places.count(place))
    key = "self_device_time_total" if settings.device == "cuda" else "self_cpu_time_total"
    top = sorted(profiler.key_averages(), key=lambda event: getattr(event, key), reverse=True)[:15]
    for event in top:
        rows.add(what=f"ms in a step: {event.key[:80]}", value=getattr(event, key) / 2e3)


def busy_seconds(spans: list[tuple[float, float]]) -> float:
    """Time that any of the spans, in microseconds, covers."""
    busy, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy / 1e6


RUN: dict[str, Callable[[Settings, Rows], None]] = {
    "environment": environment,
    "doctor": doctor,
    "kernels": kernels,
    "layouts": layouts,
    "chaos": chaos,
    "profile": profile,
    "mfu-1b": lambda settings, rows: mfu(settings, rows, "model={preset: z2all-1.1b}", 2048),
    "mfu-8b": lambda settings, rows: mfu(settings, rows, LLAMA_8B, 4096),
    "variants": variants,
}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("section", choices=list(RUN))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    settings = Settings(options.device, options.ranks, options.tiny, options.work, options.section)
    RUN[options.section](settings, Rows(settings))
