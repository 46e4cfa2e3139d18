from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import tiny_recipe
from zero2all.errors import Z2aError
from zero2all.evals import bits_per_byte
from zero2all.model import Z2all
from zero2all.recipe import ModelConfig
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenStore


def test_a_model_that_knows_nothing_has_the_closed_form(world: Path) -> None:
    recipe, tokenizer = tiny_recipe(world), Tokenizer(world / "tokenizer")
    model = Z2all(ModelConfig.model_validate({**recipe.model.model_dump(), "vocab_size": 512})).init_weights(0)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    result = bits_per_byte(model, tokenizer, recipe)
    scored = size = 0
    unigram = 0.0
    counts = np.ones(512)
    for shards in TokenStore(world / "tokens", "train").sources.values():
        counts += np.bincount(shards[0].tokens, minlength=512)
    for shards in TokenStore(world / "tokens", "valid").sources.values():
        ids = shards[0].tokens[: 4096 // 3 + 1]
        targets = [int(id) for id in ids[1 : 1 + (len(ids) - 1) // 32 * 32] if id != tokenizer.end_of_text]
        scored += len(targets)
        size += sum(len(tokenizer.token_bytes[id]) for id in targets)
        unigram += sum(math.log2(counts.sum() / counts[id]) for id in targets)
    assert result["bits_per_byte"] == pytest.approx(scored * math.log2(512) / size, abs=1e-3)
    assert result["unigram_bits_per_byte"] == pytest.approx(unigram / size, abs=1e-3)
    assert set(result["sources"]) == {"en", "zh", "code"}


def test_no_held_out_text_is_said(world: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(
        world,
        "model.context=32768",
        "train.seq_len=32768",
        "train.batch_tokens=32768",
        "train.micro_batch_tokens=32768",
    )
    tokenizer = Tokenizer(world / "tokenizer")
    model = Z2all(ModelConfig.model_validate({**recipe.model.model_dump(), "vocab_size": 512})).init_weights(0)
    with pytest.raises(Z2aError, match=r"raise corpus\.holdout"):
        bits_per_byte(model, tokenizer, recipe)
