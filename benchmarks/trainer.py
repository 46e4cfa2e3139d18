"""Our trainer beside a bare hand-written loop, and beside other trainers: tokens per second, turn by turn.

    python -m benchmarks trainer RUN --layout ddp --rounds 3       # against a bare loop on 2 ranks: ddp or fsdp
    python -m benchmarks trainer RUN --peers --rounds 3            # one process, against transformers.Trainer
    python -m benchmarks trainer RUN --peers --litgpt PYTHON       # and against litgpt, see peers/trainer_litgpt.py

RUN is a directory with a tokenizer and tokens, such as a quickstart leaves; only its token store is read. The shape is
the 25M preset, bf16 where the machine has it; beside peers all are compiled, as litgpt always is. Each contender runs
alone in a process (or two ranks) of its own, the bare loop with its data in memory; a number is the median over rounds
of the median step. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.common import benchmark_parser, read_child, show_json, take_turns
from torch import Tensor, nn

from zero2all.base.machine.devices import compute_dtype
from zero2all.model import Z2all
from zero2all.recipe import Recipe, load_recipe
from zero2all.tokenizer import Tokenizer
from zero2all.train import Run, TrainerHooks, train
from zero2all.train.run import resolve_model_config

WARM = 3  # steps that are not counted


def recipe_of(run: str, steps: int, layout: str, out: Path, compiled: bool = False) -> Recipe:
    parallel = {"one": "{}", "ddp": "{dp_replicate: 2, dp_shard: 1}", "fsdp": "{dp_shard: 2}"}[layout]
    stages = Run.open(run).recipe
    places = [f"tokenizer.dir={stages.tokenizer_dir}", f"tokens.dir={stages.tokens_dir}"]
    shape = ["model={preset: z2all-25m}", "train={}", f"train.steps={steps}", "train.seq_len=512"]
    batch = ["train.batch_tokens=4096", "train.micro_batch_tokens=2048", "train.schedule.warmup=0"]
    # The others know no documents, so ours must not see any either: it would compute less attention, in more calls.
    rest = [
        "train.document_mask=false",
        f"train.compile={str(compiled).lower()}",
        f"parallel={parallel}",
        "checkpoint.every=100000 steps",
        f"out={out}",
    ]
    return load_recipe(Run.open(run).directory / "recipe.yaml", [*places, *shape, *batch, *rest])


class Watch:
    """Seconds of every step, from the moment its batch is there to the next one."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def tick(self, *_: object) -> None:
        self.moments.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [after - before for before, after in zip(self.moments, self.moments[1:], strict=False)][WARM:]


def ours(recipe: Recipe, watch: Watch) -> dict[str, Any]:
    train(recipe, hooks=TrainerHooks(on_batch=watch.tick))
    if int(os.environ.get("RANK", "0")):
        return {}
    lines = [json.loads(line) for line in (recipe.run_dir / "record.jsonl").read_text().splitlines()]
    return {"data_wait": median(line["data_wait"] for line in lines if "data_wait" in line)}


