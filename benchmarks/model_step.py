"""Our training step beside those of transformers and litgpt with the same shape, and beside the machine's GEMM rate.

All contenders take turns in one process, on one thread, and are judged by CPU seconds, so that a busy machine spoils
little. fp32 weights, bf16 autocast where the machine computes in it, fused AdamW, clipping, the same tokens. litgpt
takes part if this Python has it (see peers/trainer_litgpt.py).

    python -m benchmarks model_step                       # the 25M shape, 4 samples of 512
    python -m benchmarks model_step --experts             # 8 experts, 2 a token, beside a dense model as wide
    python -m benchmarks model_step --only ours --profile # where our step's time goes
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from benchmarks.common import benchmark_parser, cpu_seconds, show, show_json, take_turns
from torch import nn

from zero2all.base.machine.devices import compute_dtype, dtype_name
from zero2all.model import Z2all
from zero2all.optim.optimizer import build_optimizers
from zero2all.recipe import ModelConfig, OptimizerRecipe

Step = Callable[[], float]
DTYPE = compute_dtype("auto", torch.device("cpu"))


def step_of(
    model: nn.Module, loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], batch: torch.Tensor
) -> Step:
    optimizers = build_optimizers(model, OptimizerRecipe(lr=1e-3))

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.bfloat16 == DTYPE):
            loss = loss_of(batch[:, :-1], batch[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def ours(config: ModelConfig, batch: torch.Tensor, compiled: bool) -> Step:
    model = Z2all(config).init_weights(0).train()
    if compiled:
        for layer in model.layers:
            layer.compile()
    return step_of(model, lambda x, y: model(x, targets_BS=y).sum() / y.numel(), batch)


def transformers(config: ModelConfig, batch: torch.Tensor, compiled: bool) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    from zero2all.model.hf_config import hf_config

    values = hf_config(config)
    model = LlamaForCausalLM(LlamaConfig(**{**values, "use_cache": False, "attn_implementation": "sdpa"})).train()
    call = torch.compile(model) if compiled else model

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = call(input_ids=x).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    return step_of(model, loss, batch)


def litgpt(config: ModelConfig, batch: torch.Tensor, compiled: bool) -> Step:
    from litgpt.config import Config
    from litgpt.model import GPT

    shape = Config(
        block_size=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        padded_vocab_size=config.padded_vocab_size,
        n_layer=config.num_hidden_layers,
        n_head=config.num_attention_heads,
        n_query_groups=config.num_key_value_heads,
        n_embd=config.hidden_size,
        head_size=config.head_size,
        intermediate_size=config.intermediate_size,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )
    model = GPT(shape).train()
    model.max_seq_length = batch.shape[1] - 1
    if config.tie_word_embeddings:
        model.lm_head.weight = model.transformer.wte.weight
    nn.init.normal_(model.lm_head.weight, std=0.02)
    call = torch.compile(model) if compiled else model

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(call(x).flatten(0, 1).float(), y.flatten())

    return step_of(model, loss, batch)


def gemm_rate(size: int = 2048, repeats: int = 2) -> float:
    """FLOP/s of one square product."""
    a, b = (torch.randn(size, size, dtype=DTYPE) for _ in range(2))
    out = torch.empty(size, size, dtype=DTYPE)
    begin = time.process_time()
    for _ in range(repeats):
        torch.mm(a, b, out=out)
    return 2 * size**3 * repeats / (time.process_time() - begin)


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Forward and backward: six for each weight of a product that the token goes through, and causal attention."""
    with torch.device("meta"):
        model = Z2all(config)
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    weights += config.padded_vocab_size * config.hidden_size * config.tie_word_embeddings
    if config.moe is not None:
        every = sum(p.numel() for p in model.parameters() if p.dim() == 3)
        weights += every * config.moe.num_experts_per_tok // config.moe.num_experts
    scores = (
        config.num_hidden_layers * config.num_attention_heads * config.head_size * length
    )  # half of 2 x 2 S E, being causal
    return 6 * weights + 3 * 2 * scores


def measure(steps: dict[str, Step], rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of every step by contender, and the GEMM rates between them."""
    for name, step in steps.items():
        sys.stderr.write(f"{name}: first two steps {cpu_seconds(step) + cpu_seconds(step):.1f} s\n")
    contenders: dict[str, Callable[[], float]] = {"": gemm_rate}
    found = take_turns(contenders | {name: partial(cpu_seconds, step) for name, step in steps.items()}, rounds)
    return found, found.pop("")


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--preset", default="z2all-25m")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--only", default="", help="contenders with this in their name, such as eager")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--threads", type=int, default=1, help="with more, threads that wait count as work")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = ModelConfig(preset=options.preset, vocab_size=options.vocab)
    shape = (options.samples, options.length + 1)
    batch = torch.randint(0, options.vocab, shape, generator=torch.Generator().manual_seed(0))
    if options.experts:
        moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": config.intermediate_size // 2}
        mixture = ModelConfig.model_validate({**config.model_dump(), "moe": moe})
        makers = {
            f"{name} {how}": lambda c=c, how=how: ours(c, batch, how == "compiled")
            for name, c in (("dense", config), ("experts", mixture))
            for how in ("eager", "compiled")
        }
    else:
        makers = {
            f"{name} {how}": lambda maker=maker, how=how: maker(config, batch, how == "compiled")
            for maker in (ours, transformers, litgpt)
            if maker is not litgpt or importlib.util.find_spec("litgpt")
            for name in [maker.__name__]
            for how in ("eager", "compiled")
        }
    steps = {name: make() for name, make in makers.items() if options.only in name}
    tokens = options.samples * options.length
    seconds, rates = measure(steps, options.rounds)
    rate, work = max(rates), flops_per_token(config, options.length)
    result = {
        "threads": torch.get_num_threads(),
        "dtype": dtype_name(DTYPE),
        "gemm_tflops": round(rate / 1e12, 3),
        "gflops_per_token": round(work / 1e9, 4),
    }
    for name, values in seconds.items():
        speed = tokens / min(values)
        result[name] = {"tokens_per_cpu_second": round(speed), "of_gemm_rate": round(speed * work / rate, 3)}
    show_json(result, indent=2)
    if options.profile:
        for name, step in steps.items():
            with torch.profiler.profile() as profile:
                for _ in range(3):
                    step()
            table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=18, max_name_column_width=60)
            show(f"{name}\n{table}")
