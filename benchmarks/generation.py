"""Text generation: tokens per second of batches, of one prompt at a time, and of transformers' ``generate``.

    python -m benchmarks generation                                    # 200 prompts, 300 tokens each
    python -m benchmarks generation --prompts 64 --max-tokens 60 --rounds 3

A z2all-3m model with random weights, which hardly ever ends a text early, in fp32; prompts of 5 to 30 tokens,
temperature 0.8, top-k 50. The contenders take turns. Other work on the machine changes the tokens of a CPU second less
than those of a second. transformers reads the export of the same model, with prompts padded on the left.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from benchmarks.common import benchmark_parser, show

from zero2all.generation import SamplingParams, generate_batch
from zero2all.model import Z2all
from zero2all.model.hf import export_hf
from zero2all.recipe import ModelConfig
from zero2all.tokenizer import Tokenizer

VOCAB = 4096


@dataclass
class LetterTokenizer:
    """What generation needs of a tokenizer; every token is a letter."""

    vocab_size: int = VOCAB
    eos_token_id: int = 0
    stop_token_ids: list[int] = field(default_factory=lambda: [0])
    special_ids: dict[str, int] = field(default_factory=lambda: {"<|endoftext|>": 0})
    token_bytes: list[bytes] = field(default_factory=lambda: [b"a"] * VOCAB)


def main() -> None:
    parser = benchmark_parser(__doc__)
    for name, default in (("prompts", 200), ("max-tokens", 300), ("batch-size", 64), ("rounds", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    rng = random.Random(0)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(5, 30))] for _ in range(options.prompts)]
    model = Z2all(ModelConfig(preset="z2all-3m", vocab_size=VOCAB)).init_weights(0).eval()
    params = SamplingParams(max_tokens=options.max_tokens)
    tokenizer = cast(Tokenizer, LetterTokenizer())
    few = prompts[: max(1, options.prompts // 50)]

    def generate(chosen: list[list[int]], batch_size: int) -> int:
        return sum(len(one.tokens) for one in generate_batch(model, tokenizer, chosen, params, batch_size))

    contenders: dict[str, Callable[[], int]] = {
        f"batches of {options.batch_size}": lambda: generate(prompts, options.batch_size),
        "one prompt at a time": lambda: generate(few, 1),
    }
    with tempfile.TemporaryDirectory() as directory:
        theirs = load_transformers(model, Path(directory))
    contenders["transformers, the same batches"] = lambda: generate_theirs(
        theirs, prompts, options.batch_size, options.max_tokens
    )
    show(f"{torch.get_num_threads()} threads; tokens per second, and a CPU second")
    for _ in range(options.rounds):
        for name, run in contenders.items():
            wall, cpu = time.perf_counter(), time.process_time()
            tokens = run()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            show(f"{name:<32} {tokens / wall:8.0f} {tokens / cpu:8.0f}  ({tokens} in {wall:.1f} s)")


def load_transformers(model: Z2all, directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    export_hf(model, directory, end_ids=[0])
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def generate_theirs(theirs: Any, prompts: list[list[int]], batch_size: int, max_tokens: int) -> int:
    generated = 0
    ordered = sorted(prompts, key=len)
    for first in range(0, len(ordered), batch_size):
        batch = ordered[first : first + batch_size]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        out = theirs.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            do_sample=True,
            temperature=0.8,
            top_k=50,
            pad_token_id=0,
        )[:, width:]
        ended = (out == 0).cumsum(1) > 0  # the end-of-text token and the padding after it
        generated += int((~ended).sum() + ended.any(1).sum())
    return generated