def bare(recipe: Recipe, watch: Watch, layout: str) -> dict[str, Any]:
    """What one writes by hand for one layout: no plan, no record, no sources, data in memory."""
    options = recipe.train
    config = resolve_model_config(recipe, Tokenizer(recipe.tokenizer_dir))
    model: nn.Module = Z2all(config).init_weights(0)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif layout == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rows = options.batch_samples // ranks
    data = torch.randint(0, config.vocab_size or 0, (rows, options.seq_len + 1))
    micro_batches = torch.split(data, options.effective_micro_batch_tokens // options.seq_len)
    bf16 = (compute_dtype(options.precision, torch.device("cpu")) == torch.bfloat16) and layout != "fsdp"
    for _ in range(options.steps or 0):
        watch.tick()
        for number, micro_batch in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            if layout == "fsdp":
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
            if layout == "ddp":
                model.require_backward_grad_sync = last  # type: ignore[assignment]
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss: Tensor = model(micro_batch[:, :-1], targets_BS=micro_batch[:, 1:]).sum() / (
                    rows * options.seq_len
                )
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
    if ranks > 1:
        dist.destroy_process_group()
    return {}


def transformers(recipe: Recipe, watch: Watch) -> dict[str, Any]:
    """Hugging Face's Trainer on a Llama of the same shape, its data in memory."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from zero2all.model.hf_config import hf_config

    options = recipe.train
    config = resolve_model_config(recipe, Tokenizer(recipe.tokenizer_dir))
    model = LlamaForCausalLM(LlamaConfig(**{**hf_config(config), "use_cache": False, "attn_implementation": "sdpa"}))
    row = torch.randint(0, config.vocab_size or 0, (options.seq_len,))
    data = [{"input_ids": row, "labels": row}] * (options.batch_samples * (options.steps or 0))
    micro = options.effective_micro_batch_tokens // options.seq_len

    class Ticks(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            watch.tick()

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=options.batch_samples // micro,
        max_steps=options.steps or 0,
        bf16=compute_dtype(options.precision, torch.device("cpu")) == torch.bfloat16,
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        torch_compile=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Ticks()]).train()
    return {}


def contend(options: argparse.Namespace) -> None:
    """In a process of its own: one contender, its metrics as the last line of stdout."""
    with tempfile.TemporaryDirectory() as out:
        recipe = recipe_of(options.run, options.steps, options.layout, Path(out), options.peers)
        watch = Watch()
        if options.contender == "bare":
            found = bare(recipe, watch, options.layout)
        else:
            found = {"ours": ours, "transformers": transformers}[options.contender](recipe, watch)
    if not int(os.environ.get("RANK", "0")):
        rate = recipe.train.tokens_per_step / median(watch.seconds())
        show_json({"tokens_per_second": rate, **found})


def litgpt(options: argparse.Namespace) -> dict[str, Any]:
    """In the Python that has it: what we need of a shape goes there as JSON."""
    recipe = recipe_of(options.run, options.steps, "one", Path("unused"))
    config, train_options = resolve_model_config(recipe, Tokenizer(recipe.tokenizer_dir)), recipe.train
    shape = {
        **config.model_dump(
            include={
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
            }
        ),
        "vocab_size": config.vocab_size,
        "head_dim": config.hidden_size // config.num_attention_heads if config.head_dim is None else config.head_dim,
        "seq_len": train_options.seq_len,
        "batch_samples": train_options.batch_samples,
        "micro_batch_size": train_options.effective_micro_batch_tokens // train_options.seq_len,
        "steps": options.steps,
        "bf16": compute_dtype(train_options.precision, torch.device("cpu")) == torch.bfloat16,
    }
    script = Path(__file__).parent / "peers" / "trainer_litgpt.py"
    return last_line([options.litgpt, str(script), json.dumps(shape)], options.threads or os.cpu_count() or 1)


def last_line(words: list[str], threads: int) -> dict[str, Any]:
    metrics: dict[str, Any] = read_child(words, OMP_NUM_THREADS=str(threads))
    return metrics


def measured(options: argparse.Namespace, contender: str) -> dict[str, Any]:
    if contender == "litgpt":
        return litgpt(options)
    ranks = 1 if options.layout == "one" else 2
    runner = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    runner += [] if ranks == 1 else [f"--nproc-per-node={ranks}"]
    words = [*runner, "-m", "benchmarks", "trainer", options.run, "--layout", options.layout]
    words += ["--steps", str(options.steps)]
    words += ["--peers"] if options.peers else []
    threads = options.threads or max(1, (os.cpu_count() or 1) // ranks)
    return last_line([*words, "--contender", contender], threads)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("run")
    parser.add_argument("--layout", choices=["one", "ddp", "fsdp"], default="one")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--litgpt", metavar="PYTHON", help="a Python that has litgpt")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of a rank; all cores shared out if not given")
    parser.add_argument("--contender", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        contend(options)
        return
    contenders = ["ours", "transformers"] if options.peers else ["ours", "bare"]
    if options.litgpt:
        contenders.append("litgpt")
    found = take_turns({name: partial(measured, options, name) for name in contenders}, options.rounds)
    rates = {name: median(one["tokens_per_second"] for one in turns) for name, turns in found.items()}
    best = max(contenders[1:], key=lambda name: rates[name])
    waits = [one["data_wait"] for one in found["ours"]]
    result = {
        "layout": options.layout,
        "tokens_per_second": rates,
        "ours_to_" + best: rates["ours"] / rates[best],
        "data_wait": median(waits),
        "threads": options.threads,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }
    show_json(result, indent=2)
