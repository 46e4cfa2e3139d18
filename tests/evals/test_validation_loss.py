from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import tiny_recipe
from zero2all.errors import Z2aError
from zero2all.evals import evaluate_bpb
from zero2all.model import Z2all
from zero2all.recipe import ModelConfig
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenStore


def test_an_untrained_model_has_the_closed_form(workspace: Path) -> None:
    recipe, tokenizer = tiny_recipe(workspace), Tokenizer(workspace / "tokenizer")
    model = Z2all(ModelConfig.model_validate({**recipe.model.model_dump(), "vocab_size": 512})).init_weights(0)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    result = evaluate_bpb(model, tokenizer, recipe)
    num_targets = num_bytes = 0
    unigram = 0.0
    counts = np.ones(512)
    for shards in TokenStore(workspace / "tokens", "train").sources.values():
        counts += np.bincount(shards[0].tokens, minlength=512)
    for shards in TokenStore(workspace / "tokens", "valid").sources.values():
        ids = shards[0].tokens[: 4096 // 3 + 1]
        targets = [int(id) for id in ids[1 : 1 + (len(ids) - 1) // 32 * 32] if id != tokenizer.eos_token_id]
        num_targets += len(targets)
        num_bytes += sum(len(tokenizer.token_bytes[id]) for id in targets)
        unigram += sum(math.log2(counts.sum() / counts[id]) for id in targets)
    assert result.bits_per_byte == pytest.approx(num_targets * math.log2(512) / num_bytes, abs=1e-3)
    assert result.unigram_bits_per_byte == pytest.approx(unigram / num_bytes, abs=1e-3)
    assert set(result.sources) == {"en", "zh", "code"}


def test_a_missing_validation_set_is_reported(workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(
        workspace,
        "model.max_position_embeddings=32768",
        "train.seq_len=32768",
        "train.batch_tokens=32768",
        "train.micro_batch_tokens=32768",
    )
    tokenizer = Tokenizer(workspace / "tokenizer")
    model = Z2all(ModelConfig.model_validate({**recipe.model.model_dump(), "vocab_size": 512})).init_weights(0)
    with pytest.raises(Z2aError, match=r"raise corpus\.holdout"):
        evaluate_bpb(model, tokenizer, recipe)
