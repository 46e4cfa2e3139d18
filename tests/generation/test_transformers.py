"""Greedy generation gives the tokens of transformers on the export."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import CHINESE, CODE, ENGLISH
from tests.runs import wide_model
from zero2all.generation import SamplingParams, generate_batch
from zero2all.model.hf import export_hf
from zero2all.tokenizer import Tokenizer

MAX_TOKENS = 16
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dense": (50, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "experts": (
        10,
        {"qk_norm": True, "moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}},
    ),
    "dynamic RoPE": (
        10,
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 24}},
    ),
}


def prompts(count: int) -> list[str]:
    """English, Chinese and code, of different lengths."""
    rng = random.Random(3)
    texts = [ENGLISH, CHINESE, CODE.format(n=7), "😀 mixed 中文 text 42"]
    return [texts[number % 4][: rng.randint(1, 60)] for number in range(count)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_are_those_of_transformers(variant: str, workspace: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    count, changes = VARIANTS[variant]
    tokenizer = Tokenizer(workspace / "tokenizer")
    model = wide_model(2, vocab_size=tokenizer.vocab_size, **changes)
    export_hf(model, tmp_path, tokenizer.stop_token_ids)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    reserved = sorted(set(tokenizer.special_ids.values()) - set(tokenizer.stop_token_ids))
    together = generate_batch(model, tokenizer, prompts(count), params)
    for prompt, completion in zip(prompts(count), together, strict=True):
        ids = [tokenizer.eos_token_id, *tokenizer.encode(prompt)]
        full = theirs.generate(
            torch.tensor([ids]), max_new_tokens=MAX_TOKENS, do_sample=False, suppress_tokens=reserved, pad_token_id=0
        )
        assert completion.tokens == full[0, len(ids) :].tolist(), prompt
        [alone] = generate_batch(model, tokenizer, [prompt], params)
        assert alone.tokens == completion.tokens, prompt
    assert len({tuple(completion.tokens) for completion in together}) > count // 2
