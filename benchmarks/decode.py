"""Decoding of random models against ``transformers.generate``: the same weights, type, prompt and CPU, in turns.

    python -m benchmarks decode [--threads 2] [--shapes 25m 300m] [--dtypes f32 bf16] [--tokens 48]

Prints tokens per second after the prefill (the median of three), the ratio, and the bandwidth of reading the weights as
a share of memory bandwidth: one token needs all weights once, so that share cannot be above 1.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.common import benchmark_parser, median_ratio, show, take_turns, wall_seconds

from zero2all.generation.rank_model import LocalModel
from zero2all.model import KVCache, Z2all, export_hf
from zero2all.model.decode_step import join_projections
from zero2all.recipe import ModelConfig

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
VOCAB, PROMPT, ROUNDS = 16384, 32, 3
SHAPES = {
    "25m": {"preset": "z2all-25m", "vocab_size": VOCAB},
    "300m": {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 8, "vocab_size": VOCAB, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    },
}  # fmt: skip


def prompt(batch: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, PROMPT), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def ours(model: Z2all, batch: int, tokens: int) -> float:
    local, cache = LocalModel(model), KVCache(batch, PROMPT + tokens + 1, torch.device("cpu"))
    following, counts = prompt(batch), torch.full((batch,), PROMPT)
    begin = 0.0
    for number in range(tokens):
        if number == 2:  # after the prefill and a first token
            begin = time.perf_counter()
        logits = local.generate_logits(following, cache, counts if number == 0 else None)
        assert logits is not None
        cache.advance(following.shape[1])
        following = logits[:, 0].argmax(-1, keepdim=True)
    return (tokens - 2) * batch / (time.perf_counter() - begin)


@torch.inference_mode()
def theirs(model: Any, batch: int, tokens: int) -> float:
    ids = prompt(batch)

    def generate(count: int) -> None:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip

    short = wall_seconds(generate, 2)
    return (tokens - 2) * batch / (wall_seconds(generate, tokens) - short)


def memory_speed() -> float:
    """Bytes a second that a sum over 256 MB reads."""
    values = torch.ones(64 << 20)
    values.sum()
    begin = time.perf_counter()
    for _ in range(4):
        values.sum()
    return 4 * values.nbytes / (time.perf_counter() - begin)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from transformers import AutoModelForCausalLM

    show("| shape | dtype | batch | zero2all tok/s | transformers tok/s | ratio | weights read | memory read |")
    show("|---|---|--:|--:|--:|--:|--:|--:|")
    for shape in options.shapes:
        for name in options.dtypes:
            model = Z2all(ModelConfig.model_validate(SHAPES[shape])).init_weights(0).eval().to(DTYPES[name])
            with tempfile.TemporaryDirectory() as folder:
                export_hf(model, Path(folder), dtype=DTYPES[name])
                other = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[name]).eval()
            join_projections(model)
            unread = 0 if model.config.tie_word_embeddings else model.embed_tokens.weight.numel()
            size = (sum(p.numel() for p in model.parameters()) - unread) * DTYPES[name].itemsize
            for batch in (1, 8):
                sides = {
                    "ours": partial(ours, model, batch, options.tokens),
                    "theirs": partial(theirs, other, batch, options.tokens),
                }
                speeds, references = take_turns(sides, ROUNDS, warm_up=1).values()
                speed, reference = median(speeds), median(references)
                show(
                    f"| {shape} | {name} | {batch} | {speed:.1f} | {reference:.1f} | "
                    f"{median_ratio(speeds, references):.2f} | {speed / batch * size / 1e9:.1f} GB/s | "
                    f"{memory_speed() / 1e9:.1f} GB/s |"
                )
